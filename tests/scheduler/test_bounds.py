# SPDX-License-Identifier: Apache-2.0
"""The exact solver against trying everything, and the bounds around it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler import CostModel, Heads, home_tasks
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import task_rows
from deepspeed_distca.scheduler.units import Units
from tests.scheduler.bounds import granules, least_max_load, lower_bound, naive_bytes


def random_layout(seed: int) -> Layout:
    rng = np.random.default_rng(seed)
    ranks: list[list[tuple[int, int, int]]] = [[], [], []]
    for document in range(int(rng.integers(1, 3))):
        length = int(rng.integers(1, 80))
        middle = int(rng.integers(0, length))
        for start, end in ((0, middle), (middle, length)):
            if start < end:
                ranks[int(rng.integers(3))].append((document, start, end - start))
    return Layout.from_ranks(ranks)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("phase", ["forward", "backward", "area"])
@pytest.mark.parametrize("seed", range(12))
def test_exact_solver_against_trying_everything(seed, phase, window):
    layout = random_layout(seed)
    cost = CostModel.area() if phase == "area" else CostModel.fitted()
    phase = "forward" if phase == "area" else phase
    parts = granules(layout, 32)
    assert len(parts) <= 8
    best = None
    for servers in itertools.product(range(3), repeat=len(parts)):
        placed = parts.copy()
        placed[:, 3] = servers
        rows = task_rows(placed, Units(layout, window))
        costs = cost.cost(rows[:, 1], rows[:, 2], rows[:, 3], window, phase)
        load = int(np.bincount(rows[:, 5], weights=costs, minlength=3).max())
        best = load if best is None else min(best, load)
    options = dict(phase=phase, granularity=32, window=window)
    assert abs(least_max_load(layout, cost, **options) - best) <= 1
    assert lower_bound(layout, cost, **options) <= best + 1


def test_granules():
    layout = Layout.from_ranks([[(5, 0, 100), (9, 0, 3)], [(5, 100, 200)]])
    assert granules(layout, 128).tolist() == [
        [5, 0, 100, 0],
        [5, 100, 128, 1],
        [5, 128, 256, 1],
        [5, 256, 300, 1],
        [9, 0, 3, 0],
    ]


def test_exact_solver_refuses_large_cases():
    with pytest.raises(ValueError, match="19 granules"):
        least_max_load(Layout.from_lengths([[19 * 128]]), CostModel.area())


def test_nothing_to_do():
    empty = Layout.from_lengths([[], []])
    assert least_max_load(empty, CostModel.area()) == lower_bound(empty, CostModel.area()) == 0


def test_naive_plan_sends_whole_documents():
    layout = Layout.from_ranks([[(0, 0, 10)], [(0, 10, 4), (1, 0, 3)], []])
    heads = Heads(4, 2, 8)
    rows = home_tasks(layout)
    rows[rows[:, 0] == 1, 5] = 2
    row = heads.q_bytes + heads.kv_bytes
    assert naive_bytes(layout, rows, heads).tolist() == [[0, 10 * row, 0], [4 * row, 0, 3 * row], [0, 0, 0]]
    assert (RouteCompiler(layout, rows).bytes_between(heads, "forward")[0] <= naive_bytes(layout, rows, heads)).all()
