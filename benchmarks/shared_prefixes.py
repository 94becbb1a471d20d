# SPDX-License-Identifier: Apache-2.0
"""Answers to shared prompts, with each prompt once and with a copy of it for every answer, in turns.

    torchrun --nproc_per_node 1 benchmarks/shared_prefixes.py --json results.json --save results.md

The model is as wide as Llama-3-8B (4 layers, 32/8 heads of 128, vocabulary 32000, bf16) under DeepSpeed with a
`distca` block, with Liger's kernels where they are installed. "shared" are batches of PrefixCollator, a few prompts
with all of their answers in a row; "apart" are PackedSequenceCollator's, each answer behind a prompt of its own, as
many in a row as fit. Only answers have targets. Timed is forward and backward of micro-batches, without the optimizer;
of "apart" some micro-batches only, as all of them are alike. "of tokens" is how many tokens there are apart for one
that is shared, which the ratio would be if every token took the same time. The loss is that of the same answers, both
ways.

A second table has one layer's core attention alone, for all answers to a prompt: the tree's tasks, what the cost model
takes them for, and against copies of the prompt. To try the script on CPU: `--width 64 --prompts 2 --case 96 4 16`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from small_steps import about, begin, build, on_device
from steps.ending import leave
from steps.measure import gather_floats, keep_busy

import deepspeed_distca
from deepspeed_distca.attention_server.core_attention import core_attention
from deepspeed_distca.attention_server.kernels import select_kernel
from deepspeed_distca.attention_server.merging import merge
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.steps import LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.config import DistCAConfig
from deepspeed_distca.cost_choice import find_cost_model
from deepspeed_distca.data import PrefixCollator
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import PHASES
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import home_tasks, task_costs

VOCABULARY = 32000
IGNORE = -100
#: (tokens of a prompt, answers, tokens of an answer)
Case = tuple[int, int, int]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=8, help="of all ranks together")
    parser.add_argument("--case", type=int, nargs=3, action="append", metavar=("PROMPT", "ANSWERS", "TOKENS"))
    parser.add_argument("--tokens", type=int, default=65536, help="the most of a micro-batch")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--apart", type=int, default=2, help="micro-batches of a turn without sharing")
    parser.add_argument("--attention", default="sdpa", help="of the model without the plugin, which is not run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", type=Path, help="the tables in Markdown")
    args = parser.parse_args()
    args.case = [tuple(case) for case in args.case or [(8192, 32, 512), (8192, 4, 2048)]]
    args.block, args.checkpointing, args.compile = {}, False, False
    args.ds_config = {"gradient_accumulation_steps": 1 << 30}  # no step is taken
    return args


def main() -> None:
    args = parse_args()
    device, liger = begin()
    results: dict[str, Any] = {"about": about(args, device, liger), "steps": [], "layers": []}
    for case in args.case:
        results["layers"] += one_layer(case, args, device)
    engine = build(args, "plugin", args.width, args.zero, device)
    for case in args.case:
        results["steps"].append(steps(engine, case, args, device))
        if dist.get_rank() == 0:
            print(json.dumps(results["steps"][-1]), flush=True)
    if dist.get_rank() == 0:
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
        text = report(results)
        print(text)
        if args.save:
            args.save.write_text(text)
    leave()


def features_of(case: Case, prompts: int, rank: int) -> list[dict[str, Any]]:
    prompt, answers, tokens = case
    draw = np.random.default_rng(rank)
    return [
        {
            "prompt_ids": draw.integers(0, VOCABULARY, prompt).tolist(),
            "answers": [draw.integers(0, VOCABULARY, tokens).tolist() for _ in range(answers)],
        }
        for _ in range(prompts)
    ]


def apart(features: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A document for every answer."""
    return [
        {"input_ids": f["prompt_ids"] + answer, "labels": [IGNORE] * len(f["prompt_ids"]) + answer}
        for f in features
        for answer in f["answers"]
    ]


