# SPDX-License-Identifier: Apache-2.0
"""Which servers share a node."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deepspeed_distca.given import integer, integers


@dataclass(frozen=True)
class Topology:
    """The nodes of the servers; what their links carry is the cost model's to say.

    Attributes:
        nodes: of each server, its node: numbers 0, 1, ..., each of which some server has.
    """

    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        found = set(integers("topology: nodes", self.nodes, 0))
        if found != set(range(len(found))):
            raise ValueError(f"topology: nodes must be numbered 0..{len(found) - 1} without gaps, got {sorted(found)}")

    @classmethod
    def of(cls, names: Iterable[Hashable]) -> Topology:
        """Servers on nodes of these names, one for each server."""
        names = list(names)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @classmethod
    def of_size(cls, node_size: int, ranks: int | Sequence[int]) -> Topology:
        """Servers on nodes of so many consecutive ranks.

        Args:
            ranks: of the servers, ascending; a number: all ranks below it.
        """
        integer("node_size", node_size, 1)
        return cls.of(rank // node_size for rank in (range(ranks) if isinstance(ranks, int) else ranks))

    @property
    def size(self) -> int:
        """How many nodes there are."""
        return max(self.nodes, default=-1) + 1

    @property
    def servers(self) -> list[list[int]]:
        """Of each node, its servers."""
        found: list[list[int]] = [[] for _ in range(self.size)]
        for server, node in enumerate(self.nodes):
            found[node].append(server)
        return found

    @cached_property
    def table(self) -> np.ndarray:
        """The servers of each node by their place in it, int64 [nodes, most servers of one]: those of a smaller node
        again and again. Not to be changed."""
        most = max(map(len, self.servers), default=0)
        return np.array([np.resize(its, most) for its in self.servers], dtype=np.int64).reshape(self.size, most)

    def by_place(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """The servers in the nodes of `one` that have the places that those of `other` have in theirs."""
        return self.table[self.node_of[one], self.place_of[other]]

    @cached_property
    def place_of(self) -> np.ndarray:
        """The place of each server in its node, from 0, int64 [servers], not to be changed."""
        places = np.empty(len(self.nodes), dtype=np.int64)
        for its in self.servers:
            places[its] = np.arange(len(its))
        return places

    @cached_property
    def node_of(self) -> np.ndarray:
        """The node of each server, int64 [servers], not to be changed."""
        return np.array(self.nodes, dtype=np.int64)

    @property
    def across(self) -> np.ndarray:
        """Which transfers cross nodes, bool [sender, receiver]."""
        return self.node_of[:, None] != self.node_of[None, :]
