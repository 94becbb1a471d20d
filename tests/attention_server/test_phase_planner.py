# SPDX-License-Identifier: Apache-2.0
"""Plans for devices of different speed: linear work and attention end together, and without speeds nothing changes."""

from __future__ import annotations

import itertools
import math
import pickle
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from deepspeed_distca.attention_server.coordination.agreement import GlobalMicroBatch
from deepspeed_distca.attention_server.phase_planner import MicroBatchPlanner, PhasePlanner, PlannedPhase
from deepspeed_distca.config import parse_config
from deepspeed_distca.layout import Layout, Segment
from deepspeed_distca.model_sizes import linear_flops
from deepspeed_distca.plan_options import plan_options
from deepspeed_distca.scheduler.balance import balance
from deepspeed_distca.scheduler.cost_model import CostModel, MovingCost
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import Tasks, task_costs
from deepspeed_distca.scheduler.worth import (
    LINEAR_WORK,
    PLAIN_HOST,
    SEARCH,
    SEARCH_SEGMENT,
    PlanOptions,
    Worth,
    phase_seconds,
)
from tests.huggingface.lone_server import NoExchange, lone_server
from tests.scheduler.strategies import layouts

MODEL = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
FLOPS = linear_flops(MODEL)
HEADS = Heads(32, 8, 128)
NVLINK = CostModel.fitted(HEADS)
FREE = replace(
    CostModel.area(HEADS),
    bytes_per_second=10**18,
    latency=0,
    moving_forward=MovingCost(),
    moving_backward=MovingCost(),
)
GPU = torch.device("cuda", 0)
PHASES = ["forward", "backward"]
LAYERS = 32


def planned(
    layout: Layout,
    weights: tuple[int, ...] | None,
    phase: str = "forward",
    cost: CostModel = NVLINK,
    window: int | None = None,
    **options,
) -> PlannedPhase:
    given = PlanOptions(0.005, 128, None, weights, linear_flops=FLOPS)
    return PhasePlanner(0, cost, replace(given, **options), early=True).plan(layout, window, phase, LAYERS)


def predicted(layout: Layout, phase: str, tasks: Tasks) -> tuple[float, float]:
    """Seconds of a phase over NVLink, attention and transfers that nothing covers; and what moving costs beside."""
    compiler = RouteCompiler(layout, tasks.rows)
    loads = compiler.loads(lambda rows: task_costs(rows, NVLINK, phase))
    sizes = compiler.bytes_between(HEADS, phase)
    seconds = phase_seconds(NVLINK, *(load / 1e15 for load in loads), *sizes, early=True)
    return seconds, NVLINK.moving_seconds(phase, int(compiler.messages(phase).max()))


def ends(layout: Layout, loads: np.ndarray, weights, phase: str, cost: CostModel, flops: int = FLOPS) -> np.ndarray:
    """When servers are through with linear work and attention, in seconds of a device of speed 1."""
    rate = cost.forward.pair / (2 * 32 * 256) / 1e15
    return (flops * layout.tokens * LINEAR_WORK[phase] * rate + loads / 1e15) / np.array(weights, dtype=float)


LENGTHS = st.lists(st.lists(st.integers(1, 20000), max_size=4), min_size=2, max_size=5)
SPEEDS = st.lists(st.integers(700, 1000), min_size=5, max_size=5)


@settings(max_examples=60)
@given(LENGTHS, SPEEDS, st.sampled_from([None, 3000]), st.sampled_from(PHASES), st.sampled_from([0, 20_000, FLOPS]))
def test_linear_work_and_attention_end_together(lengths, speeds, window, phase, flops) -> None:
    layout = Layout.from_lengths(lengths)
    assume(layout.tokens.any())
    weights = tuple(speeds[: layout.num_ranks])
    options = dict(cost=FREE, window=window, linear_flops=flops, tolerance=0.0, granularity=1)
    tasks = planned(layout, weights, phase, **options).tasks
    # A server is through with its linear work, and has its own attention until everybody's rows are there.
    begin, at_home, work = (
        ends(layout, loads, weights, phase, FREE, linear)
        for loads, linear in ((0 * tasks.loads, flops), (tasks.loads_before, 0), (tasks.loads, 0))
    )
    end = np.maximum(begin, begin.max() - at_home) + work
    # Shares are cut by whole queries, and rounded to millionths.
    row = FREE.phase(phase).pair * 20000 / 1e15 / min(weights)
    assert np.ptp(end) <= layout.num_ranks * (2 * row + 1e-5 * end.max())


