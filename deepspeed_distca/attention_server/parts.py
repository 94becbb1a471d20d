# SPDX-License-Identifier: Apache-2.0
"""What a rank does in one phase of a layer, in one part or, for two nano-batches, in two.

Two parts are the same plan divided in time only: what moves where is left as it was planned. Nano-batch 0 is the rows
of a rank before its cut, nano-batch 1 those from there on. A task belongs to the nano-batch of its queries, a row
travels with the nano-batch that it belongs to. A document that lies in both needs no special rule: a task waits for
the rows of the other nano-batch too if it reads any, and both have left before the first task in a workspace starts.
So every row still travels once, and any cut of any documents is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.task_batch import TaskBatch
from deepspeed_distca.layout import DOCUMENT, LENGTH, RANK, START, Layout
from deepspeed_distca.scheduler.routes import HOME_ROW, PEER, ROWS, WORK_ROW, Routes, TaskRanges

#: A row is cut at a document's border if there is one this near its middle, as a share of the row. A cut inside a
#: document costs the second half's tasks the first half's keys once more in backward; unequal halves hide less.
_NEAR = 1 / 16


def row_cuts(layout: Layout, granularity: int) -> np.ndarray:
    """Where the row of each rank is cut, int64 [num_ranks]: its first `cut` tokens are nano-batch 0.

    At the border of documents nearest the middle, if one is near; else inside a document, at a multiple of
    `granularity` in its positions where there is one. Both halves have a token wherever there are two.
    """
    cuts = np.zeros(layout.num_ranks, dtype=np.int64)
    for rank in range(layout.num_ranks):
        mine = layout.segments[layout.segments[:, RANK] == rank]
        cuts[rank] = _row_cut(mine[:, START], mine[:, LENGTH], granularity)
    return cuts


def _row_cut(start: np.ndarray, length: np.ndarray, granularity: int) -> int:
    ends = np.cumsum(length)
    tokens = int(ends[-1]) if len(ends) else 0
    if tokens < 2:
        return tokens
    middle = tokens / 2
    if len(ends) > 1:
        border = int(ends[np.abs(ends[:-1] - middle).argmin()])
        if abs(border - middle) <= tokens * _NEAR:
            return border
    inside = int(np.searchsorted(ends, middle, side="right"))
    inside = min(inside, len(ends) - 1)
    first = int(ends[inside] - length[inside])  # its first row
    position = int(start[inside]) + tokens // 2 - first
    rounded = round(position / granularity) * granularity
    cut = first + rounded - int(start[inside])
    return cut if max(first, 0) < cut < int(ends[inside]) else min(max(tokens // 2, 1), tokens - 1)


def crossings(layout: Layout, cuts: np.ndarray) -> tuple[bool, bool]:
    """Whether queries of nano-batch 0 may need keys of nano-batch 1, and the other way round: whether some document
    has tokens of the latter before some of the former. The first only happens where documents continue on other
    ranks."""
    s = layout.segments
    cut = np.clip(cuts[s[:, RANK]] - layout.rows, 0, s[:, LENGTH])
    document = np.unique(s[:, DOCUMENT], return_inverse=True)[1]
    pieces = np.concatenate(
        [
            np.stack([document, s[:, START], np.zeros_like(cut)], axis=1)[cut > 0],
            np.stack([document, s[:, START] + cut, np.ones_like(cut)], axis=1)[cut < s[:, LENGTH]],
        ]
    )
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]

    def any_before(nano: np.ndarray) -> bool:
        """Whether a document has tokens of which `nano` is 1 before some of which it is 0."""
        highest = np.maximum.accumulate(2 * pieces[:, 0] + nano) - 2 * pieces[:, 0]
        return bool((highest > nano).any())

    return any_before(pieces[:, 2]), any_before(1 - pieces[:, 2])


@dataclass(frozen=True)
class Part:
    """What this rank does for some of its rows in one phase.

    Attributes:
        first, rows: its home rows are [first, first + rows) of the rank's.
        plan: tasks in the workspace whose queries are of this part (``remote``, ``waves``), and its rows' runs,
            counted from ``first`` at home. The workspace is that of the whole plan.
        local: tasks in place, one batch for each call of a kernel, queries counted from ``first`` and keys from
            ``k_first``. In backward without those of ``shared``.
        k_first: the first home row of the key/value rows for tasks in place; they end with the part's own.
        shared: backward of nano-batch 0 only: tasks in place whose keys a task in place of nano-batch 1 has as well,
            so that their dk and dv are added, counted like ``local``.
        needs_other: a task in the workspace reads key/value rows of the other part.
    """

    first: int
    rows: int
    plan: RankPlan
    local: list[TaskBatch]
    k_first: int = 0
    shared: TaskBatch | None = None
    needs_other: bool = False


@dataclass(frozen=True)
class Parts:
    """One phase of a layer on this rank.

    Attributes:
        parts: one, or those of nano-batch 0 and 1.
        home_rows: rows of q, k and v of the rank.
        crossed: of either nano-batch, whether its queries may read keys of the other one somewhere: see
            :func:`crossings`. The same on every rank.
    """

    parts: tuple[Part, ...]
    home_rows: int
    crossed: tuple[bool, bool] = (False, False)

    @classmethod
    def whole(cls, plan: RankPlan) -> Parts:
        """All rows in one part."""
        rows = plan.routes.home_rows
        return cls((Part(0, rows, plan, plan.local),), rows)

    @property
    def divided(self) -> bool:
        return len(self.parts) > 1

    @property
    def is_local(self) -> bool:
        """Nothing to send, receive or copy."""
        return all(part.plan.is_local for part in self.parts)

    def keys_after(self, part: int) -> tuple[int, ...]:
        """Backward, which serves the last part first: whose keys have their gradients once this part was served. Where
        queries of part 0 may read keys of part 1, theirs are not complete before it was."""
        if not self.crossed[0]:
            return (part,)
        return tuple(range(len(self.parts))) if part == 0 else ()

    @cached_property
    def written(self) -> bool:
        """Backward: tasks in place write every row of dk and dv, each exactly once."""
        # Of a part's batches the first one writes, and covers what the others have; those are added to it.
        alone = [part.local[0] for part in self.parts if part.local]
        if any(part.shared is not None and len(part.shared) for part in self.parts):
            return False
        count = sum(int(tasks.k_len.sum()) for tasks in alone)
        first = [part.k_first for part in self.parts if part.local]
        spans = [(s.start + f, s.stop + f) for tasks, f in zip(alone, first, strict=True) for s in tasks.key_spans]
        return count == self.home_rows and all(a[1] <= b[0] for a, b in pairwise(sorted(spans)))

    @cached_property
    def sums(self) -> WorkspaceSums:
        """Backward: how dk and dv of the workspace come about."""
        return WorkspaceSums.of([part.plan.waves for part in self.parts], self.parts[0].plan.routes.work_kv_rows)


@dataclass(frozen=True)
class WorkspaceSums:
    """Which kernel calls of a backward write dk and dv of workspace rows, and which add to what others have written.

    Attributes:
        fresh: by part and wave, whether no earlier one had any of its key rows.
        gaps: rows that no wave writes, or none as the first: they start from zero.
        most: the most tasks that share a row.
    """

    fresh: list[list[bool]]
    gaps: list[slice]
    most: int

    @classmethod
    def of(cls, waves: Sequence[Sequence[TaskBatch]], rows: int) -> WorkspaceSums:
        """Of the waves of all parts, which run from the last part to the first; within one no two tasks share keys.

        Args:
            rows: of the workspace. Some may be there for other servers alone, which add to them.
        """
        fresh = [[True] * len(part) for part in waves]
        spans = [span for part in waves for tasks in part for span in tasks.key_spans]
        if sum(map(len, waves)) <= 1 and sum(span.stop - span.start for span in spans) == rows:
            return cls(fresh, [], 1)
        written, tasks_of = np.zeros(rows, dtype=bool), np.zeros(rows, dtype=np.int64)
        for part in reversed(range(len(waves))):
            for wave, tasks in enumerate(waves[part]):
                fresh[part][wave] = not any(tasks_of[span].any() for span in tasks.key_spans)
                for span in tasks.key_spans:
                    written[span] |= fresh[part][wave]
                    tasks_of[span] += 1
        borders = np.flatnonzero(np.diff(np.concatenate([[True], written, [True]])))
        gaps = [slice(int(a), int(b)) for a, b in borders.reshape(-1, 2)]
        return cls(fresh, gaps, int(tasks_of.max(initial=0)))


def two_parts(
    plan: Routes, cuts: np.ndarray, window: int | None, *, backward: bool, crossed: tuple[bool, bool]
) -> Parts:
    """Divides what a rank does in one phase between two nano-batches.

    Args:
        plan: the whole.
        cuts: of the rows of every server, as in :func:`row_cuts`.
        window: keys that a query sees.
        backward: keep tasks apart that would overwrite each other's dk and dv.
        crossed: see :class:`Parts`.

    Raises:
        ValueError: a plan of trees, whose tasks share queries: they run whole.
    """
    if plan.tasks_per_row > 1:
        raise ValueError("micro-batches with trees are not divided into nano-batches")
    cut = int(cuts[plan.rank])
    runs = _divide_runs(plan, cuts)

    local = _cut_tasks(plan.local, np.array([cut]), window)
    nano_local = (local.q_start >= cut).astype(np.int64)
    starts, of_run, _ = _in_order([both["q_in"] for both in runs])
    changes = starts[1:][of_run[1:] != of_run[:-1]]
    remote = _cut_tasks(plan.remote, changes, window)
    nano_remote = of_run[np.searchsorted(starts, remote.q_start, side="right") - 1] if len(remote) else remote.q_start

    reads = _other_rows([both["kv_in"] for both in runs], remote, nano_remote)
    key_end = local.k_start + local.k_len
    clash = np.zeros(len(local), dtype=bool)
    if backward:
        for i in np.flatnonzero(nano_local == 0):
            later = (nano_local == 1) & (local.k_start < key_end[i]) & (key_end > local.k_start[i])
            clash[i] = later.any()

    parts = []
    for nano, (first, end) in enumerate(((0, cut), (cut, plan.home_rows))):
        mine = nano_local == nano
        k_first = int(local.k_start[mine].min(initial=first))
        tasks = remote.take(nano_remote == nano)
        rows = end - first
        divided = RankPlan(
            Routes(
                rank=plan.rank,
                home_rows=rows,
                local=local.take(slice(0, 0)),
                remote=tasks,
                waves=_waves(tasks),
                work_q_rows=plan.work_q_rows,
                work_kv_rows=plan.work_kv_rows,
                **runs[nano],
            )
        )
        apart, shared = (_batch(local.take(mine & which), first, k_first, end) for which in (~clash, clash))
        needs_other = bool(reads[nano_remote == nano].any())
        parts.append(Part(first, rows, divided, [apart] if len(apart) else [], k_first, shared, needs_other))
    return Parts(tuple(parts), plan.home_rows, crossed)


def _batch(tasks: TaskRanges, first: int, k_first: int, end: int) -> TaskBatch:
    return TaskBatch(
        tasks.q_start - first, tasks.q_len, tasks.k_start - k_first, tasks.k_len, end - first, end - k_first
    )


def _divide_runs(plan: Routes, cuts: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
    """The runs of either nano-batch in the plan's order, by their names there, with home rows counted from its first.
    Both sides of a run cut it alike, so they go on listing what passes between them in the same order."""
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})

    def divide(name: str, before: np.ndarray, cut: np.ndarray | int, *flags: str) -> None:
        runs = getattr(plan, name)
        first, second = runs.copy(), runs.copy()
        first[:, ROWS] = before
        second[:, HOME_ROW] += before - cut
        second[:, WORK_ROW] += before
        second[:, ROWS] -= before
        for part, divided in zip(parts, (first, second), strict=True):
            mine = divided[:, ROWS] > 0
            part[name] = divided[mine]
            part.update({flag: getattr(plan, flag)[mine] for flag in flags})

    def rows_before(runs: np.ndarray, cut: np.ndarray | int) -> np.ndarray:
        return np.clip(cut - runs[:, HOME_ROW], 0, runs[:, ROWS])

    own = int(cuts[plan.rank])
    kv_before = rows_before(plan.kv_in, cuts[plan.kv_in[:, PEER]])
    divide("q_in", rows_before(plan.q_in, cuts[plan.q_in[:, PEER]]), cuts[plan.q_in[:, PEER]])
    divide("kv_in", kv_before, cuts[plan.kv_in[:, PEER]], "kv_in_direct", "kv_in_relayed")
    divide("q_out", rows_before(plan.q_out, own), own)
    divide("kv_out", rows_before(plan.kv_out, own), own, "kv_out_relayed")
    # What is relayed is cut where it lies in this rank's workspace, which the runs of kv_in fill.
    order = np.argsort(plan.kv_in[:, WORK_ROW])
    starts, border = plan.kv_in[order, WORK_ROW], (plan.kv_in[:, WORK_ROW] + kv_before)[order]
    for name, column in (("relay_in", WORK_ROW), ("relay_out", HOME_ROW)):
        runs = getattr(plan, name)
        via = np.searchsorted(starts, runs[:, column], side="right") - 1
        divide(name, np.clip(border[via] - runs[:, column], 0, runs[:, ROWS]), 0)
    return parts


def _in_order(runs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First workspace rows of the runs of both nano-batches, ascending, whose they are, and how many."""
    both = np.concatenate(runs)
    nano = np.repeat(np.arange(2), [len(part) for part in runs])
    order = np.argsort(both[:, WORK_ROW])
    return both[order, WORK_ROW], nano[order], both[order, ROWS]


