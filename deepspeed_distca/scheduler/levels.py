# SPDX-License-Identifier: Apache-2.0
"""Planning by levels: which node computes what, then which server of it.

Nodes are balanced first, each as if it were one server that has what its ranks store, so that only what a node has too
much of crosses to another. Then the servers of each node share its work out. What comes from elsewhere is stored by
nobody in the node: a server of weight 0 stands for all that do, and gives everything away. Both levels move ranges as
``balance`` does, and share its tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import gcd
from operator import gt
from typing import NamedTuple

import numpy as np

from deepspeed_distca.layout import DOCUMENT, PIECE_END, PIECE_RANK, PIECE_START, RANK, Layout, join_ranges
from deepspeed_distca.scheduler.balance import balance, row_costs
from deepspeed_distca.scheduler.cost_model import CostModel, Phase, key_start
from deepspeed_distca.scheduler.cuts import UnitCuts
from deepspeed_distca.scheduler.holdings import documents_in_order, number_documents
from deepspeed_distca.scheduler.moves import Moves
from deepspeed_distca.scheduler.shares import MAX_WEIGHT, Shares
from deepspeed_distca.scheduler.tasks import Q_END, Q_START, SERVER, TASK_DOCUMENT, Tasks, task_rows
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.scheduler.traffic import overlaps
from deepspeed_distca.scheduler.units import Units

#: The nodes' part of the tolerance is one in so many: cuts within a node add to its work.
_NODES_PART = 2

#: How often a node's work is shared out, as cuts add to the total of which limits are shares.
_ATTEMPTS = 4


def by_levels(
    layout: Layout,
    cost: CostModel,
    topology: Topology,
    *,
    phase: Phase,
    tolerance: float,
    granularity: int,
    window: int | None = None,
    server_weights: Sequence[int] | None = None,
) -> Tasks | None:
    """The tasks as nodes and then their servers share them out: a pure function of its arguments.

    Args:
        layout, cost, phase, tolerance, granularity, window, server_weights: see ``balance``.
        topology: of the layout's ranks.

    Returns:
        the tasks, whose loads exceed no limit (``Shares.limits``); None where levels leave more.
    """
    weights = [1] * layout.num_ranks if server_weights is None else [int(weight) for weight in server_weights]
    return _Levels(layout, cost, topology, phase, tolerance, granularity, window, weights).tasks()


class _Node(NamedTuple):
    """What one node computes.

    Attributes:
        servers: its servers.
        pieces: int64 [n, 4], columns (document, start, end, place): query ranges, and the place among the servers of
            the one that stores them, or the number of the servers where none does.
        shares: of the servers, and of one of weight 0 that stands for all others.
    """

    servers: list[int]
    pieces: np.ndarray
    shares: Shares


class _Levels:
    """One run; arguments as of :func:`by_levels`."""

    def __init__(
        self,
        layout: Layout,
        cost: CostModel,
        topology: Topology,
        phase: Phase,
        tolerance: float,
        granularity: int,
        window: int | None,
        weights: list[int],
    ) -> None:
        # Documents by their numbers: those that are alike to a node need not be so to its servers, and are told apart
        # by where they lie, not by their ids.
        segments = layout.segments.copy()
        self._ids = number_documents(layout.pieces).ids
        order = np.argsort(self._ids)
        segments[:, DOCUMENT] = order[np.searchsorted(self._ids[order], segments[:, DOCUMENT])]
        self._layout, self._cost, self._topology = Layout(segments, layout.num_ranks), cost, topology
        self._phase: Phase = phase
        self._tolerance, self._granularity, self._window, self._weights = tolerance, granularity, window, weights

    def tasks(self) -> Tasks | None:
        """Both levels, or None where a limit is not kept."""
        nodes = self._among_nodes()
        ranges = [node.pieces for node in nodes]
        loads = self._loads(ranges, nodes)
        for attempt in range(_ATTEMPTS):
            over = self._over(nodes, loads)
            if not over or (attempt > 1 and any(sum(loads[i]) > sum(limits) for i, (_, limits) in over.items())):
                break
            for i, (share, _) in over.items():
                ranges[i] = self._within(nodes[i], share)
            for i, load in zip(over, self._loads([ranges[i] for i in over], [nodes[i] for i in over]), strict=True):
                loads[i] = load
        servers = np.concatenate([[*node.servers, 0] for node in nodes])
        found = np.concatenate(ranges)
        found[:, 0] = self._ids[found[:, 0]]
        found[:, PIECE_RANK] = servers[found[:, PIECE_RANK] + _firsts(nodes, ranges)]
        rows = task_rows(found, Units(self._layout, self._window))
        ranks = self._layout.num_ranks
        computed, before = (self._by_server(pieces, ranks) for pieces in (_ranges_of(rows), self._layout.pieces))
        kept = Shares(self._weights, ranks, self._tolerance).are_kept(computed.tolist())
        return Tasks(rows, computed, before) if kept else None

    def _over(self, nodes: list[_Node], loads: list[list[int]]) -> dict[int, tuple[int, list[int]]]:
        """The nodes of which a server exceeds its limit: the node's share in the work of all, and the limits."""
        total, weight, found = sum(map(sum, loads)), sum(self._weights), {}
        for i, node in enumerate(nodes):
            share = total * sum(node.shares.weights) // weight
            limits = node.shares.limits(share)
            if any(map(gt, loads[i], limits)):
                found[i] = share, limits
        return found

    def _among_nodes(self) -> list[_Node]:
        """Every node that computes anything, with what it is to compute."""
        topology, layout = self._topology, self._layout
        node_of = topology.node_of
        segments = layout.segments.copy()
        segments[:, RANK] = node_of[segments[:, RANK]]
        tasks = balance(
            Layout(segments[np.argsort(segments[:, RANK], kind="stable")], topology.size),
            replace(self._cost, bytes_per_second=self._cost.nic_bytes_per_second),
            phase=self._phase,
            tolerance=self._tolerance / _NODES_PART,
            granularity=self._granularity,
            window=self._window,
            server_weights=_scaled([sum(self._weights[s] for s in its) for its in topology.servers]),
        ).rows
        # Cut where the pieces of ranks end, and each part with its place in the node.
        pieces = layout.pieces
        which, piece, rows = overlaps(pieces, tasks[:, TASK_DOCUMENT], tasks[:, Q_START], tasks[:, Q_END])
        start = np.maximum(pieces[piece, PIECE_START], tasks[which, Q_START])
        node, home = tasks[which, SERVER], pieces[piece, PIECE_RANK]
        place = np.where(node_of[home] == node, topology.place_of[home], np.bincount(node_of)[node])
        ranges = np.stack([tasks[which, TASK_DOCUMENT], start, start + rows, place], axis=1)
        order = np.lexsort((start, ranges[:, 0], node))
        borders = np.searchsorted(node[order], np.arange(topology.size + 1))
        parts = [ranges[order[low:high]] for low, high in pairwise(borders.tolist())]
        return [
            _Node(its, join_ranges(part), Shares([*(self._weights[s] for s in its), 0], len(its) + 1, self._tolerance))
            for its, part in zip(topology.servers, parts, strict=True)
            if len(part) or any(self._weights[s] for s in its)  # the others have nothing to share out
        ]

    def _within(self, node: _Node, share: int) -> np.ndarray:
        """A node's ranges [n, 4] (document, start, end, place), of whose servers all have a part.

        Args:
            share: of the node in the work of all.
        """
        terms, pieces = self._cost.phase(self._phase), node.pieces
        moves = Moves(
            pieces=pieces,
            costs=self._costs(pieces),
            documents=documents_in_order(pieces),  # numbered already
            loads=self._by_server(pieces, len(node.shares.weights)).tolist(),
            shares=node.shares,
            cuts=UnitCuts(terms, self._window, self._granularity, {}),
            window=self._window,
            row_costs=row_costs(self._cost.heads, self._phase, self._cost.bytes_per_second),
            max_received_rows=None,
            received_rows=[0] * len(node.shares.weights),
            assumed_total=share,
        )
        return join_ranges(_sorted(moves.run(patient=False)))

    def _costs(self, pieces: np.ndarray) -> np.ndarray:
        start, end = pieces[:, PIECE_START], pieces[:, PIECE_END]
        return self._cost.cost(start, end, key_start(start, self._window), self._window, self._phase)

    def _by_server(self, pieces: np.ndarray, servers: int) -> np.ndarray:
        """Loads of servers that compute these ranges, int64 [servers]."""
        loads = np.zeros(servers, dtype=np.int64)
        np.add.at(loads, pieces[:, PIECE_RANK], self._costs(pieces))
        return loads

    def _loads(self, ranges: list[np.ndarray], nodes: list[_Node]) -> list[list[int]]:
        """Of each node, the loads of its servers and of all others, with these ranges."""
        pieces = np.concatenate(ranges)
        pieces[:, PIECE_RANK] += _firsts(nodes, ranges)
        counts = [len(node.shares.weights) for node in nodes]
        loads = self._by_server(pieces, sum(counts)).tolist()
        return [loads[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def _firsts(nodes: list[_Node], ranges: list[np.ndarray]) -> np.ndarray:
    """Where the places of each range's node begin, when those of one node follow on those of another."""
    counts = np.array([len(node.shares.weights) for node in nodes])
    return np.repeat(np.cumsum(counts) - counts, [len(pieces) for pieces in ranges])


def _ranges_of(rows: np.ndarray) -> np.ndarray:
    """``Tasks.rows`` as ranges [n, 4] (document, start, end, server)."""
    return rows[:, [TASK_DOCUMENT, Q_START, Q_END, SERVER]]


def _sorted(ranges: np.ndarray) -> np.ndarray:
    """By server, document and start, so that ranges that follow on each other can be joined."""
    return ranges[np.lexsort((ranges[:, PIECE_START], ranges[:, 0], ranges[:, PIECE_RANK]))]


def _scaled(weights: list[int]) -> list[int]:
    """In the same proportions, as nearly as weights of servers can be."""
    common = gcd(*weights) or 1
    most = max(weights) // common
    return [weight // common if most <= MAX_WEIGHT else weight * MAX_WEIGHT // max(weights) for weight in weights]
