# SPDX-License-Identifier: Apache-2.0
"""One document over all ranks, 65,536 tokens each: what the busiest rank sends or receives, where the planner cuts
queries (keys travel) and where it could cut keys as well (queries travel to keys, their results back).

    python benchmarks/cut_by_keys.py --save benchmarks/results/cut_by_keys.md

Cut by keys: rank i attends to the blocks of ranks below it one by one. Of such a block a share may be computed where
its keys are, by sending queries there; the busiest ranks give such shares to the least busy ones until all have the
same work. MiB of one layer, for the larger of both directions: on the way out and back.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from deepspeed_distca.layout import Layout, Segment
from deepspeed_distca.scheduler import CostModel, Heads, balance
from deepspeed_distca.scheduler.cost_model import PHASES
from deepspeed_distca.scheduler.routes import RouteCompiler

TOKENS = 65536
HEADS = {"32 heads, 8 of keys": Heads(32, 8, 128), "32 heads, 32 of keys": Heads(32, 32, 128)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    lines = [
        "# Cutting by keys",
        "",
        "One document of 65,536 tokens a rank: MiB of the busiest rank in a layer (`benchmarks/cut_by_keys.py`).",
        "",
        "| heads of 128 | ranks | phase | by queries: out | back | by keys: out | back |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, heads in HEADS.items():
        for ranks in (2, 4, 8):
            for phase in PHASES:
                cells = [*by_queries(heads, ranks, phase), *by_keys(heads, ranks, phase)]
                lines.append(f"| {name} | {ranks} | {phase} | {' | '.join(f'{x:,.0f}' for x in cells)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if args.save:
        args.save.write_text(text)


def by_queries(heads: Heads, ranks: int, phase: str) -> tuple[float, float]:
    layout = Layout.from_ranks([[Segment(0, rank * TOKENS, TOKENS)] for rank in range(ranks)])
    tasks = balance(layout, CostModel.fitted(heads), phase=phase, tolerance=0.02)
    out, back = RouteCompiler(layout, tasks.rows).bytes_between(heads, phase)
    return busiest(out), busiest(back)


def by_keys(heads: Heads, ranks: int, phase: str) -> tuple[float, float]:
    query, result, keys, gradients = heads.moved(phase)
    work = np.arange(ranks) + 0.5  # in blocks: those below and half of a rank's own
    mean = work.mean()
    out, back = np.zeros((ranks, ranks)), np.zeros((ranks, ranks))
    for i in range(ranks - 1, -1, -1):
        for j in range(i):
            share = min(1.0, max(0.0, work[i] - mean), max(0.0, mean - work[j]))
            work[i] -= share
            work[j] += share
            out[i, j] += share * TOKENS * query
            back[j, i] += share * TOKENS * result
            if share < 1:
                out[j, i] += TOKENS * keys
                back[i, j] += TOKENS * gradients
    return busiest(out), busiest(back)


def busiest(sent: np.ndarray) -> float:
    return float(max(sent.sum(axis=0).max(), sent.sum(axis=1).max())) / 2**20


if __name__ == "__main__":
    main()