def steps(engine: Any, case: Case, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    prompt, answers, tokens = case
    mine = math.ceil(args.prompts / dist.get_world_size())
    features = features_of(case, mine, dist.get_rank())
    group = prompt - 1 + answers * (tokens + 1)
    together, alone = max(1, args.tokens // group), max(1, args.tokens // (prompt + tokens))
    kinds = {
        "shared": [PrefixCollator()(features[i : i + together]) for i in range(0, mine, together)],
        "apart": [
            deepspeed_distca.PackedSequenceCollator()(apart(features)[i : i + alone])
            for i in range(0, args.apart * alone, alone)
        ],
    }
    targets = {kind: sum(batch["num_targets"] for batch in batches) for kind, batches in kinds.items()}
    batches = {kind: [on_device(batch, device) for batch in given] for kind, given in kinds.items()}
    loss = {kind: mean_loss(engine, features[0], kind, alone, device) for kind in kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    memory: dict[str, float] = {}
    keep_busy(device)
    for turn in range(args.turns + 1):
        for kind in list(kinds)[:: 1 if turn % 2 else -1]:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            taken = timed(lambda kind=kind: [run(engine, batch) for batch in batches[kind]], device)
            if device.type == "cuda":
                memory[kind] = torch.cuda.max_memory_allocated() / 2**30
            if turn:
                seconds[kind].append(max(row[0] for row in gather_floats([taken], device)))
    rate = {kind: targets[kind] / statistics.median(seconds[kind]) for kind in kinds}
    stored = answers * (prompt + tokens) / group
    return {
        "case": case,
        "prompts": mine,
        "tokens": {kind: [batch["input_ids"].numel() for batch in given] for kind, given in kinds.items()},
        "answer_tokens_per_second": rate,
        "ratio": rate["shared"] / rate["apart"],
        "of_tokens": stored,
        "share": rate["shared"] / rate["apart"] / stored,
        "peak_gib": memory,
        "loss": loss,
        "turns": seconds,
    }


def run(engine: Any, batch: dict[str, Any]) -> None:
    engine.backward(engine(**batch).loss)


def mean_loss(engine: Any, feature: dict[str, Any], kind: str, alone: int, device: torch.device) -> float:
    """Of all answers to one prompt."""
    texts = apart([feature])
    if kind == "shared":
        made = [PrefixCollator()([feature])]
    else:
        made = [deepspeed_distca.PackedSequenceCollator()(texts[i : i + alone]) for i in range(0, len(texts), alone)]
    total = 0.0
    for batch in made:
        output = engine(**on_device(batch, device))
        # The plugin divides by the targets of all ranks; those of this one are as many.
        total += output.loss.item() * batch["num_targets"]
        engine.backward(output.loss * 0)
    return total / sum(batch["num_targets"] for batch in made)


def one_layer(case: Case, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Core attention of one layer by forward and backward, in milliseconds for all answers to a prompt."""
    prompt, answers, tokens = case
    heads, kv_heads, dim = (32, 8, 128) if args.width == 4096 else (4, 2, 16)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copies = max(1, min(answers, args.tokens // (prompt + tokens)))
    tree = [(prompt - 1, None), *[(tokens + 1, 0)] * answers]
    layouts = {
        "shared": (Layout.from_trees([[tree]]), answers),
        "apart": (Layout.from_lengths([[prompt + tokens] * copies]), copies),
    }
    spec = AttentionSpec(dim**-0.5)
    found: dict[str, Any] = {"case": case}
    model = find_cost_model(DistCAConfig(), Heads(heads, kv_heads, dim), device=device, dtype=dtype).cost
    found["predicted"] = [
        float(task_costs(home_tasks(layouts["shared"][0]), model, phase).sum()) / 1e12 for phase in PHASES
    ]
    for kind, (layout, count) in layouts.items():
        part = RankPlan(RouteCompiler(layout, home_tasks(layout)).rank(0))
        plan, rows = LayerPlan.whole(part, part), int(layout.tokens[0])
        shapes = (heads, dim), (kv_heads, dim), (kv_heads, dim)
        q, k, v = (torch.randn(rows, *s, device=device, dtype=dtype, requires_grad=True) for s in shapes)
        kernel = select_kernel(
            None, device=device, dtype=dtype, q_heads=heads, kv_heads=kv_heads, head_dim=dim, v_head_dim=dim, spec=spec
        )
        dout = torch.randn(rows, heads, dim, device=device, dtype=dtype)
        out, _ = core_attention(q, k, v, plan, spec, kernel)
        forward = repeated(lambda q=q, k=k, v=v, p=plan, n=kernel: core_attention(q, k, v, p, spec, n), device)
        backward = repeated(lambda o=out, i=(q, k, v), d=dout: torch.autograd.grad(o, i, d, retain_graph=True), device)
        found[kind] = [1e3 * seconds * answers / count for seconds in (forward, backward)]
        if kind == "shared":
            span = slice(prompt - 1, rows)
            into, more = out.detach()[span], torch.randn_like(out)[span]
            lse = torch.randn(heads, rows, device=device)[:, span]
            found["merging"] = 1e3 * repeated(lambda a=into, b=more, c=lse: merge(a, c, b, c), device)
    return [found]


def repeated(call: Callable[[], Any], device: torch.device, times: int = 10) -> float:
    for _ in range(3):
        call()
    return statistics.median(timed(lambda: [call() for _ in range(times)], device) / times for _ in range(3))


def timed(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def report(results: dict[str, Any]) -> str:
    about = results["about"]
    versions = f"torch {about['torch']}, DeepSpeed {about['deepspeed']}, Liger {about['liger']}"
    columns = ["prompt, answers", "tokens of answers a second: shared", "apart", "ratio", "of tokens", "share"]
    columns += ["peak GiB: shared", "apart", "loss: shared", "apart"]
    lines = [
        "# Answers to shared prompts",
        "",
        f"{about['ranks']} x {about['card']}, {about['date']}, {versions}, width {about['width']}, "
        f"ZeRO-{about['zero']} (`benchmarks/shared_prefixes.py`).",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for row in results["steps"]:
        prompt, answers, tokens = row["case"]
        cells = [f"{row['prompts']} of {prompt:,}, {answers} of {tokens:,}"]
        cells += [f"{row['answer_tokens_per_second'][kind]:,.0f}" for kind in ("shared", "apart")]
        cells += [f"{row[name]:.2f}" for name in ("ratio", "of_tokens", "share")]
        cells += [f"{row['peak_gib'].get(kind, 0):.1f}" for kind in ("shared", "apart")]
        cells += [f"{row['loss'][kind]:.5f}" for kind in ("shared", "apart")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Core attention of one layer for all answers to a prompt, ms:",
        "",
        "| prompt, answers | shared: forward | backward | predicted: forward | backward | apart: forward | backward "
        "| merging, once |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["layers"]:
        prompt, answers, tokens = row["case"]
        times = " | ".join(f"{x:.2f}" for x in (*row["shared"], *row["predicted"], *row["apart"], row["merging"]))
        lines.append(f"| {prompt:,}, {answers} of {tokens:,} | {times} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
