# SPDX-License-Identifier: Apache-2.0
"""Which documents are trained together: full packs, nothing lost, steps that all ranks agree on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_distca.data.global_loader.packer import GlobalPacker
from deepspeed_distca.data.packing import Piece


def coverage(lengths: list[int], pieces: list[Piece]) -> list[np.ndarray]:
    """How often each token of each document is there."""
    found = [np.zeros(n, int) for n in lengths]
    for document, start, length in pieces:
        assert length > 0 and start >= 0 and start + length <= lengths[document]
        found[document][start : start + length] += 1
    return found


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 40), max_size=60),
    st.lists(st.integers(1, 50), min_size=1, max_size=3),
    st.sampled_from(["exact", "whole"]),
    st.integers(1, 12),
    st.integers(1, 3),
)
def test_every_token_is_in_exactly_one_pack(lengths, capacities, fill, lookahead, accumulation) -> None:
    packer = GlobalPacker(capacities, fill=fill, lookahead=lookahead)
    steps = list(packer.steps(enumerate(lengths), accumulation))
    packs = [pack for step in steps for micro_batch in step for pack in micro_batch]
    assert all(len(step) == accumulation and all(len(m) == len(capacities) for m in step) for step in steps)
    assert all((c == 1).all() for c in coverage(lengths, [piece for pack in packs for piece in pack]))
    sizes = [sum(piece.length for piece in pack) for pack in packs]
    room = [capacities[i % len(capacities)] for i in range(len(packs))]
    assert all(size <= capacity for size, capacity in zip(sizes, room, strict=True))
    used = int(np.count_nonzero(sizes))
    assert all(sizes[:used])  # empty packs come last, in the last step only
    assert not steps or used > len(packs) - accumulation * len(capacities)
    cut = sum(piece.start % packer.longest > 0 for pack in packs for piece in pack)
    if fill == "exact":
        assert sizes[: used - 1] == room[: used - 1]  # all but the last are full
        assert (cut > 0) == (packer.counts.cut_documents > 0)
    else:
        assert cut == packer.counts.cut_documents == 0
    counts = packer.counts
    assert (counts.documents, counts.empty_documents) == (sum(n > 0 for n in lengths), lengths.count(0))
    assert (counts.tokens, counts.packs) == (sum(lengths), used)
    assert counts.unfilled_tokens == sum(room[:used]) - sum(lengths)
    assert counts.split_documents == sum(n > min(capacities) for n in lengths)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(5, 40), st.integers(1, 3), st.integers(1, 2))
def test_dropping_the_last_step(lengths, capacity, accumulation, groups) -> None:
    kept = GlobalPacker([capacity] * groups).steps(enumerate(lengths), accumulation)
    packer = GlobalPacker([capacity] * groups)
    full = list(packer.steps(enumerate(lengths), accumulation, drop_last=True))
    assert full == list(kept)[: len(full)]
    pieces = [piece for step in full for micro_batch in step for pack in micro_batch for piece in pack]
    assert sum(piece.length for piece in pieces) == len(full) * accumulation * groups * capacity
    assert packer.counts.tokens + packer.counts.dropped_tokens == sum(lengths)
    assert packer.counts.documents + packer.counts.dropped_documents == len(lengths)
    assert packer.counts.tokens == sum(piece.length for piece in pieces) and packer.counts.unfilled_tokens == 0
    missing = sum(lengths) - packer.counts.tokens
    assert missing < accumulation * groups * capacity


def test_real_batches_are_full_without_cutting_documents() -> None:
    # Lengths as widely spread as those of corpora: among 256 of them some always fit exactly.
    lengths = np.random.default_rng(0).lognormal(7.5, 1.2, size=5000).astype(int) + 1
    for capacity in (65536, 524288):
        packer = GlobalPacker([capacity])
        packs = list(packer.packs(enumerate(lengths.tolist())))
        assert [sum(p.length for p in pack.pieces) for pack in packs[:-1]] == [capacity] * (len(packs) - 1)
        assert packer.counts.cut_documents == sum(p.start % capacity > 0 for pack in packs for p in pack.pieces)
        assert packer.counts.cut_documents <= 2, packer.counts  # at the end, when few are left to choose from


def test_documents_keep_their_order_but_for_the_lookahead() -> None:
    lengths = np.random.default_rng(1).integers(1, 400, size=2000)
    packs = GlobalPacker([1000], lookahead=20).packs(enumerate(lengths.tolist()))
    order = list(dict.fromkeys(piece.document for pack in packs for piece in pack.pieces))
    moved = np.abs(np.array(order) - np.arange(len(order)))
    assert moved.max() < 60


def test_how_a_pack_is_filled() -> None:
    def pack(*lengths: int, **options) -> list[tuple[int, ...]]:
        return [
            tuple(p.document for p in pack.pieces) for pack in GlobalPacker([10], **options).packs(enumerate(lengths))
        ]

    assert pack(6, 5, 4, 5) == [(0, 2), (1, 3)]  # one document of the right length
    assert pack(5, 6, 2, 3, 4) == [(0, 2, 3), (1, 4)]  # two of them
    assert pack(4, 7, 6)[0] == (0, 2)
    assert pack(4, 4, 3, 4, 6)[0] == (0, 4)
    assert pack(5, 4, 2, 3) == [(0, 2, 3), (1,)]
    assert pack(3, 4, 6, 8)[0] == (1, 2)  # 3 goes back for 6
    assert GlobalPacker([10]).counts.packs == 0
    assert [p.pieces for p in GlobalPacker([10]).packs(enumerate([7, 8]))] == [
        [Piece(0, 0, 7), Piece(1, 0, 3)],
        [Piece(1, 3, 5)],
    ]
    assert [p.pieces for p in GlobalPacker([10], fill="whole").packs(enumerate([7, 8]))] == [
        [Piece(0, 0, 7)],
        [Piece(1, 0, 8)],
    ]


def test_documents_longer_than_all_budgets() -> None:
    packer = GlobalPacker([10, 8])
    pieces = [piece for pack in packer.packs([(3, 19)]) for piece in pack.pieces]
    assert sorted(pieces) == [Piece(3, 0, 8), Piece(3, 8, 8), Piece(3, 16, 3)] or packer.counts.cut_documents
    dropping = GlobalPacker([10], overflow="drop")
    assert [p.pieces for p in dropping.packs([(0, 11), (1, 10)])] == [[Piece(1, 0, 10)]]
    assert (dropping.counts.dropped_documents, dropping.counts.dropped_tokens) == (1, 11)
    with pytest.raises(
        ValueError, match='document 7 has 11 tokens, the ranks that share it hold 10.*"split" or "drop"'
    ):
        list(GlobalPacker([10], overflow="error").packs([(7, 11)]))


def test_wrong_options() -> None:
    for options in (
        {"capacities": []},
        {"capacities": [5, 0]},
        {"capacities": [5], "fill": "full"},
        {"capacities": [5], "overflow": "cut"},
        {"capacities": [5], "lookahead": 0},
        {"capacities": [5], "lookahead": True},
    ):
        with pytest.raises(ValueError, match="budget|must be"):
            GlobalPacker(**options)
