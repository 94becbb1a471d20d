# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of the resume tests: a run that is saved, at the end of a step or within one, and resumed."""

from __future__ import annotations

import hashlib
import shutil
import tempfile

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca.data import AccumulationLoader, GlobalPackedLoader, PackedSequenceCollator
from tests.data.configs import by_pairs, config
from tests.data.stateful import StatefulLoader
from tests.distributed.engine_worker import VOCABULARY, ds_config, tiny_llama

ACCUMULATION = 3


def make_loader(kind: str) -> GlobalPackedLoader | AccumulationLoader:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, VOCABULARY, size=n).tolist() for n in rng.integers(2, 70, size=44)]
    if kind != "accumulation":
        options = {"num_workers": 1 if kind == "workers" else 0, "regroup": kind != "packed"}
        return GlobalPackedLoader(documents, 64, config(ACCUMULATION, cost_model=by_pairs()), **options)
    own = documents[dist.get_rank() :: 2]
    return AccumulationLoader(
        StatefulLoader(
            [PackedSequenceCollator()([{"input_ids": d} for d in own[i : i + 2]]) for i in range(0, 18, 2)]
        ),
        ACCUMULATION,
    )


def train(kind: str, zero: int, folder: str, *, save: list[int] = (), tag: str | None = None) -> tuple[str, int]:
    """Trains to the end of the epoch, from a checkpoint or the beginning, and saves after some micro-batches.

    Returns:
        a digest of the weights, and how many micro-batches were trained.
    """
    engine, *_ = deepspeed.initialize(
        model=tiny_llama(), config=ds_config(zero, ACCUMULATION, {"advanced": {"granularity": 8}}, lr=1e-2)
    )
    engine.train()
    loader = make_loader(kind)
    if tag is not None:
        _, state = engine.load_checkpoint(folder, tag=tag)
        loader.load_state_dict(state["data"])
    count = 0
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        count += 1
        if count in save:
            engine.save_checkpoint(folder, tag=str(count), client_state={"data": loader.state_dict()})
    assert engine.micro_steps == count  # it counts from 0 after a resume: loader and engine begin steps together
    digest = hashlib.sha256()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for parameter in engine.module.parameters():
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    engine.distca.detach()
    engine.destroy()
    return digest.hexdigest(), count


def resumed(cases: list[tuple[str, int, list[int]]]) -> list[dict]:
    """For each (loader, ZeRO stage, saves): the run that was not interrupted, the one that saves,
    and those that resumed."""
    deepspeed.init_distributed("gloo")
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    found = []
    for number, (kind, zero, save) in enumerate(cases):
        folder = f"{name[0]}/{number}"
        found.append(
            {
                "plain": train(kind, zero, folder),
                "saved": train(kind, zero, folder, save=save),
                "resumed": [train(kind, zero, folder, tag=str(tag)) for tag in save],
            }
        )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(name[0])
    return found
