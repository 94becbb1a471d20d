# SPDX-License-Identifier: Apache-2.0
"""Seconds of whole DeepSpeed steps with and without the plugin, and the share of the ideal speed-up that it reaches.

    torchrun --nproc_per_node 2 benchmarks/step_time.py --tokens 65536 --layers 4 --zero 1 --json results.json

The model is a Llama of Llama-3-8B's width (vocabulary 8192), trained in bf16 with AdamW on random tokens. Every rank
has the same number of tokens; the mixes differ in how they are divided into documents:

    long|short    one document of all tokens on even ranks, documents of 4096 on odd ranks
    half|short    two documents on even ranks, documents of 4096 on odd ranks
    even          one document of all tokens on every rank
    short         documents of 4096 on every rank

"plain" is the same model under DeepSpeed without the plugin, its documents attended by the very same kernel. The
ideal of long|short is the mean of plain even and plain short: the time if attention were evened out for nothing. All
variants run in turn within one process; a number is the median of the slowest rank's steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import deepspeed_distca  # noqa: F401  hooks deepspeed.initialize
from deepspeed_distca.attention_server.core_attention import LayerPlan, core_attention
from deepspeed_distca.attention_server.kernels import Kernel, select_kernel
from deepspeed_distca.attention_server.server_plan import ServerPlan
from deepspeed_distca.attention_server.tasks import AttentionSpec
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.plan import PlanCompiler
from deepspeed_distca.scheduler.tasks import home_tasks

SHORT = 4096
MIXES = {
    "long|short": lambda rank, tokens: [tokens] if rank % 2 == 0 else [SHORT] * (tokens // SHORT),
    "half|short": lambda rank, tokens: [tokens // 2] * 2 if rank % 2 == 0 else [SHORT] * (tokens // SHORT),
    "even": lambda rank, tokens: [tokens],
    "short": lambda rank, tokens: [SHORT] * (tokens // SHORT),
}


class PlainAttention:
    """Packed documents on this rank alone, by the plugin's kernel: what the plugin is compared with."""

    NAME = "plain_packed"

    def __init__(self) -> None:
        self.plan: LayerPlan | None = None
        self.kernel: Kernel | None = None
        AttentionInterface.register(self.NAME, self)

    def set_layout(self, layout: Layout, rank: int) -> None:
        mine = Layout.from_lengths([[s.length for s in layout.rank(rank)]])
        part = ServerPlan(PlanCompiler(mine, home_tasks(mine)).rank(0), lambda t: t.q_len * t.k_len)
        self.plan = LayerPlan(part, part, None, False)

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        if self.kernel is None:
            self.kernel = select_kernel(
                None, device=q.device, dtype=q.dtype, q_heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2]
            )
        out, _ = core_attention(q, k, v, self.plan, AttentionSpec(scaling), self.kernel)
        return out[None], None


def make_engine(args: argparse.Namespace, distca: dict | None, attention: str):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=max(1, args.hidden // 512),
        max_position_embeddings=args.tokens,
        rope_theta=500000.0,
        use_cache=False,
        attn_implementation=attention,
    )
    with torch.device(torch.cuda.current_device()):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.zero},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    if distca is not None:
        ds_config["distca"] = distca
    return deepspeed.initialize(model=model, config=ds_config)[0]


def batch_of(layout: Layout, rank: int, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    lengths = {int(d): int(n) for _, d, _, n in layout.segments}
    documents = {d: torch.randint(0, 8192, (n,), generator=generator).numpy() for d, n in lengths.items()}
    batch = batch_from_layout(documents, layout, rank)
    mine = Layout.from_lengths([[s.length for s in layout.rank(rank)]])
    return {**batch, "layout": mine, "step_targets": batch["num_targets"]}


def measure(engine, batch: dict, steps: int, warm_up: int) -> list[float]:
    """Milliseconds of each step, of the slowest rank."""
    times = []
    for index in range(warm_up + steps):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        engine.backward(engine(**batch).loss)
        engine.step()
        torch.cuda.synchronize()
        took = torch.tensor([(time.perf_counter() - start) * 1e3], device=engine.device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if index >= warm_up:
            times.append(float(took))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="of each rank")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=list(MIXES))
    parser.add_argument("--overlap", nargs="+", default=["none", "local_first"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()

    plain = PlainAttention()
    variants = {"plain": (None, plain.NAME)}
    variants |= {f"distca {o}": ({"enabled": True, "overlap": o}, "sdpa") for o in args.overlap}
    layouts = {m: Layout.from_lengths([MIXES[m](r, args.tokens) for r in range(world)]) for m in args.mixes}
    results: dict[str, dict] = {mix: {} for mix in args.mixes}
    for variant, (block, attention) in variants.items():
        left = torch.cuda.memory_allocated()  # of the engine before: no part of this one's peak
        engine = make_engine(args, block, attention)
        for mix, layout in layouts.items():
            if block is None:
                plain.set_layout(layout, rank)
            batch = batch_of(layout, rank, seed=0)
            if block is None:
                tensors = ("input_ids", "labels", "shift_labels", "position_ids")
                batch = {k: batch[k].to(engine.device) for k in tensors}
            torch.cuda.reset_peak_memory_stats()
            times = measure(engine, batch, args.steps, args.warm_up)
            row = {"ms": statistics.median(times), "all_ms": times}
            row["peak_gib"] = (torch.cuda.max_memory_allocated() - left) / 2**30
            if block is not None:
                stats = engine.distca.stats
                row |= {
                    "balance_before": stats.balance_before,
                    "balance_after": stats.balance_after,
                    "planning_ms": stats.planning_ms,
                    "mib_sent_max": stats.bytes_sent_max / 2**20,
                    "kernel": engine.distca.server.kernel,
                }
            results[mix][variant] = row
        if block is not None:
            engine.distca.detach()
        engine.destroy()
        del engine
        torch.cuda.empty_cache()
    if rank == 0:
        report(args, results)
    dist.barrier()
    dist.destroy_process_group()


def report(args: argparse.Namespace, results: dict) -> None:
    card = torch.cuda.get_device_name()
    print(
        f"\n{card} x{dist.get_world_size()}, torch {torch.__version__}, {args.layers} layers of width {args.hidden}, "
        f"{args.tokens} tokens a rank, ZeRO-{args.zero}, checkpointing {'on' if args.checkpointing else 'off'}"
    )
    ideal = None
    if {"even", "short"} <= set(results):
        ideal = (results["even"]["plain"]["ms"] + results["short"]["plain"]["ms"]) / 2
    for mix, rows in results.items():
        for variant, row in rows.items():
            line = f"{mix:11s} {variant:20s} {row['ms']:8.1f} ms  x{row['ms'] / rows['plain']['ms']:.3f} of plain"
            if mix == "long|short" and ideal:
                line += f"  x{ideal and row['ms'] / ideal:.3f} of ideal ({ideal:.1f} ms)"
            if "balance_before" in row:
                line += (
                    f"  balance {row['balance_before']:.2f} -> {row['balance_after']:.2f}, sent "
                    f"{row['mib_sent_max']:.0f} MiB, planning {row['planning_ms']:.1f} ms"
                )
            print(f"{line}  peak {row['peak_gib']:.1f} GiB", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"card": card, "args": {**vars(args), "json": None}, "results": results}))


if __name__ == "__main__":
    main()
