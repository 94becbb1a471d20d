# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of one micro-batch live: documents, segments and the layout over all ranks.

Plain NumPy, no torch: the scheduler, the collator, the command line and the runtime all speak it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from deepspeed_distca.given import shown
from deepspeed_distca.trees import (
    BRANCH_DOCUMENT,
    BRANCH_LENGTH,
    BRANCH_START,
    LayoutError,
    branches_apart,
    by_document,
    check_tree,
    depths_of,
    read_tree,
)


class Segment(NamedTuple):
    """A contiguous run of one document's tokens on one rank: rows [start, start + length) of the document."""

    document: int
    start: int
    length: int


#: Columns of ``Layout.segments``.
RANK, DOCUMENT, START, LENGTH = range(4)

#: Columns of ``Layout.pieces``.
PIECE_DOCUMENT, PIECE_START, PIECE_END, PIECE_RANK = range(4)

#: Tokens of a layout, which floats still count exactly and whose sums stay in int64.
MAX_TOKENS = 2**53


class Layout:
    """The segments of every rank in storage order, for one micro-batch.

    Attributes:
        segments: int64 [num_segments, 4], columns (rank, document, start, length), ordered by rank and,
            within a rank, by storage: the rows of a rank's q, k and v are its segments one after another. Read-only.
        num_ranks: how many ranks there are; a rank may have no segment.
        branches: int64 [num_branches, 4], columns (document, start, length, parent), ordered by document and start:
            the branches of documents that are trees, [0, 4] where there is none. Read-only.
        contexts: int64 [num_contexts, 5], columns (document, start, length, rank, row): rows that documents attend to
            and that are stored elsewhere on their rank, [0, 5] but in what :meth:`for_window` makes. Read-only.

    Document ids are global: the same id on two ranks is one document. Every document must be there from
    position 0 to its end exactly once, which :meth:`validate` checks.

    A document may be a *tree*, so that what several texts have in common at their beginning is there once: a branch is
    a run of its rows that goes on from another branch, its parent, named by the row at which that one starts; -1 for
    the first branch, which has none. A row attends to the rows before it in its branch, to the parent's, to that
    one's parent's and so on, as if they were one text. A tree is stored in one segment and depth first: whatever goes
    on from a branch lies right behind it. So the *rows* of a tree count from 0 to its end as those of any document,
    and only its position ids (:meth:`position_ids`) go back where a branch begins.
    """

    __slots__ = ("_apart", "_order", "_pieces", "_valid", "branches", "contexts", "num_ranks", "segments")

    def __init__(
        self,
        segments: np.ndarray,
        num_ranks: int,
        branches: np.ndarray | None = None,
        contexts: np.ndarray | None = None,
    ) -> None:
        self.segments = _read_only(segments, 4, "segments")  # what is below is made of them once
        self.branches, self.contexts = _read_only(branches, 4, "branches"), _read_only(contexts, 5, "contexts")
        self.num_ranks = int(num_ranks)
        self._apart: Layout | None = None
        self._order: np.ndarray | None = None
        self._pieces: np.ndarray | None = None
        self._valid = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.segments, self.num_ranks, self.branches, self.contexts)

    @classmethod
    def from_ranks(cls, ranks: Sequence[Iterable[Segment | Sequence[int] | Mapping[str, int]]]) -> Layout:
        """From a list of segments for each rank; a segment is (document, start, length) or a mapping of these.

        Raises:
            LayoutError: a segment that is neither, or whose values are not integers, or not of 64 bits.
        """
        rows = []
        for rank, segments in enumerate(ranks):
            if isinstance(segments, str | bytes | Mapping) or not isinstance(segments, Iterable):
                raise LayoutError(f"rank {rank}: expected a list of segments, got {shown(segments)}")
            for index, segment in enumerate(segments):
                rows.append((rank, *_segment_values(segment, f"rank {rank}, segment {index}")))
        try:
            return cls(np.array(rows, dtype=np.int64).reshape(-1, 4), len(ranks))
        except OverflowError as error:
            raise LayoutError("a document, start or length is too large for a 64-bit integer") from error

    @classmethod
    def from_lengths(cls, lengths: Sequence[Sequence[int] | np.ndarray]) -> Layout:
        """From the lengths of whole documents on each rank, numbered in order over all ranks.

        Raises:
            LayoutError: a length that is no integer.
        """
        rows = [_int64(row, "lengths") for row in lengths]
        if any(row.ndim != 1 for row in rows):
            raise LayoutError(f"lengths must be a list of integers for each rank, got {shown(lengths)}")
        counts = [len(row) for row in rows]
        segments = np.zeros((sum(counts), 4), dtype=np.int64)
        segments[:, RANK] = np.repeat(np.arange(len(rows)), counts)
        segments[:, DOCUMENT] = np.arange(len(segments))
        segments[:, LENGTH] = np.concatenate(rows) if rows else 0
        return cls(segments, len(rows))

    @classmethod
    def from_trees(cls, ranks: Sequence[Sequence[int | Sequence[tuple[int, int | None]]]]) -> Layout:
        """From the whole documents of each rank, numbered in order over all ranks; some may be trees.

        Args:
            ranks: for each rank its documents in storage order. A document is its length, or, for a tree, the list of
                its branches in storage order: (length, parent), where the parent is the branch's place in this list,
                None for the first one.

        Raises:
            LayoutError: a length that is no integer, a parent that is none of the branches before, or an order that is
                not depth first.
        """
        lengths: list[list[int]] = []
        branches: list[tuple[int, int, int, int]] = []
        number = 0
        for rank, documents in enumerate(ranks):
            lengths.append([])
            for index, document in enumerate(documents):
                if isinstance(document, int | np.integer):
                    lengths[-1].append(int(document))
                else:
                    found = read_tree(document, f"rank {rank}, document {index}")
                    branches += [(number, *branch) for branch in found]
                    lengths[-1].append(sum(length for _, length, _ in found))
                number += 1
        segments = cls.from_lengths(lengths).segments
        return cls(segments, len(lengths), np.array(branches, dtype=np.int64)).validate()

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Sequence[int] | np.ndarray) -> Layout:
        """One rank's layout from cumulative lengths [num_documents + 1], starting at 0. Empty documents are skipped.

        Raises:
            LayoutError: cu_seqlens that are not integers, do not start at 0 or decrease.
        """
        cu = _int64(cu_seqlens, "cu_seqlens").ravel()
        if cu.size == 0 or cu[0] != 0 or (np.diff(cu) < 0).any():
            raise LayoutError(f"cu_seqlens must start at 0 and never decrease, got {cu.tolist()[:16]}")
        lengths = np.diff(cu)
        return cls.from_lengths([lengths[lengths > 0]])

    def validate(self) -> Layout:
        """Checks what a plan relies on and returns self: once, and not what :meth:`for_window` made.

        Raises:
            LayoutError: ranks out of order or out of range, lengths below 1, negative ids or starts, more than
                ``MAX_TOKENS`` tokens, a document that is not there from 0 to its end exactly once, or branches that
                are no trees stored depth first in one segment each.
        """
        if self._valid or len(self.contexts):
            return self  # or made of a layout that was looked at
        self._validate_segments()
        if len(self.branches):
            self._validate_branches()
        self._valid = True
        return self

    def _validate_segments(self) -> None:
        s = self.segments
        if self.num_ranks < 1:
            raise LayoutError(f"a layout needs at least one rank, got {self.num_ranks}")
        if not len(s):
            return
        rank, document, start, length = s.T
        if rank[0] < 0 or rank[-1] >= self.num_ranks or (rank[1:] < rank[:-1]).any():
            raise LayoutError(f"segments must be ordered by rank, with ranks in 0..{self.num_ranks - 1}")
        if length.min() < 1 or document.min() < 0 or start.min() < 0:
            bad = s[(length < 1) | (document < 0) | (start < 0)][0]
            raise LayoutError(
                f"rank {bad[RANK]}: segment (document {bad[DOCUMENT]}, start {bad[START]}, length {bad[LENGTH]}) "
                "needs length >= 1, document >= 0 and start >= 0"
            )
        if float(length.sum(dtype=np.float64)) > MAX_TOKENS or int(start.max()) > MAX_TOKENS:
            raise LayoutError(f"the documents are too long: a layout may have {MAX_TOKENS} tokens in all")
        if not start.any() and (document[1:] > document[:-1]).all():
            return  # whole documents by their numbers, as most are
        _, document, start, length = s[self.order].T
        end = start + length
        expected = np.zeros_like(start)
        same = document[1:] == document[:-1]
        expected[1:][same] = end[:-1][same]
        if (start != expected).any():
            i = int(np.flatnonzero(start != expected)[0])
            raise LayoutError(
                f"document {document[i]}: a segment starts at {start[i]} where {expected[i]} was expected; its "
                "segments over all ranks must cover it from 0 to its end exactly once"
            )

    def _validate_branches(self) -> None:
        b = self.branches
        if (b[1:, BRANCH_DOCUMENT] < b[:-1, BRANCH_DOCUMENT]).any():
            raise LayoutError("branches must be ordered by document")
        lengths: dict[int, list[int]] = {}
        for document, length in self.segments[:, [DOCUMENT, LENGTH]].tolist():
            lengths.setdefault(document, []).append(length)
        for document, tree in by_document(b).items():
            if document not in lengths:
                raise LayoutError(f"branches of document {document}: the layout has no such document")
            if len(lengths[document]) > 1:
                raise LayoutError(
                    f"document {document} has branches and {len(lengths[document])} segments; a tree lies in one"
                )
            check_tree(document, tree, lengths[document][0])

    def filled(self) -> Layout:
        """The same with a document of one token on every rank that has none; itself where there is no such rank.

        A rank without tokens cannot run a HuggingFace model, whose reshapes do not know what to make of 0 rows, but it
        serves all the same.
        """
        empty = np.flatnonzero(np.bincount(self.segments[:, RANK], minlength=self.num_ranks) == 0)
        if not len(empty):
            return self
        document = int(self.segments[:, DOCUMENT].max(initial=-1)) + 1
        extra = [(rank, document + i, 0, 1) for i, rank in enumerate(empty.tolist())]
        rows = np.concatenate([self.segments, np.array(extra, dtype=np.int64)])
        return Layout(rows[np.argsort(rows[:, RANK], kind="stable")], self.num_ranks, self.branches)

    def rank(self, rank: int) -> list[Segment]:
        """The segments of one rank in storage order."""
        return [Segment(*map(int, row[1:])) for row in self.segments[self.segments[:, RANK] == rank]]

    @property
    def order(self) -> np.ndarray:
        """Indices that sort ``segments`` by (document, start), int64 [num_segments]."""
        if self._order is None:
            self._order = sort_rows(self.segments[:, DOCUMENT], self.segments[:, START])
        return self._order

    @property
    def pieces(self) -> np.ndarray:
        """The longest contiguous ranges of each document on one rank, whether or not they lie side by side in storage.

        int64 [num_pieces, 4], columns (document, start, end, rank), sorted by (document, start).
        """
        if self._pieces is None:
            rank, document, start, length = self.segments[self.order].T
            self._pieces = join_ranges(np.stack([document, start, start + length, rank], axis=1))
            self._pieces.flags.writeable = False
        return self._pieces

    @property
    def is_whole(self) -> bool:
        """Whether every document lies in one segment."""
        document = self.segments[self.order, DOCUMENT]
        return not len(self.contexts) and not (document[1:] == document[:-1]).any()

    @property
    def has_trees(self) -> bool:
        """Whether some document is a tree."""
        return len(self.branches) > 0

    def position_ids(self, rank: int) -> np.ndarray:
        """Of a rank's rows in storage order, int64 [tokens]: how many rows of its document come before each, in a tree
        of those it attends to."""
        _, document, start, length = self.segments[self.segments[:, RANK] == rank].T
        first = np.cumsum(length) - length
        found = np.arange(int(length.sum())) - np.repeat(first - start, length)
        if self.has_trees:
            places = dict(zip(document.tolist(), first.tolist(), strict=True))
            back = self.branches[:, BRANCH_START] - depths_of(self.branches)
            for (tree, row, rows, _), shift in zip(self.branches.tolist(), back.tolist(), strict=True):
                if tree in places:
                    found[places[tree] + row : places[tree] + row + rows] -= shift
        return found

    def for_window(self, window: int | None) -> Layout:
        """The layout as layers with a window see it: itself, unless there are trees with a text that is longer than
        the window. Their branches are documents of their own then, and so numbered, each of whose rows begin where
        they stand in their text; what they attend to above is their context, which servers copy."""
        if window is None or not self.has_trees or self.longest_text <= window:
            return self
        if self._apart is None:
            segments, contexts = branches_apart(self.segments, self.rows, self.branches)
            self._apart = Layout(segments, self.num_ranks, None, contexts)
        return self._apart

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text of a tree, from its first branch to one from which none goes on; 0 without."""
        return int((depths_of(self.branches) + self.branches[:, BRANCH_LENGTH]).max(initial=0))

    @property
    def tokens(self) -> np.ndarray:
        """Tokens stored on each rank, int64 [num_ranks]."""
        return np.bincount(self.segments[:, RANK], weights=self.segments[:, LENGTH], minlength=self.num_ranks).astype(
            np.int64
        )

    @property
    def rows(self) -> np.ndarray:
        """The first storage row of each segment on its rank, int64 [num_segments]."""
        ends = np.cumsum(self.segments[:, LENGTH])
        before = np.concatenate([[0], np.cumsum(self.tokens)])[self.segments[:, RANK]]
        return ends - self.segments[:, LENGTH] - before

    def to_integers(self) -> np.ndarray:
        """A layout of one rank as int64 [n], for :meth:`from_integers`.

        A document in one segment is its length. A tree is minus the number of its branches, and for each of these its
        length and the place, from 1, of the one that it goes on from, 0 for the first. A segment of a document that
        has several is 0, a number for the document, start and length.
        """
        if not self.has_trees and not self.segments[:, START].any():
            return self.segments[:, LENGTH]
        found: list[int] = []
        counts = dict(
            zip(*(x.tolist() for x in np.unique(self.segments[:, DOCUMENT], return_counts=True)), strict=True)
        )
        numbers = {document: number for number, document in enumerate(counts)}
        for _, document, start, length in self.segments.tolist():
            tree = self.branches[self.branches[:, BRANCH_DOCUMENT] == document]
            if counts[document] > 1:
                found += [0, numbers[document], start, length]
            elif len(tree):
                places = {begin: place for place, begin in enumerate(tree[:, BRANCH_START].tolist(), 1)}
                found.append(-len(tree))
                for _, _, rows, parent in tree.tolist():
                    found += [rows, places.get(parent, 0)]
            else:
                found.append(length)
        return np.array(found, dtype=np.int64)

    @classmethod
    def from_integers(cls, ranks: Sequence[np.ndarray]) -> Layout:
        """The layout of all ranks from what :meth:`to_integers` gave for each."""
        if not any((values < 1).any() for values in ranks):
            return cls.from_lengths(ranks)
        segments, branches, documents = list[tuple[int, ...]](), list[tuple[int, ...]](), 0
        for rank, values in enumerate(ranks):
            rest, numbers = iter(values.tolist()), dict[int, int]()
            for value in rest:
                number, start, length = documents, 0, value
                if value == 0:
                    number = numbers.setdefault(next(rest), documents)
                    start, length = next(rest), next(rest)
                elif value < 0:
                    tree = [(next(rest), next(rest)) for _ in range(-value)]
                    starts = [0, *accumulate(rows for rows, _ in tree)]
                    length = starts[-1]
                    places = [-1, *starts]  # of what a branch goes on from
                    branches += [(number, starts[i], n, places[parent]) for i, (n, parent) in enumerate(tree)]
                segments.append((rank, number, start, length))
                documents += number == documents
        rows = np.array(segments, dtype=np.int64)
        return cls(rows, len(ranks), np.array(branches, dtype=np.int64)).validate()

    def to_ranks(self) -> list[list[dict[str, int]]]:
        """The form that ``ds_distca plan --layout`` reads under "ranks".

        Raises:
            LayoutError: a layout with trees, for which that form has no word.
        """
        if self.has_trees:
            raise LayoutError("a layout with trees cannot be told as segments alone")
        return [[s._asdict() for s in self.rank(r)] for r in range(self.num_ranks)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        same = self.num_ranks == other.num_ranks and np.array_equal(self.segments, other.segments)
        return same and np.array_equal(self.branches, other.branches)

    def __hash__(self) -> int:
        return hash((self.num_ranks, self.segments.tobytes(), self.branches.tobytes()))

    def __repr__(self) -> str:
        kinds = f"segments={len(self.segments)}" + (f", branches={len(self.branches)}" if self.has_trees else "")
        return f"Layout(num_ranks={self.num_ranks}, {kinds}, tokens={self.tokens.tolist()})"


def _read_only(rows: np.ndarray | None, columns: int, name: str) -> np.ndarray:
    given = np.zeros((0, columns), dtype=np.int64) if rows is None else _int64(rows, name)
    array = np.array(given, order="C").reshape(-1, columns)  # a copy: nobody else can write it
    array.flags.writeable = False
    return array


def _int64(values: Any, name: str) -> np.ndarray:
    """The values as int64; floats and the like are refused rather than cut off."""
    try:
        given = np.asarray(values)
    except (ValueError, OverflowError) as error:  # rows of unlike length
        raise LayoutError(f"{name} must be an array of integers: {error}") from error
    if given.size and given.dtype.kind not in "iu":
        raise LayoutError(f"{name} must be integers, got {given.dtype}")
    if given.size and given.dtype == np.uint64 and int(given.max()) > np.iinfo(np.int64).max:
        raise LayoutError(f"{name} must be integers of 64 bits with a sign, got {int(given.max())}")
    return given.astype(np.int64, copy=False)


def sort_rows(*columns: np.ndarray) -> np.ndarray:
    """Indices that sort rows by their columns, the first one first; equal rows stay in order. Rows that are sorted, as
    most are, are looked at once."""
    ahead = np.zeros(max(0, len(columns[0]) - 1), dtype=bool)  # of the row before, by an earlier column
    for column in columns:
        if (~ahead & (column[1:] < column[:-1])).any():
            return np.lexsort(columns[::-1])
        ahead |= column[1:] > column[:-1]
    return np.arange(len(columns[0]))


def join_ranges(ranges: np.ndarray) -> np.ndarray:
    """Ranges [n, 4] (document, start, end, rank), of which those that follow on each other in one document at one rank
    become one."""
    document, start, end, rank = ranges.T
    joined = (document[1:] == document[:-1]) & (rank[1:] == rank[:-1]) & (start[1:] == end[:-1])
    if not joined.any():
        return ranges
    first, last = np.append(True, ~joined), np.append(~joined, True)
    return np.stack([document[first], start[first], end[last], rank[first]], axis=1)


def _segment_values(segment: Any, where: str) -> tuple[int, int, int]:
    if isinstance(segment, Mapping):
        unknown, missing = set(segment) - set(Segment._fields), set(Segment._fields) - set(segment)
        if unknown or missing:
            raise LayoutError(
                f"{where}: expected the keys {list(Segment._fields)}, "
                + (f"{sorted(missing)} missing" if missing else f"{sorted(map(str, unknown))} unknown")
            )
        segment = [segment[key] for key in Segment._fields]
    try:
        values = tuple(segment)
    except TypeError:
        values = ()
    if len(values) != 3 or any(isinstance(v, bool) or not isinstance(v, int | np.integer) for v in values):
        raise LayoutError(f"{where}: expected integers (document, start, length), got {shown(segment)}")
    document, start, length = values
    return document, start, length
