# SPDX-License-Identifier: Apache-2.0
"""Rows of documents where they are stored, and ranges of them: what ``RouteCompiler`` asks for many at once."""

from __future__ import annotations

import numpy as np

from deepspeed_distca.layout import DOCUMENT, LENGTH, RANK, START, Layout, sort_rows
from deepspeed_distca.scheduler.tasks import is_full
from deepspeed_distca.trees import BRANCH_DOCUMENT


class SegmentIndex:
    """Finds the segments that hold a range of a document's positions, for many ranges at once. Documents go by numbers
    0..n-1, in order of their ids: ids may be any int64, and products with them would leave it."""

    def __init__(self, layout: Layout) -> None:
        s, row = layout.segments[layout.order], layout.rows[layout.order]
        if len(layout.contexts):
            document, start, length, rank, context_row = layout.contexts.T
            s = np.concatenate([s, np.stack([rank, document, start, length], axis=1)])
            order = sort_rows(s[:, DOCUMENT], s[:, START])
            s, row = s[order], np.append(row, context_row)[order]
        self.rank, self.start = s[:, RANK], s[:, START]
        self.end = self.start + s[:, LENGTH]
        self.row = row
        document = s[:, DOCUMENT]
        new = np.append(True, document[1:] != document[:-1])[: len(document)]
        self._ids = document[new]
        self._span = int(self.end.max(initial=0)) + 1
        self._key = (np.cumsum(new) - 1) * self._span + self.start
        self.is_tree = np.isin(self._ids, layout.branches[:, BRANCH_DOCUMENT])  # by number

    def number(self, ids: np.ndarray) -> np.ndarray:
        """The numbers of documents."""
        numbered = len(self._ids) and self._ids[0] == 0 and self._ids[-1] == len(self._ids) - 1
        return ids if numbered else np.searchsorted(self._ids, ids)

    def find(self, document: np.ndarray, position: np.ndarray) -> np.ndarray:
        """The segment that holds each position."""
        return np.searchsorted(self._key, document * self._span + position, side="right") - 1

    def pieces(self, document: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, ...]:
        """Cuts ranges [lo, hi) at segment borders, one entry a piece: (index of the range, rank, row there, offset in
        the range, rows)."""
        first = self.find(document, lo)
        count = self.find(document, hi - 1) - first + 1
        which = np.repeat(np.arange(len(lo)), count)
        segment = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + first[which]
        start = np.maximum(self.start[segment], lo[which])
        rows = np.minimum(self.end[segment], hi[which]) - start
        row = self.row[segment] + start - self.start[segment]
        return which, self.rank[segment], row, start - lo[which], rows


def most_tasks(branches: np.ndarray) -> int:
    """Of any query row, by ``Layout.branches``: one for its own branch and one for each above it."""
    above: dict[tuple[int, int], int] = {}
    for document, start, _, parent in branches.tolist():
        above[document, start] = above.get((document, parent), 0) + 1
    return max(above.values(), default=1)


def task_levels(tasks: np.ndarray) -> np.ndarray:
    """``TaskRanges.level`` of ``Tasks.rows``, which are sorted by server, document and first query."""
    found = np.zeros(len(tasks), dtype=np.int64)
    ends: list[int] = []  # of the last task of each level
    group = None
    for i in np.flatnonzero(is_full(tasks)).tolist():
        document, start, end, _, _, server = tasks[i].tolist()
        if group != (server, document):
            group, ends = (server, document), []
        level = next((n for n, reach in enumerate(ends) if reach <= start), len(ends))
        ends[level : level + 1] = [end]
        found[i] = 1 + level
    return found


def unions(
    server: np.ndarray, document: np.ndarray, low: np.ndarray, high: np.ndarray, *, joined: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The unions of ranges [low, high) of one document at one server that overlap, or, `joined`, touch each other:
    their server, document, low and high, and which of them each range is part of. Ranges are sorted by server,
    document and low."""
    new_group = np.append(True, (server[1:] != server[:-1]) | (document[1:] != document[:-1]))
    lift = np.cumsum(new_group) * (int(high.max()) + 1)
    reach = np.maximum.accumulate(high + lift) - lift  # the furthest end so far within the group
    new = new_group.copy()
    new[1:] |= (low[1:] > reach[:-1]) if joined else (low[1:] >= reach[:-1])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(low)) - 1
    return server[first], document[first], low[first], reach[last], np.cumsum(new) - 1


def rows_within(group: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """First row of each entry when the entries of a group lie one after another; groups are contiguous."""
    start = np.cumsum(rows) - rows
    if not len(group):
        return start
    new = np.ones(len(group), dtype=bool)
    new[1:] = group[1:] != group[:-1]
    first = np.flatnonzero(new)
    return start - start[first][np.cumsum(new) - 1]
