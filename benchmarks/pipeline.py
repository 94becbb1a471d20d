# SPDX-License-Identifier: Apache-2.0
"""Step time of a pipeline: PipelineEngine alone, attention shared over the grid, and the ideal.

    torchrun --nproc_per_node 2 benchmarks/pipeline.py

A Llama of Llama-3-8B's width (vocabulary 8192) over as many stages as there are GPUs (--stages: fewer, the rest are
replicas), bf16, ZeRO-1, AdamW, random tokens. A step has 8 micro-batches of equally many tokens, filled with documents
of the Pretrain mix of arXiv 2510.18121 in a random order, cut where a micro-batch is full. Rows of the table:

    plain   PipelineEngine's own schedule, every rank computes the attention of its own micro-batches by the very
            kernel that the other rows use, with attention outputs kept under activation checkpointing as they do
    grid    `distca.pipeline.scope` "grid"
    even    plain, on micro-batches that all have the mean attention work of the stream: no stragglers, but bubbles
    ideal   plain on documents of 128 tokens (next to no attention), plus the kernels' seconds of attention in plain,
            divided by the number of GPUs: attention spread evenly over all GPUs and all of the step, for nothing

A number is the median of the slowest rank's steps. Share of the ideal: (plain - row) / (plain - ideal).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from workloads.sampling import document_lengths

import deepspeed_distca  # noqa: F401  hooks deepspeed.initialize
from deepspeed_distca.integrations.pipeline import DecoderPipeline

VOCABULARY = 8192
NO_ATTENTION = 128
PLAIN = {"servers": 1, "pipeline": {"scope": "stage"}}
GRID = {"pipeline": {"scope": "grid"}}
# The smallest context that the published sampling is given for; documents are cut to the micro-batch anyway.
SAMPLED_CONTEXT = 131072


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, help="left out: one for each GPU")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=65536, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="random orders of the documents")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--overlap", choices=["none", "local_first"], help="left out: as the plugin chooses")
    parser.add_argument("--static-shape", action="store_true", help="send no shapes ahead of activations")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write everything that was measured")
    return parser.parse_args()


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
        "distca": {"enabled": True, **distca, **({"overlap": args.overlap} if args.overlap else {})},
    }
    return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=settings)[0]


def measure(engine, micro_batches: list[list[int]], steps: int, warm_up: int) -> dict:
    """Milliseconds of the slowest rank in each step, and what the last step's statistics say."""
    batches = batches_of(micro_batches, engine.grid.get_data_parallel_rank())

    def forever() -> Iterator:
        while True:
            yield from batches

    data, times, cuda = forever(), [], engine.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for index in range(warm_up + steps):
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        engine.train_batch(data)
        if cuda:
            torch.cuda.synchronize()
        took = torch.tensor([(time.perf_counter() - start) * 1e3], device=engine.device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if index >= warm_up:
            times.append(float(took))
    stats = engine.distca.stats
    attention = torch.tensor([stats.server_seconds * 1e3], device=engine.device)
    dist.all_reduce(attention)
    most = torch.tensor(
        [torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0, stats.planning_ms], device=engine.device
    )
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return {
        "ms": statistics.median(times),
        "all_ms": times,
        "attention_ms": float(attention),  # of all ranks together
        "balance": [stats.balance_before, stats.balance_after],
        "mib_sent_max": stats.bytes_sent_max / 2**20,
        "planning_ms": float(most[1]),
        "peak_gib": float(most[0]),
        "kernel": engine.distca.server.kernel,
    }


def measure_all(args: argparse.Namespace, streams: dict[str, list[list[int]]], distca: dict, device) -> dict:
    engine = make_engine(args, distca, device)
    results = {name: measure(engine, lengths, args.steps, args.warm_up) for name, lengths in streams.items()}
    engine.distca.detach()
    engine.destroy()
    del engine
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return results


def main() -> None:
    args = parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        deepspeed.init_distributed("nccl", timeout=timedelta(minutes=5))
    else:  # to try the script; CPU timings say nothing about GPUs
        device = torch.device("cpu")
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
    args.stages = args.stages or dist.get_world_size()

    streams = {f"seed {seed}": stream(args.tokens, args.micro_batches, seed) for seed in args.seeds}
    even = {f"even {name}": evened(lengths, args.tokens) for name, lengths in streams.items()}
    bare = {"bare": [_short(args.tokens)] * args.micro_batches}
    plain = measure_all(args, {**streams, **even, **bare}, PLAIN, device)
    grid = measure_all(args, streams, GRID, device)
    if dist.get_rank() == 0:
        report(args, streams, plain, grid)
    dist.barrier()
    dist.destroy_process_group()


def report(args: argparse.Namespace, streams: dict[str, list[list[int]]], plain: dict, grid: dict) -> None:
    world = dist.get_world_size()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"\n{card} x{world}, torch {torch.__version__}, kernel {next(iter(grid.values()))['kernel']}: {args.stages} "
        f"stages x {world // args.stages} replicas, {args.layers} layers of width {args.hidden}, {args.micro_batches} "
        f"micro-batches of {args.tokens} tokens, checkpointing {'on' if args.checkpointing else 'off'}"
    )
    print("| stream | row | ms | of plain | share of the ideal | balance | MiB sent in a tick, at most | peak GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in streams:
        base, bare = plain[name], plain["bare"]
        ideal = bare["ms"] + (base["attention_ms"] - bare["attention_ms"]) / world
        rows = {"plain": base, "grid": grid[name], "even": plain[f"even {name}"], "ideal": {"ms": ideal}}
        for row, values in rows.items():
            share = (base["ms"] - values["ms"]) / (base["ms"] - ideal) if base["ms"] > ideal else float("nan")
            cells = [name, row, f"{values['ms']:.1f}", f"{values['ms'] / base['ms']:.3f}", f"{share:.0%}"]
            moved = ["", ""]
            if row == "grid":
                before, after = values["balance"]
                moved = [f"{before:.2f} -> {after:.2f}", f"{values['mib_sent_max']:.0f}"]
            cells += [*moved, f"{values['peak_gib']:.1f}" if "peak_gib" in values else ""]
            print(f"| {' | '.join(cells)} |")
        print(
            f"{name}: attention {base['attention_ms']:.0f} ms of all GPUs in plain, step without attention "
            f"{bare['ms']:.1f} ms, planning {grid[name]['planning_ms']:.1f} ms in grid"
        )
    if args.json:
        everything = {"card": card, "world": world, "args": {**vars(args), "json": None}, "plain": plain, "grid": grid}
        args.json.write_text(json.dumps({**everything, "streams": streams}))


if __name__ == "__main__":
    main()
