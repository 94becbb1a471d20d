# SPDX-License-Identifier: Apache-2.0
"""Rows of documents that tasks need, and where these are stored."""

from __future__ import annotations

import numpy as np

from deepspeed_distca.layout import PIECE_DOCUMENT, PIECE_END, PIECE_RANK, PIECE_START, Layout
from deepspeed_distca.scheduler.tasks import K_END, K_START, Q_END, Q_START, SERVER, TASK_DOCUMENT


def rows_between(layout: Layout, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Query and key/value rows that servers need of other ranks, each once: int64 [home, server] each. Relays may
    bring them from elsewhere: see ``RouteCompiler.key_rows``.

    Args:
        layout: where the tokens live.
        rows: ``Tasks.rows`` of it.
    """
    q, kv = (
        _by_home(layout, *_distinct(rows[:, TASK_DOCUMENT], rows[:, low], rows[:, high], rows[:, SERVER]))
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
    layout: Layout, document: np.ndarray, low: np.ndarray, high: np.ndarray, server: np.ndarray
) -> np.ndarray:
    """Rows of ranges [low, high) by the rank that stores them and the server, another one, that needs them."""
    out = np.zeros((layout.num_ranks, layout.num_ranks), dtype=np.int64)
    which, piece, size = overlaps(layout.pieces, document, low, high)
    np.add.at(out, (layout.pieces[piece, PIECE_RANK], server[which]), size)
    np.fill_diagonal(out, 0)
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
