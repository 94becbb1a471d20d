# SPDX-License-Identifier: Apache-2.0
"""Step time of a pipeline: PipelineEngine alone, attention shared over the grid, and the ideal.

    torchrun --nproc_per_node 2 benchmarks/pipeline.py --smoke                  seconds: does everything run?
    torchrun --nproc_per_node 2 benchmarks/pipeline.py --budget-seconds 200 --json results.json

A Llama of Llama-3-8B's width (vocabulary 8192) over as many stages as there are GPUs (--stages: fewer, the rest are
replicas), bf16, ZeRO-1, AdamW, random tokens. A step has 8 micro-batches of equally many tokens, filled with documents
of the Pretrain mix of arXiv 2510.18121 in a random order, cut where a micro-batch is full. Rows of the table:

    plain   PipelineEngine's own schedule, every rank computes the attention of its own micro-batches by the very
            kernel that the other rows use, with attention outputs kept under activation checkpointing as they do
    grid    `distca.advanced.pipeline_scope` "grid"
    bare    plain on documents of 128 tokens: next to no attention
    even    plain, on micro-batches that all have the mean attention work of the stream: no stragglers, but bubbles
    ideal   bare, plus the kernels' seconds of attention in plain, divided by the number of GPUs: attention spread
            evenly over all GPUs and all of the step, for nothing

Rows take turns, a step of each in a round, so that a GPU that slows down slows all of them. A number is the median of
the slowest rank's steps. Share of the ideal: (plain - row) / (plain - ideal). Every step prints a line, the first one
of each engine a line for each pass of every rank; the results so far are written after each step. A step that takes
longer than --dump-seconds prints where every thread stands.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from steps.ending import leave
from transformers import LlamaConfig, LlamaForCausalLM
from workloads.sampling import document_lengths

import deepspeed_distca  # noqa: F401  hooks deepspeed.initialize
from deepspeed_distca.pipeline import DecoderPipeline

VOCABULARY = 8192
NO_ATTENTION = 128
ENGINES = {"plain": {"servers": 1, "advanced": {"pipeline_scope": "stage"}}, "grid": {}}
ROWS = ("plain", "grid", "bare", "even")
SMOKE = {
    "layers": 2,
    "hidden": 1024,
    "tokens": 4096,
    "micro_batches": 4,
    "warm_up": 1,
    "steps": 2,
    "dump_seconds": 20.0,
    "timeout_seconds": 90.0,
}
# The smallest context that the published sampling is given for; documents are cut to the micro-batch anyway.
SAMPLED_CONTEXT = 131072


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help=f"a small run: {SMOKE}")
    parser.add_argument("--stages", type=int, help="left out: one for each GPU")
    parser.add_argument("--layers", type=int, default=4, help="of all stages together")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=65536, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="random orders of the documents")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="the ideal needs plain and bare")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kernel", help="left out: the best that fits")
    parser.add_argument("--overlap", choices=["none", "local_first"], help="left out: as the plugin chooses")
    parser.add_argument("--static-shape", action="store_true", help="send no shapes ahead of activations")
    parser.add_argument("--steps", type=int, default=3, help="rounds that count")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before them")
    parser.add_argument("--budget-seconds", type=float, help="begin no round that would end later than this")
    parser.add_argument("--dump-seconds", type=float, default=60.0, help="a step longer than this tells where it is")
    parser.add_argument("--timeout-seconds", type=float, default=180.0, help="of every collective")
    parser.add_argument("--json", type=Path, help="where to write everything that was measured, after each step")
    args = parser.parse_args()
    if args.smoke:
        parser.set_defaults(**SMOKE)
        args = parser.parse_args()
    return args


class Clock:
    """Prints lines with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def say(self, text: str, everywhere: bool = False) -> None:
        """On rank 0, or on every rank."""
        if everywhere or dist.get_rank() == 0:
            print(f"[{self.seconds:7.1f} s, rank {dist.get_rank()}] {text}", flush=True)


