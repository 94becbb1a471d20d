# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of tests/test_example_shared_prompts.py: an update from shared prompts against rollouts one by
one, each with a prompt of its own."""

from __future__ import annotations

import sys

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca import pack_step
from tests.distributed.engine_worker import ds_config, tiny_llama
from tests.distributed.harness import ROOT
from tests.grpo_worker import DISTCA, one_by_one, report
from tests.tiny_llama import VOCABULARY

sys.path.append(str(ROOT / "examples" / "hf_llama"))
import grpo
import shared_prompts


def groups_of(sizes: list[tuple[int, list[int]]], loss: str, longest: int) -> list[shared_prompts.Group]:
    """Of the tokens of each prompt and of its answers."""
    draw = np.random.default_rng(0)
    lengths = [n for _, answers in sizes for n in answers]
    weights = iter(grpo.token_weights(loss, lengths, longest))
    found = []
    for prompt, answers in sizes:
        ids = [draw.integers(0, VOCABULARY, n).tolist() for n in (prompt, *answers)]
        gains = grpo.advantages(draw.random(len(answers)).tolist(), group=len(answers))
        found.append(shared_prompts.Group(ids[0], ids[1:], gains, [next(weights) for _ in answers]))
    return found


def gradients(sizes: list[tuple[int, list[int]]], cap: int, zero: int, loss: str) -> dict[str, object]:
    """Micro-batches of a step, bytes that moved, and the worst relative error of a parameter's gradient."""
    deepspeed.init_distributed("gloo")
    groups = groups_of(sizes, loss, cap)
    rollouts = [grpo.Rollout(g.prompt, answer) for g in groups for answer in g.answers]
    draw = np.random.default_rng(1)
    old = [torch.tensor(draw.normal(-np.log(VOCABULARY), 0.3, len(r.answer)), dtype=torch.float32) for r in rollouts]
    gains, weights = ([v for g in groups for v in getattr(g, name)] for name in ("advantages", "weights"))
    expected = one_by_one(tiny_llama(), rollouts, old, gains, weights)

    packed = pack_step([g.tokens for g in groups], cap, dist.get_world_size())
    mine = [batch[dist.get_rank()] for batch in packed]
    batches = [shared_prompts.micro_batch([groups[i] for i in row], torch.device("cpu")) for row in mine]
    first = np.cumsum([0, *(len(g.answers) for g in groups)])
    before = [torch.cat([torch.zeros(0), *(v for i in row for v in old[first[i] : first[i + 1]])]) for row in mine]
    engine, *_ = deepspeed.initialize(model=tiny_llama(), config=ds_config(zero, 1, DISTCA))
    return report(engine, packed, expected, lambda: shared_prompts.update(engine, batches, before))
