# SPDX-License-Identifier: Apache-2.0
"""Seconds of whole DeepSpeed steps with and without the plugin, and the share of the ideal speed-up that it reaches.

    torchrun --nproc_per_node 2 benchmarks/step_time.py --tokens 65536 --layers 4 --zero 1 \\
        --workloads pretrain:10 prolong:10:shuffled --steps 3 --warm-up 1 --json results.json --save results.md

The model is a Llama of Llama-3-8B's width (vocabulary 8192), trained in bf16 with AdamW on random tokens. Every rank
has the same number of tokens; batches differ in how they are divided into documents. Mixes:

    long|short    one document of all tokens on even ranks, documents of 4096 on odd ranks
    half|short    two documents on even ranks, documents of 4096 on odd ranks
    even          one document of all tokens on every rank
    short         documents of 4096 on every rank
    one           a single document over all ranks, contiguous: for the plugin and Ulysses only

Workloads are batches of arXiv 2510.18121's length distributions, packed in order over the ranks; a document that
passes a rank's end is cut there, into two documents, for every variant alike. Plain packed training can do no other,
and so its attention work is less than that of the uncut documents; with ":whole" they are not cut, and plain is left
out.

Variants: "plain" is the same model under DeepSpeed without the plugin; "distca" the plugin, with each of the overlaps,
tolerances and blocks given; "ulysses" DeepSpeed-Ulysses over all ranks on the same global batch; "evened" is plain on
other documents, which have the mean of the ranks' attention on every rank; "plain_whole", "distca_whole" and
"distca_free" are plain and the plugin on the same documents where the loader's placements "whole" and "free" store
them (docs/data.md). All have the same kernel, the same initial weights, the same batches in the same order, and run in
one process, an engine for each variant. One variant follows the other, which shows the memory of each; with `--turns`
they take turns step by step, so that a card that warms up favours none. To try the script it runs on CPU too:
`--hidden 256 --head-dim 32 --tokens 512`. What is reported: steps/report.py, NOTES.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from steps import measure
from steps.batches import MIXES, ONE, OPTIONS, Batch, mix, workload
from steps.ending import leave
from steps.report import Results
from steps.variants import KINDS, LEFT_OUT, UlyssesAttention, Variant, make_variants


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="of each rank")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=128, help="four query heads share a key/value head")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--mixes", nargs="*", default=list(MIXES), choices=[*MIXES, ONE])
    parser.add_argument("--workloads", nargs="*", default=[], metavar=f"NAME:BATCHES{OPTIONS}")
    parser.add_argument("--context", type=int, default=131072, help="of the workloads' sampling")
    parser.add_argument(
        "--variants", nargs="+", default=["plain", "distca", "ulysses"], choices=KINDS, help="in the order to run them"
    )
    parser.add_argument(
        "--cold", action="store_true", help="without those four, whose plans are large: for the growth of memory"
    )
    parser.add_argument("--turns", action="store_true", help="all engines at once, a step of each in turn; no memory")
    parser.add_argument(
        "--overlap", nargs="+", default=["none", "local_first"], help=f'"{LEFT_OUT}": the key left out'
    )
    parser.add_argument("--tolerance", nargs="+", type=float, help="left out: the plugin's default")
    parser.add_argument("--exchange", nargs="+", choices=["nccl", "peer_copy"], help="left out: as the plugin chooses")
    parser.add_argument(
        "--block", nargs="+", type=json.loads, default=[{}], help="JSON, more keys for the plugin's variants"
    )
    parser.add_argument("--steps", type=int, default=6, help="measured, on each batch")
    parser.add_argument(
        "--warm-up", type=int, default=3, help="steps before them; an engine begins with four on other batches"
    )
    parser.add_argument("--budget-seconds", type=float, help="stop after that long and report what there is")
    parser.add_argument("--json", type=Path, help="everything that was measured, rewritten as it comes")
    parser.add_argument("--save", type=Path, help="the report in Markdown")
    parser.add_argument(
        "--timeline",
        type=Path,
        help="chrome traces of a step of the plugin's last variant, one for each rank; .json.gz",
    )
    return parser.parse_args()


def start() -> torch.device:
    """The process group, and the device of this rank."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        deepspeed.init_distributed("nccl", timeout=timedelta(minutes=5))
        return device
    # Shared-memory collectives would be compiled on first use and leave buffers behind.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", timeout=timedelta(minutes=5))
    return torch.device("cpu")


