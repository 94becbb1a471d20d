# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of test_operation_order.py: what pipelines issue while they train and evaluate."""

from __future__ import annotations

from dataclasses import asdict

import deepspeed
import torch.distributed as dist

from tests.distributed.operation_order import recorded
from tests.distributed.pipeline_worker import defaults, documents_of_steps, loader, make_engine


def record(stages: int, cases: list[dict]) -> list[list[dict]]:
    """For each case the operations of an evaluation and of three steps, as JSON."""
    deepspeed.init_distributed("gloo")
    records = []
    for given in cases:
        case = defaults(given)
        engine = make_engine(stages, case.micro_batches, case, optimizer="adam", gradient_clipping=1.0)
        replica = engine.grid.get_data_parallel_rank()
        replicas = dist.get_world_size() // stages
        documents = documents_of_steps(replicas, case.micro_batches, case.steps, case.seed, case.static)
        with recorded() as recorder:
            engine.eval_batch(loader(documents[:1], replica, case.form))
            batches = loader(documents, replica, case.form)
            for _ in range(case.steps):
                engine.train_batch(batches)
        engine.distca.detach()
        records.append([asdict(operation) for operation in recorder.operations])
    return records
