# SPDX-License-Identifier: Apache-2.0
"""Steps of benchmarks/pack_step.py, measured: ranks under torchrun, plain and plugin in turns."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from small_steps import MODELS, VOCABULARY, about, begin, build, meet, on_device
from transformers import DataCollatorWithFlattening

from deepspeed_distca import AccumulationLoader, PackedSequenceCollator
from steps.ending import leave
from steps.measure import gather_floats, keep_busy

#: "ideal": every rank runs the micro-batches of all ranks, plain, and the time is divided by their number. So
#: nobody waits for anybody, and the optimizer's part is one step's for all ranks together.
KINDS = ("plain", "plugin", "ideal")
#: By micro-batch and rank, the indices of its sequences.
Step = list[list[list[int]]]


def llama(width: int, layers: int | None) -> dict[str, Any]:
    """The configuration of what `build` makes, for predictions."""
    default, feed_forward, head_dim = MODELS[width]
    heads = width // head_dim
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers or default,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
    }


def measure(args: argparse.Namespace, plans: Callable[[str, int, int], dict[str, Any]]) -> None:
    """Collective, and ends the process.

    Args:
        args: of benchmarks/pack_step.py.
        plans: for a mix, the ranks and the ZeRO stage the sequences' "lengths", the steps "plain" and "plugin", and
            what is predicted.
    """
    device, liger = begin()
    args.attention = args.attention or ("flash_attention_4" if device.type == "cuda" else "sdpa")
    results: dict[str, Any] = {"about": about(args, device, liger), "steps": []}
    for zero in args.zero:
        engines = {kind: build(args, kind, args.width, zero, device) for kind in KINDS[:2]}
        for mix in args.mixes:
            results["steps"].append(row(args, engines, mix, zero, plans(mix, dist.get_world_size(), zero), device))
            if dist.get_rank() == 0:  # a run may be cut off
                print(time.strftime("%T"), results["steps"][-1], flush=True)
                save(args, results)
        for engine in engines.values():
            engine.destroy()
        engines.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        print(f"\n{table(results)}\n", flush=True)
        save(args, results)
    leave()


def row(
    args: argparse.Namespace, engines: dict[str, Any], mix: str, zero: int, plan: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Collective: one mix."""
    lengths, rank = plan["lengths"], dist.get_rank()
    mine = {kind: [batch[rank] for batch in plan[kind]] for kind in KINDS[:2]}
    if zero < 2:  # ranks meet at the end of the step alone, and may have fewer micro-batches than others
        mine["plain"] = [row for row in mine["plain"] if row]
    mine["ideal"] = [one for batch in plan["plugin"] for one in batch if one]
    batches = {kind: made(kind, rows, lengths, device) for kind, rows in mine.items()}
    keep_busy(device)
    taken: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for turn in range(args.turns + 1):  # the first is not counted
        for kind in KINDS[:: -1 if turn % 2 else 1]:
            engine = engines["plugin" if kind == "plugin" else "plain"]
            seconds = one_step(engine, batches[kind], device)
            if turn:
                taken[kind].append([s for (s,) in gather_floats([seconds], device)])
    stats = engines["plugin"].distca.stats
    return {
        "mix": mix,
        "zero": zero,
        "sequences": len(lengths),
        "tokens": int(lengths.sum()),
        "batches": {kind: len(plan[kind]) for kind in KINDS[:2]},
        "fullest": {kind: max(int(lengths[r].sum()) for b in plan[kind] for r in b) for kind in KINDS[:2]},
        "balance": [stats.balance_before, stats.balance_after],
        "moved": stats.bytes_moved > 0,
        "turns": taken,
        "seconds": {
            kind: statistics.median(map(max, turns)) / (dist.get_world_size() if kind == "ideal" else 1)
            for kind, turns in taken.items()
        },
        "predicted": plan["predicted"],
    }


def made(kind: str, rows: list[list[int]], lengths: np.ndarray, device: torch.device) -> list[dict[str, Any]]:
    """Batches of a rank's micro-batches: a sequence has the same tokens in all kinds."""
    collate = (
        PackedSequenceCollator() if kind == "plugin" else DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    )
    ids = [
        [{"input_ids": np.random.default_rng(i).integers(0, VOCABULARY, lengths[i]).tolist()} for i in row]
        for row in rows
    ]
    if kind != "plugin":  # which takes no empty row
        return [on_device(collate(row or [{"input_ids": [0, 0]}]), device) for row in ids]
    return [on_device(batch, device) for batch in AccumulationLoader([collate(row) for row in ids], len(ids))]


def one_step(engine: Any, batches: list[dict[str, Any]], device: torch.device) -> float:
    """Seconds of an optimizer step. Collective."""
    meet(device)
    start = time.perf_counter()
    for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
        engine.set_gradient_accumulation_boundary(left == 0)  # steps have different numbers of micro-batches
        loss = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def table(results: dict[str, Any]) -> str:
    about = results["about"]
    head = [
        "mix",
        "ZeRO",
        "sequences",
        "micro-batches: LPT",
        "pack_step",
        "fullest: LPT",
        "pack_step",
        "ms: LPT, plain",
        "pack_step and plugin",
        "ideal",
        "plugin / plain",
        "predicted",
        "ideal / plugin",
    ]
    lines = [head, ["---"] * len(head)]
    for r in results["steps"]:
        s, p = r["seconds"], r["predicted"]
        lines.append(
            [r["mix"] + ", moved" * r["moved"], str(r["zero"]), str(r["sequences"])]
            + [str(n) for n in r["batches"].values()]
            + [f"{n / about['cap']:.3f}" for n in r["fullest"].values()]
            + [f"{s[kind] * 1e3:.0f}" for kind in KINDS]
            + [f"{s['plugin'] / s['plain']:.3f}", f"{p['plugin'] / p['plain']:.3f}"]
            + [f"{s['ideal'] / s['plugin']:.3f}"]
        )
    said = (
        f"{about['ranks']} x {about['card']}, {about['processor']}; {about['date']}, torch {about['torch']}, "
        f"DeepSpeed {about['deepspeed']}, Liger {about['liger']}, width {about['width']}, "
        f"layers {about['layers'] or 'default'}, cap {about['cap']:,} tokens a rank, "
        f"checkpointing {about['checkpointing']}, block {json.dumps(about['block'])}, {about['turns']} turns."
    )
    return said + "\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    if args.json:
        args.json.write_text(json.dumps(results, indent=1, default=str) + "\n")
    if args.save:
        args.save.write_text(f"# A step of sequences, measured\n\n{table(results)}\n")
