# SPDX-License-Identifier: Apache-2.0
"""Random plans with every option against all that is promised of them; and checks that can fail."""

from __future__ import annotations

import numpy as np
import pytest

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler import CostModel, Heads, Tasks, balance
from deepspeed_distca.scheduler.tasks import SERVER
from tests.scheduler import random_checks
from tests.scheduler.bounds import promised
from tests.scheduler.random_checks import check_plan, random_case

FIT = CostModel.fitted(Heads())
SMALL = Layout.from_ranks([[(0, 0, 488), (3, 0, 312)], [], [(1, 0, 2300), (2, 0, 34)]])


#: Of plans that once broke a promise: weight 0 (the first five), and the bound.
@pytest.mark.parametrize("seed", [24, 115, 215, 337, 586, 152, 10022, 10131, 10618, 11813, 12067, 12265, 20976, 24839])
def test_plans_that_broke_a_promise(seed):
    check_plan(seed)


def test_cases_come_from_their_seed_and_have_every_option():
    assert str(random_case(7)) == str(random_case(7)) != str(random_case(8))
    cases = [random_case(seed).options for seed in range(300)]
    for name in cases[0]:
        assert len({str(case[name]) for case in cases}) > 1, name


def test_a_wrong_plan_is_found(monkeypatch):
    def changed(change):
        def plan(layout, cost, **options):
            tasks = balance(layout, cost, **options)
            rows, loads = tasks.rows.copy(), tasks.loads.copy()
            change(rows, loads)
            return Tasks(rows, loads, tasks.loads_before)

        return plan

    def shorter(rows, loads):
        rows[-1:, 2] -= 1

    def heavier(rows, loads):
        loads[0] += 1

    for change in (shorter, heavier):
        monkeypatch.setattr(random_checks, "balance", changed(change))
        with pytest.raises(AssertionError, match=r"seed 3: .*ranks=\[.*granularity"):
            check_plan(3)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("granularity", [1, 128])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("cap", [None, 1, 1000])
def test_a_server_of_weight_0_computes_nothing(phase, granularity, window, cap):
    options = dict(phase=phase, granularity=granularity, window=window, max_received_rows=cap)
    for weights in ([0, 3, 3], [0, 1, 0], [1, 10**6, 0], [3, 3, 0]):
        for layout in (SMALL, Layout.from_ranks([[(0, 0, 900)], [(0, 900, 700)], [(0, 1600, 77), (1, 0, 1)]])):
            loads = balance(layout, FIT, tolerance=0.005, server_weights=weights, **options).loads
            assert [int(load) for load, weight in zip(loads, weights, strict=True) if not weight and load] == []


def test_a_cap_is_raised_no_further_than_weight_0_needs():
    layout = Layout.from_lengths([[100] * 8, [], []])
    free = balance(layout, FIT, server_weights=[0, 1, 1], max_received_rows=10**6)
    capped = balance(layout, FIT, server_weights=[0, 1, 1], max_received_rows=800)
    assert capped.loads.tolist() == free.loads.tolist()
    # 8 documents of 100 query and 100 key rows each for two servers: 800 rows each, from a cap of 500 that holds two.
    doubled = balance(layout, FIT, server_weights=[0, 1, 1], max_received_rows=500)
    assert np.bincount(doubled.rows[:, SERVER], minlength=3)[0] == 0
    assert np.bincount(doubled.rows[:, SERVER]).max() <= 1000 // 200


@pytest.mark.parametrize(
    ("heads", "servers", "length", "options"),
    [
        (Heads(4, 1, 16), 16, 2030, dict(window=1, granularity=5)),
        (Heads(4, 1, 16), 16, 2030, dict(window=1, granularity=5, phase="backward")),
        (Heads(), 16, 2030, dict(window=128, granularity=1)),
        (Heads(), 48, 3000, dict(granularity=1, phase="backward")),
    ],
)
@pytest.mark.parametrize("tolerance", [0, 0.02])
def test_one_short_document_over_many_servers_keeps_the_bound(heads, servers, length, options, tolerance):
    layout, cost = Layout.from_lengths([[length]] + [[]] * (servers - 1)), CostModel.fitted(heads)
    tasks = balance(layout, cost, tolerance=tolerance, **options)
    assert (tasks.loads <= promised(layout, cost, tasks, tolerance, **options)).all()


def test_where_tasks_are_dear_and_cuts_free_all_servers_get_the_same():
    layout, options = Layout.from_lengths([[2030]] + [[]] * 15), dict(window=1, granularity=5)
    assert balance(layout, CostModel.fitted(Heads(4, 1, 16)), tolerance=0.02, **options).balance <= 1.02


def test_a_document_in_many_pieces_joins_again():
    # Each piece alone costs as much as a task; those of a document that come together cost it once.
    rows = [[(d, 2 * i, 2) for d in range(40) for i in range(8) if (d + i) % 8 == r] for r in range(8)]
    rows[0] += [(40, 0, 500)]
    tasks = balance(Layout.from_ranks(rows), FIT, tolerance=0, window=50)
    assert (tasks.loads <= promised(Layout.from_ranks(rows), FIT, tasks, 0, window=50)).all()
