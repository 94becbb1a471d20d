# SPDX-License-Identifier: Apache-2.0
"""Bytes that balancing moves when documents are packed in order, and when their placement is free.

    python benchmarks/placement.py [--save FILE]

The documents of each batch are the same: those of arXiv 2510.18121's length distributions, packed in order into
contexts (and cut at their borders), consecutive contexts making up a batch of 65,536 tokens a rank. "In order" lays
them over the ranks one after another, "head-tail" too, with half a rank's part of a spanning document from its head
and half from its tail; "whole" and "free" are the loader's placements. Each is then balanced by the scheduler to
the same tolerance, 0.02, cost in query-key pairs; 4 query heads, 1 key/value head of 128, bf16; up to 10 batches, as
many as the documents last for, and their means. Bytes are by rank and layer. "Forward" is the dispatch of q, k and v:
the mean over ranks, and the worst rank, the larger of what it sends and receives. "Step" is the mean of all that
moves in forward and backward: with out, lse and the gradients. Keys that a rank needs for its own queries of a
spanning document count. "Queries" are the rows computed elsewhere than at home, by rank.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from workloads.sampling import layouts

from deepspeed_distca.data.global_loader.placement import place
from deepspeed_distca.layout import DOCUMENT, LENGTH, Layout
from deepspeed_distca.scheduler import CostModel, Heads, balance
from deepspeed_distca.scheduler.traffic import traffic

TOKENS, BATCHES, TOLERANCE = 65536, 10, 0.02
HEADS = Heads(query=4, key_value=1, head_dim=128)
COST = CostModel.area(HEADS)
MIB = 2**20


class Case(NamedTuple):
    """Batches of one kind; `shuffle` is the seed of the documents' order, None the published one."""

    name: str
    context: int
    servers: int
    shuffle: int | None


CASES = (
    Case("pretrain", 131072, 2, 1),
    Case("prolong", 131072, 2, 1),
    Case("pretrain", 131072, 8, None),
    Case("pretrain", 131072, 8, 1),
    Case("pretrain", 131072, 64, None),
    Case("pretrain", 524288, 32, None),
    Case("prolong", 131072, 8, None),
    Case("prolong", 131072, 8, 1),
    Case("prolong", 131072, 64, 1),
    Case("prolong", 524288, 32, 1),
)

COLUMNS = (
    "documents",
    "ranks",
    "batches",
    "placement",
    "balance before",
    "balance",
    "forward mean MiB",
    "worst MiB",
    "step MiB",
    "queries",
    "place() ms",
)


class Result(NamedTuple):
    """One batch under one placement."""

    before: float
    after: float
    mean: float
    worst: float
    step: float
    queries: float
    place_ms: float


def measure(layout: Layout, place_ms: float) -> Result:
    """Balances a layout and counts what moves."""
    tasks = balance(layout, COST, tolerance=TOLERANCE)
    rows = traffic(layout, tasks)
    forward = rows.dispatch_bytes(HEADS)
    step = sum(
        (rows.dispatch_bytes(HEADS, phase) + rows.return_bytes(HEADS, phase)).sum()
        for phase in ("forward", "backward")
    )
    return Result(
        before=tasks.balance_before,
        after=tasks.balance,
        mean=forward.sum() / layout.num_ranks / MIB,
        worst=max(forward.sum(axis=0).max(), forward.sum(axis=1).max()) / MIB,
        step=step / layout.num_ranks / MIB,
        queries=rows.q_rows.sum() / layout.num_ranks,
        place_ms=place_ms,
    )


def document_lengths(layout: Layout) -> list[int]:
    """Lengths of a batch's documents, in their order."""
    lengths = np.zeros(int(layout.segments[:, DOCUMENT].max()) + 1, dtype=np.int64)
    np.add.at(lengths, layout.segments[:, DOCUMENT], layout.segments[:, LENGTH])
    return lengths.tolist()


def compare(case: Case) -> list[list[str]]:
    """The lines of one kind of batches, and a check that free placement never moves more where it cuts documents."""
    results: dict[str, list[Result]] = {"in order": [], "head-tail": [], "whole": [], "free": []}
    options = dict(context=case.context, servers=case.servers, tokens=TOKENS, batches=BATCHES, shuffle=case.shuffle)
    for layout in layouts(case.name, **options):
        lengths, budgets = document_lengths(layout), layout.tokens.tolist()
        for (name, found), placement in zip(
            results.items(), ("contiguous", "head_tail", "whole", "free"), strict=True
        ):
            start = time.perf_counter()
            placed = place(lengths, budgets, placement=placement, cost=COST, tolerance=TOLERANCE)
            found.append(measure(placed, (time.perf_counter() - start) * 1e3))
            if placed.tokens.tolist() != budgets or document_lengths(placed) != lengths:
                raise AssertionError(f"{name}: another batch")
        if len(placed.segments) > len(lengths) and results["free"][-1].step > results["in order"][-1].step:
            raise AssertionError(f"{case}: free placement moves more")
    title = f"{case.name} {case.context // 1024}K" + (", shuffled" if case.shuffle is not None else "")
    lines = []
    for name, found in results.items():
        mean = Result(*np.mean(found, axis=0))
        lines.append(
            [
                title,
                str(case.servers),
                str(len(found)),
                name,
                f"{mean.before:.2f}",
                f"{max(r.after for r in found):.3f}",
                f"{mean.mean:.1f}",
                f"{mean.worst:.1f}",
                f"{mean.step:.1f}",
                f"{mean.queries:.0f}",
                f"{mean.place_ms:.0f}",
            ]
        )
    return lines


def table(rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the table and how it was made to a file")
    arguments = parser.parse_args()
    printed = table([line for case in CASES for line in compare(case)])
    print(printed)
    if arguments.save:
        about = " ".join(__doc__.split("\n\n", 2)[2].split())
        where = f"{datetime.date.today()}, Python {platform.python_version()}, NumPy {np.__version__}"
        arguments.save.write_text(
            f"# Placement\n\n`python benchmarks/placement.py`, {where}.\n\n{printed}\n\n{about}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
