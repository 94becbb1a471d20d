# SPDX-License-Identifier: Apache-2.0
"""Attention of every server of a plan, measured on one GPU: how even plans for many GPUs are in truth.

    python benchmarks/server_balance.py [--servers 8] [--tokens 65536] [--mixes "long|short"] \\
        [--workloads pretrain:10:shuffled prolong:10:shuffled] [--json results.json] [--save results.md]

Mixes and workloads are those of step_time.py. The plugin's planner plans them for `--servers` ranks, with its defaults
and the cost model that it has for this device; then each server's kernels run here, one server after another, with
its documents at home and with the plan's tasks. What is reported: NOTES. Nothing is sent: what transfers and waiting
cost, whole steps on several GPUs must tell. To try the script it runs on CPU too:
`--tokens 1024 --q-heads 4 --kv-heads 1 --head-dim 32`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np
import torch
from steps.batches import Batch
from steps.servers import Report, ServerCalls, Setting, add_arguments, batches_of, setting, table

from deepspeed_distca.attention_server.phase_planner import PhasePlanner, PlannedPhase
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import PHASES
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import home_tasks

NOTES = """\
Attention is a layer's, forward and backward: the kernels' time on the slowest server in each, added. "Before" is that
with every document at home, "planned" with the plan's tasks, those in place and those in the workspace one after the
other, with what is done around the latter to sum gradients; "even" the mean over servers before. The share is
(before - planned) / (before - even): a mean over batches whose slowest server is more than 1 % above the mean, and of
the batches' sums. Balance is the largest over the mean of the servers' times, by the cost model and measured. MiB is
what a rank sends in a layer, forward and backward: mean over ranks, and the worst rank. Times are medians of turns in
which every server runs once, in ms. Packing, transfers and waiting are not in them."""
#: Below this there is nothing to gain, and a share of it would be noise.
LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Phase:
    """Every server's attention in one phase of a batch, before and as planned: measured ms and predicted load in
    femtoseconds; and the bytes that each rank sends in a layer."""

    before_ms: list[float]
    planned_ms: list[float]
    before_loads: list[int]
    planned_loads: list[int]
    sent: list[int]


class Servers:
    """Runs single servers' attention on one device."""

    def __init__(self, where: Setting) -> None:
        self._calls = ServerCalls(where)

    def measure(self, layout: Layout, planned: PlannedPhase, repeats: int) -> Phase:
        """All servers in turn, so that none of them has the cool card for itself."""
        homes, plans = (
            [RankPlan(compiler.rank(server)) for server in range(layout.num_ranks)]
            for compiler in (RouteCompiler(layout, home_tasks(layout)), RouteCompiler(layout, planned.tasks.rows))
        )
        turns = []
        for _ in range(repeats + 1):
            started = [[self._start(plan, planned.phase) for plan in pair] for pair in zip(homes, plans, strict=True)]
            turns.append([[sum(read() for read in reads) for reads in pair] for pair in started])
        # The first compiles.
        ms = 1e3 * np.median(np.array(turns[1:]), axis=0)
        loads = planned.tasks.loads_before.tolist(), planned.tasks.loads.tolist()
        return Phase(ms[:, 0].tolist(), ms[:, 1].tolist(), *loads, planned.sent.tolist())

    def _start(self, plan: RankPlan, phase: str) -> list[Callable[[], float]]:
        """Its tasks in place and those in its workspace; what is returned waits and says the seconds of each."""
        started = []
        for tasks in plan.local:
            started.append(self._calls.stopwatch.start(self._calls.in_place(tasks, phase)))
        if plan.remote:
            started.append(self._calls.stopwatch.start(self._calls.in_workspace(plan, phase)))
        return started


