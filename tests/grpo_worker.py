# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of tests/test_example_grpo.py: an update from packed sequences against these one by one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca import AccumulationLoader, PackedSequenceCollator, pack_step
from deepspeed_distca.data.step_packing import Step
from tests.distributed.engine_worker import ds_config, full_gradients, reference, tiny_llama
from tests.distributed.harness import ROOT
from tests.tiny_llama import VOCABULARY

sys.path.append(str(ROOT / "examples" / "hf_llama"))
import grpo
import train_grpo

#: Cuts documents anywhere, for prices at which it pays with some hundred tokens.
DISTCA = {"enabled": True, "advanced": {"granularity": 8}}


def rollouts_of(lengths: list[int], seed: int = 0) -> list[grpo.Rollout]:
    """Some of each length; the prompt is a third of it, and at least a token."""
    draw = np.random.default_rng(seed)
    tokens = [draw.integers(0, VOCABULARY, n).tolist() for n in lengths]
    return [grpo.Rollout(ids[: max(1, len(ids) // 3)], ids[max(1, len(ids) // 3) :]) for ids in tokens]


def one_by_one(model, rollouts, old, gains, weights) -> dict[str, torch.Tensor]:
    """Gradients of the step's loss, each rollout alone, by a model without the plugin."""
    for rollout, before, gain, weight in zip(rollouts, old, gains, weights, strict=True):
        ids = torch.tensor([rollout.prompt + rollout.answer])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(rollout.prompt) - 1 : -1]
        answer = torch.tensor(rollout.answer)
        new = logits.float().log_softmax(-1)[torch.arange(len(answer)), answer]
        grpo.grpo_loss(new, before, torch.full_like(new, gain), torch.full_like(new, weight)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def gradients(lengths: list[int], cap: int, zero: int, loss: str) -> dict[str, object]:
    """Micro-batches of a step, bytes that moved, and the worst relative error of a parameter's gradient."""
    deepspeed.init_distributed("gloo")
    rollouts, draw = rollouts_of(lengths), np.random.default_rng(1)
    old = [torch.tensor(draw.normal(-np.log(VOCABULARY), 0.3, len(r.answer)), dtype=torch.float32) for r in rollouts]
    gains = grpo.advantages(draw.random(len(rollouts)).tolist(), group=2)
    weights = grpo.token_weights(loss, [len(r.answer) for r in rollouts], cap)
    expected = one_by_one(tiny_llama(), rollouts, old, gains, weights)

    packed = pack_step(lengths, cap, dist.get_world_size())
    mine = [batch[dist.get_rank()] for batch in packed]
    batches = [
        grpo.micro_batch(*([v[i] for i in row] for v in (rollouts, gains, weights)), torch.device("cpu"))
        for row in mine
    ]
    engine, *_ = deepspeed.initialize(model=tiny_llama(), config=ds_config(zero, 1, DISTCA))
    before = [torch.cat([torch.zeros(0), *(old[i] for i in row)]) for row in mine]
    return report(engine, packed, expected, lambda: train_grpo.update(engine, batches, before))


def models_own_loss(lengths: list[int], cap: int, zero: int) -> dict[str, object]:
    """The same with the loss of the model: the mean over all targets of the step."""
    deepspeed.init_distributed("gloo")
    ids = [r.prompt + r.answer for r in rollouts_of(lengths)]
    _, expected = reference(tiny_llama(), [dict(enumerate(ids))])
    packed = pack_step(lengths, cap, dist.get_world_size())
    mine = [PackedSequenceCollator()([{"input_ids": ids[i]} for i in batch[dist.get_rank()]]) for batch in packed]
    engine, *_ = deepspeed.initialize(model=tiny_llama(), config=ds_config(zero, 1, DISTCA))

    def update() -> None:
        for number, batch in enumerate(AccumulationLoader(mine, len(packed))):
            engine.set_gradient_accumulation_boundary(number == len(packed) - 1)
            engine.backward(engine(**batch, use_cache=False).loss)
            engine.step()

    return report(engine, packed, expected, update)


def report(engine, packed: Step, expected: dict[str, torch.Tensor], update: Callable[[], None]) -> dict[str, object]:
    """What an update of one step has for gradients just before the optimizer's step."""
    found: list[dict[str, torch.Tensor]] = []
    moved, step = 0, engine.step

    def looked_at() -> None:
        nonlocal moved
        moved += engine.distca.stats.bytes_moved
        if engine.is_gradient_accumulation_boundary():
            found.append(full_gradients(engine))
        step()

    with mock.patch.object(engine, "step", looked_at):
        update()
    (got,) = found
    assert engine.global_steps == 1
    errors = [float((got[name] - e).norm() / e.norm()) for name, e in expected.items()]
    engine.destroy()
    return {"micro_batches": packed, "moved": moved, "error": max(errors)}
