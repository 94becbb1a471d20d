# SPDX-License-Identifier: Apache-2.0
"""Costs of tasks: against counting pair by pair, against the measured table, and their inverse."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_distca.scheduler.cost_model import MAX_COST, MAX_TERM, CostModel, PhaseCost, key_start, pairs
from deepspeed_distca.scheduler.cuts import Cuts
from deepspeed_distca.scheduler.heads import Heads
from tests.scheduler.checks import visible_pairs
from tests.scheduler.strategies import windows

# queries, keys, tasks, TFLOP/s forward, backward: flash-attn-4 on an H200, bf16, 32/8 heads, head_dim 128, causal.
MEASURED = """
65536 65536 1 659 604
32768 65536 1 557 631
16384 65536 2 599 581
4096 65536 4 572 572
1024 65536 8 583 472
512 65536 8 641 379
256 65536 8 601 268
128 65536 8 579 153
8192 8192 8 595 537
4096 4096 16 533 501
512 4096 32 596 365
128 4096 64 526 192
333 5001 32 552 299
128 128 512 46 51
"""


@given(st.integers(0, 300), st.integers(1, 300), windows())
def test_pairs_are_those_counted_one_by_one(start, length, window):
    assert pairs(start, start + length, window) == visible_pairs(start, start + length, window)
    as_array = pairs(np.array([start]), np.array([start + length]), window)
    assert as_array.dtype == np.int64 and as_array[0] == visible_pairs(start, start + length, window)


@given(st.integers(0, 10000), windows())
def test_first_key(start, window):
    expected = 0 if window is None else max(0, start - window + 1)
    assert key_start(start, window) == expected == key_start(np.array([start]), window)[0]


@pytest.mark.parametrize(
    ("phase", "column", "flops", "median", "largest"), [("forward", 3, 4, 0.04, 0.11), ("backward", 4, 10, 0.02, 0.14)]
)
def test_the_fit_predicts_the_measured_table(phase, column, flops, median, largest):
    table = np.array([line.split() for line in MEASURED.split("\n") if line], dtype=np.int64)
    queries, keys, tasks = table[:, 0], table[:, 1], table[:, 2]
    cost = CostModel.fitted(Heads(32, 8, 128))
    predicted = cost.cost(keys - queries, keys, np.zeros_like(keys), None, phase) * tasks / 1e15
    work = flops * 32 * 128 * pairs(keys - queries, keys) * tasks
    error = np.abs(predicted / (work / (table[:, column] * 1e12)) - 1)
    assert np.median(error) < median
    assert error.max() < largest


def test_vectorised_cost_equals_the_scalar_one():
    cost = CostModel.fitted(Heads(8, 2, 64))
    rng = np.random.default_rng(0)
    start = rng.integers(0, 5000, 50)
    end = start + rng.integers(1, 5000, 50)
    for window in (None, 1, 700):
        for phase in ("forward", "backward"):
            low = key_start(start, window)
            got = cost.cost(start, end, low, window, phase)
            assert got.dtype == np.int64
            expected = [
                cost.phase(phase)(*row, window) for row in zip(*map(np.ndarray.tolist, (start, end, low)), strict=True)
            ]
            assert got.tolist() == expected


def test_scales_with_query_heads_and_head_dim():
    full, half = CostModel.fitted(Heads(32, 8, 128)), CostModel.fitted(Heads(16, 4, 128))
    assert half.forward.pair == pytest.approx(full.forward.pair / 2, abs=1)
    assert CostModel.fitted(Heads(32, 8, 64)).backward.key_row == pytest.approx(full.backward.key_row / 2, abs=1)
    # Another number of key/value heads changes bytes, not the kernel's work.
    assert CostModel.fitted(Heads(32, 1, 128)).backward == full.backward


def test_area_counts_pairs_alone():
    cost = CostModel.area(Heads(4, 1, 128))
    assert cost.forward == PhaseCost(cost.forward.pair)
    assert cost.cost(np.array([0]), np.array([100]), np.array([0]))[0] == cost.forward.pair * 5050


def test_survives_json():
    cost = CostModel.fitted(Heads(6, 2, 96, value_dim=64, element_size=4))
    assert CostModel.from_dict(json.loads(json.dumps(cost.to_dict()))) == cost


@pytest.mark.parametrize(
    "change",
    [
        {"launch": -1},
        {"launch": True},
        {"bytes_per_second": 0},
        {"latency": 1.5},
        {"forward": {"pair": 0, "query_row": 0, "key_row": 0, "task": 0}},
        {"forward": {"pair": 1, "query_row": 0, "key_row": -1, "task": 0}},
        {"backward": {"pair": 1}},
        {"heads": {"query": 3, "key_value": 2, "head_dim": 8}},
        {"surprise": 1},
    ],
)
def test_refuses_wrong_profiles(change):
    with pytest.raises(ValueError, match="cost model|heads"):
        CostModel.from_dict({**CostModel.fitted().to_dict(), **change})


def test_terms_are_checked_when_they_are_scaled():
    large = CostModel(Heads(1, 1, 1), forward=PhaseCost(1, task=MAX_TERM))
    assert large.for_heads(Heads(1, 1, 1)) is large
    with pytest.raises(
        ValueError, match=r"task.*must be an integer >= 0 and <= 4611686018427387904.*scaled from.*query=1"
    ):
        large.for_heads(Heads(4, 1, 128))
    half = CostModel(Heads(1, 1, 1), backward=PhaseCost(1, key_row=MAX_TERM))
    with pytest.raises(ValueError, match="key_row of backward.*<= 2305843009213693952.*scaled from"):
        half.for_heads(Heads(2, 2, 1))
    largest = CostModel.fitted(Heads(2**20, 2**20, 2**20, element_size=16))
    assert max(largest.terms) <= MAX_TERM


@pytest.mark.parametrize(
    "value", [MAX_COST + 1, pytest.param(10**5000, id="digits"), -1, 1.0, float("nan"), True, "1", None, [1]]
)
@pytest.mark.parametrize("name", ["pair", "query_row", "key_row", "task"])
def test_refuses_wrong_terms_by_name(name, value):
    with pytest.raises(ValueError, match=f"cost model: {name} must be an integer"):
        PhaseCost(**{"pair": 1, name: value})


def test_refuses_terms_of_another_number():
    terms = CostModel.fitted().terms
    for wrong in (terms[:-1], (*terms, 1), ()):
        with pytest.raises(ValueError, match="expected 18 terms"):
            CostModel.from_terms(Heads(), wrong)


def test_refuses_unknown_phases_and_endless_documents():
    with pytest.raises(ValueError, match="forward, backward"):
        CostModel.fitted().phase("sideways")
    with pytest.raises(OverflowError, match="too long"):
        CostModel.fitted().cost(np.array([0]), np.array([2**40]), np.array([0]))


def test_seconds_and_transfers():
    cost = CostModel(launch=10**10)
    assert cost.seconds([0, 1, 10**12]).tolist() == [0, 1e-5, 1e-3]
    default = CostModel()
    assert default.transfer_seconds(4 * 2**20) == pytest.approx(0.09e-3, rel=1e-3)
    assert default.transfer_seconds(2**30, 323 * 2**30) == pytest.approx(1, rel=1e-3)
    assert default.transfer_seconds(0) == 0


@pytest.mark.parametrize(
    "values",
    [
        {"query": 0, "key_value": 1, "head_dim": 1},
        {"query": 3, "key_value": 2, "head_dim": 1},
        {"query": True, "key_value": 1, "head_dim": 1},
        {"query": 4.0, "key_value": 1, "head_dim": 1},
        {"query": 4, "key_value": 1},
        {"query": 4, "key_value": 1, "head_dim": 8, "head_dims": 8},
        {"query": 4, "key_value": 1, "head_dim": None},
        {"query": 2**20 + 1, "key_value": 1, "head_dim": 8},
        {"query": 4, "key_value": 1, "head_dim": 10**18},
        {"query": 4, "key_value": 1, "head_dim": 8, "element_size": 17},
        {"query": 4, "key_value": 1, "head_dim": 8, "value_dim": float("inf")},
        {"query": [[4]], "key_value": 1, "head_dim": 8},
        "heads",
        None,
        [4, 1, 8],
    ],
)
def test_refuses_wrong_heads(values):
    with pytest.raises(ValueError, match="heads"):
        Heads.from_dict(values)


def test_bytes_of_rows():
    heads = Heads(query=4, key_value=2, head_dim=8, value_dim=6, element_size=2)
    assert (heads.q_bytes, heads.kv_bytes, heads.out_bytes, heads.lse_bytes) == (64, 56, 48, 16)
    assert heads.return_bytes == 64
    # Forward q; out, lse. Backward q, dout, lse, delta; dq.
    assert heads.moved("forward") == (64, 48 + 16, 56, 0)
    assert heads.moved("backward") == (64 + 48 + 16 + 16, 64, 56, 56)
    assert heads.moved("backward").query == 208 and heads.moved("backward").key == 112


@settings(max_examples=300)
@given(
    phase=st.sampled_from(["forward", "backward"]),
    window=windows(),
    granularity=st.sampled_from([1, 3, 16, 128]),
    start=st.integers(0, 3000),
    length=st.integers(1, 3000),
    share=st.floats(0, 1.2),
)
def test_cuts_are_the_last_that_fit(phase, window, granularity, start, length, share):
    cuts = Cuts(CostModel.fitted().phase(phase), window, granularity)
    end = start + length
    budget = int(cuts.cost(start, end) * share)
    grid = range(start // granularity * granularity + granularity, end, granularity)
    heads = [x for x in grid if cuts.cost(start, x) <= budget]
    head = cuts.head_within(start, end, budget)
    assert head % granularity == 0
    if heads:
        assert head == heads[-1] or (head >= end and heads[-1] == grid[-1])
    else:
        assert head <= start or head >= end
    tails = [x for x in grid if cuts.cost(x, end) <= budget]
    tail = cuts.tail_within(start, end, budget)
    assert tail % granularity == 0
    if tails:
        assert tail == tails[0] or (tail <= start and tails[0] == grid[0])
    else:
        assert tail >= end or tail <= start


@given(window=windows(), a=st.integers(0, 500), b=st.integers(1, 500), c=st.integers(1, 500))
def test_joined_is_what_one_task_saves(window, a, b, c):
    cuts = Cuts(CostModel.fitted().backward, window, 1)
    middle, end = a + b, a + b + c
    assert cuts.cost(a, end) == cuts.cost(a, middle) + cuts.cost(middle, end) - cuts.joined(middle)


def test_linear_layers_run_at_their_own_rate_whatever_the_heads() -> None:
    measured = replace(CostModel.fitted(), linear_rate=700 * 10**12)
    for heads in (Heads(32, 8, 128), Heads(32, 8, 64), Heads(8, 8, 256)):
        cost = measured.for_heads(heads)
        assert cost.linear_seconds(7 * 10**12) == pytest.approx(0.01) and cost.linear_cost(7 * 10**12) == 10**13
        assert CostModel.from_terms(heads, cost.terms) == CostModel.from_dict(cost.to_dict()) == cost
    older = {key: value for key, value in measured.to_dict().items() if key != "linear_rate"}
    unknown = CostModel.from_dict(older)
    # As fast as attention's forward: two matrix products of 128 numbers for each of 32 heads and each pair.
    assert unknown.linear_seconds(4 * 32 * 128) == pytest.approx(unknown.forward.pair / 1e15)
