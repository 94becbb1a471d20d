# SPDX-License-Identifier: Apache-2.0
"""Trains a model with the `distca` block and without it on the same packed rows, and says how far the two are apart.

Without the block the rows go through transformers' own mask, which keeps documents apart where there is no cache; the
first scenario of ``compatibility_worker`` holds that against documents that run alone.
"""

from __future__ import annotations

import functools
import gc
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.distributed.doors_worker import documents
from tests.tiny_llama import llama

#: Rows move, whatever that saves.
BLOCK: dict[str, Any] = {"advanced": {"granularity": 1, "min_gain": 0.0, "tolerance": 0.0}}
#: Of each rank's documents in every step: unequal enough that rows move.
STEPS = [[[181, 13, 29], [30, 7, 22]], [[9, 40], [3, 150, 17, 1]], [[120, 2], [61, 5]]]

Forward = Callable[[Any, dict[str, Any]], torch.Tensor]


@dataclass
class Run:
    """What a training came to.

    Attributes:
        losses: of every step, the mean over ranks.
        gradients: of every step and parameter, averaged over ranks.
        parameters: those that are trained, after the last step.
        moved: whether rows moved in every step.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    moved: bool = True


def config_of(block: bool, zero: dict[str, Any] | int = 0, **more: Any) -> dict[str, Any]:
    """A DeepSpeed config, with the block or without."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero} if isinstance(zero, int) else zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled first
        "steps_per_print": 10**9,
        **({"distca": BLOCK} if block else {}),
        **more,
    }


def batch_of(lengths: list[list[int]]) -> dict[str, torch.Tensor]:
    """This rank's documents as one row, told apart by position ids."""
    mine = documents(lengths, dist.get_rank())
    return {
        "input_ids": torch.tensor([[t for d in mine for t in d]]),
        "labels": torch.tensor([[t for d in mine for t in [-100, *d[1:]]]]),
        "position_ids": torch.tensor([[p for d in mine for p in range(len(d))]]),
    }


def targets_of(lengths: list[list[int]]) -> int:
    return sum(n - 1 for row in lengths for n in row)


def models_loss(engine: Any, batch: dict[str, Any]) -> torch.Tensor:
    return engine(**batch).loss


def start(build: Callable[[], torch.nn.Module], config: dict[str, Any], **arguments: Any) -> Any:
    """An engine that trains."""
    model = build()
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config, **arguments)
    engine.train()
    return engine


def go_on(engine: Any, run: Run, steps: list[list[list[int]]], forward: Forward = models_loss) -> Run:
    """More steps of an engine, told apart by whether it has the plugin."""
    distca = getattr(engine, "distca", None)
    for lengths in steps:
        batch: dict[str, Any] = batch_of(lengths)
        if distca is None:
            batch["num_items_in_batch"] = targets_of(lengths) / dist.get_world_size()
        loss = forward(engine, batch)
        engine.backward(loss)
        run.gradients.append(gradients_of(engine))
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        run.losses.append(float(total) / dist.get_world_size())
        run.moved = run.moved and distca is not None and distca.stats.bytes_moved > 0
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        trained = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
        run.parameters = {n: p.detach().clone() for n, p in trained}
    return run


def gradients_of(engine: Any) -> dict[str, torch.Tensor]:
    """Of what is trained."""
    if engine.zero_optimization_stage() == 0:
        return {n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None}
    from deepspeed.utils import safe_get_full_grad

    return {n: safe_get_full_grad(p).clone() for n, p in engine.module.named_parameters() if p.requires_grad}


def end(engine: Any) -> None:
    if getattr(engine, "distca", None) is not None:
        engine.distca.detach()
    engine.destroy()
    gc.collect()


def trained(
    build: Callable[[], torch.nn.Module],
    config: dict[str, Any],
    steps: list[list[list[int]]] = STEPS,
    forward: Forward = models_loss,
) -> Run:
    """An engine of its own, from its start to its end."""
    engine = start(build, config)
    try:
        return go_on(engine, Run(), steps, forward)
    finally:
        end(engine)


def apart(run: Run, plain: Run) -> dict[str, Any]:
    """The largest relative error of a loss, of a gradient and of a parameter, and whether rows moved."""
    error = max(abs(a - b) / abs(b) for a, b in zip(run.losses, plain.losses, strict=True))
    which = "loss"
    pairs = [*zip(run.gradients, plain.gradients, strict=True), (run.parameters, plain.parameters)]
    for own, wanted in pairs:
        assert own.keys() == wanted.keys(), sorted(own.keys() ^ wanted.keys())
        largest = max((float(t.norm()) for t in wanted.values()), default=0.0)
        for name, tensor in wanted.items():
            distance = float((own[name] - tensor).norm()) / max(float(tensor.norm()), 1e-3 * largest, 1e-30)
            if not distance <= error:
                error, which = distance, name
    return {"error": error if math.isfinite(error) else "no number", "where": which, "moved": run.moved}


def compared(
    build: Callable[[], torch.nn.Module],
    zero: dict[str, Any] | int = 0,
    forward: Forward = models_loss,
    steps: list[list[list[int]]] = STEPS,
    **more: Any,
) -> dict[str, Any]:
    """With the block against without it."""
    run = trained(build, config_of(True, zero, **more), steps, forward)
    return apart(run, trained(build, config_of(False, zero, **more), steps, forward))


def outcomes(scenarios: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Of every scenario what it gives, or an error's words."""
    found = {}
    for name, scenario in scenarios.items():
        try:
            found[name] = scenario()
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        dist.barrier()
    return found


@functools.cache
def wanted() -> Run:
    """Plain training of the small Llama, which ``compatibility_worker`` holds against each document run alone."""
    return trained(llama, config_of(False))
