# SPDX-License-Identifier: Apache-2.0
"""CA-tasks of a whole layout, and the tasks that there are when everything is computed at home."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepspeed_distca.layout import PIECE_DOCUMENT, PIECE_RANK, PIECE_START, Layout, join_ranges, sort_rows
from deepspeed_distca.scheduler.cost_model import key_start

#: Columns of ``Tasks.rows``.
TASK_DOCUMENT, Q_START, Q_END, K_START, SERVER = range(5)


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


def home_tasks(layout: Layout, window: int | None = None) -> np.ndarray:
    """``Tasks.rows`` with every query row computed at its home."""
    return task_rows(layout.pieces, window)


def task_rows(pieces: np.ndarray, window: int | None = None) -> np.ndarray:
    """``Tasks.rows`` from query ranges [n, 4] (document, start, end, server); ranges of one document that follow on
    each other at one server become one task."""
    pieces = pieces[sort_rows(pieces[:, PIECE_RANK], pieces[:, PIECE_DOCUMENT], pieces[:, PIECE_START])]
    document, start, end, server = join_ranges(pieces).T
    return np.stack([document, start, end, key_start(start, window), server], axis=1)
