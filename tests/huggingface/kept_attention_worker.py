# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: HuggingFace models whose layers are checkpointed in all sorts of ways, over real exchanges."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import partial

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from deepspeed_distca import Layout, PackedSequenceCollator
from deepspeed_distca.data.from_layout import batch_from_layout
from tests.distributed.engine_worker import (
    counting,
    documents_of,
    ds_config,
    enable_checkpointing,
    kept,
    reference,
    tiny_llama,
)
from tests.distributed.models_worker import DISTCA, LAYOUT, worst_error

LAYERS = 3


class Wrapped(nn.Module):
    """A layer that is called, hooks and all, by a checkpointing function which knows nothing of keyword arguments."""

    def __init__(self, layer: nn.Module, function: Callable) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: torch.Tensor, **arguments) -> torch.Tensor:
        return self.function(partial(self.layer, **arguments), x)


def wrap(function: Callable, model) -> None:
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = Wrapped(layer, function)


def nested(model) -> None:
    enable_checkpointing(model, "non-reentrant")
    wrap(deepspeed.checkpointing.checkpoint, model)


def selective(model) -> None:
    def policy(context, operation, *_, **__):
        products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


#: By name: what is done to the model, and how many layers wait for their recomputation after forward.
MODELS: dict[str, tuple[Callable, int]] = {
    "reentrant": (partial(enable_checkpointing, how="reentrant"), LAYERS),
    "non-reentrant": (partial(enable_checkpointing, how="non-reentrant"), LAYERS),
    "every second layer": (lambda m: m.gradient_checkpointing_enable(every_n_layers=2), (LAYERS + 1) // 2),
    "selective": (selective, LAYERS),
    "wrapped, deepspeed": (partial(wrap, deepspeed.checkpointing.checkpoint), LAYERS),
    "wrapped, deepspeed non-reentrant": (partial(wrap, deepspeed.checkpointing.non_reentrant_checkpoint), LAYERS),
    "nested": (nested, LAYERS),
}


def _engine(change: Callable, seed: int):
    model = tiny_llama(seed, num_hidden_layers=LAYERS)
    change(model)
    engine, *_ = deepspeed.initialize(model=model, config=ds_config(0, 1, DISTCA))
    engine.train()
    return engine


def _batches(seed: int, number: int) -> tuple[list[dict], list[dict]]:
    """This rank's micro-batches, and their documents on all ranks."""
    layout = Layout.from_ranks(LAYOUT).validate()
    documents = [documents_of(layout, np.random.default_rng((seed, i))) for i in range(number)]
    return [batch_from_layout(d, layout, dist.get_rank()) for d in documents], documents


def _gradient_error(engine, documents: list[dict], seed: int) -> float:
    """Of the gradients that backward left, summed over the micro-batches of which each is its own mean."""
    expected: dict[str, torch.Tensor] = {}
    for micro_batch in documents:
        _, gradients = reference(tiny_llama(seed, num_hidden_layers=LAYERS), [micro_batch])
        expected = {n: g + expected[n] if expected else g for n, g in gradients.items()}
    given = {n.replace(".layer.", "."): p.grad for n, p in engine.module.named_parameters()}
    return worst_error(expected, given)[0]


def one_step(seed: int, change: Callable, around=contextlib.nullcontext) -> dict:
    engine = _engine(change, seed)
    (batch,), documents = _batches(seed, 1)
    with counting() as counts, around():
        loss = engine(**batch).loss
        waiting = sum(kept())
        engine.backward(loss)
    return {
        "gradient_error": _gradient_error(engine, documents, seed),
        "counts": counts,
        "waiting": waiting,
        "left": sum(kept()),
    }


def two_at_once(seed: int) -> dict:
    """Two micro-batches are forwarded before the first one's backward; the same data twice, too."""
    found = {}
    for name, pick in (("different", (0, 1)), ("the same", (0, 0))):
        engine = _engine(partial(enable_checkpointing, how="non-reentrant"), seed)
        batches, documents = _batches(seed, 2)
        with counting() as counts:
            losses = [engine(**batches[i]).loss for i in pick]
            waiting = sum(kept())
            engine.backward(sum(losses))
        error = _gradient_error(engine, [documents[i] for i in pick], seed)
        found[name] = {"gradient_error": error, "counts": counts, "waiting": waiting, "left": sum(kept())}
    return found


def two_engines(seed: int) -> dict:
    """Forwards of two engines before either one's backward."""
    engines = [_engine(partial(enable_checkpointing, how=how), seed) for how in ("reentrant", "non-reentrant")]
    (batch,), documents = _batches(seed, 1)
    with counting() as counts:
        losses = [engine(**batch).loss for engine in engines]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
    errors = [_gradient_error(engine, documents, seed) for engine in engines]
    return {"gradient_error": max(errors), "counts": counts, "left": sum(kept())}


def nothing_left(seed: int) -> dict:
    """How much is kept after forwards that no backward follows."""
    found = {}
    for how in ("reentrant", "non-reentrant", "deepspeed"):
        engine = _engine(partial(enable_checkpointing, how=how), seed)
        batches, _ = _batches(seed, 1)
        packed = PackedSequenceCollator()([{"input_ids": list(range(1, 9))}, {"input_ids": [5, 6, 7]}])
        gc.collect()
        gc.disable()  # what is found below is not for the collector to find
        output = engine(**batches[0])
        waiting = sum(kept())
        del output
        dropped = kept()
        with torch.no_grad():
            output = engine(**packed)
        no_grad = kept()
        engine.eval()
        output = engine(**packed)  # gradients on, as some losses are evaluated
        evaluation = kept()
        gc.enable()
        del output
        found[how] = {"waiting": waiting, "dropped": dropped, "no_grad": no_grad, "evaluation": evaluation}
    return found


def different_options(seed: int) -> str:
    """Rank 1 keeps nothing, and would wait for exchanges of recomputation that rank 0 does not start."""
    block = {**DISTCA, "keep_attention": dist.get_rank() == 0}
    try:
        deepspeed.initialize(model=tiny_llama(seed), config=ds_config(0, 1, block))
    except RuntimeError as error:
        return str(error)
    return ""


def run(seed: int) -> dict:
    deepspeed.init_distributed("gloo")
    steps = {name: one_step(seed, change) for name, (change, _) in MODELS.items()}
    off = partial(enable_checkpointing, how="off")
    steps["off"] = one_step(seed, off)
    steps["offloaded"] = one_step(seed, off, torch.autograd.graph.save_on_cpu)
    steps["offloaded non-reentrant"] = one_step(seed, MODELS["non-reentrant"][0], torch.autograd.graph.save_on_cpu)
    return {
        "steps": steps,
        "two at once": two_at_once(seed),
        "two engines": two_engines(seed),
        "nothing left": nothing_left(seed),
        "different options": different_options(seed),
    }
