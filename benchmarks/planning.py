# SPDX-License-Identifier: Apache-2.0
"""How long one core takes to plan steps of many short documents.

    OMP_NUM_THREADS=1 python benchmarks/planning.py [--repeats 7] [--json FILE]

Lengths are log-normal (sigma 1), scaled so that ranks are full and cut off at what a rank holds; documents stay in
order and whole. Llama 3 8B's heads, the shipped cost model, tolerance 0.005. "Read" makes the layout of what ranks
tell each other, arrays of lengths. "Balance" is balance() in one phase, whether moving pays or not. "Compile" is the
part of one rank in both phases. "Both phases" is all of it. "A step" plans both phases as training does: rows stay at
home without a search where moving them cannot pay. "Ahead" is what is left of that where a loader's worker has planned
(``GlobalPackedLoader.plan_ahead``). Times are of the processor, in ms: the least of the repeats, so
that a busy machine does not matter, and the median of "both phases". The first repeat of all is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deepspeed_distca.attention_server.phase_planner import MicroBatchPlanner, PhasePlanner
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler import CostModel, Heads, balance
from deepspeed_distca.scheduler.cost_model import PHASES
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.worth import PlanOptions

TOLERANCE, MIN_GAIN = 0.005, 0.04
LINEAR = 436_207_616  # of a layer of Llama 3 8B and a token, in forward
COST = CostModel.fitted(Heads())


class Case(NamedTuple):
    """So many documents on so many ranks of so many tokens, and what planning them may take, in ms."""

    documents: int
    ranks: int
    tokens: int
    target: float


CASES = (
    Case(1208, 64, 8192, 10),
    Case(4546, 256, 8192, 40),
    Case(8524, 64, 65536, 15),
    Case(55281, 50, 65536, 60),
)

COLUMNS = ("documents", "ranks", "tokens", "balance before", "forward", "backward", "read", "balance forward")
COLUMNS += ("balance backward", "compile", "both phases", "median", "a step", "ahead", "target")


def lengths(case: Case, seed: int) -> list[np.ndarray]:
    """Lengths of each rank's documents."""
    drawn = np.random.default_rng(seed).lognormal(size=case.documents)
    scaled = np.rint(drawn * (case.ranks * case.tokens / drawn.sum()))
    found = np.clip(scaled, 1, case.tokens).astype(np.int64)
    middle = np.cumsum(found) - found / 2
    rank = np.minimum((middle * case.ranks / found.sum()).astype(int), case.ranks - 1)
    return [found[rank == r] for r in range(case.ranks)]


def measure(case: Case, seed: int, repeats: int) -> dict[str, float]:
    """One line of the table."""
    told = lengths(case, seed)
    options = PlanOptions(
        tolerance=TOLERANCE, granularity=128, max_received_rows=None, min_gain=MIN_GAIN, linear_flops=LINEAR
    )
    times, step, ahead = [], [], []
    for _ in range(repeats + 1):
        gc.collect()
        at = [time.process_time()]
        layout = Layout.from_lengths(told)
        at.append(time.process_time())
        tasks = []
        for phase in PHASES:
            tasks.append(balance(layout, COST, phase=phase, tolerance=TOLERANCE))
            at.append(time.process_time())
        for planned in tasks:
            RouteCompiler(layout, planned.rows).rank(0)
        at.append(time.process_time())
        times.append(np.diff(at) * 1e3)
        start = time.process_time()
        planner = MicroBatchPlanner(PhasePlanner(0, COST, options, early=True), {None: 16})
        made = planner(Layout.from_lengths(told))
        step.append((time.process_time() - start) * 1e3)
        layout = Layout.from_lengths(told)
        start = time.process_time()
        planner.phases(layout, made)
        ahead.append((time.process_time() - start) * 1e3)
    least = np.min(times[1:], axis=0)
    both = [float(t.sum()) for t in times[1:]]
    figures = (tasks[0].balance_before, tasks[0].balance, tasks[1].balance, *least.tolist())
    figures += (min(both), statistics.median(both), min(step[1:]), min(ahead[1:]), case.target)
    return dict(zip(COLUMNS, (case.documents, case.ranks, case.tokens, *figures), strict=True))


def table(rows: list[dict[str, float]]) -> str:
    """A Markdown table."""
    shown = [[f"{v:.4f}" if 3 < i < 6 else f"{v:.4g}" for i, v in enumerate(row.values())] for row in rows]
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *shown]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="plans of each layout (7)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    arguments = parser.parse_args()
    rows = [measure(case, arguments.seed, arguments.repeats) for case in CASES]
    print(table(rows))
    if arguments.json:
        about = f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}"
        arguments.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
