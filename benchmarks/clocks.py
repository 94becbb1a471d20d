# SPDX-License-Identifier: Apache-2.0
"""Clock and power of every GPU in the measured steps of a step_time.py run: how fast the cards were, by variant.

    nvidia-smi --query-gpu=timestamp,index,clocks.sm,power.draw --format=csv,noheader,nounits -lms 50 -f clocks.csv &
    torchrun --nproc_per_node 2 benchmarks/step_time.py --turns ... --json results.json
    kill %1; python benchmarks/clocks.py results.json clocks.csv

Both files are of one machine and one time zone. A GPU at its power limit lowers its clock, and one that waits for
others in a step may raise it afterwards; so the same matrix product takes longer in a step without waiting.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from statistics import mean

import numpy as np

Samples = dict[int, np.ndarray]


def read_samples(path: Path) -> Samples:
    """By GPU: seconds since 1970, SM clock in MHz, power in W, float64 [samples, 3]. A line cut short is left out."""
    found: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            cells = [cell.strip() for cell in line.split(",")]
            try:
                when = datetime.strptime(cells[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
                found[int(cells[1])].append((when, float(cells[2]), float(cells[3])))
            except (ValueError, IndexError):
                continue
    return {gpu: np.array(rows) for gpu, rows in sorted(found.items())}


def within(samples: np.ndarray, spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean clock and power over the samples within any of the spans; nan where there are none."""
    inside = np.zeros(len(samples), dtype=bool)
    for start, end in spans:
        inside |= (samples[:, 0] >= start) & (samples[:, 0] < end)
    return tuple(samples[inside, 1:].mean(0)) if inside.any() else (float("nan"), float("nan"))


def table(results: dict, samples: Samples) -> str:
    """Markdown: a line for each group of batches and variant."""
    spans: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for batch, rows in results["batches"].items():
        for variant, row in rows.items():
            key = batch.partition(" #")[0], variant
            spans[key] += [tuple(span) for span in row["when"]]
            times[key].append(row["ms"])
    head = ["batches", "variant", "step, ms", *(f"GPU {gpu}: MHz, W" for gpu in samples)]
    lines = [head, ["---"] * len(head)]
    for (group, variant), found in spans.items():
        cells = [group.replace("|", "\\|"), variant, f"{mean(times[group, variant]):.1f}"]
        lines.append([*cells, *("{:.0f}, {:.0f}".format(*within(samples[gpu], found)) for gpu in samples)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="of step_time.py --json")
    parser.add_argument("samples", type=Path, help="of nvidia-smi, .csv or .csv.gz")
    args = parser.parse_args()
    print(table(json.loads(args.results.read_text()), read_samples(args.samples)))


if __name__ == "__main__":
    main()
