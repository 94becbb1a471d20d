# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of test_overlap_choice.py: engines whose block does not say how exchanges are hidden."""

from __future__ import annotations

import contextlib
import io

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.layout import Layout
from tests.distributed.engine_worker import documents_of, reference, tiny_llama
from tests.distributed.ping_pong_worker import engine_of, full_gradients, split, train_once

LAYOUT = [[[0, 0, 121]], [[1, 0, 9], [2, 0, 20], [3, 0, 31], [4, 0, 40], [5, 0, 21]]]
STEPS = 5


def train_cases(cases: list[dict]) -> list[dict]:
    """See ``ping_pong_worker.train_once``, and the line at start-up as "printed"."""
    deepspeed.init_distributed("gloo")
    outcomes = []
    for case in cases:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            outcome = train_once(**case)
        outcomes.append({**outcome, "printed": printed.getvalue()})
    return outcomes


def fallbacks(slow: str) -> dict[str, dict]:
    """Steps of engines that cannot run in two nano-batches, or not any more from the fourth step on: which of them
    were divided, what stood against it, and the errors of the last step."""
    deepspeed.init_distributed("gloo")
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return {
        "nothing": _steps(slow),
        "reentrant": _steps(slow, before=lambda model: model.gradient_checkpointing_enable({"use_reentrant": True})),
        "reentrant later": _steps(
            slow, later=lambda model: model.gradient_checkpointing_enable({"use_reentrant": True})
        ),
        "DeepSpeed's": _steps(slow, before=_checkpointed_by_deepspeed),
        "by hand": _steps(slow, before=_checkpointed_by_hand),
        "not kept": _steps(
            slow,
            before=lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
            keep_attention=False,
        ),
        "a hook on one rank": _steps(slow, later=_hook_on_rank_1),
        "dynamic rope": _steps(slow, options={"rope_parameters": dynamic}),
        "ZeRO-3": _steps(slow, zero=3),
        "odd outputs": _steps(slow, before=_more_outputs),
    }


def _steps(slow: str, before=None, later=None, zero: int = 1, options: dict | None = None, **block) -> dict:
    layout = Layout.from_ranks(LAYOUT).validate()
    documents = documents_of(layout, np.random.default_rng(0))
    expected_loss, expected = reference(tiny_llama(0, **(options or {})), [documents])
    engine = engine_of(zero, options=options, overlap=None, cost_model=slow, **block)
    if before is not None:
        before(engine.module)
    batch = batch_from_layout(documents, layout, dist.get_rank())
    splits = []
    for step in range(STEPS):
        if step == 3 and later is not None:
            later(engine.module)
        loss = engine(**batch).loss
        splits.append(split(engine))
        engine.backward(loss)
        gradients = full_gradients(engine, set(expected))
        engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    scale = max(float(g.abs().max()) for g in expected.values())
    errors = [float((gradients[n] - g).abs().max()) / scale for n, g in expected.items()]
    ping_pong = engine.distca._ping_pong
    return {
        "splits": splits,
        "fault": ping_pong and ping_pong.trial.fault,
        "error": max(abs(float(total) / dist.get_world_size() - expected_loss) / expected_loss, *errors),
    }


def _checkpointed_by_deepspeed(model) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = deepspeed.checkpointing.checkpoint


def _checkpointed_by_hand(model) -> None:
    """In a way that only shows when a forward runs."""
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = lambda hidden, f=forward, **kwargs: checkpoint(
            lambda given: f(given, **kwargs), hidden, use_reentrant=True
        )
    model.model.embed_tokens.weight.requires_grad_(True)


def _hook_on_rank_1(model) -> None:
    if dist.get_rank() == 1:
        model.model.layers[0].register_forward_hook(lambda *_: None)


def _more_outputs(model) -> None:
    """An output that nobody knows how to put together from those of two halves."""
    forward = model.model.forward

    def more(*args, **kwargs):
        output = forward(*args, **kwargs)
        output["attentions"] = torch.zeros(3)
        return output

    model.model.forward = more
