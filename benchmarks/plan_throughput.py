# SPDX-License-Identifier: Apache-2.0
"""What a server's batches of CA-tasks take on one GPU, against whole documents and against the cost model's word.

    python benchmarks/plan_throughput.py [--servers 8] [--tokens 65536] [--mixes "long|short"] \\
        [--workloads pretrain:4:shuffled prolong:4:shuffled] [--json results.json] [--save results.md]

Mixes and workloads are those of step_time.py. The plugin's planner plans them for `--servers` ranks, with its defaults
and the cost model that it has for this device; the batches of single servers then run here, alone, on random rows.
What is reported: NOTES. To try the script it runs on CPU too: `--tokens 1024 --q-heads 4 --kv-heads 1 --head-dim 32`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from steps.batches import Batch
from steps.servers import Report, ServerCalls, Setting, add_arguments, batches_of, setting, table

from deepspeed_distca.attention_server.kernels import KernelError
from deepspeed_distca.attention_server.phase_planner import PhasePlanner
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.task_batch import TaskBatch
from deepspeed_distca.scheduler.cost_model import PHASES

NOTES = """\
A server's workspace batch is all tasks that it computes on rows brought together for it: one kernel call forward;
backward one call for each wave, by delta, with what is done around it to sum gradients. Whole documents are as many
documents as the batch has tasks, each of nearly its task's area, side by side, computed as at home. "Share" is the
batch's TFLOP/s over theirs: median and smallest, and "together" that of the sums. The home batch is what the same
server computes in place. Error is measured / predicted - 1: the median of its absolute value, and the median. Times
are medians of calls that take turns, in ms, and sums over the server batches; rows and tasks are medians. Of each
batch those servers are measured whose workspace has the largest area, servers with equal tasks once. TFLOP/s count
4 x area x query heads x head dimension forward, 2.5 times that backward."""


@dataclass(frozen=True)
class Timed:
    """A batch of tasks, how long it took and how long the cost model says it takes."""

    tasks: int
    q_rows: int
    k_rows: int
    area: int
    ms: float
    predicted_ms: float
    tflops: float

    @property
    def error(self) -> float:
        return self.ms / self.predicted_ms - 1


@dataclass(frozen=True)
class Row:
    """One server in one phase; `alike` servers of the batch have such tasks, `calls` is what the workspace takes."""

    batch: str
    group: str
    phase: str
    server: int
    alike: int
    calls: int
    workspace: Timed
    whole: Timed
    home: Timed | None

    @property
    def share(self) -> float:
        return self.workspace.tflops / self.whole.tflops


class Bench:
    """Times the batches of a server."""

    def __init__(self, where: Setting) -> None:
        self._cost, self._calls = where.cost, ServerCalls(where)

    def measure(self, plan: RankPlan, phase: str, repeats: int) -> tuple[Timed, Timed, Timed | None]:
        """The batch in the workspace, whole documents of its area, and the batch at home if there is one."""
        batches = [*plan.remote, *map(whole_documents, plan.remote), *plan.local]
        calls = [self._calls.in_workspace(plan, phase), *(self._calls.in_place(tasks, phase) for tasks in batches[1:])]
        # In turns and without a pause, so that clocks are alike, and those of training.
        taken = [[self._calls.stopwatch.start(call) for call in calls] for _ in range(repeats + 1)]
        # The first turn compiles.
        seconds = [median(read() for read in reads) for reads in zip(*taken[1:], strict=True)]
        timed = [self._timed(tasks, phase, s) for tasks, s in zip(batches, seconds, strict=True)]
        return timed[0], timed[1], timed[2] if len(timed) > 2 else None

    def _timed(self, tasks: TaskBatch, phase: str, seconds: float) -> Timed:
        heads = self._cost.heads
        flops = 4 * tasks.area * heads.query * heads.head_dim * (1 if phase == "forward" else 2.5)
        # Causal without a window: the first key is the document's first.
        load = self._cost.cost(tasks.k_len - tasks.q_len, tasks.k_len, 0 * tasks.k_len, None, phase).sum()
        predicted = float(self._cost.seconds(load))
        counts = len(tasks), tasks.q_rows, tasks.k_rows, tasks.area
        return Timed(*counts, seconds * 1e3, predicted * 1e3, flops / seconds / 1e12)


def whole_documents(tasks: TaskBatch) -> TaskBatch:
    """A document for each task, of the length whose causal area is nearest to the task's, side by side."""
    length = np.array([_nearest(q * (2 * k - q + 1) // 2) for q, k in zip(tasks.q_len, tasks.k_len, strict=True)])
    start = np.cumsum(length) - length
    rows = int(length.sum())
    return TaskBatch(start, length, start, length, rows, rows)


def _nearest(area: int) -> int:
    low = max(1, (math.isqrt(8 * int(area) + 1) - 1) // 2)
    return min(low, low + 1, key=lambda n: abs(n * (n + 1) // 2 - int(area)))


def largest(plans: Sequence[RankPlan], count: int) -> list[tuple[int, int]]:
    """(server, how many have equal tasks) of the servers with the largest area in their workspace."""
    alike: dict[tuple, list[int]] = {}
    for server in sorted(range(len(plans)), key=lambda s: -sum(tasks.area for tasks in plans[s].remote)):
        p = plans[server]
        lengths = [x for tasks in (*p.remote, *p.local) for x in (tasks.q_len, tasks.k_len)]
        if p.remote:
            alike.setdefault(tuple(x.tobytes() for x in lengths), []).append(server)
    return [(servers[0], len(servers)) for servers in list(alike.values())[:count]]


class Results(Report):
    """Everything that was measured, and its tables."""

    def add(self, row: Row) -> None:
        self.rows.append(row)
        w, home = row.workspace, row.home
        print(
            f"{row.batch:24s} {row.phase:8s} server {row.server}: {w.tasks} tasks, {w.ms:.2f} ms, {w.tflops:.3g} "
            f"TFLOP/s, {row.share:.1%} of whole documents, {w.error:+.1%} of predicted"
            + (f"; at home {home.ms:.2f} ms, {home.error:+.1%}" if home else ""),
            flush=True,
        )

    def summary(self) -> str:
        """Shares, then errors: a line for each group of batches and phase, and for all of them."""
        groups = list(dict.fromkeys(row.group for row in self.rows))
        shares, errors = [], []
        for group in [*groups, *(["all"] if len(groups) > 1 else [])]:
            for phase in PHASES:
                rows = [r for r in self.rows if r.phase == phase and group in (r.group, "all")]
                if rows:
                    shares.append([group, phase, *_share_cells(rows)])
                    errors.append([group, phase, *_error_cells(rows)])
        head = ["batches", "phase", "server batches", "tasks", "query rows", "key rows", "calls: most"]
        first = table([*head, "TFLOP/s", "share: median", "smallest", "together"], shares)
        head = ["batches", "phase"]
        for place in ("workspace", "home"):
            head += [f"{place}: ms", "predicted", "error", "signed"]
        return f"{first}\n\n{table(head, errors)}"

    def details(self) -> str:
        """A line for each server and phase."""
        head = ["batch", "phase", "server", "alike", "tasks", "calls", "query rows", "key rows", "workspace, ms"]
        head += ["predicted", "whole documents, ms", "share", "home: tasks", "home, ms", "predicted"]
        lines = []
        for r in self.rows:
            w = r.workspace
            home = ["", "", ""] if r.home is None else [r.home.tasks, _ms(r.home.ms), _ms(r.home.predicted_ms)]
            line = [r.batch, r.phase, r.server, r.alike, w.tasks, r.calls, w.q_rows, w.k_rows, _ms(w.ms)]
            lines.append([*line, _ms(w.predicted_ms), _ms(r.whole.ms), f"{r.share:.1%}", *home])
        return table(head, lines)


def _share_cells(rows: Sequence[Row]) -> list[object]:
    batches, whole = [r.workspace for r in rows], [r.whole for r in rows]
    counts = [f"{median(getattr(b, name) for b in batches):g}" for name in ("tasks", "q_rows", "k_rows")]
    shares = [r.share for r in rows]
    together = _speed(batches) / _speed(whole)
    speed = f"{median(b.tflops for b in batches):.3g}"
    return [len(rows), *counts, max(r.calls for r in rows), speed, f"{median(shares):.1%}", f"{min(shares):.1%}",
            f"{together:.1%}"]  # fmt: skip


def _speed(batches: Sequence[Timed]) -> float:
    """Area by time of all of them."""
    return sum(b.area for b in batches) / sum(b.ms for b in batches)


def _error_cells(rows: Sequence[Row]) -> list[object]:
    cells: list[object] = []
    for batches in ([r.workspace for r in rows], [r.home for r in rows if r.home is not None]):
        if not batches:
            cells += [""] * 4
            continue
        errors = [b.error for b in batches]
        cells += [_ms(sum(b.ms for b in batches)), _ms(sum(b.predicted_ms for b in batches))]
        cells += [f"{median(abs(e) for e in errors):.1%}", f"{median(errors):+.1%}"]
    return cells


def _ms(value: float) -> str:
    return f"{value:.2f}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["long|short"], ["pretrain:4:shuffled", "prolong:4:shuffled"])
    parser.add_argument("--servers-per-batch", type=int, default=2, help="of each phase")
    return parser.parse_args()


def run(
    args: argparse.Namespace, bench: Bench, planners: Sequence[PhasePlanner], batches: list[Batch], results: Results
) -> None:
    """Measures the servers of all batches, as far as the budget goes."""
    end = math.inf if args.budget_seconds is None else time.monotonic() + args.budget_seconds
    unmoved = dict.fromkeys(PHASES, 0)
    for batch in batches:
        for phase in PHASES:
            plans = [planner.plan(batch.layout, None, phase, 1).part for planner in planners]
            chosen = largest(plans, args.servers_per_batch)
            unmoved[phase] += not chosen
            for server, alike in chosen:
                if time.monotonic() > end:
                    results.note(f"The budget of {args.budget_seconds:g} s was over in {batch.name}, {phase}.")
                    return
                plan = plans[server]
                try:
                    timed = bench.measure(plan, phase, args.repeats)
                except (KernelError, torch.cuda.OutOfMemoryError) as error:
                    results.note(f"{batch.name}, {phase}, server {server} was left out: {error}")
                    continue
                calls = 1 if phase == "forward" else len(plan.waves)
                results.add(Row(batch.name, batch.group, phase, server, alike, calls, *timed))
        results.save_json()
    if any(unmoved.values()):
        counts = ", ".join(f"{count} {phase}" for phase, count in unmoved.items())
        results.note(f"Of {len(batches)} batches no row moves in {counts}.")


@torch.no_grad()
def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    where = setting(args)
    # Results leave early by peer copies, the default of a node's GPUs.
    planners = [PhasePlanner(rank, where.cost, where.options, early=True) for rank in range(args.servers)]
    results = Results(args, where)
    run(args, Bench(where), planners, batches_of(args), results)
    results.finish(NOTES)


if __name__ == "__main__":
    main()
