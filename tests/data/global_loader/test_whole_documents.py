# SPDX-License-Identifier: Apache-2.0
"""Dividing documents without cutting any: exact in tokens, near in work, nothing lost."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_distca.data.global_loader import whole_documents
from deepspeed_distca.data.global_loader.placement import place
from deepspeed_distca.data.global_loader.whole_documents import divide, subset
from deepspeed_distca.scheduler import CostModel, balance
from deepspeed_distca.scheduler.cost_model import PHASES
from deepspeed_distca.scheduler.traffic import rows_between


def work(tokens: int) -> int:
    return tokens * tokens + 300 * tokens


def every_subset(lengths: list[int], tokens: int) -> list[int]:
    """Work of all subsets with so many tokens."""
    found = []
    for size in range(len(lengths) + 1):
        found += [sum(map(work, c)) for c in combinations(lengths, size) if sum(c) == tokens]
    return found


@settings(max_examples=150)
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


@pytest.mark.parametrize("wanted", [0.0, 0.5, 1.0, 1.2])
@pytest.mark.parametrize("seed", range(6))
def test_its_work_is_near_the_target(seed: int, wanted: float) -> None:
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(1, 40, size=14)]
    tokens = int(sum(lengths[::2]))
    possible = np.array(every_subset(lengths, tokens))
    target = int(wanted * possible.min() + (1 - wanted) * possible.max()) if wanted < 1.1 else possible.min() // 2
    found = sum(work(lengths[i]) for i in subset(lengths, [work(n) for n in lengths], tokens, target))
    # Work is told apart in 48 steps up to the target, and each of some ten documents is rounded by half of one.
    assert abs(found - target) <= abs(possible - target).min() + 0.03 * max(target, possible.min())


def test_rounding_work_in_several_ways_helps(monkeypatch) -> None:
    errors = {}
    monkeypatch.setattr(whole_documents, "_NEAR", 0)
    for tries in (1, 4):
        monkeypatch.setattr(whole_documents, "_TRIES", tries)
        errors[tries] = 0.0
        for seed in range(20):
            rng = np.random.default_rng(seed)
            lengths = [int(n) for n in rng.integers(1, 4000, size=30)]
            works = [work(n) for n in lengths]
            tokens, target = sum(lengths[::2]), sum(works) // 2
            errors[tries] += abs(sum(works[i] for i in subset(lengths, works, tokens, target)) - target) / target
    assert errors[4] < 0.7 * errors[1]


def test_too_many_tokens_for_a_table(monkeypatch) -> None:
    lengths = [500, 501, 502, 503]
    assert sorted(subset(lengths, lengths, 1001, 0)) == [0, 1]
    monkeypatch.setattr(whole_documents, "_MOST_TOKENS", 1000)
    assert subset(lengths, lengths, 1001, 0) is None
    assert subset(lengths, lengths, 1505, 0) == [0, 2, 3]  # all but 501 tokens


@settings(max_examples=60)
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


def short_documents(seed: int, ranks: int, tokens: int, mean: int) -> list[int]:
    """Documents that fill so many ranks."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < ranks * tokens:
        lengths.append(min(int(rng.exponential(mean)) + 1, ranks * tokens - sum(lengths)))
    return lengths


@pytest.mark.parametrize(("ranks", "mean"), [(64, 200), (128, 200), (64, 500)])
def test_many_ranks_of_short_documents(ranks: int, mean: int) -> None:
    for seed in range(3):
        lengths = short_documents(seed, ranks, 16384, mean)
        start = time.process_time()
        divided = divide(lengths, [16384] * ranks, work, [1] * ranks)
        assert time.process_time() - start < 3  # 0.1 to 0.2 s
        assert divided is not None
        loads = [sum(work(lengths[d]) for d in rank) for rank in divided]
        assert max(loads) < 1.25 * np.mean(loads)


def test_long_ranks_choose_among_fewer_documents() -> None:
    rng = np.random.default_rng(0)
    packs = [rng.integers(20000, 40000, size=32) for _ in range(8)]  # 0.9 to 1 million tokens a rank
    lengths, budgets = np.concatenate(packs).tolist(), [int(pack.sum()) for pack in packs]
    divided = divide(lengths, budgets, work, [1] * 8)
    assert [sum(lengths[d] for d in rank) for rank in divided] == budgets
    # Fewer documents than a pool has, and still too many tokens for one table.
    lengths = [55000, 60000, 65000, 70000] * 5
    divided = divide(lengths, [625000] * 2, work, [1] * 2)
    assert [sum(lengths[d] for d in rank) for rank in divided] == [625000] * 2


