# SPDX-License-Identifier: Apache-2.0
"""How much of a total load each server should, and may, compute. Exact: Python integers throughout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_TOLERANCE_UNIT = 10**9

#: The largest weight of a server.
MAX_WEIGHT = 10**6

#: The largest tolerance: beyond any balance that there can be.
MAX_TOLERANCE = 10**9


class Shares:
    """Each server's share of a total load, by weight, and its limit: the share times (1 + tolerance)."""

    def __init__(self, weights: Sequence[int] | None, num_ranks: int, tolerance: float) -> None:
        """Args:
            weights: relative speeds of the servers, integers in 0..1000000; None is all equal.
            num_ranks: how many servers there are.
            tolerance: in 0..1000000000; taken to the nearest 1e-9.

        Raises:
            ValueError: weights of a wrong number or kind, or all 0.
        """
        self.weights = _checked(weights, num_ranks)
        self._sum, self.are_equal = sum(self.weights), len(set(self.weights)) == 1
        self._slack = round(tolerance * _TOLERANCE_UNIT)
        self._rooms_of, self._rooms = -1, dict[int, int]()  # of a total, what is asked for again and again, by weight

    def limits(self, total: int) -> list[int]:
        """The largest load that each server may have."""
        if self.are_equal:
            return [self._part(total, self.weights[0], _TOLERANCE_UNIT + self._slack)] * len(self.weights)
        return [self._part(total, weight, _TOLERANCE_UNIT + self._slack) for weight in self.weights]

    def are_kept(self, loads: list[int]) -> bool:
        """No load exceeds its limit."""
        return all(load <= limit for load, limit in zip(loads, self.limits(sum(loads)), strict=True))

    def total_at(self, loads: list[int]) -> int:
        """The total load whose limits these loads keep; a server of weight 0 does not count."""
        factor = _TOLERANCE_UNIT + self._slack
        return max(
            -(-load * self._sum * _TOLERANCE_UNIT // (weight * factor))
            for load, weight in zip(loads, self.weights, strict=True)
            if weight
        )

    def promised(self, total: int, shard: int) -> list[int]:
        """The load of each server that is not exceeded where nothing is cut finer than a shard of that cost.

        That is its limit; or its share plus the shard, if that is more. With unequal weights a fast server may rightly
        keep more: it stays above its limit where a shard more would put every other server s above its load by
        weight, (load_s + shard) / weight_s >= load / weight. Multiplied by weight_s and summed over all n servers
        that compute, load <= share + shard * (n - 1) * weight / (sum of weights).
        """
        others = sum(map(bool, self.weights)) - 1
        return [
            max(
                limit,
                self._part(total, weight, _TOLERANCE_UNIT) + max(shard, -(-shard * others * weight // self._sum)),
            )
            if weight
            else 0
            for limit, weight in zip(self.limits(total), self.weights, strict=True)
        ]

    def total_for_one(self, load: int) -> int:
        """A total load of which the fastest server may have this load."""
        return -(-load * self._sum // max(self.weights))

    def least_room(self, server: int, total: int) -> int:
        """What a server below its share has at least left below its limit; never 0."""
        weight = self.weights[server]
        if self._rooms_of != total:
            self._rooms_of, self._rooms = total, {}
        room = self._rooms.get(weight)
        if room is None:
            room = self._rooms[weight] = max(1, self._part(total, weight, self._slack))
        return room

    def relative(self, server: int, load: int) -> int:
        """Load by weight, comparable between servers."""
        weight = self.weights[server]
        return (load << 20) // weight if weight else load << 90

    def _part(self, total: int, weight: int, factor: int) -> int:
        return total * weight * factor // (self._sum * _TOLERANCE_UNIT)


def _checked(weights: Sequence[int] | None, num_ranks: int) -> list[int]:
    if weights is None:
        return [1] * num_ranks
    values = list(weights)
    if len(values) != num_ranks:
        raise ValueError(f"server_weights must have one entry for each of {num_ranks} ranks, got {len(values)}")
    if any(isinstance(w, bool) or not isinstance(w, int | np.integer) or not 0 <= w <= MAX_WEIGHT for w in values):
        raise ValueError(f"server_weights must be integers in 0..{MAX_WEIGHT}, got {values}")
    if not any(values):
        raise ValueError("server_weights are all 0: some server must compute")
    return [int(w) for w in values]
