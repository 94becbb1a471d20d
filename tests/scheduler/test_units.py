# SPDX-License-Identifier: Apache-2.0
"""Layouts with trees: their tasks have every pair of rows that attend to each other once, whoever computes them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler import CostModel, Heads, balance, home_tasks
from deepspeed_distca.scheduler.cost_model import PHASES
from deepspeed_distca.scheduler.cuts import UnitCuts, costliest_shard
from deepspeed_distca.scheduler.shares import Shares
from deepspeed_distca.scheduler.tasks import K_END, K_START, Q_END, Q_START, SERVER, TASK_DOCUMENT, task_costs
from deepspeed_distca.scheduler.units import Units
from tests.distributed.random_plans import random_layout, visible

COST = CostModel.fitted(Heads(32, 8, 128))


def pairs(rows: np.ndarray, document: int, length: int) -> np.ndarray:
    """How many tasks have each pair of a query and a key of a document."""
    counts = np.zeros((length, length), dtype=int)
    for task in rows[rows[:, TASK_DOCUMENT] == document].tolist():
        a, b, first, last = (task[c] for c in (Q_START, Q_END, K_START, K_END))
        assert b <= last or last <= a, "neither causal nor full"
        counts[a:b, first:last] += np.tri(b - a, last - first, last - first - (b - a), dtype=int) if last == b else 1
    return counts


def lengths(layout: Layout) -> dict[int, int]:
    found: dict[int, int] = {}
    for _, document, start, length in layout.segments.tolist():
        found[document] = max(found.get(document, 0), start + length)
    return found


@settings(max_examples=150)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.sampled_from(PHASES),
    st.sampled_from([0.0, 0.02, 0.3]),
    st.sampled_from([1, 8]),
)
def test_every_pair_once_within_the_bound(seed: int, ranks: int, phase, tolerance: float, granularity: int) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, ranks, documents=int(rng.integers(1, 7)), longest=60, trees=0.6)
    options = dict(phase=phase, tolerance=tolerance, granularity=granularity)
    tasks = balance(layout, COST, **options)
    for rows in (home_tasks(layout), tasks.rows):
        for document, length in lengths(layout).items():
            assert np.array_equal(pairs(rows, document, length), visible(layout, document, length))
    loads = np.zeros(ranks, dtype=np.int64)
    np.add.at(loads, tasks.rows[:, SERVER], task_costs(tasks.rows, COST, phase))
    assert np.array_equal(loads, tasks.loads)
    units = Units(layout, None)
    shard = costliest_shard(units.pieces, lambda ends: units.costs(ends, COST, phase), granularity)
    bound = Shares(None, ranks, tolerance).promised(int(loads.sum()), shard)
    assert all(load <= most for load, most in zip(loads.tolist(), bound, strict=True))


def test_answers_are_spread() -> None:
    """A prompt with many answers on one rank, documents on another: the full tile's queries move."""
    layout = Layout.from_trees([[[(8192, None), *[(512, 0)] * 32]], [512, 512], [1024], [1024]])
    tasks = balance(layout, COST, tolerance=0.02)
    assert tasks.balance_before > 3.5 and tasks.balance <= 1.02
    moved = tasks.rows[(tasks.rows[:, TASK_DOCUMENT] == 0) & (tasks.rows[:, SERVER] != 0)]
    assert (moved[:, K_END] <= moved[:, Q_START]).any()


@pytest.mark.parametrize("phase", PHASES)
def test_cuts_of_full_units(phase) -> None:
    terms, rng = COST.phase(phase), np.random.default_rng(0)
    cuts = UnitCuts(terms, None, 4, {7: 300}).of(7)
    for _ in range(200):
        start = int(rng.integers(0, 100))
        end = start + int(rng.integers(1, 200))
        budget = int(rng.integers(0, 2 * cuts.cost(start, end)))
        head, tail = cuts.head_within(start, end, budget), cuts.tail_within(start, end, budget)
        assert head % 4 == tail % 4 == 0
        if start < head:
            assert cuts.cost(start, head) <= budget < cuts.cost(start, head + 4)
        if tail < end:
            assert cuts.cost(tail, end) <= budget < cuts.cost(tail - 4, end)
        middle = (start + end) // 2
        assert cuts.cost(start, end) == cuts.cost(start, middle) + cuts.cost(middle, end) - cuts.joined(middle)
