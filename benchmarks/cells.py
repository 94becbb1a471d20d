# SPDX-License-Identifier: Apache-2.0
"""Steps at 64 to 512 GPUs beside plain data parallelism, WLB and the ideal, as `ds_distca simulate` predicts them.

    OMP_NUM_THREADS=1 python benchmarks/cells.py [--json FILE] [--save FILE]

ZeRO-3, checkpointing, Liger's kernels, nodes of 8 H200s; Pretrain and ProLong in contexts of 128K to 512K, documents
in random order, one micro-batch a cell. The 8B and the 34B model of benchmarks/paper.py with 65,536 tokens a GPU, and
the 34B one with 32,768: with 65,536 an H200 has memory for the attention of some of its layers only, and that of the
others is repeated in recomputation ("kept" are layers; "GiB" are estimates of the fullest rank; an H200 has 131).
"WLB" is "dealt by work": whole documents to groups of ranks, up to twice the mean tokens a rank, the best degree;
ranks of a group wait for keys. "In order" is the plugin with documents as they are packed, "placed" with documents
where `GlobalPackedLoader` stores them, by nodes; "all kept" is the latter, were there memory for all layers. The ideal
repeats no attention. "4D" is the set-up of benchmarks/paper.py with 4 pipeline stages and 8 micro-batches, where
tokens are those of a node, and checkpointing is not reentrant. Nothing is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import paper
from workloads.sampling import document_lengths

from deepspeed_distca.scheduler.profiles import choose
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.simulator.documents import micro_batches
from deepspeed_distca.simulator.model import Model, training_options
from deepspeed_distca.simulator.policies import DEALT, IDEAL, OURS, PLACED, PLAIN, outcomes, placed_step
from deepspeed_distca.simulator.step import Training

SIZES = (
    *(("ZeRO-3", "8B", 65536), ("ZeRO-3", "34B", 65536), ("ZeRO-3", "34B", 32768)),
    *(("4D", "8B", 131072), ("4D", "34B", 65536)),
)
#: Seconds of a step, by column.
SECONDS = {"plain": PLAIN, "WLB": DEALT, "in order": OURS, "placed": PLACED, "ideal": IDEAL}
ALL_KEPT = "placed, all kept"
RATIOS = (
    *(("in order", "ideal"), ("placed", "ideal"), (ALL_KEPT, "ideal"), ("WLB", "in order"), ("WLB", "placed")),
    *(("plain", "in order"), ("plain", "placed")),
)
ABOUT = ("set-up", "model", "tokens", "documents", "context", "GPUs", "kept")
COLUMNS = (*ABOUT, *SECONDS, ALL_KEPT, "GiB: plain", "GiB: WLB", "GiB: plugin")


class AllKept(Training):
    """With memory for the attention of all layers."""

    def kept(self, ranks: int, tokens: int) -> int:
        return self.model.attention_layers


def zero_3(name: str, gpus: int) -> Training:
    """A DeepSpeed user's: no tensor parallelism."""
    model = Model.of(paper.CONFIGS[name])
    cost = choose(paper.H200, model.heads, folder=None).cost
    options = replace(training_options(paper.CONFIGS[name]), topology=Topology.of_size(paper.NODE, gpus))
    return Training(model, cost, options, checkpointing=True, liger=True, zero=3)


def row(kind: str, model: str, tokens: int, documents: str, context: int, gpus: int) -> dict[str, Any] | None:
    """A cell; None where there is no room for a context, or the documents do not last."""
    pipeline = kind == "4D"
    training = paper.paper(model, gpus, paper.STAGES)[0] if pipeline else zero_3(model, gpus)
    ranks = gpus // paper.NODE if pipeline else gpus
    replicas, count = ranks // training.stages, paper.MICRO_BATCHES if pipeline else 1
    batches = list(micro_batches(document_lengths(documents, context), replicas, tokens, count, paper.SEED, context))
    if replicas * tokens < context or len(batches) < count:
        return None
    found = {one.name: one for one in outcomes(training, batches, context, placed=True)}
    size = {"set-up": kind, "model": model, "tokens": tokens, "documents": documents, "context": context, "GPUs": gpus}
    kept = training.kept(ranks, tokens)
    line: dict[str, Any] = {**size, "kept": f"{kept} of {training.model.attention_layers}"}
    line |= {column: found[name].seconds for column, name in SECONDS.items()}
    line[ALL_KEPT] = line["placed"]
    if kept < training.model.attention_layers:
        other = AllKept(**{field.name: getattr(training, field.name) for field in fields(training)})
        line[ALL_KEPT] = placed_step(other, batches).seconds
    names = {"GiB: plain": PLAIN, "GiB: WLB": DEALT, "GiB: plugin": OURS}
    return line | {column: found[name].memory / 2**30 for column, name in names.items()}


def rows(gpus: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    for size in SIZES:
        for documents in paper.WORKLOADS:
            for context in paper.CONTEXTS:
                for n in gpus:
                    if line := row(*size, documents, context, n):
                        yield line


def ratio(line: dict[str, Any], pair: tuple[str, str]) -> float | None:
    """Of two columns; None where one has no cell."""
    above, below = (line[column] for column in pair)
    return above / below if above and below else None


def cells(line: dict[str, Any]) -> list[str]:
    def shown(value: Any) -> str:
        return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    return [*(shown(line[column]) for column in COLUMNS), *(shown(ratio(line, pair)) for pair in RATIOS)]


def ranges(found: list[dict[str, Any]]) -> list[list[str]]:
    """Least, most and median of each size."""
    lines = [["set-up", "tokens a server", "documents", *(" / ".join(pair) for pair in RATIOS)]]
    for kind, model, tokens in SIZES:
        for documents in paper.WORKLOADS:
            size = (kind, model, tokens, documents)
            own = [
                line for line in found if (line["set-up"], line["model"], line["tokens"], line["documents"]) == size
            ]
            spans = [[one for line in own if (one := ratio(line, pair))] for pair in RATIOS]
            told = [f"{min(x):.2f} to {max(x):.2f}, {statistics.median(x):.2f}" if x else "" for x in spans]
            lines.append([f"{kind}, {model}", f"{tokens:,}", documents, *told])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=paper.GPUS, help="GPUs (64 128 256 512)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the tables to a file, in Markdown")
    args = parser.parse_args()
    found = []
    for line in rows(tuple(args.gpus)):
        found.append(line)
        print(" | ".join(cells(line)), flush=True)
    head = [*COLUMNS, *(" / ".join(pair) for pair in RATIOS)]
    text = f"{paper.table(ranges(found))}\n\n{paper.table([head, *map(cells, found)])}"
    if args.json:
        args.json.write_text(json.dumps({"made": str(datetime.date.today()), "rows": found}, indent=1) + "\n")
    if args.save:
        about = (__doc__ or "").partition("[--save FILE]")[2].strip()
        args.save.write_text(f"# Cells\n\n{about}\n\n{datetime.date.today()}:\n\n{text}\n")


if __name__ == "__main__":
    main()
