# SPDX-License-Identifier: Apache-2.0
"""Documents change places within a step: none is lost, micro-batches keep their tokens, and less has to move."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_distca.data.global_loader import regrouping
from deepspeed_distca.data.global_loader.regrouping import _excess, regroup


def square(length: int) -> int:
    return length * length


def excess(packs: list[list[int]], ranks: int, tokens: int) -> int:
    return sum(_excess(pack, ranks, tokens, {n: n * n for pack in packs for n in pack}) for pack in packs)


@settings(max_examples=300)
@given(
    st.lists(st.lists(st.one_of(st.integers(1, 9), st.integers(1, 60)), max_size=12), max_size=5),
    st.integers(1, 5),
    st.integers(0, 20),
)
def test_documents_and_tokens_are_kept_and_work_is_more_even(packs: list[list[int]], ranks: int, more: int) -> None:
    tokens = max(1, -(-max(map(sum, packs), default=0) // ranks) + more)
    groups = regroup(packs, ranks, tokens, square)
    if groups is None:
        return
    lengths = list(itertools.chain.from_iterable(packs))
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(len(lengths)))
    regrouped = [[lengths[i] for i in group] for group in groups]
    assert list(map(sum, regrouped)) == list(map(sum, packs))
    assert excess(regrouped, ranks, tokens) < excess(packs, ranks, tokens)


def test_long_documents_meet() -> None:
    short = [4] * 16
    packs = [[64, *short], [64, *short], [64, *short], [64, *short], [*short, *short], [*short, *short]]
    groups = regroup(packs, 2, 64, square)
    lengths = list(itertools.chain.from_iterable(packs))
    assert sorted(sorted(lengths[i] for i in group)[-2:] for group in groups) == [[4, 4]] * 4 + [[64, 64]] * 2


def test_the_one_that_is_left_gets_the_longest_company() -> None:
    packs = [[64, *[8] * 8], [64, *[8] * 8], [64, *[8] * 8], [32, *[8] * 12]]
    groups = regroup(packs, 2, 64, square)
    lengths = list(itertools.chain.from_iterable(packs))
    assert sorted(sorted(lengths[i] for i in group)[-2:] for group in groups) == [[8, 8], [8, 8], [32, 64], [64, 64]]


def test_a_document_of_several_ranks_counts_as_several() -> None:
    packs = [[128, *[8] * 16], [128, *[8] * 16], [256], [8] * 32]
    groups = regroup(packs, 4, 64, square)
    lengths = list(itertools.chain.from_iterable(packs))
    found = sorted(sorted(lengths[i] for i in group)[-2:] for group in groups)
    assert found == [[8, 8], [8, 8], [128, 128], [256]]


@pytest.mark.parametrize(
    "packs",
    [
        [],
        [[64, 8, 8]],
        [[], []],
        [[8] * 16, [8] * 16],  # even as they are
        [[64, 64], [8] * 16],  # they have met already
        [[64, *[32] * 2], [40, *[44] * 2]],  # nothing fills what 64 and 44 leave
    ],
)
def test_nothing_changes_without_need_or_way(packs: list[list[int]]) -> None:
    assert regroup(packs, 2, 64, square) is None
    assert regroup(packs, 1, 128, square) is None  # one rank has nobody to wait for


def test_few_tries_where_short_documents_are_missing(monkeypatch) -> None:
    tries = []
    monkeypatch.setattr(regrouping, "divide", lambda *args: tries.append(len(args[0])))
    packs = [[100, *[50 - i % 3] * 2] for i in range(60)]
    assert regroup(packs, 2, 150, square) is None
    assert len(tries) == regrouping._TRIES and tries == sorted(tries)
