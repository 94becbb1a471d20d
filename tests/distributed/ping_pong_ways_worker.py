# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of test_ping_pong.py: ways of training that are other people's, in two nano-batches."""

from __future__ import annotations

import copy
import gc
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, MixtralForCausalLM

from deepspeed_distca.attention_server import steps
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.layout import Layout
from tests.distributed.engine_worker import documents_of, ds_config, enable_checkpointing, reference, tiny_llama
from tests.distributed.models_worker import worst_error
from tests.distributed.ping_pong_worker import full_gradients, split
from tests.tiny_llama import SIZES

PING_PONG = {"advanced": {"granularity": 8}, "overlap": "ping_pong"}
Documents = dict[int, list[int]]


def _given(ranks: list, seed: int = 0) -> tuple[Documents, dict]:
    layout = Layout.from_ranks(ranks).validate()
    documents = documents_of(layout, np.random.default_rng(seed))
    return documents, batch_from_layout(documents, layout, dist.get_rank())


def _engine(model: nn.Module, zero: int, block: dict | None = None):
    config = ds_config(zero, 1, block or PING_PONG, lr=0.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    engine.train()
    return engine


def _stepped(engine, losses: Callable[[], torch.Tensor], expected: dict[str, torch.Tensor]) -> dict:
    """The second of two steps against what is expected of it."""
    for _ in range(2):
        loss = losses()
        with mock.patch.object(
            steps.BackwardSteps, "dispatch", autospec=True, side_effect=steps.BackwardSteps.dispatch
        ) as parts:
            engine.backward(loss)
        trained = {n for n, p in engine.module.named_parameters() if p.requires_grad}
        gradients = full_gradients(engine, trained)
        engine.step()
    error, parameter = worst_error({n: g for n, g in expected.items() if n in trained}, gradients)
    return {"gradient_error": error, "parameter": parameter, "split": split(engine), "parts": parts.call_count}


def frozen(layout: list, checkpointing: bool, keep_attention: bool) -> dict:
    """The embedding and the first of three layers are frozen; torch's own checkpoints ask for no gradient of an
    input."""
    deepspeed.init_distributed("gloo")
    model = tiny_llama(0, num_hidden_layers=3)
    documents, batch = _given(layout)
    _, expected = reference(copy.deepcopy(model), [documents])
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    if checkpointing:
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    engine = _engine(model, 1, {**PING_PONG, "keep_attention": keep_attention})
    return _stepped(engine, lambda: engine(**batch).loss, expected)


def inner_loss(layout: list, zero: int, checkpointing: str) -> dict:
    """A loss that reads what the first layer gives, and nothing else."""
    deepspeed.init_distributed("gloo")
    model = tiny_llama(0, num_hidden_layers=3)
    documents, batch = _given(layout)
    plain = copy.deepcopy(model).train()
    for tokens in documents.values():
        output = plain(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        (output.hidden_states[1].square().sum() / dist.get_world_size()).backward()
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}
    enable_checkpointing(model, checkpointing)
    engine = _engine(model, zero)
    batch = {k: v for k, v in batch.items() if k not in ("labels", "shift_labels")}
    return _stepped(
        engine, lambda: engine(**batch, output_hidden_states=True).hidden_states[1].square().sum(), expected
    )


def one_backward(layouts: list, checkpointing: str) -> dict:
    """Several forwards, and one backward through all of them."""
    deepspeed.init_distributed("gloo")
    model = tiny_llama(0)
    given = [_given(layout, seed) for seed, layout in enumerate(layouts)]
    plain, expected = copy.deepcopy(model), {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for documents, _ in given:
        _, gradients = reference(plain, [documents])
        expected = {n: expected[n] + g for n, g in gradients.items()}
    enable_checkpointing(model, checkpointing)
    engine, splits = _engine(model, 1), []

    def losses() -> torch.Tensor:
        found = []
        for _, batch in given:
            found.append(engine(**batch).loss)
            splits.append(split(engine))
        return torch.stack(found).sum()

    return {**_stepped(engine, losses, expected), "splits": splits}


def _experts(seed: int) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    sizes = {**SIZES, "num_hidden_layers": 3, "num_local_experts": 16, "num_experts_per_tok": 1}
    config = MixtralConfig(**sizes, sliding_window=None, experts_implementation="eager")
    return MixtralForCausalLM(config)


def joint_experts(layouts: list, engines: int) -> dict:
    """Two forwards, of one engine or of two, and one backward through both, in a process that has not trained yet."""
    deepspeed.init_distributed("gloo")
    models = [_experts(seed) for seed in range(engines)]
    given = [_given(layout, seed) for seed, layout in enumerate(layouts)]
    expected = [{n: torch.zeros_like(p) for n, p in model.named_parameters()} for model in models]
    for index, (documents, _) in enumerate(given):
        sums = expected[index % engines]
        for name, gradient in reference(copy.deepcopy(models[index % engines]), [documents])[1].items():
            sums[name] += gradient
    made, splits, errors = [_engine(model, 1) for model in models], [], []

    def train() -> None:
        for _ in range(2):
            losses = []
            for index, (_, batch) in enumerate(given):
                engine = made[index % engines]
                losses.append(engine(**batch).loss)
                splits.append(split(engine))
            loss = torch.stack(losses).sum()
            # Of several engines none can call it for the others; of one DeepSpeed wants it for several forwards.
            (made[0].backward if engines == 1 else torch.Tensor.backward)(loss)
            for engine, sums in zip(made, expected, strict=True):
                errors.append(worst_error(sums, full_gradients(engine, set(sums)))[0])
                engine.step()

    # Autograd counts the nodes of every thread from 0.
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return {"errors": errors or [math.inf], "splits": splits}


def dropped(layout: list, checkpointing: str, forwards: int = 4) -> dict:
    """How many tensors there are after each of some forwards of which nothing is kept, without a garbage collector."""
    deepspeed.init_distributed("gloo")
    model = tiny_llama(0)
    enable_checkpointing(model, checkpointing)
    engine, (_, batch), tensors = _engine(model, 1), _given(layout), []
    engine.backward(engine(**batch).loss)
    engine.step()
    gc.collect()
    gc.disable()
    for _ in range(forwards):
        engine(**batch)
        tensors.append(sum(torch.is_tensor(x) for x in gc.get_objects()))
    gc.enable()
    return {"tensors": tensors, "split": split(engine)}


def reentrant_parts(layout: list, zero: int) -> dict:
    """A reentrant checkpoint around every MLP, where two nano-batches were asked for and where they are chosen."""
    deepspeed.init_distributed("gloo")
    documents, batch = _given(layout)
    found = {}
    for name, block in (("asked", PING_PONG), ("chosen", {"advanced": {"granularity": 8, "node_size": 1}})):
        model = tiny_llama(0)
        _, expected = reference(copy.deepcopy(model), [documents])
        for layer in model.model.layers:
            layer.mlp.forward = partial(checkpoint, layer.mlp.forward, use_reentrant=True)
        engine = _engine(model, zero, block)
        try:
            found[name] = _stepped(engine, lambda engine=engine: engine(**batch).loss, expected)
        except ValueError as error:
            found[name] = str(error)
    return found


def model_in_checkpoint(layout: list, zero: int) -> dict:
    """A checkpoint around the whole model, whose recomputation ends by an exception: whole, and where two nano-batches
    were asked for and where they are chosen."""
    deepspeed.init_distributed("gloo")
    documents, batch = _given(layout)
    found = {}
    blocks = {
        "whole": {"advanced": {"granularity": 8}},
        "asked": PING_PONG,
        "chosen": {"advanced": {"granularity": 8, "node_size": 1}},
    }
    for name, block in blocks.items():
        model = tiny_llama(0)
        _, expected = reference(copy.deepcopy(model), [documents])
        engine = _engine(model, zero, block)

        def losses(engine=engine) -> torch.Tensor:
            return checkpoint(lambda: engine(**batch).loss, use_reentrant=False)

        try:
            found[name] = _stepped(engine, losses, expected)
        except ValueError as error:
            found[name] = str(error)
    return found


class _Group(nn.Module):
    """Layers in one checkpoint, each in another one within it."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, **arguments) -> torch.Tensor:
        def all_of_them(x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False, **arguments)
            return x

        return checkpoint(all_of_them, x, use_reentrant=False)


def nested(layout: list, zero: int, keep_attention: bool) -> dict:
    """Checkpoints within checkpoints."""
    deepspeed.init_distributed("gloo")
    model = tiny_llama(0, num_hidden_layers=4)
    documents, batch = _given(layout)
    _, expected = reference(copy.deepcopy(model), [documents])
    layers = model.model.layers
    model.model.layers = nn.ModuleList([_Group(layers[:2]), _Group(layers[2:])])
    names = dict(zip(expected, (n for n, _ in model.named_parameters()), strict=True))
    engine = _engine(model, zero, {**PING_PONG, "keep_attention": keep_attention})
    return _stepped(engine, lambda: engine(**batch).loss, {names[n]: g for n, g in expected.items()})
