# SPDX-License-Identifier: Apache-2.0
"""What a layer sends and is predicted to take where the loader's placements store the documents.

    python benchmarks/placement.py [--save FILE]

The documents of each batch are the same: those of arXiv 2510.18121's length distributions, packed in order into
contexts (and cut at their borders), consecutive contexts making up a batch. Each placement is then planned as on GPUs,
for a layer of Llama-3-8B's width. "Before" and "planned" are the largest over the mean load of attention, forward and
backward. MiB is what a rank sends and receives for a layer in forward and backward: the mean of what is sent, and the
largest of either. "Layer" is predicted, not measured: attention with its transfers and the linear work of a layer's
forward and backward, with links of an H200's NVLink and with 50 GB/s between all ranks. Means over the batches; the
last column is CPU time of `place()` for a batch.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from workloads.sampling import layouts

from deepspeed_distca.data.global_loader.placement import PLACEMENTS, place
from deepspeed_distca.defaults import GRANULARITY, MIN_GAIN, TOLERANCE
from deepspeed_distca.layout import DOCUMENT, LENGTH, Layout
from deepspeed_distca.model_sizes import linear_flops
from deepspeed_distca.scheduler import CostModel
from deepspeed_distca.scheduler.cost_model import PHASES
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.worth import PlanOptions, Worth

MODEL = SimpleNamespace(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
OPTIONS = PlanOptions(TOLERANCE, GRANULARITY, min_gain=MIN_GAIN, linear_flops=linear_flops(MODEL))
NVLINK = CostModel.fitted()
NETWORK = replace(NVLINK, bytes_per_second=50 * 10**9)


class Case(NamedTuple):
    """Batches of one kind; `shuffle` is the seed of the documents' order, None the published one."""

    name: str
    context: int
    tokens: int  # of a rank
    ranks: int
    shuffle: int | None
    batches: int


CASES = (
    Case("pretrain", 131072, 65536, 8, None, 4),
    Case("pretrain", 131072, 65536, 8, 1, 4),
    Case("prolong", 131072, 65536, 8, 1, 4),
    Case("pretrain", 131072, 131072, 8, 1, 4),
    Case("prolong", 131072, 131072, 8, 1, 4),
    Case("pretrain", 131072, 65536, 16, 1, 3),
    Case("prolong", 131072, 65536, 16, 1, 3),
    Case("pretrain", 131072, 131072, 32, 1, 2),
    Case("prolong", 131072, 131072, 32, 1, 1),
    Case("pretrain", 131072, 65536, 64, 1, 2),
    Case("prolong", 131072, 65536, 64, 1, 1),
    Case("pretrain", 524288, 65536, 64, 1, 1),
    Case("prolong", 524288, 65536, 64, 1, 1),
)
COLUMNS = (
    *("documents", "tokens", "ranks", "placement", "before", "planned", "MiB, mean", "MiB, worst"),
    *("layer ms, NVLink", "layer ms, 50 GB/s", "place() ms"),
)


def planned(layout: Layout, cost: CostModel) -> np.ndarray:
    """Before, planned, MiB, MiB of the worst rank, and milliseconds of a layer."""
    found = np.zeros(5)
    for phase in PHASES:
        worth = Worth(layout, None, phase, cost, OPTIONS, early=True)
        tasks, compiler = worth.spread(RouteCompiler(layout, worth.home.rows))
        flow = sum(compiler.bytes_between(cost.heads, phase)) / 2**20
        loads = (tasks.loads_before, tasks.loads)
        seconds = worth.whole - worth.before + worth.seconds(compiler)
        worst = max(flow.sum(0).max(), flow.sum(1).max())
        found += [*(n.max() / n.mean() / 2 for n in loads), flow.sum() / layout.num_ranks, worst, seconds * 1e3]
    return found


def document_lengths(layout: Layout) -> list[int]:
    """Lengths of a batch's documents, in their order."""
    lengths = np.zeros(int(layout.segments[:, DOCUMENT].max()) + 1, dtype=np.int64)
    np.add.at(lengths, layout.segments[:, DOCUMENT], layout.segments[:, LENGTH])
    return lengths.tolist()


def compare(case: Case) -> list[list[str]]:
    """The lines of one kind of batches."""
    options = dict(context=case.context, servers=case.ranks, tokens=case.tokens, batches=case.batches)
    batches = [document_lengths(layout) for layout in layouts(case.name, shuffle=case.shuffle, **options)]
    title = f"{case.name} {case.context // 1024}K" + (", shuffled" if case.shuffle is not None else "")
    lines = []
    for placement in PLACEMENTS:
        start = time.process_time()
        placed = [place(lengths, [case.tokens] * case.ranks, placement=placement) for lengths in batches]
        ms = (time.process_time() - start) / len(batches) * 1e3
        near, far = (np.mean([planned(layout, cost) for layout in placed], axis=0) for cost in (NVLINK, NETWORK))
        numbers = f"{near[0]:.2f}", f"{near[1]:.3f}", *(f"{n:.0f}" for n in near[2:4])
        times = f"{near[4]:.1f}", f"{far[4]:.1f}", f"{ms:.0f}"
        lines.append([title, f"{case.tokens // 1024}K", str(case.ranks), placement, *numbers, *times])
        print(" | ".join(lines[-1]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="the report in Markdown")
    args = parser.parse_args()
    print(" | ".join(COLUMNS))
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(line for case in CASES for line in compare(case))]
    if args.save:
        date = datetime.date.today().isoformat()
        about = f"Written by `benchmarks/placement.py` on {date}, Python {platform.python_version()}, computed."
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        args.save.write_text(f"{about}\n\n{__doc__.split('FILE]')[1].strip()}\n\n{table}\n")


if __name__ == "__main__":
    main()
