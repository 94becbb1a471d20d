# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a plan: its routes made ready for the device, as batches of tasks and runs of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress

import numpy as np
import torch

from deepspeed_distca.attention_server.task_batch import TaskBatch
from deepspeed_distca.scheduler.routes import HOME_ROW, PEER, ROWS, WORK_ROW, Routes, TaskRanges


@dataclass(frozen=True)
class Run:
    """Rows that travel together: [home, home + rows) on a rank's home buffers, [work, work + rows) in a workspace."""

    peer: int
    home: int
    work: int
    rows: int

    @property
    def at_home(self) -> slice:
        return slice(self.home, self.home + self.rows)

    @property
    def at_work(self) -> slice:
        return slice(self.work, self.work + self.rows)


#: What is added to rows: a buffer's number, the first row there, and the run that says where to.
Contribution = tuple[int, int, Run]
#: A range of rows, and all that is added to it.
Sum = tuple[slice, list[Contribution]]


class RankPlan:
    """What core attention needs of a rank's routes, with per-device metadata made once and kept.

    Attributes:
        local: the tasks in place, one batch for each call of a kernel in either phase; the first are causal ones.
        remote: the tasks in the workspace, likewise for forward; ``waves`` are the same, cut for backward.
        q_in, kv_in: runs from other ranks into the workspace; q_keep, kv_keep: this rank's own rows that go there.
        q_out, kv_out: runs to other servers.
        kv_in_direct: those of ``kv_in`` that homes send themselves; the rest comes as ``relay_in``, from another
            workspace, and ``relay_out`` is what this rank sends on; their ``home`` is the row in that workspace.
        back_in, back_out: gradients of keys that go back in a second round, by ``kv_in_direct`` and ``kv_out``: those
            of rows that were sent on, with what came back to the relay. The others go back in the first:
            ``first_back_in``, ``first_back_out``.
    """

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self.local = [_batch(tasks, routes.home_rows, routes.home_rows) for tasks in _by_level(routes.local)]
        self.remote = [self._work(tasks) for tasks in _by_level(routes.remote)]
        self.waves = [self._work(routes.remote.take(index)) for index in routes.waves]
        self.q_in, self.q_keep = _incoming(routes.q_in, routes.rank)
        self.kv_in, self.kv_keep = _incoming(routes.kv_in, routes.rank)
        self.q_out, self.kv_out = _runs(routes.q_out), _runs(routes.kv_out)
        direct, relayed = routes.kv_in_direct, routes.kv_in_relayed
        self.kv_in_direct = _incoming(routes.kv_in[direct], routes.rank)[0]
        self.first_back_in = _incoming(routes.kv_in[direct & ~relayed], routes.rank)[0]
        self.back_in = _incoming(routes.kv_in[direct & relayed], routes.rank)[0]
        self.back_out = list(compress(self.kv_out, routes.kv_out_relayed))
        self.first_back_out = list(compress(self.kv_out, ~routes.kv_out_relayed))
        self.relay_in, self.relay_out = _runs(routes.relay_in), _runs(routes.relay_out)
        self._returned_rows: dict[torch.device, torch.Tensor] = {}
        runs = (self.q_in, self.q_keep, self.q_out, self.kv_in, self.kv_keep, self.kv_out)
        #: nothing to send, receive or copy: the kernel runs on q, k and v as they are
        self.is_local = not self.remote and not any(runs)

    def _work(self, tasks: TaskRanges) -> TaskBatch:
        return _batch(tasks, self.routes.work_q_rows, self.routes.work_kv_rows)

    @cached_property
    def returned(self) -> list[Run]:
        """Query runs whose results come back to home from a workspace, this rank's own workspace last."""
        return self.q_out + self.q_keep

    def returned_rows(self, device: torch.device) -> torch.Tensor:
        """Home rows of ``returned`` in order, int64 [rows]; made once per device."""
        if device not in self._returned_rows:
            parts = [np.arange(run.home, run.home + run.rows) for run in self.returned]
            index = torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64))
            if device.type == "cuda":
                index = index.pin_memory()
            self._returned_rows[device] = index.to(device, non_blocking=True)
        return self._returned_rows[device]

    @cached_property
    def touched(self) -> list[Sum]:
        """Home key/value row ranges to which workspaces contribute: source 0 is the buffer into which the runs of
        ``kv_out`` are received one after another, source 1 this rank's own workspace."""
        return _sums([*_consecutive(self.kv_out), *((1, run.work, run) for run in self.kv_keep)])

    @cached_property
    def relayed_sums(self) -> list[Sum]:
        """Key/value row ranges of the workspace to which the servers contribute that got them from here: source 0 is
        the buffer into which the runs of ``relay_out`` are received one after another."""
        return _sums(_consecutive(self.relay_out))


def _consecutive(runs: list[Run]) -> list[Contribution]:
    starts = accumulate((run.rows for run in runs), initial=0)
    return [(0, row, run) for row, run in zip(starts, runs, strict=False)]


def _sums(contributions: list[Contribution]) -> list[Sum]:
    """The ranges of rows that they cover, each with its own."""
    contributions.sort(key=lambda c: (c[2].home, c[2].rows, c[0], c[1]))
    ranges: list[Sum] = []
    for contribution in contributions:
        run = contribution[2]
        if ranges and run.home < ranges[-1][0].stop:
            span, members = ranges[-1]
            ranges[-1] = (slice(span.start, max(span.stop, run.home + run.rows)), [*members, contribution])
        else:
            ranges.append((run.at_home, [contribution]))
    return ranges


def _by_level(tasks: TaskRanges) -> list[TaskRanges]:
    """The tasks of each level that has any."""
    if not len(tasks):
        return []
    if not tasks.level.any():
        return [tasks]
    return [tasks.take(tasks.level == level) for level in np.unique(tasks.level)]


def _batch(tasks: TaskRanges, q_rows: int, k_rows: int) -> TaskBatch:
    """Tasks of one level."""
    ranges = tasks.q_start, tasks.q_len, tasks.k_start, tasks.k_len
    return TaskBatch(*ranges, q_rows, k_rows, causal=not tasks.level.any())


def _runs(runs: np.ndarray) -> list[Run]:
    return [Run(r[PEER], r[HOME_ROW], r[WORK_ROW], r[ROWS]) for r in runs.tolist()]


def _incoming(runs: np.ndarray, rank: int) -> tuple[list[Run], list[Run]]:
    own = runs[:, PEER] == rank
    return _runs(runs[~own]), _runs(runs[own])
