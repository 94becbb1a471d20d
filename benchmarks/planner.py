# SPDX-License-Identifier: Apache-2.0
"""Balance, bytes and time of plans for the document lengths of arXiv 2510.18121.

    python benchmarks/planner.py [--save FILE]

65,536 tokens a server, contiguous layout, 4 query heads and 1 key/value head of 128, bf16, tolerance 0.02, cost in
query-key pairs; up to 10 batches, as many as the documents last for. Bytes are the forward dispatch (q, k, v),
by rank: "mean" over ranks, sent and received being the same; "worst" the larger of what some rank sends and what some
rank receives. Both are means over batches, balances the worst of all batches. Everything that crosses ranks counts,
also the keys that a rank needs for its own queries of a document that began on another, and the keys that a server
sends on to others in the second round of a dispatch. A granule is 128 query rows at the end of the longest document,
over the mean load.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from workloads.sampling import layouts

from deepspeed_distca.layout import LENGTH, START, Layout
from deepspeed_distca.scheduler import CostModel, Heads, balance
from deepspeed_distca.scheduler.routes import RouteCompiler

TOKENS, BATCHES, TOLERANCE, GRANULARITY = 65536, 10, 0.02, 128
HEADS = Heads(query=4, key_value=1, head_dim=128)
MIB = 2**20


class Case(NamedTuple):
    """One line of the table and what it is to reach: MiB of the mean and the worst rank, milliseconds."""

    name: str
    context: int
    servers: int
    shuffle: int | None
    target_mib: tuple[int, int] | None
    target_ms: float | None


CASES = (
    Case("pretrain", 131072, 8, None, (48, 192), None),
    Case("pretrain", 524288, 32, None, (175, 747), None),
    Case("pretrain", 131072, 64, None, (49, 208), 5.0),
    Case("prolong", 131072, 64, 1, (35, 432), None),
    Case("pretrain", 131072, 512, None, None, 50.0),
)

COLUMNS = (
    "documents",
    "servers",
    "batches",
    "balance before",
    "balance",
    "1.02 + granule",
    "mean MiB",
    "worst MiB",
    "sent",
    "received",
    "target MiB",
    "balance() ms",
    "+ compile ms",
    "target ms",
)


class Result(NamedTuple):
    """One batch's plan."""

    before: float
    after: float
    granule: float
    mean: float
    sent: float
    received: float
    balance_ms: float
    compile_ms: float


def measure(layout: Layout, repeats: int) -> Result:
    """Plans one layout; times are medians over the repeats."""
    cost = CostModel.area(HEADS)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        tasks = balance(layout, cost, tolerance=TOLERANCE, granularity=GRANULARITY)
        balanced = time.perf_counter()
        RouteCompiler(layout, tasks.rows).rank(0)
        times.append((balanced - start, time.perf_counter() - balanced))
    moved, _ = RouteCompiler(layout, tasks.rows).bytes_between(HEADS, "forward")
    longest = int((layout.segments[:, START] + layout.segments[:, LENGTH]).max())
    granule = cost.forward(max(0, longest - GRANULARITY), longest, 0)
    return Result(
        before=tasks.balance_before,
        after=tasks.balance,
        granule=granule / tasks.loads.mean(),
        mean=moved.sum() / layout.num_ranks / MIB,
        sent=moved.sum(axis=1).max() / MIB,
        received=moved.sum(axis=0).max() / MIB,
        balance_ms=statistics.median(a for a, _ in times) * 1e3,
        compile_ms=statistics.median(b for _, b in times) * 1e3,
    )


def row(case: Case, repeats: int) -> list[str]:
    """The table's line of a case."""
    batches = list(
        layouts(
            case.name,
            context=case.context,
            servers=case.servers,
            tokens=TOKENS,
            batches=BATCHES,
            shuffle=case.shuffle,
        )
    )
    results = [measure(layout, repeats) for layout in batches]

    def mean(*names: str) -> float:
        return float(np.mean([max(getattr(r, name) for name in names) for r in results]))

    worst = max(results, key=lambda r: r.after)
    return [
        f"{case.name} {case.context // 1024}K" + (f", shuffled ({case.shuffle})" if case.shuffle is not None else ""),
        str(case.servers),
        str(len(results)),
        f"{min(r.before for r in results):.2f}-{max(r.before for r in results):.2f}",
        f"{worst.after:.4f}",
        f"{1 + TOLERANCE + worst.granule:.4f}",
        f"{mean('mean'):.1f}",
        f"{mean('sent', 'received'):.1f}",
        f"{mean('sent'):.1f}",
        f"{mean('received'):.1f}",
        "/".join(map(str, case.target_mib)) if case.target_mib else "-",
        f"{statistics.median(r.balance_ms for r in results):.2f}",
        f"{statistics.median(r.compile_ms for r in results):.2f}",
        f"{case.target_ms:.0f}" if case.target_ms else "-",
    ]


def table(rows: list[list[str]]) -> str:
    """A Markdown table."""
    widths = [max(len(line[i]) for line in [list(COLUMNS), *rows]) for i in range(len(COLUMNS))]
    lines = [list(COLUMNS), ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def cpu_model() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="plans of each batch, of which times are medians (7)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the table and where it was made to a file")
    arguments = parser.parse_args()
    printed = table([row(case, arguments.repeats) for case in CASES])
    print(printed)
    if arguments.save:
        about = " ".join(__doc__.split("\n\n", 2)[2].split())
        where = f"{datetime.date.today()}, {cpu_model()}, Python {platform.python_version()}, NumPy {np.__version__}"
        arguments.save.write_text(f"# Planning\n\n`python benchmarks/planner.py`, {where}.\n\n{printed}\n\n{about}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