def _other_rows(runs: list[np.ndarray], tasks: TaskRanges, nano: np.ndarray) -> np.ndarray:
    """Key/value rows of the other nano-batch that each task in the workspace reads."""
    starts, of_run, rows = _in_order(runs)
    borders = np.append(starts, starts[-1:] + rows[-1:])  # the runs tile the workspace
    found = np.zeros(len(tasks), dtype=np.int64)
    for which in range(2):
        others = np.concatenate([[0], np.cumsum(np.where(of_run == which, 0, rows))])
        mine = nano == which
        if mine.any():
            low, high = (np.interp(x[mine], borders, others) for x in (tasks.k_start, tasks.k_start + tasks.k_len))
            found[mine] = np.rint(high - low)
    return found


def _cut_tasks(tasks: TaskRanges, points: np.ndarray, window: int | None) -> TaskRanges:
    """The tasks with their query rows cut at the given rows (ascending); keys end with the last query's."""
    q_end, k_end = tasks.q_start + tasks.q_len, tasks.k_start + tasks.k_len
    first = np.searchsorted(points, tasks.q_start, side="right")
    pieces = np.searchsorted(points, q_end, side="left") - first + 1
    task = np.repeat(np.arange(len(tasks)), pieces)
    piece = np.arange(len(task)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    bounded = np.append(points, 0)  # what is looked up past the end is not used
    start = np.where(piece == 0, tasks.q_start[task], bounded[first[task] + piece - 1])
    end = np.where(piece == pieces[task] - 1, q_end[task], bounded[np.minimum(first[task] + piece, len(points))])
    k_end = k_end[task] - (q_end[task] - end)
    k_start = tasks.k_start[task]
    if window is not None:
        k_start = np.maximum(k_start, k_end - (end - start) - window + 1)
    return TaskRanges(start, end - start, k_start, k_end - k_start, tasks.level[task])


def _waves(tasks: TaskRanges) -> tuple[np.ndarray, ...]:
    """Indices of the tasks in as few groups as keep overlapping key ranges apart."""
    last: list[int] = []  # the furthest key row of each group
    members: list[list[int]] = []
    for i in np.argsort(tasks.k_start, kind="stable").tolist():
        start, end = int(tasks.k_start[i]), int(tasks.k_start[i] + tasks.k_len[i])
        group = next((g for g, reach in enumerate(last) if reach <= start), len(last))
        if group == len(last):
            last.append(0)
            members.append([])
        last[group] = end
        members[group].append(i)
    return tuple(np.array(sorted(group)) for group in members)
