# SPDX-License-Identifier: Apache-2.0
"""CA-tasks of a whole layout, and the tasks that there are when everything is computed at home."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepspeed_distca.layout import DOCUMENT, LENGTH, RANK, START, Layout
from deepspeed_distca.scheduler.cost_model import key_start

#: Columns of ``Tasks.rows``.
TASK_DOCUMENT, Q_START, Q_END, K_START, SERVER = range(5)

#: Columns of :func:`home_pieces`.
PIECE_DOCUMENT, PIECE_START, PIECE_END, PIECE_RANK = range(4)


@dataclass(frozen=True)
class Tasks:
    """All CA-tasks of one layout in one phase.

    Attributes:
        rows: int64 [num_tasks, 5], columns (document, q_start, q_end, k_start, server), sorted by (server, document,
            q_start). Queries [q_start, q_end) against keys [k_start, q_end).
        loads: int64 [num_ranks], predicted cost of each server in the cost model's unit.
        loads_before: the same, had every query row been computed at its home.
    """

    rows: np.ndarray
    loads: np.ndarray
    loads_before: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def balance(self) -> float:
        """Max load over mean load; 1.0 where there is no load."""
        return _balance(self.loads)

    @property
    def balance_before(self) -> float:
        """The same with everything at home."""
        return _balance(self.loads_before)


def _balance(loads: np.ndarray) -> float:
    total = int(loads.sum())
    return int(loads.max()) * len(loads) / total if total else 1.0


def home_pieces(layout: Layout) -> np.ndarray:
    """The longest contiguous ranges of each document on one rank, whether or not they lie side by side in storage.

    Returns:
        int64 [num_pieces, 4], columns (document, start, end, rank), sorted by (document, start).
    """
    s = layout.segments
    s = s[np.lexsort((s[:, START], s[:, DOCUMENT]))]
    document, start, rank = s[:, DOCUMENT], s[:, START], s[:, RANK]
    end = start + s[:, LENGTH]
    joined = (document[1:] == document[:-1]) & (rank[1:] == rank[:-1]) & (start[1:] == end[:-1])
    if joined.any():
        first = np.append(True, ~joined)
        last = np.append(~joined, True)
        document, start, rank, end = document[first], start[first], rank[first], end[last]
    return np.stack([document, start, end, rank], axis=1)


def home_tasks(layout: Layout, window: int | None = None) -> np.ndarray:
    """``Tasks.rows`` with every query row computed at its home."""
    return task_rows(home_pieces(layout), window)


def task_rows(pieces: np.ndarray, window: int | None = None) -> np.ndarray:
    """``Tasks.rows`` from query ranges [n, 4] (document, start, end, server); ranges of one document that follow on
    each other at one server become one task."""
    pieces = pieces[np.lexsort((pieces[:, PIECE_START], pieces[:, PIECE_DOCUMENT], pieces[:, PIECE_RANK]))]
    document, start, end, server = pieces.T
    joined = (document[1:] == document[:-1]) & (server[1:] == server[:-1]) & (start[1:] == end[:-1])
    if joined.any():
        first = np.append(True, ~joined)
        last = np.append(~joined, True)
        document, start, server, end = document[first], start[first], server[first], end[last]
    return np.stack([document, start, end, key_start(start, window), server], axis=1)
