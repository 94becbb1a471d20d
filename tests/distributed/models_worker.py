# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of the sweep over all decoders: each against its documents run alone by the model itself."""

from __future__ import annotations

import copy
import inspect
import math
import re
import traceback
from collections.abc import Iterator
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn

from deepspeed_distca import Layout, LayoutError
from deepspeed_distca.attention_server.coordination.agreement import AgreementError
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.huggingface.decoders import UnsupportedModelError, attention_modules, attention_windows
from tests.distributed import model_families
from tests.distributed.engine_worker import ds_config, reference

#: A document that continues on the next rank, one that is longer than every window, tokens alone.
LAYOUT = [[(0, 0, 47), (1, 0, 14)], [(1, 14, 9), (2, 0, 7), (3, 0, 1), (4, 0, 11)]]
#: The same documents, each whole on one rank.
WHOLE = [[(0, 0, 47), (1, 0, 23), (2, 0, 7), (3, 0, 1)], [(4, 0, 11)]]
_ROUTER = "output_router_logits"
LENGTHS = {0: 47, 1: 23, 2: 7, 3: 1, 4: 11}
DISTCA = {"enabled": True, "advanced": {"granularity": 4, "tolerance": 0.0}}


def worst_error(expected: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of a parameter's gradient, and whose it is. Gradients that are nearly zero beside the
    others are measured by a thousandth of the largest. What is no number is infinitely wrong."""
    scale = max(float(g.norm()) for g in expected.values())
    errors = {
        name: float((given[name].cpu() - g).norm()) / max(float(g.norm()), 1e-3 * scale, 1e-30)
        for name, g in expected.items()
    }
    errors = {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def batches(documents: dict[int, list[int]], rank: int, shifted: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same documents in every way that is tried: one that continues on the next rank; whole ones in a packed row
    that position ids tell apart; and rows that a mask tells from their padding, on the right, and on the left with
    position ids beside it.

    Args:
        shifted: the label of a position is the token after it, as some models want it.
    """
    row = batch_from_layout(documents, Layout.from_ranks(LAYOUT).validate(), rank)
    yield "continued", {**row, "labels": row["shift_labels"] if shifted else row["labels"]}
    row = batch_from_layout(documents, Layout.from_ranks(WHOLE).validate(), rank)
    row["labels"] = row["shift_labels"] if shifted else row["labels"]
    yield "packed", {key: row[key] for key in ("input_ids", "labels", "position_ids")}
    whole = [documents[document] for document, *_ in WHOLE[rank]]
    longest = max(map(len, whole))
    for side in ("right", "left"):
        batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
        if side == "left":
            batch["position_ids"] = []
        for tokens in whole:
            filling = longest - len(tokens)
            row = {
                "input_ids": (tokens, 0),
                "labels": ([*tokens[1:], -100] if shifted else [-100, *tokens[1:]], -100),
                "attention_mask": ([1] * len(tokens), 0),
                "position_ids": (list(range(len(tokens))), 0),
            }
            for key in batch:
                own, filler = row[key]
                batch[key].append([filler] * filling + own if side == "left" else own + [filler] * filling)
        yield f"padded {side}", {key: torch.tensor(value) for key, value in batch.items()}


def sweep_one(name: str) -> dict[str, Any]:
    """How one model does: "absent" with the error of the model alone, "refused" with the plugin's, or its errors by
    "ways" of giving the documents, each of which may be refused too."""
    model_type, options = model_families.ALL[name]
    seed = sum(name.encode())
    generator = np.random.default_rng(seed)
    documents = {d: generator.integers(3, 97, size=n).tolist() for d, n in LENGTHS.items()}
    try:
        model = model_families.build(model_type, options, seed)
        plain = copy.deepcopy(model)
        expected_loss, expected = reference(plain, [documents])
    except Exception as error:
        return {"name": name, "absent": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = {"name": name, "class": type(model).__name__}
    try:
        engine, *_ = deepspeed.initialize(model=model, config=ds_config(0, 1, DISTCA, lr=0.0))
    except UnsupportedModelError as error:
        return {**found, **_refusal(model, error)}
    modules = attention_modules(model)
    found |= {"features": model_families.features(model, attention_windows(modules)), "ways": {}}
    shifted = _wants_shifted_labels(plain, documents[0])
    engine.train()
    for way, batch in batches(documents, dist.get_rank(), shifted):
        try:
            loss = engine(**batch).loss
        except (UnsupportedModelError, LayoutError, AgreementError) as error:
            found["ways"][way] = _refusal(model, error)
            continue
        engine.backward(loss)
        given = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in engine.module.named_parameters()}
        error, parameter = worst_error(expected, given)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        loss_error = abs(float(total) / dist.get_world_size() - expected_loss) / expected_loss
        found["ways"][way] = {
            "error": max(error, loss_error if math.isfinite(loss_error) else math.inf),
            "parameter": parameter,
            "bytes_moved": engine.distca.stats.bytes_moved,
        }
    exact = [way for way, outcome in found["ways"].items() if "refused" not in outcome]
    if exact and _ROUTER in inspect.signature(model.forward).parameters:
        found["ways"] |= _router_loss(engine, plain, documents, exact)
    engine.distca.detach()  # its threads, too, which watch the other rank
    return found


def _wants_shifted_labels(plain: nn.Module, tokens: list[int]) -> bool:
    """Whether the model's own loss compares a position with its label, not with the next one's."""
    row = torch.tensor([tokens])
    with torch.no_grad():
        out = plain(input_ids=row, labels=row, use_cache=False)
    logits = out.logits[0].float()
    same = nn.functional.cross_entropy(logits, row[0])
    following = nn.functional.cross_entropy(logits[:-1], row[0, 1:])
    return bool((out.loss - same).abs() < (out.loss - following).abs())


def _router_loss(
    engine: deepspeed.DeepSpeedEngine, plain: nn.Module, documents: dict[int, list[int]], exact: list[str]
) -> dict:
    """How far the auxiliary loss of experts, a mean over a rank's tokens, is off the model's own on rows padded on the
    right; nothing for a model that has none."""
    ways = dict(batches(documents, dist.get_rank(), shifted=False))
    del ways["continued"]
    try:
        expected = float(plain(**ways["padded right"], **{_ROUTER: True}, use_cache=False).aux_loss)
    except (AttributeError, TypeError):  # some models of some versions fail at their own
        return {}
    worst = 0.0
    for batch in (batch for way, batch in ways.items() if way in exact):
        out = engine(**batch, **{_ROUTER: True})
        engine.backward(out.loss)
        engine.step()
        error = abs(float(out.aux_loss) - expected) / expected
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return {"router loss": {"error": worst, "parameter": "aux_loss"}}


def _refusal(model: nn.Module, error: Exception) -> dict[str, Any]:
    """The words of a refusal, and whether they name the model, its type or one of its modules."""
    names = {model.config.model_type, *(type(module).__name__ for module in model.modules())}
    return {"refused": str(error), "by_name": not names.isdisjoint(re.findall(r"[\w-]+", str(error)))}


def run(names: list[str]) -> list[dict[str, Any]]:
    """Goes through the models together with the other ranks; one that fails is told and does not keep the others."""
    transformers.logging.set_verbosity_error()
    deepspeed.init_distributed("gloo")
    results = []
    for name in names:
        print(f"\nmodel {name}", flush=True)
        try:
            results.append(sweep_one(name))
        except Exception as error:
            traceback.print_exc()
            results.append({"name": name, "failed": f"{type(error).__name__}: {error}"})
        dist.barrier()
    return results