def stream(tokens: int, count: int, seed: int) -> list[list[int]]:
    """Document lengths of each micro-batch: the sampled documents in order, cut where a micro-batch is full."""
    micro_batches: list[list[int]] = [[]]
    room = tokens
    for length in document_lengths("pretrain", SAMPLED_CONTEXT, shuffle=seed).tolist():
        while length:
            part = min(length, room)
            micro_batches[-1].append(part)
            length, room = length - part, room - part
            if not room:
                if len(micro_batches) == count:
                    return micro_batches
                micro_batches.append([])
                room = tokens
    raise ValueError(f"the documents do not last for {count} micro-batches of {tokens} tokens")


def evened(micro_batches: list[list[int]], tokens: int) -> list[list[int]]:
    """As many micro-batches, each with the mean attention work: one long document, the rest short ones."""
    work = np.mean([sum(n * n for n in lengths) for lengths in micro_batches])
    # long^2 + (tokens - long) * short = work
    short = NO_ATTENTION
    long = int((short + np.sqrt(short**2 - 4 * (tokens * short - work))) / 2) if work > tokens * short else short
    return [[long, *_short(tokens - long)] for _ in micro_batches]


def _short(tokens: int) -> list[int]:
    return [NO_ATTENTION] * (tokens // NO_ATTENTION) + [tokens % NO_ATTENTION] * bool(tokens % NO_ATTENTION)


def batches_of(micro_batches: list[list[int]], replica: int) -> list:
    """Random tokens in PipelineEngine's form; each replica goes through the stream from another micro-batch on."""
    generator = torch.Generator().manual_seed(replica)
    start, batches = replica % len(micro_batches), []
    for lengths in micro_batches[start:] + micro_batches[:start]:
        ids = torch.randint(0, VOCABULARY, (1, sum(lengths)), generator=generator)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        labels = ids.roll(-1, 1)
        labels[0, np.cumsum(lengths) - 1] = -100
        batches.append(((ids, positions), labels))
    return batches


def make_engine(args: argparse.Namespace, distca: dict, device: torch.device):
    torch.manual_seed(0)
    heads = args.hidden // args.head_dim
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=args.head_dim,
        max_position_embeddings=args.tokens,
        use_cache=False,
        attn_implementation="sdpa",
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = LlamaForCausalLM(config).to(dtype)
    module = DecoderPipeline(model, args.stages, dynamic_shape=not args.static_shape)
    del model
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": args.micro_batches,
        "bf16": {"enabled": device.type == "cuda"},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "pipeline": {"activation_checkpoint_interval": int(args.checkpointing), "use_reentrant": True},
        "steps_per_print": 10**9,
        "distca": {
            **distca,
            "timeout_seconds": args.timeout_seconds,
            **({"overlap": args.overlap} if args.overlap else {}),
            **({"kernel": args.kernel} if args.kernel else {}),
        },
    }
    return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=settings)[0]


@dataclass
class Built:
    """An engine that rows are measured on.

    Attributes:
        allocated: bytes that it holds between steps.
        fresh: it has not run yet.
    """

    engine: object
    allocated: int
    fresh: bool = True


@dataclass
class Row:
    """One row of the table for one stream: micro-batches for an engine, and what its steps gave.

    Attributes:
        ms: of the slowest rank, by step, warm-up included.
    """

    built: Built
    batches: Iterator
    ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    attention_ms: float = 0.0  # of all ranks together, in the last step
    planning_ms: float = 0.0
    peak_gib: float = 0.0
    balance: tuple[float, float] = (1.0, 1.0)
    mib_sent_max: float = 0.0

    def median(self, warm_up: int) -> float:
        """Of the steps that count; the last one where the budget ended before any of them."""
        return statistics.median(self.ms[warm_up:] or self.ms[-1:] or [float("nan")])

    def as_dict(self) -> dict:
        return {k: v for k, v in vars(self).items() if k not in ("built", "batches")}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _telling(engine, say: Callable[[str], None]) -> dict:
    """The engine's instructions, its passes with a line when the device has finished them."""

    def told(name: str, run: Callable) -> Callable:
        def tell(self, **arguments):
            run(self, **arguments)
            _synchronize()
            say(f"stage {engine.stage_id}: {name} done")

        return tell

    passes = {
        kind: told(kind.__name__, engine._INSTRUCTION_MAP[kind])
        for kind in engine._INSTRUCTION_MAP
        if kind in (schedule.ForwardPass, schedule.BackwardPass, schedule.OptimizerStep)
    }
    return {**engine._INSTRUCTION_MAP, **passes}


