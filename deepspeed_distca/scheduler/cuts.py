# SPDX-License-Identifier: Apache-2.0
"""Where to cut a document so that a part costs what is wanted: the cost of a query range, inverted, in integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt

import numpy as np

from deepspeed_distca.layout import PIECE_END, PIECE_START
from deepspeed_distca.scheduler.cost_model import PhaseCost, key_start


class Cuts:
    """Cuts of query ranges [start, end) of a document at multiples of a granularity, under one cost and window.

    All arguments and results are Python integers; a result is always a multiple of the granularity and may lie outside
    the range, which is for the caller to check.
    """

    def __init__(self, cost: PhaseCost, window: int | None, granularity: int) -> None:
        self._terms, self._window, self._granularity = cost, window, granularity
        self._pair, self._query, self._key, self._task = cost.pair, cost.query_row, cost.key_row, cost.task
        self._head = cost.pair + 2 * (cost.query_row + cost.key_row)
        self._tail = cost.pair + 2 * cost.query_row

    def cost(self, start: int, end: int) -> int:
        """Cost of queries [start, end) as one task."""
        if self._window is None:
            return (
                self._pair * ((end * (end + 1) - start * (start + 1)) // 2)
                + self._query * (end - start)
                + self._key * end
                + self._task
            )
        return self._terms(start, end, key_start(start, self._window), self._window)

    def limits(self, start: int, end: int) -> tuple[int, int]:
        """The first and the last place where [start, end) may be cut into parts of at least a granule; the first is
        beyond the last where there is none."""
        granularity = self._granularity
        return -(-start // granularity) * granularity + granularity, end // granularity * granularity - granularity

    def last_granule(self, start: int, end: int) -> int:
        """Cost of the last granule's number of queries of [start, end)."""
        return self.cost(max(start, end - self._granularity), end)

    def joined(self, border: int) -> int:
        """How much less two tasks cost that meet at `border` when they are computed as one: its keys are read once."""
        return self._key * (border - key_start(border, self._window)) + self._task

    def head_within(self, start: int, end: int, budget: int) -> int:
        """The largest x for which [start, x) costs at most `budget`; `end` is where the search may stop."""
        if self._window is not None:
            return self._search(start, end, lambda x: self.cost(start, x) <= budget)
        # pair x(x+1)/2 + (query + key) x <= level, solved for x: 2 pair x + head <= sqrt(head^2 + 8 pair level).
        level = budget - self._task + self._pair * (start * (start + 1) // 2) + self._query * start
        root = self._head * self._head + 8 * self._pair * level
        if root < 0:
            return start // self._granularity * self._granularity
        x = (isqrt(root) - self._head) // (2 * self._pair)
        return x // self._granularity * self._granularity

    def tail_within(self, start: int, end: int, budget: int) -> int:
        """The smallest x for which [x, end) costs at most `budget`; `start` is where the search may stop."""
        if self._window is not None:
            over = self._search(start, end, lambda x: self.cost(x, end) > budget)
            return over + self._granularity
        level = self._pair * (end * (end + 1) // 2) + self._query * end + self._key * end + self._task - budget
        if level <= 0:
            return 0
        root = isqrt(self._tail * self._tail + 8 * self._pair * level - 1) + 1
        x = -((self._tail - root) // (2 * self._pair))
        return -(-x // self._granularity) * self._granularity

    def _search(self, start: int, end: int, holds: Callable[[int], bool]) -> int:
        """The last multiple of the granularity in (start, end) at which `holds`, true and then false, is true; the
        multiple at or below `start` where it never is."""
        low, high = start // self._granularity, -(-end // self._granularity)
        while high - low > 1:
            middle = (low + high) // 2
            if holds(middle * self._granularity):
                low = middle
            else:
                high = middle
        return low * self._granularity


class FullCuts(Cuts):
    """The same for queries that each attend to the same number of keys."""

    def __init__(self, cost: PhaseCost, keys: int, granularity: int) -> None:
        super().__init__(cost, None, granularity)
        self._keys, self._fixed = keys, cost.full(0, keys)
        self._row = cost.full(1, keys) - self._fixed

    def cost(self, start: int, end: int) -> int:
        return self._row * (end - start) + self._fixed

    def joined(self, border: int) -> int:
        return self._fixed

    def head_within(self, start: int, end: int, budget: int) -> int:
        x = start + max(0, budget - self._fixed) // self._row
        return x // self._granularity * self._granularity

    def tail_within(self, start: int, end: int, budget: int) -> int:
        x = end - max(0, budget - self._fixed) // self._row
        return -(-x // self._granularity) * self._granularity


class UnitCuts:
    """The cuts of every document, or unit of one (see ``units``), by its number in Holdings."""

    def __init__(self, cost: PhaseCost, window: int | None, granularity: int, full: Mapping[int, int]) -> None:
        """Args:
        full: how many keys each query attends to, of full units.
        """
        self._causal = Cuts(cost, window, granularity)
        self._full = {unit: FullCuts(cost, keys, granularity) for unit, keys in full.items()}

    def of(self, document: int) -> Cuts:
        return self._full.get(document, self._causal) if self._full else self._causal


def costliest_shard(pieces: np.ndarray, costs: Callable[[np.ndarray], np.ndarray], granularity: int) -> int:
    """Cost of the costliest query range that no cut divides: the last three granules' rows of some piece, of which two
    parts of at least a granule, cut at a multiple of it, cannot always be made.

    Args:
        pieces: see ``Layout.pieces``.
        costs: of query ranges, with the same columns.
    """
    if not len(pieces):
        return 0
    ends = pieces.copy()
    ends[:, PIECE_START] = np.maximum(pieces[:, PIECE_START], pieces[:, PIECE_END] - 3 * granularity)
    return int(costs(ends).max())