@dataclass(frozen=True)
class Row:
    """A batch with both phases."""

    batch: str
    group: str
    phases: dict[str, Phase]

    def slowest(self, times: str) -> float:
        return sum(max(getattr(phase, times)) for phase in self.phases.values())

    @property
    def even(self) -> float:
        return sum(mean(phase.before_ms) for phase in self.phases.values())

    def balance(self, times: str) -> float:
        return self.slowest(times) / sum(mean(getattr(phase, times)) for phase in self.phases.values())

    @property
    def sent(self) -> np.ndarray:
        return np.sum([phase.sent for phase in self.phases.values()], axis=0) / 2**20


class Results(Report):
    """Everything that was measured, and its tables."""

    card = "One {}"

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(" | ".join(str(cell) for cell in [row.batch, *_cells([row])]), flush=True)

    def summary(self) -> str:
        """A line for each group of batches, and for all of them."""
        groups = {row.group: [r for r in self.rows if r.group == row.group] for row in self.rows}
        if len(groups) > 1:
            groups["all"] = self.rows
        return _lines([[f"{name} ({len(rows)})", *_cells(rows)] for name, rows in groups.items()])

    def details(self) -> str:
        """A line for each batch."""
        return _lines([[row.batch, *_cells([row])] for row in self.rows])


def _lines(lines: Sequence[Sequence[object]]) -> str:
    head = ["batches", "before", "planned", "even", "share: mean", "together", "balance before: predicted", "measured"]
    return table([*head, "planned: predicted", "measured", "worst", "MiB: mean", "worst"], lines)


def _cells(rows: Sequence[Row]) -> list[str]:
    """Means over the rows."""
    before, planned, even = (
        [row.slowest("before_ms") for row in rows],
        [row.slowest("planned_ms") for row in rows],
        [row.even for row in rows],
    )
    gains = [(b - p, b - e) for b, p, e in zip(before, planned, even, strict=True)]
    shares = [got / most for (got, most), b in zip(gains, before, strict=True) if most > LEAST_GAIN * b]
    together = [sum(part) for part in zip(*gains, strict=True)]
    measured = [row.balance("planned_ms") for row in rows]
    return [
        *(f"{mean(times):.2f}" for times in (before, planned, even)),
        *([f"{mean(shares):.1%}", f"{together[0] / together[1]:.1%}"] if shares else ["", ""]),
        *(f"{mean(row.balance(kind) for row in rows):.3f}" for kind in ("before_loads", "before_ms", "planned_loads")),
        f"{mean(measured):.3f}",
        f"{max(measured):.3f}",
        f"{mean(float(row.sent.mean()) for row in rows):.0f}",
        f"{max(float(row.sent.max()) for row in rows):.0f}",
    ]


def run(args: argparse.Namespace, where: Setting, batches: Sequence[Batch], results: Results) -> None:
    """Measures the batches, as far as the budget goes."""
    end = math.inf if args.budget_seconds is None else time.monotonic() + args.budget_seconds
    servers = Servers(where)
    # Results leave early by peer copies, the default of a node's GPUs.
    planner = PhasePlanner(0, where.cost, where.options, early=True)
    taken: list[float] = [0.0]
    for batch in batches:
        begin = time.monotonic()
        if begin + median(taken) > end:
            results.note(f"The budget of {args.budget_seconds:g} s was over before {batch.name}.")
            return
        planned = {phase: planner.plan(batch.layout, None, phase, 1) for phase in PHASES}
        phases = {phase: servers.measure(batch.layout, planned[phase], args.repeats) for phase in PHASES}
        results.add(Row(batch.name, batch.group, phases))
        taken.append(time.monotonic() - begin)
        results.save_json()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [f"{name}:10{order}" for order in (":shuffled", "") for name in ("pretrain", "prolong")]
    add_arguments(parser, ["long|short"], kinds)
    args = parser.parse_args()
    torch.manual_seed(0)
    where = setting(args)
    results = Results(args, where)
    run(args, where, batches_of(args), results)
    results.finish(NOTES)


if __name__ == "__main__":
    main()
