# SPDX-License-Identifier: Apache-2.0
"""Steps of a whole Llama-3-8B in a script as users write it, with and without the plugin.

    torchrun --nproc_per_node 2 benchmarks/whole_model.py --json plain.json
    torchrun --nproc_per_node 2 benchmarks/whole_model.py --plugin --json plugin.json

ZeRO-3, bf16, activation checkpointing, Liger's fused loss, transformers' own flattening collator, 65,536 tokens a
rank, random weights and tokens. What `--plugin` changes is an import and the `distca` block, nothing else; without a
block the package leaves DeepSpeed untouched. Both runs have the same weights and the same rows: one document of all
tokens on even ranks beside sixteen on odd ones, one on each, sixteen on each, and batches of arXiv 2510.18121's two
length distributions, packed in order and cut at the ranks' ends. Each step is timed from a barrier to a barrier; the
first two are warm-up. To try the script on CPU: `--hidden 64 --layers 2 --tokens 512 --vocabulary 128 --batches 1
--attention sdpa`. The package has to be installed, or PYTHONPATH to name the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM


def main() -> None:
    args = parse_args()
    if args.plugin:
        import deepspeed_distca  # noqa: F401 -- the first of the two lines
    rows = document_lengths(args)
    engine, device = build(args)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    draw = np.random.default_rng(dist.get_rank())
    batches = {
        name: collate([{"input_ids": draw.integers(0, args.vocabulary, n).tolist()} for n in lengths])
        for name, lengths in rows.items()
    }
    for name in ("short", "long|short"):
        step(engine, batches[name], device)
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in batches}
    for _ in range(args.repeat):
        for name, batch in batches.items():
            seconds, loss = step(engine, batch, device)
            steps[name].append({"ms": seconds * 1e3, "loss": loss, **plan_of(engine)})
            memory = peak(device)
            if dist.get_rank() == 0:
                print("plugin" if args.plugin else "plain", name, json.dumps(steps[name][-1]), flush=True)
                save(args, steps, device, memory)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # no interpreter exit: threads of process groups may abort there


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", action="store_true", help="the two lines")
    parser.add_argument("--tokens", type=int, default=65536, help="of each rank")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--batches", type=int, default=5, help="of each length distribution (5)")
    parser.add_argument("--seed", type=int, default=11, help="of their order")
    parser.add_argument("--repeat", type=int, default=1, help="steps of each batch")
    parser.add_argument("--attention", default="flash_attention_4", help="of the model without the plugin")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args()


def document_lengths(args: argparse.Namespace) -> dict[str, list[int]]:
    """By batch, the lengths of this rank's documents."""
    from workloads.sampling import layouts

    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    rank, world, tokens = dist.get_rank(), dist.get_world_size(), args.tokens
    short = [tokens // 16] * 16
    rows = {"long|short": [[tokens], short][rank % 2], "even": [tokens], "short": short}
    for name in ("prolong", "pretrain"):
        made = layouts(name, context=131072, servers=world, tokens=tokens, batches=args.batches, shuffle=args.seed)
        for index, layout in enumerate(made if tokens >= 65536 else ()):
            rows[f"{name}#{index}"] = [segment.length for segment in layout.rank(rank)]
    return rows


def build(args: argparse.Namespace) -> tuple[Any, torch.device]:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
    }
    if args.plugin:
        config["distca"] = {"enabled": True}  # the second
    heads = max(1, args.hidden // 128)
    architecture = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    torch.manual_seed(0)
    inside = deepspeed.zero.Init(config_dict_or_path=config) if args.zero == 3 else nullcontext()
    with inside:
        model = LlamaForCausalLM._from_config(
            architecture, dtype=torch.bfloat16, attn_implementation=args.attention
        ).to(device if args.zero < 3 else None)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.train()
    return engine, device


def save(args: argparse.Namespace, steps: dict, device: torch.device, memory: dict[str, float]) -> None:
    """What is known so far: a run may be cut off."""
    if not args.json:
        return
    about = {
        **vars(args),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "ranks": dist.get_world_size(),
        "date": time.strftime("%Y-%m-%d"),
        **memory,
    }
    Path(args.json).write_text(json.dumps({"about": about, "steps": steps}, indent=1))


def step(engine: Any, batch: dict[str, Any], device: torch.device) -> tuple[float, float]:
    """Seconds of a step, and its loss over all ranks."""
    batch = {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}
    wait(device)
    start = time.perf_counter()
    loss = engine(**batch, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    wait(device)
    seconds = time.perf_counter() - start
    mean = loss.detach().float()
    dist.all_reduce(mean)
    return seconds, float(mean) / dist.get_world_size()


def plan_of(engine: Any) -> dict[str, float]:
    stats = getattr(getattr(engine, "distca", None), "stats", None)
    if stats is None:
        return {}
    return {"balance_before": stats.balance_before, "balance_after": stats.balance_after}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def peak(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    most = torch.tensor(
        [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(most, dist.ReduceOp.MAX)
    allocated, reserved = (most / 2**30).tolist()
    return {"allocated_gib": allocated, "reserved_gib": reserved}


if __name__ == "__main__":
    main()
