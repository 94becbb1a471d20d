# SPDX-License-Identifier: Apache-2.0
"""Which servers share a node, and what links between nodes carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_distca.given import integer, integers
from deepspeed_distca.scheduler.cost_model import MAX_TERM


@dataclass(frozen=True)
class Topology:
    """The nodes of the servers. Links within a node are what the cost model says of transfers.

    Attributes:
        nodes: of each server, its node: numbers 0, 1, ..., each of which some server has.
        bytes_per_second: that a server sends to other nodes, and receives from them at the same time.
        latency: femtoseconds of a transfer of no size between nodes.
    """

    nodes: tuple[int, ...]
    bytes_per_second: int = 50 * 10**9
    latency: int = 78_000_000_000

    def __post_init__(self) -> None:
        found = set(integers("topology: nodes", self.nodes, 0))
        if found != set(range(len(found))):
            raise ValueError(f"topology: nodes must be numbered 0..{len(found) - 1} without gaps, got {sorted(found)}")
        integer("topology: bytes_per_second", self.bytes_per_second, 1, MAX_TERM)
        integer("topology: latency", self.latency, 0, MAX_TERM)

    @classmethod
    def of_size(cls, node_size: int, ranks: int | Sequence[int], **links: int) -> Topology:
        """Servers on nodes of so many consecutive ranks.

        Args:
            ranks: of the servers, ascending; a number: all ranks below it.
            links: ``bytes_per_second`` and ``latency``, where they are known.
        """
        integer("node_size", node_size, 1)
        nodes = [rank // node_size for rank in (range(ranks) if isinstance(ranks, int) else ranks)]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        return cls(tuple(numbers[node] for node in nodes), **links)

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

    @property
    def across(self) -> np.ndarray:
        """Which transfers cross nodes, bool [sender, receiver]."""
        node = np.array(self.nodes, dtype=np.int64)
        return node[:, None] != node[None, :]