def step(row: Row, name: str, args: argparse.Namespace, clock: Clock) -> None:
    """One step of a row; collective. Adds to the row what it gave."""
    built, engine = row.built, row.built.engine
    instructions = engine._INSTRUCTION_MAP
    if built.fresh:
        clock.say(f"{name}: the first step of this engine; kernels are compiled in it")
        engine._INSTRUCTION_MAP = _telling(engine, lambda text: clock.say(text, everywhere=True))
    before = _allocated()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    _synchronize()
    dist.barrier()
    faulthandler.dump_traceback_later(args.dump_seconds, repeat=True)
    start = time.perf_counter()
    loss = engine.train_batch(row.batches)
    _synchronize()
    took = (time.perf_counter() - start) * 1e3
    faulthandler.cancel_dump_traceback_later()
    engine._INSTRUCTION_MAP, built.fresh = instructions, False
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    stats = engine.distca.stats
    most = torch.tensor([took, peak - before + built.allocated, stats.planning_ms], device=engine.device)
    total = torch.tensor([stats.server_seconds * 1e3], device=engine.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    built.allocated += _allocated() - before
    row.ms.append(float(most[0]))
    row.losses.append(float(loss))
    row.peak_gib = max(row.peak_gib, float(most[1]) / 2**30)
    row.planning_ms, row.attention_ms = float(most[2]), float(total)
    row.balance, row.mib_sent_max = (stats.balance_before, stats.balance_after), stats.bytes_sent_max / 2**20
    clock.say(
        f"{name}: step {len(row.ms)} of {args.warm_up + args.steps}: {row.ms[-1]:.1f} ms, loss {row.losses[-1]:.4f}, "
        f"attention {row.attention_ms:.0f} ms of all GPUs, peak {row.peak_gib:.1f} GiB"
    )


def make_rows(args: argparse.Namespace, clock: Clock, device: torch.device) -> dict[str, Row]:
    """Rows by "seed 0 plain" and the like, "bare" once for all seeds."""
    streams = {f"seed {seed}": stream(args.tokens, args.micro_batches, seed) for seed in args.seeds}
    wanted = {}
    for name, lengths in streams.items():
        given = {"plain": lengths, "grid": lengths, "even": evened(lengths, args.tokens)}
        wanted |= {f"{name} {row}": given[row] for row in given if row in args.rows}
    if "bare" in args.rows:
        wanted["bare"] = [_short(args.tokens)] * args.micro_batches
    kinds = {name: "grid" if name.endswith("grid") else "plain" for name in wanted}
    built = {}
    for kind in dict.fromkeys(kinds.values()):
        before = _allocated()
        engine = make_engine(args, ENGINES[kind], device)
        gc.collect()  # the whole model, of which the engine keeps a stage
        if device.type == "cuda":
            torch.cuda.empty_cache()
        built[kind] = Built(engine, _allocated() - before)
        clock.say(f"engine {kind} built, {built[kind].allocated / 2**30:.1f} GiB", everywhere=True)
    replica = next(iter(built.values())).engine.grid.get_data_parallel_rank()
    return {name: Row(built[kinds[name]], cycle(batches_of(lengths, replica))) for name, lengths in wanted.items()}


def main() -> None:
    args, clock = parse_args(), Clock()
    timeout = timedelta(seconds=args.timeout_seconds)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        deepspeed.init_distributed("nccl", timeout=timeout)
    else:  # to try the script; CPU timings say nothing about GPUs
        device = torch.device("cpu")
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo", timeout=timeout)
    args.stages = args.stages or dist.get_world_size()

    rows = make_rows(args, clock, device)
    rounds, expected = args.warm_up + args.steps, 0.0
    for index in range(rounds):
        # The same on all ranks, or some would begin a round that others do not.
        now = torch.tensor([clock.seconds, expected], device=device)
        dist.all_reduce(now, op=dist.ReduceOp.MAX)
        began, expected = now.tolist()
        if args.budget_seconds and began + expected > args.budget_seconds:
            clock.say(f"the budget of {args.budget_seconds:.0f} s ends before round {index + 1} of {rounds} would")
            break
        for name, row in rows.items():
            step(row, name, args, clock)
            if dist.get_rank() == 0 and args.json:
                write(args, rows)
        # By the median step: first steps compile, those of "bare" too, for 20 s each, and the others do not.
        expected = len(rows) * statistics.median(row.ms[-1] for row in rows.values()) / 1e3
    if dist.get_rank() == 0:
        report(args, rows)
    leave()


def _card() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def write(args: argparse.Namespace, rows: dict[str, Row]) -> None:
    results = {name: {**row.as_dict(), "median_ms": row.median(args.warm_up)} for name, row in rows.items()}
    settings = {**vars(args), "json": None}
    everything = {"card": _card(), "world": dist.get_world_size(), "torch": torch.__version__, "args": settings}
    args.json.write_text(json.dumps({**everything, "rows": results}))


def report(args: argparse.Namespace, rows: dict[str, Row]) -> None:
    world = dist.get_world_size()
    kernel = next(iter(rows.values())).built.engine.distca.server.kernel
    print(
        f"\n{_card()} x{world}, torch {torch.__version__}, kernel {kernel}: {args.stages} stages x "
        f"{world // args.stages} replicas, {args.layers} layers of width {args.hidden}, {args.micro_batches} "
        f"micro-batches of {args.tokens} tokens, checkpointing {'on' if args.checkpointing else 'off'}"
    )
    if not any(row.ms[args.warm_up :] for row in rows.values()):
        print("No step counts: the rounds were warm-up, in which kernels are compiled.")
    print("| stream | row | ms | of plain | share of the ideal | balance | MiB sent in a tick, at most | peak GiB |")
    print("|---|---|---|---|---|---|---|---|")
    nothing = float("nan")
    bare = rows.get("bare")
    for seed in args.seeds:
        of_seed = {name: rows[f"seed {seed} {name}"] for name in ROWS if f"seed {seed} {name}" in rows}
        times = {name: row.median(args.warm_up) for name, row in of_seed.items()}
        base, ideal = times.get("plain", nothing), nothing
        if bare and "plain" in of_seed:
            ideal = bare.median(args.warm_up) + (of_seed["plain"].attention_ms - bare.attention_ms) / world
        for name, ms in {**times, "ideal": ideal}.items():
            share = (base - ms) / (base - ideal) if base > ideal else nothing
            row, moved, peak = of_seed.get(name), ["", ""], ""
            if row is not None:
                peak = f"{row.peak_gib:.1f}"
                if name == "grid":
                    moved = [f"{row.balance[0]:.2f} -> {row.balance[1]:.2f}", f"{row.mib_sent_max:.0f}"]
            cells = [f"seed {seed}", name, f"{ms:.1f}", f"{ms / base:.3f}", f"{share:.0%}", *moved, peak]
            print(f"| {' | '.join(cells)} |")
        if {"plain", "grid"} <= set(of_seed):
            plain, grid = of_seed["plain"], of_seed["grid"]
            print(
                f"seed {seed}: attention {plain.attention_ms:.0f} ms of all GPUs in plain, {grid.attention_ms:.0f} in "
                f"grid; planning {grid.planning_ms:.1f} ms in grid; first loss {plain.losses[0]:.5f} in plain, "
                f"{grid.losses[0]:.5f} in grid"
            )
    if bare:
        print(
            f"bare: {bare.median(args.warm_up):.1f} ms, {bare.attention_ms:.0f} of attention on all GPUs", flush=True
        )


if __name__ == "__main__":
    main()
