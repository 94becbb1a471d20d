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
from deepspeed_distca.scheduler.cost_model import PHASES
from deepspeed_distca.scheduler.levels import by_levels
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.scheduler.traffic import rows_between

COST = CostModel.area(Heads(query=4, key_value=1, head_dim=8))


def lengths_of(layout) -> dict[int, int]:
    found: dict[int, int] = {}
    for _, document, _, length in layout.segments.tolist():
        found[document] = found.get(document, 0) + length
    return found


@settings(max_examples=120)
@given(
    st.lists(st.integers(1, 700), max_size=30),
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.sampled_from(["free", "whole", "contiguous", "head_tail"]),
    st.booleans(),
    st.none() | st.integers(1, 300),
    st.integers(1, 9),
)
def test_every_token_is_stored_once_and_budgets_are_met(lengths, parts, placement, full, window, node_size) -> None:
    # Budgets in proportion to `parts`, as large as the documents or larger.
    total = sum(lengths) if full else 2 * sum(lengths) + 3
    budgets = share_tokens(max(1, total), parts) if total >= sum(parts) else [n * (sum(lengths) + 1) for n in parts]
    options = dict(placement=placement, cost=COST, window=window)
    nodes = Topology.of_size(node_size, len(parts))
    layout = place(lengths, budgets, **options, nodes=nodes).validate()
    assert lengths_of(layout) == dict(enumerate(lengths))
    assert (layout.tokens <= budgets).all()
    if sum(budgets) == sum(lengths):
        assert layout.tokens.tolist() == budgets
    else:  # the same part of every budget, to a token
        share = np.array(budgets) * sum(lengths) / sum(budgets)
        assert (abs(layout.tokens - share) < 1 + 1e-9).all()
    assert layout == place(lengths, budgets, **options, nodes=nodes)
    known = place(lengths, budgets, **options)
    assert layout.tokens.tolist() == known.tokens.tolist()
    if nodes.size == 1 or placement in ("contiguous", "head_tail"):
        assert np.array_equal(layout.segments, known.segments)


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
        q, kv = (rows.sum() for rows in rows_between(layout, tasks.rows))
        return int(sum(q * row.query + kv * row.key for row in map(COST.heads.moved, PHASES))), tasks.balance_before

    free, contiguous, head_tail = (moved(p) for p in ("free", "contiguous", "head_tail"))
    assert free[0] < 0.9 * min(contiguous[0], head_tail[0]), (free, contiguous, head_tail)
    assert free[1] < contiguous[1]


def uneven(seed: int, ranks: int, tokens: int, longest: int) -> list[int]:
    """Lengths of a few long documents and many short ones, which fill the ranks."""
    rng, left, lengths = np.random.default_rng(seed), ranks * tokens, []
    while left:
        length = int(rng.integers(longest // 4, longest) if rng.random() < 0.1 else rng.integers(16, tokens // 16))
        lengths.append(min(length, left))
        left -= lengths[-1]
    return lengths


def across(layout, nodes: Topology) -> tuple[int, float]:
    """Rows that cross nodes, and the work of the node that has most at home, over the mean."""
    options = dict(phase="backward", tolerance=0.02)
    tasks = by_levels(layout, COST, nodes, granularity=128, **options) or balance(layout, COST, **options)
    queries, keys = rows_between(layout, tasks.rows)[0], RouteCompiler(layout, tasks.rows, nodes).key_rows()
    loads = np.array([tasks.loads_before[its].sum() / len(its) for its in nodes.servers])
    return int((queries + keys)[nodes.across].sum()), float(loads.max() / loads.mean())


@pytest.mark.parametrize("placement", ["whole", "free"])
@pytest.mark.parametrize("seed", range(3))
def test_nodes_have_equal_work(placement: str, seed: int) -> None:
    # Nodes that are not consecutive ranks, as well.
    nodes = Topology((0, 1, 2) * 4) if seed == 2 else Topology.of_size(4, 12)
    lengths, budgets = uneven(seed, 12, 8192, 16384), [8192] * 12
    known, unknown = (
        across(place(lengths, budgets, placement=placement, cost=COST, nodes=given), nodes) for given in (nodes, None)
    )
    assert known[1] < 1.04, (known, unknown)
    assert known[0] < 0.5 * unknown[0], (known, unknown)


def test_whole_documents_are_cut_where_nodes_would_be_uneven() -> None:
    # Two documents of a rank each: whole, one of three nodes has none.
    lengths, budgets = [4096, 4096, *[64] * 256], [4096] * 6
    nodes = Topology.of_size(2, 6)
    whole, known = (place(lengths, budgets, cost=COST, nodes=given) for given in (None, nodes))
    assert len(whole.segments) == len(lengths) and across(whole, nodes)[1] > 1.4
    assert len(known.segments) > len(lengths) and across(known, nodes)[1] < 1.03
    # Where whole documents can be dealt out evenly, none is.
    lengths = [4096] * 3 + [64] * 192
    known = place(lengths, budgets, cost=COST, nodes=nodes)
    assert len(known.segments) == len(lengths) and across(known, nodes) == (0, 1.0)


def test_nodes_of_other_sizes_and_speeds() -> None:
    lengths, budgets = uneven(1, 12, 8192, 16384), [8192] * 12
    nodes, weights = Topology((*[0] * 4, *[1] * 8)), [3] * 4 + [2] * 8
    layout = place(lengths, budgets, cost=COST, nodes=nodes, server_weights=weights).validate()
    assert layout.tokens.tolist() == budgets
    before = balance(layout, COST, server_weights=weights).loads_before
    assert before[:4].sum() == pytest.approx(before.sum() * 3 / 7, rel=0.05)
    # A node that computes nothing stores its tokens all the same.
    weights = [0, 0, *[1] * 10]
    layout = place(lengths, budgets, cost=COST, nodes=nodes, server_weights=weights).validate()
    assert layout.tokens.tolist() == budgets


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
    with pytest.raises(ValueError, match="nodes must be one for each of the 2 ranks, got 3"):
        place([1], [4, 4], nodes=Topology((0, 1, 1)))
    for lengths, budgets in (([1.5], [4]), ([1], [4.0]), (["1"], [4])):
        with pytest.raises(ValueError, match="must be whole numbers"):
            place(lengths, budgets)