def main() -> None:
    args = parse_args()
    device = start()
    budget = measure.Budget(args.budget_seconds, device)
    world = dist.get_world_size()
    batches = [mix(name, world, args.tokens) for name in args.mixes]
    for spec in args.workloads:
        batches += workload(spec, world, args.tokens, args.context)
    results = Results(about(args, device, world))
    query, key_value, _ = measure.heads(args)
    kinds = list(args.variants)
    unfit = UlyssesAttention.unfit(world, query, key_value)
    if unfit and "ulysses" in kinds:
        kinds = [kind for kind in kinds if kind != "ulysses"]
        note(results, unfit + ".")
    variants = make_variants(kinds, args.overlap, args.tolerance, args.exchange, args.block)
    traced = next((v for v in reversed(variants) if v.block is not None), None)
    if args.turns:
        take_turns(args, variants, batches, budget, results, device)
        variants = []
    for variant in variants:
        complete = run(args, variant, batches, budget, results, device, trace=variant is traced)
        if dist.get_rank() == 0 and args.json:
            results.save_json(args.json)
        if not complete:
            note(results, f"The budget of {args.budget_seconds:g} s was over in {variant.name}; the rest was not run.")
            break
    if dist.get_rank() == 0:
        report(args, results)
    leave()


def run(
    args: argparse.Namespace,
    variant: Variant,
    batches: list[Batch],
    budget: measure.Budget,
    results: Results,
    device: torch.device,
    trace: bool,
) -> bool:
    """Collective: one variant on all batches that it fits; False if the budget was over before the last."""
    left = measure.settle(device)
    mine = [batch for batch in batches if variant.fits(batch)]
    if not mine:
        return True
    if budget.over():
        return False
    engine = measure.make_engine(args, variant, device)
    reserved: list[float] = []
    if not args.cold:
        measure.begin(engine, variant, args, reserved)
    complete = True
    for index, batch in enumerate(mine):
        if index and budget.over():
            complete = False
            break
        row = measure.measure(engine, variant, batch, args, reserved)
        results.add(batch.group, batch.name, variant.name, row)
        if dist.get_rank() == 0:
            print(results.line(batch.name, variant.name), flush=True)
            if args.json:
                results.save_json(args.json)
    if reserved:
        rows = [rows[variant.name] for rows in results.rows.values() if variant.name in rows]
        peaks = [max(peak) for peak in zip(*(row["peak_gib"] for row in rows), strict=True)]
        growth = reserved[-1] - reserved[min(2, len(reserved) - 1)]
        gathered = measure.gather_floats([left, growth], device)
        results.memory[variant.name] = {
            "peak_gib": peaks,
            "left_gib": [values[0] for values in gathered],
            "growth_gib": [values[1] for values in gathered],
            "reserved_gib_after_steps": reserved,  # of rank 0
        }
        if max(values[0] for values in gathered) > 0.02 * max(peaks):
            worst = max(values[0] for values in gathered)
            note(
                results, f"{variant.name}: {worst:.2f} GiB were still allocated when it began; its peak has them too."
            )
    if args.timeline and trace:
        measure.timeline(engine, variant, mine[0], args, args.timeline)
    measure.destroy(engine, variant)
    return complete


def take_turns(
    args: argparse.Namespace,
    variants: list[Variant],
    batches: list[Batch],
    budget: measure.Budget,
    results: Results,
    device: torch.device,
) -> None:
    """Collective: all variants on every batch, a step of each in turn, there and back."""
    engines = {variant.name: measure.make_engine(args, variant, device) for variant in variants}
    for variant in variants:
        measure.begin(engines[variant.name], variant, args, [])
    for number, batch in enumerate(batches):
        if budget.over():
            note(results, f"The budget of {args.budget_seconds:g} s was over before {batch.name}.")
            break
        mine = {v.name: measure.Measurement(engines[v.name], v, batch, args) for v in variants if v.fits(batch)}
        measure.keep_busy(device)  # a card is fast after the pause between two batches
        for turn in range(args.warm_up + args.steps):
            # There and back, since a card is fast after a step in which it waited; every other batch begins with back.
            for measurement in list(mine.values())[:: -1 if (turn + number) % 2 else 1]:
                measurement.step(count=turn >= args.warm_up)
        for name, measurement in mine.items():
            row = measurement.row()
            row.pop("peak_gib", None)  # of all engines together
            results.add(batch.group, batch.name, name, row)
        if dist.get_rank() == 0:
            print("\n".join(results.line(batch.name, name) for name in mine), flush=True)
            if args.json:
                results.save_json(args.json)
    for variant in variants:
        measure.destroy(engines[variant.name], variant)


def note(results: Results, text: str) -> None:
    """A remark for the report, shown at once."""
    results.notes.append(text)
    if dist.get_rank() == 0:
        print(text, flush=True)


def about(args: argparse.Namespace, device: torch.device, world: int) -> dict:
    return {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "world": world,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        # Names of the files that are written, without the folders of one machine.
        "command": shlex.join([f"benchmarks/{Path(sys.argv[0]).name}", *(_name(word, args) for word in sys.argv[1:])]),
        "args": {k: v.name if isinstance(v, Path) else v for k, v in vars(args).items()},
    }


def _name(word: str, args: argparse.Namespace) -> str:
    return Path(word).name if Path(word) in (args.json, args.save, args.timeline) else word


def report(args: argparse.Namespace, results: Results) -> None:
    text = results.markdown()
    if args.save:
        args.save.write_text(text)
    if args.json:
        results.save_json(args.json)
    print(f"\n{results.summary()}\n\n{results.memory_table()}", flush=True)


if __name__ == "__main__":
    main()
