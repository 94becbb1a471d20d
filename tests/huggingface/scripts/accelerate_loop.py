# SPDX-License-Identifier: Apache-2.0
"""Accelerate's own loop: the DeepSpeed config comes from the launcher's --config_file."""

from __future__ import annotations

import common
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DummyOptim
from torch.utils.data import DataLoader

from deepspeed_distca import AccumulationLoader, PackedSequenceCollator

common.no_compiled_collectives()
PartialState(backend="gloo")
accelerator = Accelerator()
model = common.model()
loader = DataLoader(common.features(), batch_size=1, collate_fn=PackedSequenceCollator())
model, optimizer, loader = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
losses, step = [], []
model.train()
for batch in AccumulationLoader(loader, common.ACCUMULATION):
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    step.append(loss.detach())
    if len(step) == common.ACCUMULATION:
        losses.append(float(accelerator.reduce(torch.stack(step).mean(), "mean")))
        step = []
common.report({"losses": losses, "moved": model.distca.stats.bytes_moved})
common.leave()
