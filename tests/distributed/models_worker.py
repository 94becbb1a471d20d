# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of the model tests: one optimizer step of many small decoders against documents run alone."""

from __future__ import annotations

import copy

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca import Layout
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.integrations.transformers import UnsupportedModelError, attention_modules, attention_windows
from tests.distributed import model_families
from tests.distributed.engine_worker import documents_of, ds_config, reference

#: A document that continues on the next rank, one that is longer than every window, tokens alone.
LAYOUT = [[(0, 0, 47), (1, 0, 14)], [(1, 14, 9), (2, 0, 7), (3, 0, 1), (4, 0, 11)]]
DISTCA = {"enabled": True, "granularity": 4, "tolerance": 0.0}


def worst_error(expected: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of a parameter's gradient, and whose it is. Gradients that are nearly zero beside the
    others are measured by a thousandth of the largest."""
    scale = max(float(g.norm()) for g in expected.values())
    errors = {
        name: float((given[name].cpu() - g).norm()) / max(float(g.norm()), 1e-3 * scale, 1e-30)
        for name, g in expected.items()
    }
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def one_step(name: str, seed: int) -> dict:
    model_type, options = model_families.EXACT[name]
    model = model_families.build(model_type, options, seed)
    plain = copy.deepcopy(model)
    layout = Layout.from_ranks(LAYOUT).validate()
    documents = documents_of(layout, np.random.default_rng(seed))
    expected_loss, expected = reference(plain, [documents])
    engine, *_ = deepspeed.initialize(model=model, config=ds_config(0, 1, DISTCA))
    engine.train()
    loss = engine(**batch_from_layout(documents, layout, dist.get_rank())).loss
    engine.backward(loss)
    given = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in engine.module.named_parameters()}
    error, parameter = worst_error(expected, given)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {
        "name": name,
        "class": type(model).__name__,
        "features": model_families.features(model, attention_windows(attention_modules(model))),
        "loss_error": abs(float(total) / dist.get_world_size() - expected_loss),
        "gradient_error": error,
        "parameter": parameter,
        "bytes_moved": engine.distca.stats.bytes_moved,
    }


def refused_while_running(name: str) -> str:
    model_type, options, _ = model_families.REFUSED_RUNNING[name]
    engine, *_ = deepspeed.initialize(model=model_families.build(model_type, options), config=ds_config(0, 1, DISTCA))
    try:
        engine(input_ids=torch.arange(1, 30)[None], labels=torch.arange(1, 30)[None])
    except UnsupportedModelError as error:
        return str(error)
    return "not refused"


def run(names: list[str], refused: list[str]) -> dict:
    deepspeed.init_distributed("gloo")
    results = []
    for seed, name in enumerate(names):
        try:
            results.append(one_step(name, seed))
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            # The other rank meets the same; the test names all families that fail, not the first.
            results.append({"name": name, "error": f"{type(error).__name__}: {error}"})
    return {"exact": results, "refused": {name: refused_while_running(name) for name in refused}}
