# SPDX-License-Identifier: Apache-2.0
"""Packing documents into rows, and the order in which ranks read the rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from deepspeed_distca.data import PackedRows, PackedSequenceCollator, Piece, RowSampler, pack_documents


@settings(max_examples=200)
@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 32), st.none() | st.integers(0, 9))
def test_every_token_is_in_exactly_one_row(lengths, max_tokens, seed):
    packing = pack_documents(lengths, max_tokens, seed=seed)
    assert all(0 < sum(piece.length for piece in row) <= max_tokens for row in packing.rows)
    covered = [np.zeros(n, int) for n in lengths]
    for row in packing.rows:
        for document, start, length in row:
            assert length > 0 and start + length <= lengths[document]
            covered[document][start : start + length] += 1
    assert all((c == 1).all() for c in covered)
    # Only what is longer than a row is cut, into as few pieces as can be.
    pieces = np.bincount([p.document for row in packing.rows for p in row], minlength=len(lengths))
    assert pieces.tolist() == [-(-n // max_tokens) for n in lengths]
    assert packing.split_documents == sum(n > max_tokens for n in lengths)
    assert (packing.dropped_documents, packing.dropped_tokens, packing.tokens) == (0, 0, sum(lengths))
    # Best fit never leaves two rows that would fit into one.
    sizes = sorted(sum(piece.length for piece in row) for row in packing.rows)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > max_tokens
    assert packing == pack_documents(lengths, max_tokens, seed=seed)


def test_best_fit():
    packing = pack_documents([6, 7, 3, 4], max_tokens=10)
    assert packing.rows == ((Piece(0, 0, 6), Piece(3, 0, 4)), (Piece(1, 0, 7), Piece(2, 0, 3)))
    assert packing.fill == 1.0
    shuffled = pack_documents([6, 7, 3, 4] * 5, max_tokens=10, seed=1)
    assert shuffled.rows != pack_documents([6, 7, 3, 4] * 5, max_tokens=10, seed=2).rows


def test_too_long_documents():
    lengths = [4, 11, 5]
    with pytest.raises(ValueError, match='document 1 has 11 tokens, a row at most 10.*"split" or "drop"'):
        pack_documents(lengths, 10, overflow="error")
    dropped = pack_documents(lengths, 10, overflow="drop")
    assert dropped.rows == ((Piece(0, 0, 4), Piece(2, 0, 5)),)
    assert (dropped.dropped_documents, dropped.dropped_tokens) == (1, 11) and dropped.fill == 0.9
    assert pack_documents([], 10).fill == 1.0
    for bad in (dict(max_tokens=0), dict(max_tokens=10, overflow="cut")):
        with pytest.raises(ValueError, match="must be"):
            pack_documents(lengths, **bad)
    for lengths in ([2.7], ["3"], [2**70], [None]):
        with pytest.raises(ValueError, match="lengths must be whole numbers"):
            pack_documents(lengths, 8)
    with pytest.raises(ValueError, match="lengths must be at least 0, got -2"):
        pack_documents([1, -2], 10)


def documents(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 100, n).tolist() for n in lengths]


def test_rows_are_features_for_the_collator():
    tokens = documents([5, 23, 0, 7])
    labelled = [{"input_ids": ids, "labels": [-100] * len(ids), "text": "ignored"} for ids in tokens]
    packing = pack_documents([len(ids) for ids in tokens], 10)
    for source in (tokens, labelled):
        rows = PackedRows(source, packing)
        seen = sorted(tuple(f["input_ids"]) for i in range(len(rows)) for f in rows[i])
        assert seen == sorted(tuple(ids[a : a + 10]) for ids in tokens for a in range(0, len(ids), 10))
    assert PackedSequenceCollator(max_tokens=10)(rows[0])["num_targets"] == 0


def read(num_rows, num_ranks, micro_batches, start=0, seed=3):
    """Rows in the order of the stream: all ranks' first, all ranks' second, ..."""
    samplers = [
        RowSampler(num_rows, rank=r, num_ranks=num_ranks, micro_batches=micro_batches, seed=seed, start=start)
        for r in range(num_ranks)
    ]
    assert all(len(s) == micro_batches for s in samplers)
    return [row for together in zip(*samplers, strict=True) for row in together]


@pytest.mark.parametrize(("num_rows", "num_ranks"), [(12, 1), (12, 2), (13, 2), (7, 3), (2, 5), (1, 4)])
def test_every_row_once_an_epoch_over_all_ranks(num_rows, num_ranks):
    epochs = 4
    stream = read(num_rows, num_ranks, micro_batches=-(-epochs * num_rows // num_ranks))
    for epoch in range(epochs):
        assert sorted(stream[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    if num_rows > 6:
        assert stream[:num_rows] != stream[num_rows : 2 * num_rows]
        assert stream != read(num_rows, num_ranks, micro_batches=len(stream) // num_ranks, seed=4)


@pytest.mark.parametrize("resumed_on", [1, 2, 3, 6])
def test_a_resume_reads_on_where_it_stopped(resumed_on):
    whole = read(num_rows=11, num_ranks=1, micro_batches=42)
    before = read(num_rows=11, num_ranks=2, micro_batches=9)
    after = read(num_rows=11, num_ranks=resumed_on, micro_batches=24 // resumed_on, start=len(before))
    assert before + after == whole


def test_the_sampler_leaves_the_global_generators_alone():
    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    list(RowSampler(5, rank=0, num_ranks=1, micro_batches=20))
    assert np.random.rand() == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_rows=0, rank=0, num_ranks=1, micro_batches=1), "dataset is empty"),
        (dict(num_rows=4, rank=2, num_ranks=2, micro_batches=1), "rank must be an integer >= 0 and <= 1, got 2"),
        (dict(num_rows=4, rank=0, num_ranks=1, micro_batches=-1), "micro_batches must be an integer >= 0"),
        (dict(num_rows=4, rank=0, num_ranks=0, micro_batches=1), "num_ranks must be an integer >= 1"),
        (dict(num_rows=4, rank=0, num_ranks=1, micro_batches=1, start=-1), "start must be an integer >= 0, got -1"),
        (dict(num_rows=4, rank=0, num_ranks=1, micro_batches=1, start=2.0), r"start must be .* got 2\.0"),
        (dict(num_rows=4, rank=0, num_ranks=1, micro_batches=True), "micro_batches must be .* got True"),
    ],
)
def test_impossible_samplers(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        RowSampler(**arguments)


def test_with_a_data_loader():
    tokens = documents([5, 23, 3, 7, 9, 1])
    packing = pack_documents([len(ids) for ids in tokens], 10, seed=0)
    rows = PackedRows(tokens, packing)
    seen = []
    for rank in range(2):
        sampler = RowSampler(len(rows), rank=rank, num_ranks=2, micro_batches=-(-len(rows) // 2))
        loader = DataLoader(rows, batch_size=None, sampler=sampler, collate_fn=PackedSequenceCollator(10))
        assert len(loader) == len(sampler)
        seen += [batch["input_ids"].numel() for batch in loader]
    assert sum(sorted(seen)) >= packing.tokens and max(seen) <= 10
