# SPDX-License-Identifier: Apache-2.0
"""How even ranks' attention is, and what moves, when documents may change the micro-batches of their step.

    python benchmarks/regrouping.py [--save FILE]

Sixteen consecutive batches of arXiv 2510.18121's length distributions in an order shuffled by seed 1 (eight of them
for 8 ranks), 65,536 tokens a rank, each document cut where it passes a rank's end. "A step" is how many of them make
up one. `GlobalPackedLoader`'s own parts regroup the step's documents and place them, and the plugin's planner plans
every micro-batch as it does on GPUs, for a layer of Llama-3-8B's width with the H200 fit. "Nothing moves" is the part
of the micro-batches in which it leaves every row at home in forward and backward. "Before" is the time of attention of
the busiest rank with all rows at home over that of the mean rank, by the cost model, of all micro-batches' sums;
"planned" the same with the plans. MiB is what a rank sends for a layer, forward and backward, on average. The last
column is what regrouping and placing took for a micro-batch, on one core of this machine.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import platform
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from steps.batches import workload

from deepspeed_distca.attention_server.phase_planner import PhasePlanner, PlanOptions
from deepspeed_distca.data.global_loader.batches import StepBatches
from deepspeed_distca.data.packing import Piece
from deepspeed_distca.defaults import MIN_GAIN
from deepspeed_distca.layout import LENGTH, Layout
from deepspeed_distca.model_sizes import linear_flops
from deepspeed_distca.scheduler.cost_model import PHASES, CostModel
from deepspeed_distca.scheduler.heads import Heads

TOKENS, CONTEXT = 65536, 131072
HEADS = Heads(query=32, key_value=8, head_dim=128)
LAYER = SimpleNamespace(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128
)
RANKS, ACCUMULATION = (2, 4, 8), (1, 2, 4, 8)
COLUMNS = ("documents", "ranks", "a step", "placement", "nothing moves", "before", "planned", "MiB", "ms")


def planned(planner: PhasePlanner, layout: Layout) -> list[float]:
    """Of a micro-batch: the busiest rank's load before and as planned, the mean rank's, and MiB sent by all."""
    found = np.zeros(4)
    for phase in PHASES:
        plan = planner.plan(layout, None, phase, 1)
        before, after = plan.tasks.loads_before, plan.tasks.loads
        found += [before.max(), after.max(), before.mean(), plan.sent.sum() / 2**20]
    return found.tolist()


def line(name: str, ranks: int, accumulation: int, placement: str, packs: list[list[Piece]]) -> list[str]:
    """One line of the table."""
    cost = CostModel.fitted(HEADS)
    options = PlanOptions(0.02, 128, None, None, min_gain=MIN_GAIN, linear_flops=linear_flops(LAYER))
    planner = PhasePlanner(0, cost, options, early=True)
    where = {"placement": placement, "cost": cost, "window": None, "tolerance": 0.02}
    batches = StepBatches(rank=0, group=0, budgets=[TOKENS] * ranks, placement=where, regroup=True)
    rows, seconds = [], 0.0
    for first in range(0, len(packs) - accumulation + 1, accumulation):
        begin = time.perf_counter()
        step = batches.regrouped(packs[first : first + accumulation])
        layouts = [batches.layout([piece.length for piece in pack]) for pack in step]
        seconds += time.perf_counter() - begin
        rows += [planned(planner, layout) for layout in layouts]
    found = np.array(rows)
    before, after, mean, sent = found.sum(axis=0)
    return [
        name,
        str(ranks),
        str(accumulation),
        placement,
        f"{np.mean(found[:, 3] == 0):.0%}",
        f"{before / mean:.2f}",
        f"{after / mean:.3f}",
        f"{sent / len(rows) / ranks:.0f}",
        f"{1e3 * seconds / len(rows):.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="the report in Markdown")
    args = parser.parse_args()
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    for name, ranks in itertools.product(("pretrain", "prolong"), RANKS):
        counted = itertools.count()
        packs = [
            [Piece(next(counted), 0, length) for length in batch.layout.segments[:, LENGTH].tolist()]
            for batch in workload(f"{name}:{8 if ranks == 8 else 16}:shuffled", ranks, TOKENS, CONTEXT)
        ]
        for accumulation, placement in itertools.product(ACCUMULATION, ("whole", "free")):
            lines.append(line(name, ranks, accumulation, placement, packs))
            print(" | ".join(lines[-1]), flush=True)
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    if args.save:
        date = datetime.date.today().isoformat()
        about = f"Written by `benchmarks/regrouping.py` on {date}, Python {platform.python_version()}, computed."
        args.save.write_text(f"{about}\n\n{__doc__.split('FILE]')[1].strip()}\n\n{table}\n")


if __name__ == "__main__":
    main()
