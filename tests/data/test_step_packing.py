# SPDX-License-Identifier: Apache-2.0
"""A step's sequences into micro-batches of equal tokens."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_distca import pack_step
from deepspeed_distca.data import pack_documents
from tests.distributed.harness import slowness

CAP = 64
#: Lengths of many kinds: all alike, mostly short, close to the cap, anything.
LENGTHS = st.one_of(
    st.lists(st.integers(1, CAP), min_size=1, max_size=60),
    st.lists(st.integers(1, 6), min_size=1, max_size=120),
    st.lists(st.integers(CAP // 3, CAP), min_size=1, max_size=40),
    st.lists(st.sampled_from([1, 2, CAP - 1, CAP]), min_size=1, max_size=60),
)


def tokens_of(packed: list[list[list[int]]], lengths: list[int]) -> np.ndarray:
    """[micro-batches, ranks]"""
    return np.array([[sum(lengths[i] for i in rank) for rank in batch] for batch in packed])


@settings(max_examples=400)
@given(LENGTHS, st.integers(1, 9))
def test_what_holds_of_every_step(lengths, ranks):
    packed = pack_step(lengths, CAP, ranks)
    tokens = tokens_of(packed, lengths)
    # Every sequence once, whole, in order; the same number of micro-batches on every rank; none above the cap.
    assert sorted(i for batch in packed for rank in batch for i in rank) == list(range(len(lengths)))
    assert tokens.shape[1] == ranks and tokens.max() <= CAP
    assert all(rank == sorted(rank) for batch in packed for rank in batch)
    # A rank without a sequence only where there are not enough of them.
    assert (tokens == 0).sum() == max(0, tokens.size - len(lengths))
    # No more micro-batches than best fit has rows for.
    rows = pack_documents(sorted(lengths, reverse=True), CAP).rows
    assert len(packed) == -(-len(rows) // ranks) and (tokens.max(axis=1) > 0).all()
    assert packed == pack_step(np.array(lengths, dtype=np.int32), CAP, ranks)
    assert all(type(i) is int for batch in packed for rank in batch for i in rank)


@settings(max_examples=200)
@given(st.lists(st.integers(1, CAP), min_size=1, max_size=80), st.integers(2, 8), st.data())
def test_short_sequences_make_tokens_even(longs, ranks, data):
    """With enough sequences of one token, ranks differ by one, whatever the others are, as long as there is room."""
    least = sum(CAP - n for n in longs) + CAP * ranks
    lengths = longs + [1] * data.draw(st.integers(least, least + ranks * CAP))
    tokens = tokens_of(pack_step(lengths, CAP, ranks), lengths)
    assert (tokens.max(axis=1) - tokens.min(axis=1)).max() <= 1


@pytest.mark.parametrize("ranks", [2, 4, 5, 10])
def test_no_rank_is_without_a_sequence_where_it_is_too_tight_for_even_tokens(ranks):
    """So tight that sequences stay where best fit has put them, which leaves a rank without any."""
    lengths = [7] * 3 + [6] * 4 + [5] * 4 + [4] * 16 + [3] * 24 + [2] * 13
    tokens = tokens_of(pack_step(lengths, 12, ranks), lengths)
    assert tokens.size * 12 > sum(lengths) == tokens.sum() and 0 < tokens.min() <= tokens.max() <= 12


def test_long_sequences_share_a_micro_batch():
    """Where the long ones fill a micro-batch on some ranks, the others get as many tokens there, not the average."""
    lengths = [1] * 120 + [60, 60]
    packed = pack_step(lengths, 60, 3)
    assert tokens_of(packed, lengths).tolist() == [[60, 60, 60], [20, 20, 20]]
    assert [120] in packed[0] and [121] in packed[0]
    # Of ranks with equal tokens those with like attention go together.
    lengths = [8, 1, 1, 1, 1, 1, 1, 1, 1] * 2
    packed = pack_step(lengths, 8, 2)
    assert packed == [[[0], [9]], [[1, 3, 5, 7, 10, 12, 14, 16], [2, 4, 6, 8, 11, 13, 15, 17]]]


def test_where_evening_out_does_not_fit_best_fit_does():
    lengths = [10, 9, 8, 7, 6, 5, 5, 4, 3, 3]  # 60 of 60 tokens
    assert tokens_of(pack_step(lengths, 15, 2), lengths).tolist() == [[15, 15], [15, 15]]


def test_fewer_sequences_than_ranks():
    assert pack_step([5, 3], 8, 4) == [[[0], [1], [], []]]
    assert pack_step([8, 8, 8], 8, 2) == [[[0], [1]], [[2], []]]


def test_large_steps_take_a_second_or_so():
    lengths = np.random.default_rng(0).lognormal(8, 1, 100_000).clip(1, 65536).astype(int)
    begun = time.process_time()
    packed = pack_step(lengths, 65536, 512)
    assert time.process_time() - begun < 10 * slowness()
    tokens = tokens_of(packed, lengths.tolist())
    assert tokens.max() <= 65536 and tokens.max(axis=1).sum() < 1.005 * lengths.sum() / 512


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([4, 9, 2, 11], 8, 2), r"lengths\[1\] has 9 tokens, but a rank at most tokens_per_rank=8; raise .*\(2 of 4"),
        (([4, 0], 8, 2), r"lengths\[1\] has 0 tokens, but a sequence has at least 1; leave it out \(1 of 2"),
        (([4, -3], 8, 2), r"lengths\[1\] has -3 tokens"),
        (([], 8, 2), "lengths is empty.*leave a step without any out"),
        (([4.0], 8, 2), "lengths must be whole numbers"),
        (([4], 0, 2), "tokens_per_rank must be an integer >= 1 and <= 16777216, got 0"),
        (([4], 8, 0), "ranks must be an integer >= 1, got 0"),
        (([4], 8, 2.0), r"ranks must be an integer >= 1, got 2\.0"),
    ],
)
def test_refusals(given, words):
    with pytest.raises(ValueError, match=words):
        pack_step(*given)
