# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of test_training_gpu.py: a model trained by the plugin in one way after the other, and plainly.

With a GPU for each rank it is ZeRO-1, and NCCL carries DeepSpeed's collectives. Ranks that share one train with ZeRO-0
over gloo, which has what that needs on GPUs, and exchange rows by peer copies all the same.

On its own: torchrun --nproc_per_node 2 -m tests.gpu.training_worker
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from transformers import LlamaForCausalLM

from deepspeed_distca import building
from tests.gpu.compatibility_worker import MODEL, worst
from tests.huggingface.compared import Run, batch_of, end, start, targets_of
from tests.tiny_llama import llama

TOKENS, LAYERS = 2048, 3
#: A token without a target.
NOTHING = {"input_ids": 0, "labels": -100, "position_ids": 0}
#: Rows move, whatever that saves.
ALWAYS = {"min_gain": 0.0}
#: By name: the block, whether layers are checkpointed, and of how many of them there is memory to keep attention.
WAYS: dict[str, tuple[dict[str, Any], bool, int | None]] = {
    overlap + said: ({"overlap": overlap, "advanced": ALWAYS}, checkpointing, room)
    for overlap in ("none", "local_first", "ping_pong")
    for said, checkpointing, room in (("", False, None), (", recomputed", True, 0), (", one layer kept", True, 1))
}


@dataclass
class Training(Run):
    """What a training came to.

    Attributes:
        in_two: steps in which the model ran in two.
        kept: layers whose attention was kept in the last step.
    """

    in_two: int = 0
    kept: int = 0


def check(tokens: int = TOKENS) -> dict[str, dict[str, Any]]:
    """By way of training, how far losses and gradients are from plain training's in the worst step, and what it was
    like; see :func:`apart`."""
    device = meet()
    plain = train(device, tokens, None)
    found = {}
    for name, (block, checkpointing, room) in WAYS.items():
        found[name] = apart(train(device, tokens, block, checkpointing, room), plain)
    # A rank without tokens is a server beside those that have some.
    weights = [*[1] * (dist.get_world_size() - 1), 3]
    alone = train(device, tokens, None, pool=True)
    for overlap in ("local_first", "ping_pong"):
        block = {"overlap": overlap, "advanced": {**ALWAYS, "server_weights": weights}}
        found[f"{overlap}, a pool"] = apart(train(device, tokens, block, pool=True), alone)
    dist.barrier()
    return found


def meet() -> torch.device:
    """Collective: begins."""
    cuda, world = torch.cuda.is_available(), int(os.environ["WORLD_SIZE"])
    if not cuda:
        deepspeed.init_distributed("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if shared(world):
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed takes it for the device
    deepspeed.init_distributed("gloo" if shared(world) else "nccl")
    return device


def shared(world: int) -> bool:
    """Whether ranks share a GPU, which NCCL refuses."""
    return 0 < torch.cuda.device_count() < world


def gloo_group(ranks: list[list[int]], device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """For ``building.exchange_group``."""
    (members,) = ranks
    return dist.new_group(members, backend="gloo", timeout=timeout)


def train(
    device: torch.device,
    tokens: int,
    block: dict[str, Any] | None,
    checkpointing: bool = False,
    room: int | None = None,
    pool: bool = False,
) -> Training:
    """An engine of its own, from its start to its end.

    Args:
        pool: the last rank has no documents.
    """
    world = dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 0 if shared(world) else 1},
        "torch_autocast": {"enabled": device.type == "cuda", "dtype": "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **({} if block is None else {"distca": block}),
    }

    def model() -> LlamaForCausalLM:
        made = llama(**MODEL, num_hidden_layers=LAYERS)
        if checkpointing:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        return made

    group = gloo_group if shared(world) else building.exchange_group
    with mock.patch.object(building, "exchange_group", group):
        engine = start(model, config)
    distca, run = getattr(engine, "distca", None), Training()
    if room is not None and distca is not None:
        distca._kept_layers.affordable = lambda tokens: room
    try:
        for lengths in batches(world, tokens, pool):
            batch = {k: v.long().to(device) for k, v in batch_of(lengths).items()}
            if distca is None:
                if not batch["labels"].numel():  # a model cannot run without a token
                    batch = {k: torch.full((1, 1), fill, device=device) for k, fill in NOTHING.items()}
                batch["num_items_in_batch"] = torch.tensor(targets_of(lengths) / world, device=device)
            loss = engine(**batch).loss
            engine.backward(loss)
            run.gradients.append({n: gradient(engine, p) for n, p in engine.module.named_parameters()})
            engine.step()
            total = loss.detach().float().clone()
            dist.all_reduce(total)
            run.losses.append(float(total) / world)
            if distca is not None:
                run.moved = run.moved and distca.stats.bytes_moved > 0
                run.in_two += distca._overlap.ping_pong is not None and distca._overlap.ping_pong.split
                run.kept = distca.stats.kept_layers
        return run
    finally:
        end(engine)


def gradient(engine: Any, parameter: torch.nn.Parameter) -> torch.Tensor:
    found = parameter.grad if engine.zero_optimization_stage() == 0 else safe_get_full_grad(parameter)
    return found.detach().float().cpu().clone()


def batches(world: int, tokens: int, pool: bool) -> list[list[list[int]]]:
    """Document lengths of every rank in each step. Ranks have as many tokens, or the last has none."""
    long, short, mixed = [tokens], [tokens // 8] * 8, [tokens // 2, *[tokens // 8] * 3, tokens // 8 - 3, 3]
    found = []
    for step in range(6):
        of = [(long, short, mixed)[(rank + step) % 3] for rank in range(world)]
        found.append([*of[:-1], []] if pool else of)
    return found


def apart(run: Training, other: Training) -> dict[str, Any]:
    """The largest relative error of a loss, and of a gradient with its name; and what the training was like."""
    losses = zip(run.losses, other.losses, strict=True)
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in losses),
        "gradient": max(worst(*pair) for pair in zip(run.gradients, other.gradients, strict=True)),
        "moved": run.moved,
        "in_two": run.in_two,
        "kept": run.kept,
        "steps": len(run.losses),
    }


if __name__ == "__main__":
    for name, distances in check().items():
        if dist.get_rank() == 0:
            print(name, json.dumps(distances), flush=True)
    os._exit(0)
