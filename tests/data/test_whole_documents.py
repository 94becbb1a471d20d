# SPDX-License-Identifier: Apache-2.0
"""Dividing documents without cutting any: exact in tokens, near in work, nothing lost."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_distca.data.placement import place
from deepspeed_distca.data.whole_documents import divide, subset
from deepspeed_distca.scheduler import CostModel, balance


def work(tokens: int) -> int:
    return tokens * tokens + 300 * tokens


def every_subset(lengths: list[int], tokens: int) -> list[int]:
    """Work of all subsets with so many tokens."""
    found = []
    for size in range(len(lengths) + 1):
        found += [sum(map(work, c)) for c in combinations(lengths, size) if sum(c) == tokens]
    return found


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=10), st.data())
def test_a_subset_is_found_where_there_is_one(lengths, data) -> None:
    tokens = data.draw(st.integers(0, sum(lengths)))
    target = data.draw(st.integers(0, 2 * sum(map(work, lengths))))
    possible = every_subset(lengths, tokens)
    found = subset(lengths, [work(n) for n in lengths], tokens, target)
    if not possible:
        assert found is None
        return
    assert len(set(found)) == len(found) and sum(lengths[i] for i in found) == tokens
    assert sum(work(lengths[i]) for i in found) in possible


@pytest.mark.parametrize("seed", range(8))
def test_its_work_is_near_the_target(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(1, 40, size=14)]
    tokens = int(sum(lengths[::2]))
    possible = np.array(every_subset(lengths, tokens))
    target = int(rng.integers(possible.min(), possible.max() + 1))
    found = sum(work(lengths[i]) for i in subset(lengths, [work(n) for n in lengths], tokens, target))
    # Work is told apart in 48 steps up to the target, and each of some ten documents is rounded by half of one.
    assert abs(found - target) <= abs(possible - target).min() + 0.03 * target


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 40))
def test_every_document_once_and_budgets_met(seed, ranks, mean) -> None:
    rng = np.random.default_rng(seed)
    packs = [rng.integers(1, 3 * mean, size=int(rng.integers(0, 30))).tolist() for _ in range(ranks)]
    lengths = [n for pack in packs for n in pack]
    rng.shuffle(lengths)
    lengths = [int(n) for n in lengths]
    budgets = [sum(pack) for pack in packs]
    weights = [int(w) for w in rng.integers(0, 4, size=ranks)]
    divided = divide(lengths, budgets, work, weights)
    if divided is not None:  # one rank's few documents may be the only ones that fit it
        assert sorted(d for rank in divided for d in rank) == list(range(len(lengths)))
        assert [sum(lengths[d] for d in rank) for rank in divided] == budgets
    else:
        assert ranks > 1


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_many_documents_are_divided_evenly(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    lengths: list[int] = []
    while sum(lengths) < ranks * 16384:
        lengths.append(min(int(rng.exponential(500)) + 1, ranks * 16384 - sum(lengths)))
    divided = divide(lengths, [16384] * ranks, work, [1] * ranks)
    loads = [sum(work(lengths[d]) for d in rank) for rank in divided]
    in_order = np.diff(np.searchsorted(np.cumsum(lengths), np.arange(ranks + 1) * 16384))
    ends = np.cumsum([0, *in_order])
    before = [sum(map(work, lengths[a:b])) for a, b in pairwise(ends)]
    assert max(loads) / np.mean(loads) < 1.02 < max(before) / np.mean(before)
    assert divided == divide(lengths, [16384] * ranks, work, [1] * ranks)


def test_faster_ranks_get_more_work() -> None:
    rng = np.random.default_rng(5)
    lengths = [int(n) for n in rng.integers(50, 900, size=60)]
    budgets = [sum(lengths[:30]), sum(lengths[30:])]
    divided = divide(lengths, budgets, work, [3, 4])
    loads = [sum(work(lengths[d]) for d in rank) for rank in divided]
    assert loads[1] / loads[0] == pytest.approx(4 / 3, rel=0.01)


def test_free_placement_cuts_nothing_where_whole_documents_are_even() -> None:
    # In order the first rank would have the long ones, and a document would be cut at its end.
    rng = np.random.default_rng(2)
    lengths = sorted((int(n) for n in rng.integers(100, 8000, size=30)), reverse=True)
    budgets = [sum(lengths) // 2, sum(lengths) - sum(lengths) // 2]
    cost = CostModel.fitted()
    layout = place(lengths, budgets, cost=cost)
    assert len(layout.segments) == len(lengths) and layout.tokens.tolist() == budgets
    assert balance(layout, cost).balance_before < 1.08
    assert balance(place(lengths, budgets, placement="contiguous"), cost).balance_before > 1.15


def test_whole_placement_cuts_nothing_even_where_work_is_uneven() -> None:
    rng = np.random.default_rng(4)
    lengths = [12000, *(int(n) for n in rng.integers(100, 700, size=50))]
    budgets = [sum(lengths) // 2, sum(lengths) - sum(lengths) // 2]
    whole = place(lengths, budgets, placement="whole")
    assert len(whole.segments) == len(lengths) and whole.tokens.tolist() == budgets
    assert balance(whole, CostModel.fitted()).balance_before > 1.08
    # Nothing fills a rank but a part of a document: then documents lie in order.
    assert place([10, 10, 10], [15, 15], placement="whole") == place([10, 10, 10], [15, 15], placement="contiguous")


def test_a_document_of_more_than_a_share_is_still_divided() -> None:
    lengths = [8000, *[100] * 20, *[60] * 100]
    budgets = [sum(lengths) // 2, sum(lengths) - sum(lengths) // 2]
    layout = place(lengths, budgets, cost=CostModel.fitted())
    assert len(layout.segments) > len(lengths)
