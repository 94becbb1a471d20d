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
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from plan_throughput import Setting, about, add_arguments, batches_of, setting, table
from steps.batches import Batch

from deepspeed_distca.attention_server.core_attention import _serve_backward
from deepspeed_distca.attention_server.phase_planner import PhasePlanner, PlannedPhase
from deepspeed_distca.attention_server.row_dots import row_dots
from deepspeed_distca.attention_server.server_plan import ServerPlan
from deepspeed_distca.attention_server.tasks import AttentionSpec, TaskBatch
from deepspeed_distca.layout import Layout
from deepspeed_distca.profiling.measure import Stopwatch
from deepspeed_distca.scheduler.cost_model import PHASES
from deepspeed_distca.scheduler.plan import PlanCompiler
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
    """Every server's attention in one phase of a batch: measured ms and predicted seconds, before and as planned."""

    before_ms: list[float]
    planned_ms: list[float]
    before_loads: list[int]
    planned_loads: list[int]
    sent: list[int]


class Servers:
    """Runs single servers' attention on one device, on the same random rows."""

    def __init__(self, where: Setting) -> None:
        self._where, self._stopwatch = where, Stopwatch(where.device, where.dtype)
        self._spec = AttentionSpec(where.cost.heads.head_dim**-0.5)
        self._rows: dict[str, torch.Tensor] = {}

    def measure(self, layout: Layout, planned: PlannedPhase, repeats: int) -> Phase:
        """All servers in turn, so that none of them has the cool card for itself."""
        homes, plans = (
            [ServerPlan(compiler.rank(server)) for server in range(layout.num_ranks)]
            for compiler in (PlanCompiler(layout, home_tasks(layout)), PlanCompiler(layout, planned.tasks.rows))
        )
        turns = []
        for _ in range(repeats + 1):
            pairs = zip(homes, plans, strict=True)
            turns.append([[self._server(plan, planned.phase) for plan in pair] for pair in pairs])
        # The first compiles.
        ms = 1e3 * np.median(np.array(turns[1:]), axis=0)
        loads = planned.tasks.loads_before.tolist(), planned.tasks.loads.tolist()
        return Phase(ms[:, 0].tolist(), ms[:, 1].tolist(), *loads, planned.sent.tolist())

    def _server(self, plan: ServerPlan, phase: str) -> float:
        """Seconds of its tasks in place and of those in its workspace."""
        seconds = 0.0
        for tasks, prepare in ((plan.local, self._in_place), (plan.remote, self._in_workspace)):
            if len(tasks):
                seconds += self._stopwatch(prepare(plan, tasks, phase))
        return seconds

    def _in_place(self, plan: ServerPlan, tasks: TaskBatch, phase: str) -> Callable[[], object]:
        kernel, spec = self._where.kernel, self._spec
        q, k, v, dout, out, lse = self._take(tasks)
        if phase == "forward":
            return lambda: kernel.forward(q, k, v, tasks, spec, out, lse)
        kernel.forward(q, k, v, tasks, spec, out, lse)
        wide = kernel.grad_dtype(q.dtype)
        dq, dk, dv = self._some("dq", q.shape), self._some("dk", k.shape, wide), self._some("dv", v.shape, wide)
        return lambda: kernel.backward(dout, q, k, v, lse, tasks, spec, out=out, delta=None, dq=dq, dk=dk, dv=dv)

    def _in_workspace(self, plan: ServerPlan, tasks: TaskBatch, phase: str) -> Callable[[], object]:
        kernel, spec = self._where.kernel, self._spec
        q, k, v, dout, out, lse = self._take(tasks)
        if phase == "forward":
            return lambda: kernel.forward(q, k, v, tasks, spec)
        kernel.forward(q, k, v, tasks, spec, out, lse)
        stats = torch.stack([lse.t(), row_dots(dout, out).t()], dim=1)
        # Private, but the very thing to be measured.
        return lambda: _serve_backward(plan, kernel, spec, dout, q, k, v, stats)

    def _take(self, tasks: TaskBatch) -> tuple[torch.Tensor, ...]:
        """q, k, v, dout and out at random, and an lse."""
        heads = self._where.cost.heads
        query, key = (tasks.q_rows, heads.query, heads.head_dim), (tasks.k_rows, heads.key_value, heads.head_dim)
        shapes = {"q": query, "k": key, "v": key, "dout": query, "out": query}
        lse = torch.zeros(heads.query, tasks.q_rows, device=self._where.device)
        return *(self._some(name, shape) for name, shape in shapes.items()), lse

    def _some(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The first rows of a buffer that grows as needed."""
        have = self._rows.get(name)
        if have is None or len(have) < shape[0]:
            have = torch.randn(*shape, device=self._where.device, dtype=dtype or self._where.dtype)
            self._rows[name] = have
        return have[: shape[0]]


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


class Results:
    """Everything that was measured, and its tables."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about, self.rows, self.notes = about, [], []

    def note(self, text: str) -> None:
        """A remark for the report, shown at once."""
        self.notes.append(text)
        print(text, flush=True)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(" | ".join(str(cell) for cell in [row.batch, *_cells([row])]), flush=True)

    def save_json(self, path: Path) -> None:
        rows = [asdict(row) for row in self.rows]
        path.write_text(json.dumps({**self.about, "notes": self.notes, "rows": rows}))

    def markdown(self) -> str:
        about = self.about
        head = (
            f"**One {about['card']}, {about['date']}**, torch {about['torch']}, kernel {about['kernel']}, cost model "
            f"{about['cost_model']}; plans for {about['args']['servers']} ranks of {about['args']['tokens']} tokens. "
            f"`{about['command']}`"
        )
        return "\n\n".join([head, *self.notes, self.summary(), NOTES, self.by_batch()]) + "\n"

    def summary(self) -> str:
        """A line for each group of batches, and for all of them."""
        groups = {row.group: [r for r in self.rows if r.group == row.group] for row in self.rows}
        if len(groups) > 1:
            groups["all"] = self.rows
        return _lines([[f"{name} ({len(rows)})", *_cells(rows)] for name, rows in groups.items()])

    def by_batch(self) -> str:
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
        if args.json:
            results.save_json(args.json)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [f"{name}:10{order}" for order in (":shuffled", "") for name in ("pretrain", "prolong")]
    add_arguments(parser, ["long|short"], kinds)
    args = parser.parse_args()
    torch.manual_seed(0)
    where = setting(args)
    results = Results(about(args, where.device, where.kernel, where.cost_source))
    run(args, where, batches_of(args), results)
    if args.json:
        results.save_json(args.json)
    if args.save:
        args.save.write_text(results.markdown())
    print(f"\n{results.summary()}", flush=True)


if __name__ == "__main__":
    main()
