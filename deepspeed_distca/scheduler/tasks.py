# SPDX-License-Identifier: Apache-2.0
"""CA-tasks of a whole layout, and the tasks that there are when everything is computed at home."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import CostModel, Phase
from deepspeed_distca.scheduler.units import Units, sorted_ranges

#: Columns of ``Tasks.rows``.
TASK_DOCUMENT, Q_START, Q_END, K_START, K_END, SERVER = range(6)


@dataclass(frozen=True)
class Tasks:
    """All CA-tasks of one layout in one phase.

    Attributes:
        rows: int64 [num_tasks, 6], columns (document, q_start, q_end, k_start, k_end, server), sorted by (server,
            document, q_start). Queries [q_start, q_end) against keys [k_start, k_end): causal, the last query with the
            last key, where both end together, or every query with every key (a *full* task) where keys end before the
            queries begin. Several tasks have the same queries only in trees.
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
    units = Units(layout, window)
    return task_rows(units.pieces, units)


def task_rows(ranges: np.ndarray, units: Units) -> np.ndarray:
    """``Tasks.rows`` from query ranges [n, 4] (unit, start, end, server) of a layout's units; ranges of one unit that
    follow on each other at one server become one task."""
    unit, start, end, server = sorted_ranges(ranges).T
    return np.stack([*units.places(unit, start, end), server], axis=1)


def is_full(rows: np.ndarray) -> np.ndarray:
    """Which tasks are full, bool [num_tasks]; see ``Tasks.rows``."""
    return rows[:, K_END] < rows[:, Q_END]


def task_costs(rows: np.ndarray, cost: CostModel, phase: Phase, window: int | None = None) -> np.ndarray:
    """What the tasks of ``Tasks.rows`` cost, int64 [num_tasks].

    Raises:
        OverflowError: see :meth:`CostModel.cost`.
    """
    _, q_start, q_end, k_start, k_end, _ = rows.T
    full = is_full(rows)
    # A causal task costs what its queries would at the same distance from a first key at 0.
    first = np.where(full, q_start, k_start)
    causal = cost.cost(q_start - first, q_end - first, 0 * first, window, phase)
    if not full.any():
        return causal
    return np.where(full, cost.full(q_end - q_start, k_end - k_start, phase), causal)
