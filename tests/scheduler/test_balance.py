# SPDX-License-Identifier: Apache-2.0
"""balance(): exact cover, two-sided bound, bytes, and independence of names, on random layouts and at extremes."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from deepspeed_distca.layout import Layout, LayoutError, Segment
from deepspeed_distca.scheduler import CostModel, balance, home_tasks
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import SERVER
from deepspeed_distca.scheduler.traffic import rows_between
from tests.scheduler.bounds import least_max_load, lower_bound, naive_bytes, promised
from tests.scheduler.checks import check_shards, check_tasks, documents_of
from tests.scheduler.strategies import COSTS, HEADS, layouts, windows

AREA = COSTS["area"][0]

OPTIONS = st.fixed_dictionaries(
    {
        "tolerance": st.sampled_from([0.0, 0.001, 0.02, 0.05, 0.3]),
        "granularity": st.sampled_from([1, 16, 128, 128, 1000]),
        "window": windows(),
    }
)


@settings(max_examples=250)
@given(layout=layouts(), cost=st.sampled_from(sorted(COSTS)), options=OPTIONS)
def test_covers_every_query_once_and_keeps_the_promise(layout, cost, options):
    model, phase = COSTS[cost]
    tasks = balance(layout, model, phase=phase, **options)
    check_tasks(layout, tasks.rows, options["window"])
    check_shards(layout, tasks.rows, options["granularity"])
    rows, window = tasks.rows, options["window"]
    costs = model.cost(rows[:, 1], rows[:, 2], rows[:, 3], window, phase)
    loads = np.bincount(rows[:, 5], weights=costs, minlength=layout.num_ranks)
    assert np.allclose(tasks.loads, loads, rtol=1e-12)
    home = home_tasks(layout, window)
    check_tasks(layout, home, window)
    costs = model.cost(home[:, 1], home[:, 2], home[:, 3], window, phase)
    before = np.bincount(home[:, 5], weights=costs, minlength=layout.num_ranks)
    assert np.allclose(tasks.loads_before, before, rtol=1e-12)
    bound = promised(layout, model, tasks, phase=phase, **options)
    assert all(load <= most for load, most in zip(tasks.loads.tolist(), bound, strict=True))
    least = lower_bound(layout, model, phase=phase, granularity=options["granularity"], window=window)
    assert tasks.loads.max() >= least
    queries, keys = rows_between(layout, tasks.rows)
    by_home, sent = queries * HEADS.q_bytes + keys * HEADS.kv_bytes, RouteCompiler(layout, tasks.rows).key_rows()
    assert (by_home <= naive_bytes(layout, tasks, HEADS)).all()
    # Relays change who sends keys, not who receives how many, and load nobody more than the busiest home was.
    assert (sent.sum(axis=0) == keys.sum(axis=0)).all()
    assert sent.sum(axis=1).max() <= keys.sum(axis=1).max()


@settings(max_examples=150)
@given(
    layout=layouts(lengths=st.integers(1000, 60000)),
    tolerance=st.sampled_from([0.01, 0.02, 0.05]),
    granularity=st.sampled_from([16, 64]),
)
def test_two_sided_bound_where_granules_are_finer_than_the_tolerance(layout, tolerance, granularity):
    mean = int(balance(layout, AREA, tolerance=10**6).loads.sum()) / layout.num_ranks
    longest = max(map(len, documents_of(layout).values()))
    rows = 3 * granularity
    assume(AREA.forward(max(0, longest - rows), longest, 0) <= tolerance * mean)
    tasks = balance(layout, AREA, tolerance=tolerance, granularity=granularity)
    assert tasks.loads.max() <= (1 + tolerance) * mean


@settings(max_examples=100)
@given(layout=layouts(), cost=st.sampled_from(sorted(COSTS)), window=windows(), tolerance=st.floats(0, 8))
def test_within_the_tolerance_nothing_moves(layout, cost, window, tolerance):
    model, phase = COSTS[cost]
    tasks = balance(layout, model, phase=phase, window=window, tolerance=tolerance)
    before = tasks.loads_before
    if before.max() * layout.num_ranks <= (1 + tolerance - 1e-8) * before.sum():
        assert np.array_equal(tasks.rows, home_tasks(layout, window))
        assert not rows_between(layout, tasks.rows)[0].any()
        assert np.array_equal(tasks.loads, before)
    else:
        assert tasks.loads.max() <= before.max()


@settings(max_examples=100)
@given(layout=layouts(), cost=st.sampled_from(sorted(COSTS)), window=windows(), seed=st.integers(0, 2**32))
def test_neither_ids_nor_storage_order_matter(layout, cost, window, seed):
    model, phase = COSTS[cost]
    rng = random.Random(seed)
    old = sorted(documents_of(layout))
    new = rng.sample(range(10**12), len(old))
    name = dict(zip(old, new, strict=True))
    ranks = [[Segment(name[s.document], s.start, s.length) for s in layout.rank(r)] for r in range(layout.num_ranks)]
    for row in ranks:
        rng.shuffle(row)
    other = Layout.from_ranks(ranks)

    def shape(where: Layout) -> list:
        # Documents that lie alike may change places: each counts with where it lies and what becomes of it.
        tasks = balance(where, model, phase=phase, window=window)
        homes = documents_of(where)
        return sorted(
            (homes[document].tolist(), tasks.rows[tasks.rows[:, 0] == document][:, 1:].tolist()) for document in homes
        ), tasks.loads.tolist()

    assert shape(layout) == shape(other)


def test_is_a_pure_function():
    layout = Layout.from_lengths([[40000, 300], [500] * 20, [], [7000]])
    segments = layout.segments.copy()
    first, second = (balance(layout, CostModel.fitted(), phase="backward") for _ in range(2))
    assert np.array_equal(first.rows, second.rows) and np.array_equal(first.loads, second.loads)
    assert np.array_equal(layout.segments, segments)


@settings(max_examples=60)
@given(
    layout=layouts(ranks=st.integers(2, 3), documents=st.integers(1, 4), lengths=st.integers(1, 520)),
    cost=st.sampled_from(sorted(COSTS)),
)
def test_against_the_exact_optimum(layout, cost):
    model, phase = COSTS[cost]
    try:
        best = least_max_load(layout, model, phase=phase, max_granules=11)
    except ValueError:
        assume(False)
    tasks = balance(layout, model, phase=phase, tolerance=0)
    assert lower_bound(layout, model, phase=phase) <= best <= tasks.loads.max()
    # One more shard than the best possible.
    most = max(promised(layout, model, tasks, 0, phase=phase))
    assert tasks.loads.max() <= max(best, most)
    assert tasks.loads.max() <= tasks.loads_before.max()


def test_small_cases_are_near_the_optimum():
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(40):
        lengths = 128 * rng.integers(1, 5, int(rng.integers(1, 5)))
        layout = Layout.from_lengths([[int(n) for n in lengths], [], []])
        try:
            best = least_max_load(layout, AREA, max_granules=12)
        except ValueError:
            continue
        ratios.append(balance(layout, AREA, tolerance=0).loads.max() / best)
    assert len(ratios) > 25
    assert min(ratios) >= 1
    assert np.mean(ratios) < 1.15
    assert np.mean(np.array(ratios) == 1) > 0.25


@settings(max_examples=80)
@given(
    layout=layouts(), cap=st.sampled_from([1, 500, 5000, 50000]), cost=st.sampled_from(sorted(COSTS)), window=windows()
)
def test_cap_on_received_rows(layout, cap, cost, window):
    model, phase = COSTS[cost]
    tasks = balance(layout, model, phase=phase, window=window, max_received_rows=cap)
    check_tasks(layout, tasks.rows, window)
    received = sum(rows_between(layout, tasks.rows)).sum(axis=0)
    at_home = rows_between(layout, home_tasks(layout, window))[1].sum(axis=0)
    assert (received <= np.maximum(cap, at_home)).all()
    assert tasks.loads.max() <= tasks.loads_before.max()


def test_a_loose_cap_changes_nothing_and_a_tight_one_keeps_all_at_home():
    layout = Layout.from_lengths([[60000], [2000] * 8, [], [500]])
    free = balance(layout, AREA)
    loose = balance(layout, AREA, max_received_rows=10**9)
    assert np.array_equal(free.rows, loose.rows)
    tight = balance(layout, AREA, max_received_rows=100)
    assert np.array_equal(tight.rows, home_tasks(layout))
    between = balance(layout, AREA, max_received_rows=40000)
    assert free.loads.max() < between.loads.max() < tight.loads.max()


@settings(max_examples=80)
@example(layout=Layout.from_lengths([[], [], [], [], [], [1, 1]]), weights=[0, 0, 0, 1, 2, 2, 0], tolerance=0.02)
@given(
    layout=layouts(ranks=st.integers(2, 7)),
    weights=st.lists(st.integers(0, 4), min_size=7, max_size=7),
    tolerance=st.sampled_from([0.02, 0.1]),
)
def test_weighted_servers(layout, weights, tolerance):
    weights = weights[: layout.num_ranks]
    assume(any(weights))
    tasks = balance(layout, AREA, tolerance=tolerance, server_weights=weights)
    check_tasks(layout, tasks.rows, None)
    bound = promised(layout, AREA, tasks, tolerance, server_weights=weights)
    for load, most, weight in zip(tasks.loads.tolist(), bound, weights, strict=True):
        assert load <= most if weight else load == 0


@settings(max_examples=150)
@example(homes=[0, 0, 0], weights=[4, 1, 1, 1])
@given(
    homes=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    weights=st.lists(st.integers(1, 4), min_size=4, max_size=4),
)
def test_weighted_unit_documents_against_every_assignment(homes, weights):
    layout = Layout.from_lengths([[1] * homes.count(rank) for rank in range(4)])
    loads = balance(layout, AREA, tolerance=0.02, server_weights=weights).loads
    unit = int(loads.sum()) // len(homes)
    slowest = max(Fraction(int(load) // unit, weight) for load, weight in zip(loads, weights, strict=True))
    assert slowest == min(
        max(Fraction(servers.count(s), weights[s]) for s in range(4))
        for servers in itertools.product(range(4), repeat=len(homes))
    )


def test_weights_are_shares():
    layout = Layout.from_lengths([[100000], [], []])
    tasks = balance(layout, AREA, server_weights=[1, 2, 5], tolerance=0.02)
    relative = tasks.loads / tasks.loads.sum() / (np.array([1, 2, 5]) / 8)
    assert relative.max() <= 1.02 and relative.min() > 0.9


@pytest.mark.parametrize("cost", sorted(COSTS))
@pytest.mark.parametrize(
    "layout",
    [
        Layout.from_lengths([[131072], [], [], []]),
        Layout.from_lengths([[1] * 500, [], [1]]),
        Layout.from_lengths([[1] * 5000] + [[] for _ in range(6)]),
        Layout.from_lengths([[4096] * 4 for _ in range(5)]),
        Layout.from_lengths([[30000], [7], [13], [1], [1, 1], [], [2]]),
        Layout.from_ranks([[(0, i * 8192, 8192)] for i in range(7)]),
        Layout.from_ranks([[(0, i * 4096, 4096), (0, (13 - i) * 4096, 4096)] for i in range(7)]),
        Layout.from_lengths([[7], [1], [1, 1, 1], [9, 8, 8, 12, 8, 12], [127]]),
        Layout.from_lengths([[]]),
        Layout.from_lengths([[], [], []]),
        Layout.from_lengths([[100003]]),
    ],
    ids=[
        "one document is everything",
        "one-token documents",
        "very many one-token documents on one rank",
        "all equal",
        "more ranks than documents",
        "a document longer than a rank",
        "head and tail",
        "tiny",
        "nothing on one rank",
        "nothing on three ranks",
        "one rank",
    ],
)
@pytest.mark.parametrize("window", [None, 100])
def test_extremes(layout, cost, window):
    model, phase = COSTS[cost]
    tasks = balance(layout, model, phase=phase, window=window, tolerance=0.02)
    check_tasks(layout, tasks.rows, window)
    bound = promised(layout, model, tasks, 0.02, phase=phase, window=window)
    assert all(load <= most for load, most in zip(tasks.loads.tolist(), bound, strict=True))


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("ranks", [2, 7, 31])
def test_one_long_document_is_spread_evenly(ranks, phase):
    layout = Layout.from_lengths([[262144], *[[] for _ in range(ranks - 1)]])
    tasks = balance(layout, CostModel.fitted(), phase=phase, tolerance=0.02)
    assert tasks.balance <= 1.02
    assert np.bincount(tasks.rows[:, SERVER]).max() == 1, "one contiguous range for each server"


def test_takers_prefer_a_document_they_have_keys_of():
    # Rank 1 stores the middle of document 0 and has as much room as rank 3, which stores nothing of it.
    layout = Layout.from_ranks([[(0, 0, 20000)], [(0, 20000, 8000)], [(0, 28000, 30000)], [(1, 0, 23664)]])
    tasks = balance(layout, AREA, tolerance=0.1)
    assert tasks.balance <= 1.1
    sent, _ = RouteCompiler(layout, tasks.rows).bytes_between(HEADS, "forward")
    assert sent.sum() < 0.6 * naive_bytes(layout, tasks, HEADS).sum()


def test_pieces_of_equal_cost_are_told_apart_by_where_the_rest_lies():
    def plan(first: int, second: int) -> list:
        layout = Layout.from_ranks(
            [
                [(first, 0, 20000), (second, 0, 20000)],
                [(first, 20000, 3000)],
                [(second, 20000, 3000)],
                [(2, 0, 9000)],
            ]
        )
        rows = balance(layout, AREA).rows
        return [rows[rows[:, 0] == document][:, 1:].tolist() for document in (first, second)]

    assert plan(0, 1) == plan(1, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": -0.1}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"tolerance": float("inf")}, "tolerance"),
        ({"tolerance": True}, "tolerance"),
        ({"tolerance": "0.1"}, "tolerance"),
        ({"granularity": 0}, "granularity"),
        ({"granularity": 1.5}, "granularity"),
        ({"window": 0}, "window"),
        ({"window": False}, "window"),
        ({"max_received_rows": -1}, "max_received_rows"),
        ({"phase": "both"}, "phase"),
        ({"server_weights": [1]}, "server_weights"),
        ({"server_weights": [0, 0]}, "server_weights"),
        ({"server_weights": [1, -1]}, "server_weights"),
        ({"server_weights": [1, 1.5]}, "server_weights"),
    ],
)
def test_refuses_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        balance(Layout.from_lengths([[5], [9]]), AREA, **options)


def test_refuses_wrong_layouts():
    with pytest.raises(LayoutError, match="expected"):
        balance(Layout.from_ranks([[(0, 0, 5)], [(0, 6, 5)]]), AREA)
    with pytest.raises(OverflowError, match="too long"):
        balance(Layout.from_lengths([[2**26] * 3000, []]), AREA)
