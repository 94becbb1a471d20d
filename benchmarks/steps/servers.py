# SPDX-License-Identifier: Apache-2.0
"""What scripts share that run single servers of a plan on one GPU: arguments, setting, a server's calls, reports."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed_distca.attention_server.kernels import BackwardInputs, Gradients, Kernel, select_kernel
from deepspeed_distca.attention_server.kernels.libraries import distribution_version
from deepspeed_distca.attention_server.parts import Parts
from deepspeed_distca.attention_server.phase_planner import PlanOptions
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.row_dots import row_dots
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch
from deepspeed_distca.attention_server.workspace import WorkspaceGradients, serve_backward
from deepspeed_distca.config import DistCAConfig
from deepspeed_distca.cost_choice import find_cost_model
from deepspeed_distca.plan_options import plan_options
from deepspeed_distca.profiling.measure import Stopwatch
from deepspeed_distca.scheduler.cost_model import CostModel
from deepspeed_distca.scheduler.heads import Heads
from steps.batches import MIXES, ONE, OPTIONS, Batch, mix, workload


def add_arguments(parser: argparse.ArgumentParser, mixes: list[str], workloads: list[str]) -> None:
    """Of such a script; the lists are defaults."""
    parser.add_argument("--servers", type=int, default=8, help="ranks that are planned for; none of them is needed")
    parser.add_argument("--tokens", type=int, default=65536, help="of each rank")
    parser.add_argument("--mixes", nargs="*", default=mixes, choices=[*MIXES, ONE])
    parser.add_argument("--workloads", nargs="*", default=workloads, metavar=f"NAME:BATCHES{OPTIONS}")
    parser.add_argument("--context", type=int, default=131072, help="of the workloads' sampling")
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernel", help="default: as the plugin chooses")
    parser.add_argument("--cost-model", help="the file of a profile; default: as the plugin chooses")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget-seconds", type=float, help="stop after that long and report what there is")
    parser.add_argument("--json", type=Path, help="everything that was measured, rewritten as it comes")
    parser.add_argument("--save", type=Path, help="the report in Markdown")


@dataclass(frozen=True)
class Setting:
    """What runs where, as the plugin would choose it for the arguments."""

    kernel: Kernel
    cost: CostModel
    cost_source: str
    options: PlanOptions
    dtype: torch.dtype
    device: torch.device


def setting(args: argparse.Namespace) -> Setting:
    """The kernel, the cost model and the options of planning for the arguments' heads on this device."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16
    heads = Heads(args.q_heads, args.kv_heads, args.head_dim, element_size=dtype.itemsize)
    config = DistCAConfig(kernel=args.kernel, cost_model=args.cost_model)
    sizes = {"q_heads": args.q_heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
    kernel = select_kernel(config.kernel, device=device, dtype=dtype, **sizes)
    choice = find_cost_model(config, heads, device=device, dtype=dtype)
    hidden = args.q_heads * args.head_dim
    # step_time.py's model: whether moving rows pays depends on its linear work.
    model = SimpleNamespace(
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_attention_heads=args.q_heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
    )
    return Setting(kernel, choice.cost, choice.source, plan_options(config, device, model), dtype, device)


def batches_of(args: argparse.Namespace) -> list[Batch]:
    """The mixes, then the workloads."""
    batches = [mix(name, args.servers, args.tokens) for name in args.mixes]
    for spec in args.workloads:
        batches += workload(spec, args.servers, args.tokens, args.context)
    return batches


class ServerCalls:
    """What a server runs in a phase, "forward" or "backward", on random rows; and the watch that times it."""

    def __init__(self, where: Setting) -> None:
        self._where = where
        self._spec = AttentionSpec(where.cost.heads.head_dim**-0.5)
        # The one that cost models are measured by.
        self.stopwatch = Stopwatch(where.device, where.dtype)

    def in_workspace(self, plan: RankPlan, phase: str) -> Callable[[], object]:
        """All tasks in its workspace: one kernel call forward, and what sums gradients around those backward."""
        (tasks,) = plan.remote  # there are no trees
        q, k, v, dout, out, lse = self._rows(tasks)
        if phase == "forward":
            return lambda: self._where.kernel.forward(q, k, v, tasks, self._spec)
        self._where.kernel.forward(q, k, v, tasks, self._spec, (out, lse))
        stats = torch.stack([lse.t(), row_dots(dout, out).t()], dim=1)
        parts, wide = Parts.whole(plan), self._where.kernel.grad_dtype(q.dtype)

        def backward() -> object:
            sums = WorkspaceGradients(parts, k, v, wide)
            return serve_backward(0, [q, dout, stats, k, v], sums, self._spec, self._where.kernel)

        return backward

    def in_place(self, tasks: TaskBatch, phase: str) -> Callable[[], object]:
        """Tasks on the rows where they are stored: one kernel call."""
        q, k, v, dout, out, lse = self._rows(tasks)
        if phase == "forward":
            return lambda: self._where.kernel.forward(q, k, v, tasks, self._spec, (out, lse))
        self._where.kernel.forward(q, k, v, tasks, self._spec, (out, lse))
        wide = self._where.kernel.grad_dtype(q.dtype)
        grads = Gradients(torch.empty_like(q), torch.empty_like(k, dtype=wide), torch.empty_like(v, dtype=wide))
        inputs = BackwardInputs(q, k, v, dout, lse, out)
        return lambda: self._where.kernel.backward(inputs, tasks, self._spec, grads)

    def _rows(self, tasks: TaskBatch) -> tuple[torch.Tensor, ...]:
        """q, k, v, dout at random; out and lse zero, since rows of no task must be finite."""
        h, query, key = self._where.cost.heads, tasks.q_rows, tasks.k_rows
        shapes = [(query, h.query), (key, h.key_value), (key, h.key_value), (query, h.query)]
        device, dtype = self._where.device, self._where.dtype
        q, k, v, dout = (torch.randn(*s, h.head_dim, device=device, dtype=dtype) for s in shapes)
        return q, k, v, dout, torch.zeros_like(q), torch.zeros(h.query, query, device=device)


class Report:
    """Everything that was measured, in rows that are dataclasses. Subclasses make the tables.

    Attributes:
        card: how the report's first words name it.
    """

    card = "{}"

    def __init__(self, args: argparse.Namespace, where: Setting) -> None:
        self.about, self.rows, self.notes = _about(args, where), [], []
        self._json, self._save = args.json, args.save

    def note(self, text: str) -> None:
        """A remark for the report, shown at once."""
        self.notes.append(text)
        print(text, flush=True)

    def save_json(self) -> None:
        """Rewrites the file, if one is wanted."""
        if self._json:
            rows = [asdict(row) for row in self.rows]
            self._json.write_text(json.dumps({**self.about, "notes": self.notes, "rows": rows}))

    def finish(self, remarks: str) -> None:
        """Writes what is wanted and prints the summary.

        Args:
            remarks: what the columns mean.
        """
        self.save_json()
        if self._save:
            parts = [self._head(), *self.notes, self.summary(), remarks, self.details()]
            self._save.write_text("\n\n".join(parts) + "\n")
        print(f"\n{self.summary()}", flush=True)

    def summary(self) -> str:
        """A table of groups of batches."""
        raise NotImplementedError

    def details(self) -> str:
        """A table with a line for each row."""
        raise NotImplementedError

    def _head(self) -> str:
        about = self.about
        return (
            f"**{self.card.format(about['card'])}, {about['date']}**, torch {about['torch']}, kernel "
            f"{about['kernel']}, cost model {about['cost_model']}; plans for {about['args']['servers']} ranks of "
            f"{about['args']['tokens']} tokens. `{about['command']}`"
        )


def table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """In Markdown."""
    rows = [head, ["---"] * len(head), *([str(cell).replace("|", "\\|") for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _about(args: argparse.Namespace, where: Setting) -> dict[str, Any]:
    """What a reader needs to know, JSON values."""
    distribution = getattr(sys.modules[type(where.kernel).__module__], "DISTRIBUTION", None)
    version = "" if distribution is None else f" ({distribution} {distribution_version(distribution)})"
    files = (args.json, args.save)  # named without the folders of one machine
    words = [Path(word).name if Path(word) in files else word for word in sys.argv[1:]]
    return {
        "card": torch.cuda.get_device_name(where.device) if where.device.type == "cuda" else "CPU",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "torch": str(torch.__version__),
        "kernel": where.kernel.name + version,
        "cost_model": where.cost_source,
        "command": shlex.join([f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "args": {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()},
    }