@settings(max_examples=60)
@given(LENGTHS, st.sampled_from(PHASES), st.sampled_from([0.0, 0.01, 0.04]))
def test_without_speeds_attention_alone_is_balanced(lengths, phase, min_gain) -> None:
    """Whatever numbers of tokens the ranks have; and rows stay at home by the linear work of the most tokens, or where
    the host would be later."""
    layout = Layout.from_lengths(lengths)
    plan, free = (planned(layout, None, phase, min_gain=gain) for gain in (min_gain, 0.0))
    assert plan.weights is None
    assert np.array_equal(free.tasks.rows, balance(layout, NVLINK, phase=phase, tolerance=0.005).rows)
    options = PlanOptions(0.005, 128, min_gain=min_gain, linear_flops=FLOPS)
    tolerance = Worth(layout, None, phase, NVLINK, options, early=True).tolerance() if min_gain else 0.005
    tasks = balance(layout, NVLINK, phase=phase, tolerance=tolerance)
    moved = bool(plan.sent.any())
    assert np.array_equal(plan.tasks.loads, tasks.loads if moved else tasks.loads_before)
    if free.sent.any() and min_gain:
        linear = NVLINK.linear_seconds(FLOPS * int(layout.tokens.max()) * LINEAR_WORK[phase])
        before = float((tasks.loads_before / 1e15).max())
        seconds, price = predicted(layout, phase, tasks)
        later = max(linear + seconds, PLAIN_HOST[phase] + price)
        search = (SEARCH + SEARCH_SEGMENT * len(layout.segments)) / LAYERS
        left = (1 - min_gain) * (linear + before) - later - search
        assert abs(left) < 1e-12 or moved == (left > 0)


