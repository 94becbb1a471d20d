# SPDX-License-Identifier: Apache-2.0
"""Runs in one process of its own: what needs engines of DeepSpeed and torch.distributed. See test_compat.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import config
from deepspeed.runtime.pipe import schedule as ds
from torch import nn

from deepspeed_distca.compat import deepspeed as compat
from deepspeed_distca.compat.torch import default_store
from tests.distributed.engine_worker import ds_config


def run() -> dict[str, Any]:
    """By function of compat, what was found; all of it JSON."""
    deepspeed.init_distributed("gloo")
    default_store().set("compat", "said")
    found: dict[str, Any] = {
        "default_store": default_store().get("compat").decode(),
        "sequence_parallel_size": compat.sequence_parallel_size(),
    }
    dist.barrier()
    return found | _zero_3() | _pipeline()


def _zero_3() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine, *_ = deepspeed.initialize(model=model, config=ds_config(3, 1, None))
    compat.show_in_config(engine, "distca_config", "shown here")
    with mock.patch.object(config, "logger") as logger:
        engine._config.print("what DeepSpeed prints at the start")
    printed = " ".join(str(call) for call in logger.info.call_args_list)
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()

    def step() -> list[int]:
        """The first layer's gradients to come: after forward and after backward."""
        rows = torch.ones(2, 4, requires_grad=True)
        loss = engine(rows).sum()
        counts = [compat.gradients_to_come(model[0])]
        engine.backward(loss)
        counts.append(compat.gradients_to_come(model[0]))
        engine.step()
        return counts

    counts = step()
    step()
    traced = [not coordinator.is_invalid_trace()]
    compat.forget_trace(engine)
    traced.append(not coordinator.is_invalid_trace())
    compat.set_gradients_to_come(model[0], 5)
    return {
        "show_in_config": "distca_config" in printed and "shown here" in printed,
        "forget_trace": traced,
        "counts_gradients": [compat.counts_gradients(m) for m in (model[0], nn.Linear(1, 1))],
        "gradients_to_come": counts,
        "set_gradients_to_come": model[0].ds_grads_remaining,
        "is_count": [compat.is_count(n) for n in ("ds_grads_remaining", *vars(nn.Linear(1, 1)))].count(True),
    }


def _pipeline() -> dict[str, Any]:
    module = PipelineModule([nn.Linear(4, 4)], num_stages=1, loss_fn=nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(model=module, config=ds_config(0, 1, None))
    batch = torch.ones(1, 4), torch.zeros(1, 4)
    told: list[str] = []
    run_own, instructions = compat.own_schedule(engine)
    replaced = [compat.schedule_is_replaced(engine)]

    def run_and_tell(schedule: ds.PipeSchedule) -> None:
        told.append(type(schedule).__name__)
        run_own(schedule)

    def forward(engine: Any, buffer_id: int) -> None:
        told.append(f"forward in buffer {buffer_id}")
        instructions[ds.ForwardPass](engine, buffer_id)

    def next_batch() -> tuple:
        told.append("batch")
        return batch

    compat.replace_schedule(engine, run_and_tell, {**instructions, ds.ForwardPass: forward})
    replaced.append(compat.schedule_is_replaced(engine))
    compat.replace_next_batch(engine, next_batch)
    engine.train_batch(iter([]))
    compat.replace_next_batch(engine, None)
    engine.train_batch(iter([batch]))
    compat.restore_schedule(engine)
    replaced.append(compat.schedule_is_replaced(engine))
    before = len(told)
    engine.train_batch(iter([batch]))
    schedule = ds.TrainSchedule(micro_batches=4, stages=2, stage_id=0)
    return {
        "own_schedule": sorted(kind.__name__ for kind in instructions if kind in (ds.ForwardPass, ds.BackwardPass)),
        "replace_schedule": told[:before],
        "schedule_is_replaced": replaced,
        "replace_next_batch": told.count("batch"),
        "restore_schedule": told[before:],
        "buffer_of": [compat.buffer_of(schedule, m) for m in range(4)],
        "has_stage": [compat.has_stage(schedule, s) for s in (-1, 0, 1, 2)],
    }
