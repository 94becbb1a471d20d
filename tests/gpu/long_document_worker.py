# SPDX-License-Identifier: Apache-2.0
"""Runs on both GPUs of test_long_document_gpu.py: a document of twice a rank's 64K tokens, against one GPU."""

from __future__ import annotations

import os

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.layout import Layout, Segment
from tests.distributed.engine_worker import documents_of, ds_config, full_gradients, tiny_llama

HALF = 65536


def check(placement: str) -> dict:
    """Relative errors of the loss and the worst gradient, fp32 over two GPUs against fp32 in one process."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    deepspeed.init_distributed("nccl")
    if placement == "contiguous":
        ranks = [[Segment(0, 0, HALF)], [Segment(0, HALF, HALF)]]
    else:
        quarter = HALF // 2
        ranks = [[Segment(0, 0, quarter), Segment(0, HALF + quarter, quarter)], [Segment(0, quarter, HALF)]]
    layout = Layout.from_ranks(ranks).validate()
    documents = documents_of(layout, np.random.default_rng(0))
    options = {"max_position_embeddings": 2 * HALF, "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2}
    options["num_key_value_heads"] = 1

    def train(layout: Layout, rank: int, ranks: int) -> tuple[float, dict[str, torch.Tensor]]:
        batch = batch_from_layout(documents, layout, rank)
        engine, *_ = deepspeed.initialize(model=tiny_llama(**options), config=ds_config(0, 1, {"servers": ranks}))
        loss = engine(**batch).loss
        engine.backward(loss)
        total = loss.detach().clone()
        dist.all_reduce(total)
        gradients = full_gradients(engine)
        engine.distca.detach()
        return float(total) / dist.get_world_size(), gradients

    got_loss, got = train(layout, rank, 2)
    # Each GPU alone with the whole document: the mean over two equal ranks is that of one.
    whole = Layout.from_ranks([[Segment(0, 0, 2 * HALF)]])
    loss, expected = train(whole, 0, 1)
    errors = {n: float((got[n] - g).norm() / g.norm()) for n, g in expected.items()}
    worst = max(errors, key=errors.get)
    return {"loss": abs(got_loss - loss) / loss, "gradient": errors[worst], "parameter": worst}