@st.composite
def equally_filled(draw) -> Layout:
    """Ranks with the same number of tokens each, in documents whose borders may lie inside a rank's row."""
    tokens, ranks = draw(st.integers(1, 40000)), draw(st.integers(2, 5))
    borders = draw(st.sets(st.integers(1, tokens * ranks), max_size=12)) | {0, tokens * ranks}
    whole = draw(st.booleans())  # documents end where rows do
    borders |= set(range(0, tokens * ranks, tokens)) if whole else set()
    rows: list[list[Segment]] = [[] for _ in range(ranks)]
    for document, (start, end) in enumerate(itertools.pairwise(sorted(borders))):
        for rank in range(start // tokens, -(-end // tokens)):
            first, last = max(start, rank * tokens), min(end, (rank + 1) * tokens)
            rows[rank].append(Segment(document, first - start, last - first))
    return Layout.from_ranks(rows)


@settings(max_examples=80)
@given(
    equally_filled(),
    st.sampled_from([None, 3000]),
    st.sampled_from(PHASES),
    st.sampled_from([0.0, 0.01, 0.04, 0.15]),
    st.sampled_from([0, FLOPS]),
)
def test_equal_speeds_of_ranks_with_equal_tokens_plan_as_none_do(layout, window, phase, min_gain, flops) -> None:
    options = dict(window=window, min_gain=min_gain, linear_flops=flops)
    without, equal = (planned(layout, weights, phase, **options) for weights in (None, (1000,) * layout.num_ranks))
    assert len(set(equal.weights)) == 1 and equal.digest == without.digest


@settings(max_examples=150)
@given(
    LENGTHS.map(Layout.from_lengths) | layouts(ranks=st.integers(2, 5)),
    st.none() | SPEEDS,
    st.sampled_from([None, 3000]),
    st.sampled_from(PHASES),
    st.floats(0.001, 0.7),
    st.sampled_from([0, 20_000, FLOPS]),
    st.booleans(),
)
def test_what_is_not_searched_would_have_stayed_at_home(layout, speeds, window, phase, min_gain, flops, free) -> None:
    """A plan is the same without the bound that saves the search."""
    weights = tuple(speeds[: layout.num_ranks]) if speeds else None
    options = dict(cost=FREE if free else NVLINK, window=window, min_gain=min_gain, linear_flops=flops)
    plan = planned(layout, weights, phase, **options)
    with mock.patch.object(Worth, "least", return_value=-math.inf):
        searched = planned(layout, weights, phase, **options)
    assert plan.digest == searched.digest
    assert np.array_equal(plan.sent, searched.sent) and plan.weights == searched.weights


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rows", [[[65536], [65536]], [[4096] * 16, [4096] * 16]])
def test_a_balanced_batch_costs_nothing_on_cards_that_differ_a_little(rows, phase) -> None:
    layout, weights = Layout.from_lengths(rows), (1000, 970)
    on_gpu = plan_options(parse_config({}), GPU, MODEL, weights)
    plan = PhasePlanner(0, NVLINK, on_gpu, early=True).plan(layout, None, phase, 1)
    assert not plan.sent.any()
    # There would have been something to gain: at best half of what the cards differ by.
    free = PhasePlanner(0, NVLINK, replace(on_gpu, min_gain=0.0), early=True).plan(layout, None, phase, 1)
    before, after = (ends(layout, p.tasks.loads, weights, phase, NVLINK).max() for p in (plan, free))
    assert free.sent.any() and 0.01 < 1 - after / before < 0.016


def test_an_uneven_batch_is_balanced_by_speed() -> None:
    layout, weights = Layout.from_lengths([[65536], [4096] * 16]), (1000, 970)
    on_gpu = plan_options(parse_config({}), GPU, MODEL, weights)
    for phase in PHASES:
        plan = PhasePlanner(0, NVLINK, on_gpu, early=True).plan(layout, None, phase, 1)
        end = ends(layout, plan.tasks.loads, weights, phase, NVLINK)
        assert plan.sent.any() and np.ptp(end) < 0.005 * end.max()
        assert plan.tasks.loads[1] < 0.96 * plan.tasks.loads[0]  # more than the speeds differ: linear work is late too


@pytest.mark.parametrize("phase", PHASES)
def test_a_pool_of_servers_begins_with_the_rows_of_others(phase) -> None:
    layout = Layout.from_lengths([[32768], [4096] * 8, []])
    loads = planned(layout, (1, 1, 1), phase, tolerance=0.0).tasks.loads
    assert loads.min() > 0.99 * loads.mean()
    loads = planned(layout, (1, 1, 3), phase, tolerance=0.0).tasks.loads
    assert loads / loads.sum() == pytest.approx([0.2, 0.2, 0.6], abs=0.01)


def test_who_has_fewer_tokens_does_its_own_attention_meanwhile() -> None:
    # The second rank is through with its linear work after half of the time, and with its attention soon after.
    layout = Layout.from_lengths([[65536], [4096] * 8])
    plan = planned(layout, (1, 1), tolerance=0.0)
    assert plan.tasks.loads[1] - plan.tasks.loads[0] == pytest.approx(plan.tasks.loads_before[1], rel=0.05)


def test_a_server_of_weight_0_computes_nothing_whatever_that_costs() -> None:
    layout = Layout.from_lengths([[8192] * 2, [16384], [2048] * 8])
    plan = planned(layout, (0, 99, 100), min_gain=10.0)
    assert plan.tasks.loads[0] == 0 and plan.weights[0] == 0
    end = ends(layout, plan.tasks.loads, (100, 99, 100), "forward", NVLINK)[1:]
    assert np.ptp(end) < 0.005 * end.max()


@pytest.mark.parametrize("weights", [None, (1, 1), (1000, 970), (1, 3)])
def test_a_plan_that_is_followed_shows_a_balance_of_1(weights) -> None:
    layout = Layout.from_lengths([[65536], [4096] * 16])
    options = PlanOptions(0.0, 128, None, weights, linear_flops=FLOPS)
    server = lone_server(NVLINK, options)
    server.plan_tick("forward", [(layout, None, 1)], note=True)
    stats = server.planned
    assert stats.balance_before > 1.5 and stats.balance_after == pytest.approx(1.0, abs=2e-3)
    assert stats.balance_after >= 1.0


def test_a_batch_that_stays_at_home_shows_how_late_the_last_is() -> None:
    layout, weights = Layout.from_lengths([[65536], [65536]]), (1000, 900)
    options = PlanOptions(0.005, 128, None, weights, min_gain=1.0, linear_flops=FLOPS)
    server = lone_server(NVLINK, options)
    server.plan_tick("forward", [(layout, None, 1)], note=True)
    stats = server.planned
    loads = NVLINK.cost(*(np.array([x]) for x in (0, 65536, 0))).repeat(2)
    end = ends(layout, loads, np.array(weights) / 950, "forward", NVLINK)
    late = end.max() - np.average(end, weights=weights)  # when all would end, had they the same to do by speed
    assert stats.balance_before == stats.balance_after == pytest.approx(1 + late / (loads.mean() / 1e15))


def test_the_exchange_is_told_what_either_phase_moves() -> None:
    layout = Layout.from_lengths([[65536], [4096] * 16, [2048] * 32])
    exchange = NoExchange()
    server = lone_server(NVLINK, PlanOptions(0.005, 128), exchange)
    steps = server.plan(GlobalMicroBatch(layout, 1, None))
    expected = np.zeros((3, 3), dtype=np.int64)
    for phase in ("forward", "backward"):
        plan, _ = next(steps)
        tasks = balance(layout, NVLINK, phase=phase, tolerance=0.005, granularity=128)
        for one_way in RouteCompiler(layout, tasks.rows).bytes_between(NVLINK.heads, phase):
            expected = np.maximum(expected, one_way)
        sizes = exchange.sizes[-1]
        assert np.array_equal(sizes, expected) and np.count_nonzero(sizes) >= 4
        assert (plan.layers[None].backward is not None) == (phase == "backward")


def test_what_is_kept_of_a_layout_serves_no_other() -> None:
    """One planner for layouts and windows in turn, against a new one for each."""
    options = PlanOptions(0.005, 128, min_gain=0.04, linear_flops=FLOPS)
    one = PhasePlanner(1, NVLINK, options, early=True)
    layouts = [[[65536], [4096] * 16], [[4096] * 16, [4096] * 16], [[65536], [4096] * 16]]
    for lengths, window in itertools.product(layouts, [None, 4096]):
        layout = Layout.from_lengths(lengths)
        for phase in PHASES:
            kept, new = (p.plan(layout, window, phase, 2) for p in (one, PhasePlanner(1, NVLINK, options, early=True)))
            assert kept.digest == new.digest and np.array_equal(kept.largest, new.largest)
            both = zip(kept.part.local + kept.part.remote, new.part.local + new.part.remote, strict=True)
            for ours, theirs in both:
                assert all(
                    np.array_equal(a, b) for a, b in zip(vars(ours).values(), vars(theirs).values(), strict=True)
                )


def micro_batch_planner(server: int, **options) -> MicroBatchPlanner:
    given = replace(PlanOptions(0.005, 128, min_gain=0.0, linear_flops=FLOPS), **options)
    return MicroBatchPlanner(PhasePlanner(server, NVLINK, given, early=True), {None: 3, 512: 1})


def test_a_plan_made_ahead_elsewhere_is_the_one_made_here(monkeypatch) -> None:
    layout = Layout.from_lengths([[65536], [4096] * 16])
    expected = micro_batch_planner(1).phases(layout)
    assert [(p.phase, p.window, p.layers) for p in expected] == [
        (p, w, n) for p in PHASES for w, n in ((None, 3), (512, 1))
    ]
    ahead = pickle.loads(pickle.dumps(micro_batch_planner(1)))(layout)
    ahead = pickle.loads(pickle.dumps(ahead))  # as a worker hands it over
    here = micro_batch_planner(1)
    monkeypatch.setattr(PhasePlanner, "plan", None)
    taken = here.phases(Layout.from_lengths([[65536], [4096] * 16]), ahead)
    assert all(a is b for a, b in zip(taken, ahead.phases, strict=True)) and [p.digest for p in taken] == [
        p.digest for p in expected
    ]
    for mine, other in zip(taken, expected, strict=True):
        for name, value in vars(other.part.routes).items():
            if isinstance(value, np.ndarray):
                assert np.array_equal(getattr(mine.part.routes, name), value)


@pytest.mark.parametrize("what", ["layout", "server", "options", "nothing", "something else"])
def test_another_plan_is_not_taken(what: str) -> None:
    layout = Layout.from_lengths([[8192], [4096] * 2])
    made = {
        "layout": lambda: micro_batch_planner(1)(Layout.from_lengths([[8192], [8192]])),
        "server": lambda: micro_batch_planner(0)(layout),
        "options": lambda: micro_batch_planner(1, tolerance=0.1)(layout),
        "nothing": lambda: None,
        "something else": lambda: {"plan": 1},
    }[what]()
    here = micro_batch_planner(1)
    phases = here.phases(layout, made)
    assert [p.digest for p in phases] == [p.digest for p in micro_batch_planner(1).phases(layout)]
    assert not any(a is b for a, b in zip(phases, getattr(made, "phases", ()), strict=False))
