# SPDX-License-Identifier: Apache-2.0
"""A script that knows nothing of the plugin: plain DeepSpeed and transformers, packed by transformers' collator."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import common
import deepspeed
import torch.distributed as dist
from transformers import DataCollatorWithFlattening

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--local_rank", type=int, default=-1)  # what DeepSpeed's launcher passes
args = parser.parse_args()
assert __name__ == "__main__" and Path(sys.argv[0]).name == Path(__file__).name

common.no_compiled_collectives()
deepspeed.init_distributed("gloo")
model = common.model()
config = {**common.config(), "gradient_accumulation_steps": 1}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
rows = common.rows()[dist.get_rank() :: common.RANKS]
losses = []
engine.train()
for row in rows[: args.steps]:
    loss = engine(**collate([{"input_ids": document} for document in row])).loss
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(float(mean) / common.RANKS)
distca = getattr(engine, "distca", None)
common.report({"losses": losses, "moved": distca and distca.stats.bytes_moved, "local_rank": args.local_rank})
common.leave()
