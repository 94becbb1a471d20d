# SPDX-License-Identifier: Apache-2.0
"""Where the documents of a global batch are stored: every token once, budgets met, few bytes to move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_distca.data.global_loader.placement import place, share_tokens
from deepspeed_distca.layout import Segment
from deepspeed_distca.scheduler import CostModel, Heads, balance
from deepspeed_distca.scheduler.traffic import traffic

COST = CostModel.area(Heads(query=4, key_value=1, head_dim=8))


def lengths_of(layout) -> dict[int, int]:
    found: dict[int, int] = {}
    for _, document, _, length in layout.segments.tolist():
        found[document] = found.get(document, 0) + length
    return found


@settings(deadline=None, max_examples=120)
@given(
    st.lists(st.integers(1, 700), max_size=30),
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.sampled_from(["free", "whole", "contiguous", "head_tail"]),
    st.booleans(),
    st.none() | st.integers(1, 300),
)
def test_every_token_is_stored_once_and_budgets_are_met(lengths, parts, placement, full, window) -> None:
    # Budgets in proportion to `parts`, as large as the documents or larger.
    total = sum(lengths) if full else 2 * sum(lengths) + 3
    budgets = share_tokens(max(1, total), parts) if total >= sum(parts) else [n * (sum(lengths) + 1) for n in parts]
    layout = place(lengths, budgets, placement=placement, cost=COST, window=window).validate()
    assert lengths_of(layout) == dict(enumerate(lengths))
    assert (layout.tokens <= budgets).all()
    if sum(budgets) == sum(lengths):
        assert layout.tokens.tolist() == budgets
    else:  # the same part of every budget, to a token
        share = np.array(budgets) * sum(lengths) / sum(budgets)
        assert (abs(layout.tokens - share) < 1 + 1e-9).all()
    assert layout == place(lengths, budgets, placement=placement, cost=COST, window=window)


def test_documents_in_order() -> None:
    layout = place([5, 20, 3], [8, 8, 0, 12], placement="contiguous")
    assert [layout.rank(r) for r in range(4)] == [
        [Segment(0, 0, 5), Segment(1, 0, 3)],
        [Segment(1, 3, 8)],
        [],
        [Segment(1, 11, 9), Segment(2, 0, 3)],
    ]
    layout = place([5, 20, 3], [8, 8, 0, 12], placement="head_tail")
    assert [layout.rank(r) for r in range(4)] == [
        [Segment(0, 0, 5), Segment(1, 0, 2), Segment(1, 19, 1)],
        [Segment(1, 2, 4), Segment(1, 15, 4)],
        [],
        [Segment(1, 6, 9), Segment(2, 0, 3)],
    ]


def test_head_and_tail_even_out_one_long_document() -> None:
    budgets = [4096] * 8
    contiguous, head_tail = (
        balance(place([8 * 4096], budgets, placement=p), COST) for p in ("contiguous", "head_tail")
    )
    assert contiguous.balance_before > 1.8 and head_tail.balance_before < 1.001


@pytest.mark.parametrize("seed", range(6))
def test_free_placement_moves_fewer_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    budgets = [16384] * int(rng.integers(2, 9))
    long = rng.integers(4000, 40000, size=2)
    lengths = [int(n) for n in long]
    while sum(lengths) < sum(budgets):
        lengths.append(min(int(rng.integers(50, 3000)), sum(budgets) - sum(lengths)))
    lengths = [lengths[i] for i in rng.permutation(len(lengths))]
    if sum(lengths) > sum(budgets):
        pytest.skip("longer than the budgets")

    def moved(placement: str) -> tuple[int, float]:
        layout = place(lengths, budgets, placement=placement, cost=COST)
        tasks = balance(layout, COST)
        assert tasks.balance < 1.03
        rows = traffic(layout, tasks)
        return int((rows.q_rows * COST.heads.step_q_bytes + rows.kv_rows * COST.heads.step_kv_bytes).sum()), (
            tasks.balance_before
        )

    free, contiguous, head_tail = (moved(p) for p in ("free", "contiguous", "head_tail"))
    assert free[0] < 0.9 * min(contiguous[0], head_tail[0]), (free, contiguous, head_tail)
    assert free[1] < contiguous[1]


def test_documents_that_fit_are_not_cut() -> None:
    # Two of each kind: whole on two ranks they are balanced, and nothing has to move.
    lengths = [1000, 24, 500, 500, 24, 1000, 1000, 24, 500, 500, 24, 1000]
    for placement in ("whole", "free"):
        layout = place(lengths, [3048, 3048], placement=placement, cost=COST)
        assert len(layout.segments) == 12 and balance(layout, COST).balance_before < 1.001


def test_a_rank_without_tokens_and_server_weights() -> None:
    lengths, budgets = [3000, 60, 40, 500, 400, 200], [1400, 1400, 1400, 0]
    layout = place(lengths, budgets, placement="free", cost=COST)
    assert layout.tokens.tolist() == budgets
    # The third server is three times as fast: it gets most of the work at once.
    weighted = place(lengths, [1400] * 3, placement="free", cost=COST, server_weights=[1, 1, 3])
    before = balance(weighted, COST, server_weights=[1, 1, 3]).loads_before
    assert before.argmax() == 2 and before[2] > 1.5 * before[0]


def test_wrong_arguments() -> None:
    for lengths, budgets, options in (
        ([5], [4], {}),
        ([0, 2], [4], {}),
        ([1], [0, 0], {}),
        ([1], [], {}),
        ([1], [-1, 4], {}),
        ([1], [4], {"placement": "random"}),
    ):
        with pytest.raises(ValueError, match="must be|must not|tokens, the budgets"):
            place(lengths, budgets, **options)
    for lengths, budgets in (([1.5], [4]), ([1], [4.0]), (["1"], [4])):
        with pytest.raises(ValueError, match="must be whole numbers"):
            place(lengths, budgets)
