# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: the contract of a model under ZeRO-3, and what its training does afterwards."""

from __future__ import annotations

from dataclasses import astuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from deepspeed_distca.huggingface.contract import find_contract
from deepspeed_distca.huggingface.decoders import UnsupportedModelError, attention_modules
from tests.distributed.engine_worker import ds_config
from tests.distributed.model_families import build
from tests.huggingface.faulty_models import in_a_layer, llama


def engine_of(model):
    config = ds_config(3, 1, None)
    # Small buckets, so that parameters are really fetched and released.
    config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 2000}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def contract_of(engine):
    model = engine.module
    return find_contract(model, model, attention_modules(model), device=engine.device)


def train(engine) -> list[float]:
    losses = []
    for step in range(4):
        ids = torch.arange(1, 30)[None] * (2 + step + dist.get_rank()) % 97
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def run() -> dict:
    deepspeed.init_distributed("gloo")
    plain = train(engine_of(llama()))
    engine = engine_of(llama())
    found = contract_of(engine)
    partitioned = all(p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in engine.module.parameters())
    try:
        contract_of(engine_of(in_a_layer(lambda x: x.roll(1, 1))))
        refused = "not refused"
    except UnsupportedModelError as error:
        refused = str(error)
    # Its convolution raises where it is told of borders, in the middle of a forward.
    hybrid = engine_of(build("lfm2", {}))
    told = contract_of(hybrid)
    return {
        "hybrid": (told.rows, told.why),
        "hybrid partitioned": all(p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in hybrid.module.parameters()),
        "hybrid plain": train(engine_of(build("lfm2", {}))),
        "hybrid probed": train(hybrid),
        "contract": list(astuple(found)),
        "partitioned": partitioned,
        "plain": plain,
        "probed": train(engine),
        "refused": refused,
    }
