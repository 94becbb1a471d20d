# SPDX-License-Identifier: Apache-2.0
"""A picture of what the GPUs do during one layer's attention, from the traces of `step_time.py --timeline`.

    torchrun --nproc_per_node 2 benchmarks/step_time.py --mixes "half|short" --timeline trace.json.gz
    python benchmarks/timeline.py trace_rank0.json.gz trace_rank1.json.gz --layer 1 --save timeline.png

One row for each stream of each rank. Traces of one host have one clock, so rows can be compared across ranks.
"""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

KINDS = {
    "attention": "#d1495b",
    "copies and sends": "#2e8b57",
    "linear layers": "#8d99ae",
    "others": "#d9dce3",
}
#: How much of the step is shown before and after the attention, as a share of its own time.
MARGIN = 0.12


@dataclass(frozen=True)
class Span:
    """Something that ran on a GPU; times in microseconds of the host's clock."""

    stream: int
    kind: str
    phase: str | None  # of attention's main kernels
    start: float
    end: float


def read(path: Path) -> list[Span]:
    """What ran on the GPU, in order.

    Raises:
        ValueError: a trace without anything of a GPU.
    """
    raw = path.read_bytes()
    events = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]
    spans = [
        Span(e["args"]["stream"], *_kind(e["name"], e["cat"]), e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    if not spans:
        raise ValueError(f"{path}: nothing of a GPU is in this trace")
    return sorted(spans, key=lambda span: span.start)


def _kind(name: str, category: str) -> tuple[str, str | None]:
    """A row of KINDS, and the phase of a flash-attention kernel."""
    if "flash_fwd" in name:
        return "attention", "forward"
    if "flash_bwd" in name:
        return "attention", "backward" if "process" not in name else None
    if "nccl" in name.lower() or (category == "gpu_memcpy" and "PtoP" in name):
        return "copies and sends", None
    if any(word in name for word in ("nvjet", "gemm", "cutlass")):
        return "linear layers", None
    return "others", None


def window(ranks: list[list[Span]], phase: str, layer: int) -> tuple[float, float]:
    """Start and end of one layer's attention in a phase, over all ranks.

    Args:
        layer: in the order in which the phase comes to it.

    Raises:
        ValueError: fewer layers than that.
    """
    starts, ends = [], []
    for spans in ranks:
        main = _busiest(spans)
        groups: list[list[Span]] = []
        for span in (s for s in spans if s.phase == phase):
            # Layers are apart by linear layers on the main stream.
            between = groups and any(
                s.kind == "linear layers" and s.stream == main and groups[-1][-1].end <= s.start < span.start
                for s in spans
            )
            if not groups or between:
                groups.append([])
            groups[-1].append(span)
        if layer >= len(groups):
            raise ValueError(f"layer {layer} of {phase} was asked for; the trace has {len(groups)}")
        starts.append(min(s.start for s in groups[layer]))
        ends.append(max(s.end for s in groups[layer]))
    margin = MARGIN * (max(ends) - min(starts))
    return min(starts) - margin, max(ends) + margin


def _busiest(spans: list[Span]) -> int:
    streams = {span.stream for span in spans}
    return max(streams, key=lambda stream: sum(s.end - s.start for s in spans if s.stream == stream))


def draw(ranks: list[list[Span]], layer: int, save: Path) -> None:
    """One panel for forward and one for backward."""
    lanes = []
    for rank, spans in enumerate(ranks):
        main = _busiest(spans)
        side = {s.stream for s in spans if s.phase and s.stream != main}
        moving = {s.stream for s in spans if s.kind == "copies and sends"} - {main} - side
        lanes += [(rank, "main stream", {main}), (rank, "side stream", side), (rank, "copies, sends", moving)]
    figure, panels = pyplot.subplots(2, 1, figsize=(11, 0.9 + 0.62 * 2 * len(lanes) / 1.6), constrained_layout=True)
    for panel, phase in zip(panels, ("forward", "backward"), strict=True):
        low, high = window(ranks, phase, layer)
        for row, (rank, _, streams) in enumerate(lanes):
            for span in ranks[rank]:
                if span.stream in streams and span.end > low and span.start < high:
                    start, end = max(span.start, low), min(span.end, high)
                    panel.barh(row, (end - start) / 1e3, left=(start - low) / 1e3, color=KINDS[span.kind], height=0.8)
        panel.set_yticks(range(len(lanes)), [f"rank {rank}: {name}" for rank, name, _ in lanes])
        panel.invert_yaxis()
        panel.set_xlim(0, (high - low) / 1e3)
        panel.set_xlabel(f"{phase}, ms")
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in KINDS.items()], loc="outside upper center", ncol=4
    )
    figure.savefig(save, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="of rank 0, 1, ..")
    parser.add_argument("--layer", type=int, default=1, help="in the order in which a phase comes to it (1)")
    parser.add_argument("--save", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        draw([read(path) for path in arguments.traces], arguments.layer, arguments.save)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
