# SPDX-License-Identifier: Apache-2.0
"""What is shared out among servers: units, query rows that all attend to one run of keys.

A document is one unit, causal within itself. A tree is several: each branch within itself, causal, and all that lies
below a branch against its keys, full. Ranges of a unit's queries can be computed anywhere and independently of other
units'; where units have the same queries, their results are merged by lse afterwards.

Rows of a unit count from 0. A plain document's unit has its id, and is where the document is; a layout with trees has
its units numbered anew.
"""

from __future__ import annotations

import numpy as np

from deepspeed_distca.layout import (
    DOCUMENT,
    PIECE_DOCUMENT,
    PIECE_RANK,
    PIECE_START,
    RANK,
    Layout,
    LayoutError,
    join_ranges,
    sort_rows,
)
from deepspeed_distca.scheduler.cost_model import CostModel, Phase, key_start
from deepspeed_distca.trees import BRANCH_DOCUMENT, BRANCH_LENGTH, BRANCH_START


class Units:
    """The units of a layout, for layers with one window.

    Attributes:
        pieces: int64 [n, 4], columns (unit, start, end, rank), sorted by the first two: as ``Layout.pieces``, with
            units for documents.
        window: keys a query of a causal unit sees, or None.
        full: how many keys a full unit has, by unit; empty without trees.
    """

    def __init__(self, layout: Layout, window: int | None) -> None:
        """Raises:
        LayoutError: trees whose texts are longer than the window; ``Layout.for_window`` has them apart.
        """
        self.pieces, self.window, self.full = layout.pieces, window, dict[int, int]()
        # Of each unit: document, first query, first key, how many keys, 0 for causal; none without trees.
        self._where = np.zeros((0, 4), dtype=np.int64)
        if layout.has_trees:
            self._of_trees(layout)

    def _of_trees(self, layout: Layout) -> None:
        branches = layout.branches
        if self.window is not None and layout.longest_text > self.window:
            raise LayoutError(
                f"a tree has a text of {layout.longest_text} tokens, and the window is {self.window}: give what "
                "Layout.for_window makes of the layout for layers with that window"
            )
        # Plain documents first, each one unit.
        plain = layout.pieces[~np.isin(layout.pieces[:, PIECE_DOCUMENT], branches[:, BRANCH_DOCUMENT])]
        ids, number = np.unique(plain[:, PIECE_DOCUMENT], return_inverse=True)
        plain = plain.copy()
        plain[:, PIECE_DOCUMENT] = number
        rank_of = dict(layout.segments[:, [DOCUMENT, RANK]].tolist())
        where: list[tuple[int, int, int, int]] = [(i, 0, 0, 0) for i in ids.tolist()]
        pieces: list[tuple[int, int, int, int]] = []
        below = _ends_of_subtrees(branches)
        for (document, start, length, _), end in zip(branches.tolist(), below, strict=True):
            pieces.append((len(where), 0, length, rank_of[document]))
            where.append((document, start, start, 0))
            if end > start + length:
                pieces.append((len(where), 0, end - start - length, rank_of[document]))
                where.append((document, start + length, start, length))
        self._where = np.array(where, dtype=np.int64)
        self.full = {unit: keys for unit, (_, _, _, keys) in enumerate(where) if keys}
        self.pieces = np.concatenate([plain, np.array(pieces, dtype=np.int64)])

    def places(self, unit: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, ...]:
        """Document, first and last query and first and last key, in rows of the document, of queries [start, end) of
        units; int64 like the arguments [n] each. Ends are exclusive."""
        if not len(self._where):
            return unit, start, end, key_start(start, self.window), end
        document, q_shift, k_shift, keys = self._where[unit].T
        full = keys > 0
        k_start = k_shift + np.where(full, 0, key_start(start, self.window))
        return document, q_shift + start, q_shift + end, k_start, k_shift + np.where(full, keys, end)

    def costs(self, ranges: np.ndarray, cost: CostModel, phase: Phase) -> np.ndarray:
        """Of queries [start, end) of units, each range as one task; int64 [n].

        Args:
            ranges: int64 [n, 4], columns as of ``pieces``.

        Raises:
            OverflowError: see :meth:`CostModel.cost`.
        """
        unit, start, end, _ = ranges.T
        causal = cost.cost(start, end, key_start(start, self.window), self.window, phase)
        if not self.full:
            return causal
        keys = self._where[unit, 3]
        return np.where(keys > 0, cost.full(end - start, keys, phase), causal)


def sorted_ranges(ranges: np.ndarray) -> np.ndarray:
    """Query ranges [n, 4] (unit, start, end, server) by server, unit and start; those that follow on each other in one
    unit at one server become one."""
    return join_ranges(ranges[sort_rows(ranges[:, PIECE_RANK], ranges[:, PIECE_DOCUMENT], ranges[:, PIECE_START])])


def _ends_of_subtrees(branches: np.ndarray) -> list[int]:
    """Where all that goes on from each branch ends, in rows of its document, by ``Layout.branches``."""
    ends = (branches[:, BRANCH_START] + branches[:, BRANCH_LENGTH]).tolist()
    places = {(b[BRANCH_DOCUMENT], b[BRANCH_START]): i for i, b in enumerate(branches.tolist())}
    for i in reversed(range(len(ends))):  # children lie behind their parents
        document, _, _, parent = branches[i].tolist()
        if parent >= 0:
            above = places[document, parent]
            ends[above] = max(ends[above], ends[i])
    return ends
