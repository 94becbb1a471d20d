# SPDX-License-Identifier: Apache-2.0
"""Rows and bytes that tasks make ranks send each other, for weighing, reports and checks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepspeed_distca.layout import PIECE_DOCUMENT, PIECE_END, PIECE_RANK, PIECE_START, Layout
from deepspeed_distca.scheduler.cost_model import Phase
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.routes import RouteCompiler, bytes_of
from deepspeed_distca.scheduler.tasks import K_END, K_START, Q_END, Q_START, SERVER, TASK_DOCUMENT, Tasks
from deepspeed_distca.scheduler.topology import Topology


class Traffic(NamedTuple):
    """Rows between ranks in one phase, int64 [num_ranks, num_ranks].

    The diagonals are 0: what stays at home is no traffic. A (document, server) pair receives each key/value row once,
    and its gradients go back the way that it came.

    Attributes:
        q_rows, kv_rows: by home and server.
        dispatched_kv_rows: by who sends them, a home or a relay, and server; with those that are carried for others.
    """

    q_rows: np.ndarray
    kv_rows: np.ndarray
    dispatched_kv_rows: np.ndarray

    def dispatch_bytes(self, heads: Heads, phase: Phase = "forward") -> np.ndarray:
        """[sender, receiver] bytes on the way out: q, k, v; in backward dout, lse and delta as well.

        Raises:
            OverflowError: see ``plan.bytes_of``; so does :meth:`return_bytes`.
        """
        q = heads.q_bytes if phase == "forward" else heads.q_bytes + heads.out_bytes + 2 * heads.lse_bytes
        return bytes_of(self.q_rows, q) + bytes_of(self.dispatched_kv_rows, heads.kv_bytes)

    def return_bytes(self, heads: Heads, phase: Phase = "forward") -> np.ndarray:
        """[sender, receiver] bytes on the way back, from servers to homes: out and lse; in backward dq, dk, dv."""
        if phase == "forward":
            return bytes_of(self.q_rows, heads.return_bytes).T
        return (bytes_of(self.q_rows, heads.q_bytes) + bytes_of(self.dispatched_kv_rows, heads.kv_bytes)).T


def traffic(layout: Layout, tasks: Tasks | np.ndarray, nodes: Topology | None = None) -> Traffic:
    """What tasks (or their rows) make ranks send; `nodes` of the servers, None is one node."""
    rows = tasks.rows if isinstance(tasks, Tasks) else tasks
    q, kv = rows_between(layout.pieces, rows, layout.num_ranks)
    np.fill_diagonal(q, 0)
    np.fill_diagonal(kv, 0)
    return Traffic(q, kv, RouteCompiler(layout, rows, nodes).key_rows())


def rows_between(pieces: np.ndarray, rows: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Query and key/value rows that servers need, each once, by home: int64 [home, server] each, diagonal and all.

    Args:
        pieces: see ``Layout.pieces``.
        rows: ``Tasks.rows``.
    """
    q, kv = (
        _by_home(pieces, *_distinct(rows[:, TASK_DOCUMENT], rows[:, low], rows[:, high], rows[:, SERVER]), num_ranks)
        for low, high in ((Q_START, Q_END), (K_START, K_END))
    )
    return q, kv


def _distinct(
    document: np.ndarray, low: np.ndarray, high: np.ndarray, server: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ranges [low, high) of documents at servers without what several of them have in common: each row once."""
    order = np.lexsort((low, document, server))
    d, s, low, high = document[order], server[order], low[order], high[order]
    if len(order):
        same = np.append(False, (d[1:] == d[:-1]) & (s[1:] == s[:-1]))
        lift = np.cumsum(~same) * (int(high.max()) + 1)
        reach = np.maximum.accumulate(high + lift) - lift
        # What an earlier range of the group covers is counted there: each range keeps its part beyond the reach.
        low[1:] = np.where(same[1:], np.maximum(low[1:], reach[:-1]), low[1:])
        more = low < high
        d, s, low, high = d[more], s[more], low[more], high[more]
    return d, low, high, s


def _by_home(
    pieces: np.ndarray, document: np.ndarray, low: np.ndarray, high: np.ndarray, server: np.ndarray, num_ranks: int
) -> np.ndarray:
    """Rows of ranges [low, high) by the rank that stores them and the server that needs them."""
    out = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    which, piece, size = overlaps(pieces, document, low, high)
    np.add.at(out, (pieces[piece, PIECE_RANK], server[which]), size)
    return out


def overlaps(
    pieces: np.ndarray, document: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts ranges [low, high) at the borders of pieces: index of the range, index of the piece, and rows, by part."""
    if not len(document):
        return (np.zeros(0, dtype=np.int64),) * 3
    span = int(pieces[:, PIECE_END].max()) + 1
    ids, start, end = pieces[:, PIECE_DOCUMENT], pieces[:, PIECE_START], pieces[:, PIECE_END]
    # Documents by number, not id: ids may be as large as they like.
    number = np.cumsum(np.append(True, ids[1:] != ids[:-1])) - 1
    number_of = number[np.searchsorted(ids, document)]
    key = number * span + start
    first = np.searchsorted(key, number_of * span + low, side="right") - 1
    count = np.searchsorted(key, number_of * span + high - 1, side="right") - first
    which = np.repeat(np.arange(len(document)), count)
    piece = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + first[which]
    return which, piece, np.minimum(end[piece], high[which]) - np.maximum(start[piece], low[which])


def homes_of(layout: Layout, rows: np.ndarray) -> list[list[int]]:
    """The ranks that store the query rows of each task of `rows` (``Tasks.rows``), ascending."""
    pieces = layout.pieces
    which, piece, _ = overlaps(pieces, rows[:, TASK_DOCUMENT], rows[:, Q_START], rows[:, Q_END])
    homes: list[set[int]] = [set() for _ in range(len(rows))]
    for task, rank in zip(which.tolist(), pieces[piece, PIECE_RANK].tolist(), strict=True):
        homes[task].add(rank)
    return [sorted(ranks) for ranks in homes]
