# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: a batch in the form of each framework, against every document run alone."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from tests.distributed.doors_worker import alone, documents, engine_of
from tests.huggingface.frameworks import FORMS
from tests.tiny_llama import llama

#: Of each rank's documents: unequal enough that rows move.
LENGTHS = [[181, 13, 29], [30, 7, 22]]


def run() -> dict[str, dict[str, Any]]:
    """Of every form: the largest relative error of loss and gradients, and whether rows moved; or an error's words."""
    deepspeed.init_distributed()
    found = {}
    for name, form in FORMS.items():
        try:
            found[name] = outcome(form(documents(LENGTHS, dist.get_rank())))
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        dist.barrier()
    return found


def outcome(batch: dict[str, Any]) -> dict[str, Any]:
    everyone = documents(LENGTHS)
    wanted, references = alone(llama(), everyone)
    engine = engine_of(llama())
    result = engine(**batch)
    # A framework that gives no labels makes its loss from logits, and weights it itself.
    loss = result.loss if "labels" in batch else loss_of(result.logits, sum(len(d) - 1 for d in everyone))
    engine.backward(loss)
    total = loss.detach().clone()
    dist.all_reduce(total)
    error = abs(float(total) / dist.get_world_size() - wanted) / wanted
    for parameter, reference in zip(engine.module.parameters(), references, strict=True):
        error = max(error, float((parameter.grad - reference).norm() / reference.norm()))
    moved = engine.distca.stats.bytes_moved > 0
    engine.destroy()
    return {"error": error, "moved": moved}


def loss_of(logits: torch.Tensor, targets: int) -> torch.Tensor:
    """The mean over all ranks' targets, times ranks, since gradients are averaged over them."""
    total, start = logits.new_zeros(()), 0
    for document in documents(LENGTHS, dist.get_rank()):
        own = logits[0, start : start + len(document) - 1].float()
        total = total + cross_entropy(own, torch.tensor(document[1:]), reduction="sum")
        start += len(document)
    return total * dist.get_world_size() / targets
