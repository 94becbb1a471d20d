# SPDX-License-Identifier: Apache-2.0
"""Random batches through an engine: gradients and loss against every document run alone, or an error on all ranks."""

from __future__ import annotations

import collections

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

import deepspeed_distca  # noqa: F401
from tests.fuzz.batches import IGNORE, Case, make_case
from tests.fuzz.ranks import until
from tests.tiny_llama import llama

#: Relative error of a parameter's gradient, and of the loss, in fp32.
TOLERANCE = 1e-5


def main(first: int, count: int, seconds: float) -> dict[str, int]:
    """Micro-batches of so many seeds, or of as many as there is time for; the same on every rank.

    Returns:
        how many were exact, and how many were refused, by what was wrong with them.

    Raises:
        AssertionError: a wrong gradient or loss, a wrong batch that came in, or a right one that was refused.
    """
    deepspeed.init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    reference, model = llama(), llama()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "distca": {"advanced": {"granularity": 1, "min_gain": 0.0, "tolerance": 0.0}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.train()
    found: collections.Counter[str] = collections.Counter()
    for seed in until(first, count, seconds):
        cases = [_case(seed, r) for r in range(world)]
        wrong = sorted({case.spoiled for case in cases if case.spoiled})
        try:
            loss = engine(**cases[rank].batch).loss
        except (ValueError, RuntimeError) as error:
            assert wrong, f"seed {seed}: right batches were refused: {error}"
            found[f"refused: {wrong[0]}"] += 1
            continue
        assert not wrong, f"seed {seed}: came in in spite of {wrong}"
        engine.backward(loss)  # and no step: weights stay
        total = loss.detach().clone()
        dist.all_reduce(total)
        gradients = [p.grad for p in model.parameters()]
        _compare(f"seed {seed}", gradients, float(total) / world, _alone(reference, cases))
        found["exact"] += 1
        model.zero_grad()
    return dict(found)


def _case(seed: int, rank: int) -> Case:
    return make_case(seed * 31 + rank)


def _alone(model: LlamaForCausalLM, cases: list[Case]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of the documents of all ranks, each a row of its own; causal, so padding is not seen."""
    documents = [document for case in cases for document in case.documents]
    model.zero_grad()
    longest = max((len(tokens) for tokens, _ in documents), default=1)
    ids = torch.zeros((max(1, len(documents)), longest), dtype=torch.long)
    targets = torch.full_like(ids, IGNORE)
    for row, (tokens, expected) in enumerate(documents):
        ids[row, : len(tokens)], targets[row, : len(tokens)] = torch.tensor(tokens), torch.tensor(expected)
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = loss / max(1, int((targets != IGNORE).sum()))
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def _compare(
    where: str, gradients: list[torch.Tensor], loss: float, expected: tuple[torch.Tensor, list[torch.Tensor]]
) -> None:
    wanted, alone = expected
    assert abs(loss - float(wanted)) <= TOLERANCE * max(float(wanted), 1e-6), f"{where}: loss {loss}, not {wanted}"
    largest = max(float(g.norm()) for g in alone)
    for gradient, reference in zip(gradients, alone, strict=True):
        error = float((gradient - reference).norm())
        assert error <= TOLERANCE * max(float(reference.norm()), 1e-2 * largest), f"{where}: {error} of {largest}"
