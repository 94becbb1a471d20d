# SPDX-License-Identifier: Apache-2.0
"""Runs on both GPUs of test_long_document_gpu.py: a document of twice a rank's 64K tokens, against one GPU.

On its own, with a line for each step: torchrun --nproc_per_node 2 -m tests.gpu.long_document_worker
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.layout import Layout, Segment
from tests.distributed.engine_worker import documents_of, ds_config, full_gradients, tiny_llama

HALF = 65536
# Attention of 2 heads of 32 over 128K tokens is 4 TFLOP a layer, forward and backward; nothing else is of that order.
MODEL = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def placements(half: int) -> dict[str, list[list[Segment]]]:
    """Ways to lay a document of 2 * half tokens over two ranks; the last one with budgets of 1 to 3."""
    quarter = half // 2
    return {
        "contiguous": [[Segment(0, 0, half)], [Segment(0, half, half)]],
        "head-tail": [[Segment(0, 0, quarter), Segment(0, half + quarter, quarter)], [Segment(0, quarter, half)]],
        "budgets": [[Segment(0, 0, quarter)], [Segment(0, quarter, 3 * quarter)]],
    }


def check(half: int = HALF) -> dict[str, dict]:
    """For each placement the relative errors of the loss and of the worst gradient: fp32 over two ranks against fp32
    in one process, where every rank holds the whole document on its own."""
    faulthandler.dump_traceback_later(60, repeat=True)
    rank = int(os.environ["RANK"])
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    deepspeed.init_distributed("nccl" if cuda else "gloo")
    started = time.perf_counter()

    def train(what: str, layout: Layout, rank: int, ranks: int) -> tuple[float, dict[str, torch.Tensor]]:
        batch = batch_from_layout(documents, layout, rank)
        model = tiny_llama(**MODEL, max_position_embeddings=2 * half)
        engine, *_ = deepspeed.initialize(model=model, config=ds_config(0, 1, {"servers": ranks}))
        loss = engine(**batch).loss
        engine.backward(loss)
        total = loss.detach().clone()
        dist.all_reduce(total)
        gradients = full_gradients(engine)
        engine.distca.detach()
        value = float(total) / dist.get_world_size()
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        print(
            f"{what}: loss {value:.6f}, {time.perf_counter() - started:.1f} s since the start, kernel "
            f"{engine.distca.server.kernel}, attention {engine.distca.stats.server_seconds:.2f} s on this rank, "
            f"peak {peak:.1f} GiB",
            flush=True,
        )
        return value, gradients

    whole = Layout.from_ranks([[Segment(0, 0, 2 * half)]])
    documents = documents_of(whole, np.random.default_rng(0))
    # Each rank alone with the whole document: the mean over two equal ranks is that of one.
    loss, expected = train("one process", whole, 0, 1)
    results = {}
    for name, ranks in placements(half).items():
        got_loss, got = train(name, Layout.from_ranks(ranks).validate(), rank, 2)
        errors = {n: float((got[n] - g).norm() / g.norm()) for n, g in expected.items()}
        worst = max(errors, key=errors.get)
        results[name] = {"loss": abs(got_loss - loss) / loss, "gradient": errors[worst], "parameter": worst}
    faulthandler.cancel_dump_traceback_later()
    return results


if __name__ == "__main__":
    print(json.dumps(check(int(sys.argv[1]) if len(sys.argv) > 1 else HALF), indent=1), flush=True)
    dist.destroy_process_group()
