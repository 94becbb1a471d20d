# SPDX-License-Identifier: Apache-2.0
"""Layouts: how they are made, what is refused, and what they say of themselves."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_distca.layout import Layout, LayoutError, Segment
from tests.distributed.random_plans import random_layout
from tests.scheduler.strategies import layouts


def test_from_ranks_takes_segments_tuples_and_mappings():
    ranks = [[Segment(7, 0, 5), (3, 4, 2)], [], [{"document": 3, "start": 0, "length": 4}]]
    layout = Layout.from_ranks(ranks)
    assert layout.num_ranks == 3
    assert layout.segments.dtype == np.int64
    assert layout.segments.tolist() == [[0, 7, 0, 5], [0, 3, 4, 2], [2, 3, 0, 4]]
    assert layout.rank(0) == [Segment(7, 0, 5), Segment(3, 4, 2)] and layout.rank(1) == []
    assert layout.tokens.tolist() == [7, 0, 4]
    assert layout.rows.tolist() == [0, 5, 0]
    assert Layout.from_ranks([[(np.int64(0), np.int32(0), 3)]]).tokens.tolist() == [3]


@given(layouts())
def test_survives_the_form_of_the_command_line(layout):
    assert Layout.from_ranks(json.loads(json.dumps(layout.to_ranks()))) == layout
    assert layout.validate() is layout


@given(layouts())
def test_rows_are_offsets_in_storage_order(layout):
    row, before = 0, -1
    for (rank, _, _, length), first in zip(layout.segments.tolist(), layout.rows.tolist(), strict=True):
        row = row if rank == before else 0
        assert first == row
        row, before = row + length, rank
    assert layout.tokens.sum() == layout.segments[:, 3].sum()


def test_from_lengths_numbers_documents_over_all_ranks():
    layout = Layout.from_lengths([[5, 3], [], [1]])
    assert layout.segments.tolist() == [[0, 0, 0, 5], [0, 1, 0, 3], [2, 2, 0, 1]]
    assert layout.num_ranks == 3


def test_from_cu_seqlens():
    assert Layout.from_cu_seqlens([0, 5, 5, 8]) == Layout.from_lengths([[5, 3]])
    assert Layout.from_cu_seqlens(np.array([0, 2], dtype=np.int32)) == Layout.from_lengths([[2]])
    assert Layout.from_cu_seqlens([0]) == Layout.from_lengths([[]])
    for wrong in ([], [1, 2], [0, 5, 4]):
        with pytest.raises(LayoutError, match="cu_seqlens"):
            Layout.from_cu_seqlens(wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Layout.from_lengths([[5.7]]),
        lambda: Layout.from_lengths([["5"]]),
        lambda: Layout.from_lengths([[10**5000]]),
        lambda: Layout.from_cu_seqlens([0, 2.5, 4]),
        lambda: Layout.from_cu_seqlens(np.array([0, 2**64 - 1], dtype=np.uint64)),
        lambda: Layout.from_cu_seqlens([[0, 1], [2]]),
        lambda: Layout.from_cu_seqlens(np.array([False, True])),
        lambda: Layout(np.array([[0, 0, 0, 1.5]]), 1),
        lambda: Layout.from_ranks([[(0, 0, 2**63)]]),
        lambda: Layout.from_ranks([[(0, 0, 2**62)], [(0, 2**62, 2**62)]]).validate(),
        lambda: Layout.from_ranks([[(d, 0, 2**62) for d in range(4)]]).validate(),
        lambda: Layout.from_ranks([[(0, 2**62, 1)]]).validate(),
    ],
)
def test_numbers_that_would_be_cut_off_or_wrap_around_are_refused(make):
    with pytest.raises(LayoutError) as raised:
        make()
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "at least one rank"),
        ([[(0, 0, 0)]], "length >= 1"),
        ([[(0, 0, -4)]], "length >= 1"),
        ([[(-1, 0, 4)]], "document >= 0"),
        ([[(0, -1, 4)]], "start >= 0"),
        ([[(0, 1, 4)]], "starts at 1 where 0 was expected"),
        ([[(0, 0, 4)], [(0, 5, 4)]], "starts at 5 where 4 was expected"),
        ([[(0, 0, 4)], [(0, 3, 4)]], "starts at 3 where 4 was expected"),
        ([[(0, 0, 4), (0, 0, 4)]], "starts at 0 where 4 was expected"),
    ],
)
def test_validate_refuses(ranks, message):
    with pytest.raises(LayoutError, match=message):
        Layout.from_ranks(ranks).validate()


def test_validate_wants_ranks_in_order():
    for segments in ([[1, 0, 0, 4], [0, 1, 0, 4]], [[2, 0, 0, 4]], [[-1, 0, 0, 4]]):
        with pytest.raises(LayoutError, match="ordered by rank"):
            Layout(np.array(segments), 2).validate()


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[(0, 0)]], "integers"),
        ([[(0, 0, 1.0)]], "integers"),
        ([[(0, 0, True)]], "integers"),
        ([[(0, 0, "4")]], "integers"),
        ([[5]], "integers"),
        ([5], "list of segments"),
        (["segments"], "list of segments"),
        ([{"document": 0, "start": 0, "length": 1}], "list of segments"),
        ([[{"document": 0, "start": 0}]], "'length'.* missing"),
        ([[{"document": 0, "start": 0, "length": 1, "end": 1}]], "'end'.* unknown"),
    ],
)
def test_from_ranks_refuses(ranks, message):
    with pytest.raises(LayoutError, match=message):
        Layout.from_ranks(ranks)


def test_filled_gives_empty_ranks_a_document_of_their_own():
    layout = Layout.from_ranks([[], [(4, 0, 3)], []])
    filled = layout.filled().validate()
    assert filled.tokens.tolist() == [1, 3, 1]
    assert len(set(filled.segments[:, 1].tolist())) == 3
    assert filled.filled() is filled


def test_equality_and_hash():
    one, same = Layout.from_lengths([[5], [3]]), Layout.from_ranks([[(0, 0, 5)], [(1, 0, 3)]])
    assert one == same and hash(one) == hash(same)
    assert one != Layout.from_lengths([[5], [3], []])
    assert one != Layout.from_lengths([[5], [4]])
    assert one != "layout"
    assert "num_ranks=2" in repr(one)


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_ranks_tell_each_other_their_layouts_as_integers(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    alone = [random_layout(rng, 1, documents=int(rng.integers(0, 6)), longest=30, trees=0.4) for _ in range(ranks)]
    found = Layout.from_integers([layout.to_integers() for layout in alone])
    assert found.num_ranks == ranks
    expected = [(rank, segment) for rank, layout in enumerate(alone) for segment in layout.segments.tolist()]
    # Documents of different ranks are different ones, and may be numbered otherwise.
    names = {(r, d): new for (r, (_, d, *_)), (_, new, *_) in zip(expected, found.segments.tolist(), strict=True)}
    assert len(set(names.values())) == len(names)
    assert [[r, names[r, d], *rest] for r, (_, d, *rest) in expected] == found.segments.tolist()
    branches = [[names[r, d], *rest] for r, layout in enumerate(alone) for d, *rest in layout.branches.tolist()]
    assert sorted(branches) == found.branches.tolist()


def test_a_tree_lies_in_one_segment() -> None:
    """Also where its branches cover the first of several."""
    segments = np.array([[0, 0, 0, 10], [1, 0, 10, 5]])
    with pytest.raises(LayoutError, match="2 segments; a tree lies in one"):
        Layout(segments, 2, np.array([[0, 0, 6, -1], [0, 6, 4, 0]])).validate()
    with pytest.raises(LayoutError, match="10 rows, its segment has 12"):
        Layout(np.array([[0, 0, 0, 12]]), 1, np.array([[0, 0, 6, -1], [0, 6, 4, 0]])).validate()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], "a tree needs at least one branch"),
        ([(3, 0)], r"branch 0 goes on from itself; .* the first one from none"),
        ([(3, None), (2, 2)], "branch 1 goes on from branch 2; .* 0 to 0"),
        ([(3, None), (2, -1)], "branch 1 goes on from branch -1"),
        ([(3, None), (2, True)], "the parent must be a branch's place or None, got True"),
        ([(3, None), (0, 0)], "branch 1: the length must be an integer >= 1, got 0"),
        ([(3, None), (1.5, 0)], "the length must be an integer >= 1, got 1.5"),
        ([(3, None), 4], r"branch 1: expected \(length, parent\), got 4"),
        ([(3, None), (2, None)], "the branch at row 3 has no parent"),
        ([(3, None), (2, 0), (1, 0), (4, 1)], "row 6 goes on from the one at row 3, behind which lies another"),
    ],
)
def test_trees_that_are_none(tree: list, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.from_trees([[5, tree]])


@pytest.mark.parametrize(
    ("branches", "message"),
    [
        ([[0, 0, 4, -1], [0, 5, 5, 0]], "a branch of 5 rows starts at 5 where 4 was expected"),
        ([[0, 0, 4, -1], [0, 4, 0, 0]], "a branch of 0 rows"),
        ([[0, 0, 4, 0], [0, 4, 6, 0]], "the branch at row 0 has parent 0"),
        (
            [[0, 0, 4, -1], [0, 4, 6, 2]],
            "the one at row 2, but there is none before it; those before it start at rows",
        ),
        ([[0, 0, 4, -1], [0, 4, 5, 0]], "its branches have 9 rows, its segment has 10"),
        ([[3, 0, 10, -1]], "branches of document 3: the layout has no such document"),
        ([[1, 0, 2, -1], [0, 0, 10, -1]], "branches must be ordered by document"),
    ],
)
def test_branches_that_are_no_trees(branches: list, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout(np.array([[0, 0, 0, 10], [0, 1, 0, 2]]), 1, np.array(branches)).validate()


def test_is_its_own_and_looked_at_once(monkeypatch) -> None:
    given = np.array([[0, 0, 0, 4], [1, 1, 0, 2]])
    layout = Layout(given, 2).validate()
    given[:] = -1  # the caller's array may be used again
    assert layout == Layout.from_lengths([[4], [2]]) and not layout.segments.flags.writeable
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout and not copy.segments.flags.writeable
    monkeypatch.setattr(Layout, "_validate_segments", lambda self: pytest.fail("looked at again"))
    layout.validate()