@pytest.mark.parametrize("with_tokens", [slice(0, 4), slice(0, 8, 2)])
def test_ranks_without_tokens_get_nothing_and_disturb_nothing(with_tokens: slice) -> None:
    lengths, budgets = short_documents(3, 4, 65536, 2500), [0] * 8
    budgets[with_tokens] = [65536] * 4
    divided = divide(lengths, budgets, work, [1] * 8)
    loads = np.array([sum(work(lengths[d]) for d in rank) for rank in divided])
    assert (loads[np.array(budgets) == 0] == 0).all()
    assert loads.max() < 1.02 * loads[with_tokens].mean()
    whole = place(lengths, budgets, placement="whole")
    assert len(whole.segments) == len(lengths) and whole.tokens.tolist() == budgets
    # They have to be given rows all the same, so that "free" goes by bytes.
    assert place(lengths, budgets, placement="free").tokens.tolist() == budgets


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_many_documents_are_divided_evenly(ranks: int) -> None:
    lengths = short_documents(ranks, ranks, 16384, 500)
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
    first = {}
    for weights in ([3, 4], [1, 0], [0, 1]):
        layout = place(lengths, budgets, placement="whole", server_weights=weights)
        assert len(layout.segments) == len(lengths)
        loads = balance(layout, CostModel.fitted(), server_weights=weights).loads_before
        first[tuple(weights)] = loads[0] / loads.sum()
    assert first[3, 4] == pytest.approx(3 / 7, rel=0.01)
    assert first[0, 1] < 0.43 and first[1, 0] > 0.49  # as unequal as the tokens allow


@pytest.mark.parametrize("weights", [[0, 0], [1, 2, 3], [-1, 2], [1.9, 0.5], [True, 1], [1]])
@pytest.mark.parametrize("placement", ["free", "whole"])
def test_wrong_weights_are_refused(weights: list, placement: str) -> None:
    with pytest.raises(ValueError, match="server_weights"):
        place([5, 6, 7], [9, 9], placement=placement, server_weights=weights)


def test_free_placement_cuts_nothing_where_whole_documents_are_even() -> None:
    # In order the first rank would have the long ones, and a document would be cut at its end.
    rng = np.random.default_rng(2)
    lengths = sorted((int(n) for n in rng.integers(100, 8000, size=30)), reverse=True)
    budgets = [sum(lengths) // 2, sum(lengths) - sum(lengths) // 2]
    cost = CostModel.fitted()
    layout = place(lengths, budgets, placement="free", cost=cost)
    assert len(layout.segments) == len(lengths) and layout.tokens.tolist() == budgets
    assert balance(layout, cost).balance_before < 1.08
    assert balance(place(lengths, budgets, placement="contiguous"), cost).balance_before > 1.15


def test_uneven_whole_documents_compete_by_bytes() -> None:
    cost = CostModel.fitted()
    lengths, budgets = [3438, 1116, 3501, 1155, 2385, 824, 3509, 2674, 2334, 1922, 1984], [12421] * 2

    def moved(layout) -> int:
        q, kv = (rows.sum() for rows in rows_between(layout, balance(layout, cost, tolerance=0.02).rows))
        return int(sum(q * row.query + kv * row.key for row in map(cost.heads.moved, PHASES)))

    contiguous = place(lengths, budgets, placement="contiguous")
    even_enough = place(lengths, budgets, placement="free", tolerance=0.02)
    assert len(even_enough.segments) == len(lengths)
    by_bytes = place(lengths, budgets, placement="free", tolerance=0.02, min_gain=0.0)
    assert moved(by_bytes) <= moved(contiguous) < moved(even_enough)
    # 16 % above the mean at best: too much, so that a document is cut.
    lengths = [6000, 6000, 6000, 500, 500, 500]
    budgets = [9750] * 2
    assert len(place(lengths, budgets, placement="free").segments) > len(lengths)


def test_whole_placement_cuts_nothing_even_where_work_is_uneven() -> None:
    rng = np.random.default_rng(4)
    lengths = [12000, *(int(n) for n in rng.integers(100, 700, size=50))]
    budgets = [sum(lengths) // 2, sum(lengths) - sum(lengths) // 2]
    whole = place(lengths, budgets, placement="whole")
    assert len(whole.segments) == len(lengths) and whole.tokens.tolist() == budgets
    assert balance(whole, CostModel.fitted()).balance_before > 1.08
    # Nothing fills a rank but a part of a document: then the fewest bytes move.
    assert len(place([10, 10, 10], [15, 15]).segments) == 4
    for lengths, budgets in (([10, 10, 10], [15, 15]), ([12000, 700, 650, 650], [7000] * 2)):
        assert place(lengths, budgets) == place(lengths, budgets, placement="free", min_gain=0.0)


def test_a_document_of_more_than_a_share_is_still_divided() -> None:
    lengths = [8000, *[100] * 20, *[60] * 100]
    budgets = [sum(lengths) // 2, sum(lengths) - sum(lengths) // 2]
    layout = place(lengths, budgets, placement="free", cost=CostModel.fitted())
    assert len(layout.segments) > len(lengths)
