# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: training with `keep_attention` left out, on a device whose memory the test tells."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca import Layout, engine_runtime
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.huggingface import kept_layers
from deepspeed_distca.huggingface.kept_layers import Memory
from tests.distributed.engine_worker import (
    counting,
    digest,
    documents_of,
    ds_config,
    enable_checkpointing,
    full_gradients,
    tiny_llama,
)
from tests.distributed.models_worker import DISTCA, LAYOUT

LAYERS = 3
#: For each optimizer step, of how many layers each rank has memory to keep attention.
ROOM = [(3, 3), (3, 3), (3, 3), (0, 3), (2, 1), (5, 2), (1, 3), (4, 4)]


def trained(checkpointing: str, keep: bool | None, seed: int = 3) -> list[dict]:
    """What each step gave."""
    layout = Layout.from_ranks(LAYOUT).validate()
    model = tiny_llama(seed, num_hidden_layers=LAYERS)
    enable_checkpointing(model, checkpointing)
    found: list[dict] = []
    asked = []

    def memory() -> Memory:
        config = model.config
        row = config.num_attention_heads * (config.hidden_size // config.num_attention_heads + 1) * 4
        layers = ROOM[len(found)][dist.get_rank()]
        return Memory(int((layers + 0.5) * row * layout.tokens[dist.get_rank()] / (1 - kept_layers._MARGIN)), 0, 0)

    def memory_of(device: torch.device) -> Callable[[], Memory]:
        asked.append(device)
        return memory

    with mock.patch.object(engine_runtime, "memory_of", memory_of):
        engine, *_ = deepspeed.initialize(
            model=model, config=ds_config(0, 1, DISTCA if keep is None else {**DISTCA, "keep_attention": keep})
        )
        engine.train()
        for step in range(len(ROOM)):
            documents = documents_of(layout, np.random.default_rng((seed, step)))
            with counting() as counts:
                loss = engine(**batch_from_layout(documents, layout, dist.get_rank())).loss
                engine.backward(loss)
            gradients = full_gradients(engine)
            engine.step()
            stats = engine.distca.stats
            found.append(
                {
                    "loss": loss.item(),
                    "gradients": digest([gradients[name] for name in sorted(gradients)]),
                    "attention": counts["attention"],
                    "exchanges": counts["exchanges"],
                    "kept": stats.kept_layers,
                }
            )
    assert bool(asked) == (keep is None)
    engine.distca.detach()
    return found


def run() -> dict:
    deepspeed.init_distributed("gloo")
    return {
        f"{checkpointing}, {keep}": trained(checkpointing, keep)
        for checkpointing in ("reentrant", "non-reentrant", "off")
        for keep in (None, True, False)
    }
