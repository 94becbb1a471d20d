# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: the sweep over models, where the kernels of their other mixers are installed."""

from __future__ import annotations

from typing import Any

import deepspeed
import numpy as np
import torch.distributed as dist

from tests.distributed import mixer_kernels, model_families, models_worker
from tests.distributed.engine_worker import ds_config, full_gradients, reference


def run(names: list[str]) -> list[dict[str, Any]]:
    """See ``models_worker.run``."""
    mixer_kernels.install()
    return models_worker.run(names)


def partitioned(names: list[str]) -> dict[str, float]:
    """Under ZeRO-3 and activation checkpointing, without the kernels: how far gradients of a document a row are off
    those of documents run alone, by model."""
    deepspeed.init_distributed("gloo")
    found = {}
    for name in names:
        generator = np.random.default_rng(0)
        documents = {d: generator.integers(3, 97, size=n).tolist() for d, n in models_worker.LENGTHS.items()}
        _, expected = reference(model_families.build(name, {}), [documents])
        model = model_families.build(name, {})
        model.gradient_checkpointing_enable({"use_reentrant": False})
        engine, *_ = deepspeed.initialize(model=model, config=ds_config(3, 1, models_worker.DISTCA, lr=0.0))
        engine.train()
        batch = dict(models_worker.batches(documents, dist.get_rank(), shifted=False))["padded right"]
        engine.backward(engine(**batch).loss)
        found[name], _ = models_worker.worst_error(expected, full_gradients(engine))
        found[name] += float(engine.distca.stats.bytes_moved == 0)
        engine.distca.detach()
    return found
