# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed engine and a loop."""

from __future__ import annotations

import common
import deepspeed
import torch
import torch.distributed as dist

from deepspeed_distca import AccumulationLoader, PackedSequenceCollator

common.no_compiled_collectives()
deepspeed.init_distributed()
model = common.model()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=common.config())
collate = PackedSequenceCollator()
mine = common.features()[dist.get_rank() :: common.RANKS]
losses, step = [], []
engine.train()
for batch in AccumulationLoader([collate([feature]) for feature in mine], common.ACCUMULATION):
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    step.append(loss.detach())
    if len(step) == common.ACCUMULATION:
        mean = torch.stack(step).mean()
        dist.all_reduce(mean)
        losses.append(float(mean) / common.RANKS)
        step = []
common.report({"losses": losses, "moved": engine.distca.stats.bytes_moved})
common.leave()
