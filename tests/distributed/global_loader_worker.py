# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of the global loader's tests: an epoch's gradients against every document run alone."""

from __future__ import annotations

import pickle
import shutil
import tempfile

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

from deepspeed_distca.data import GlobalPackedLoader
from tests.data.configs import by_pairs, config
from tests.distributed.engine_worker import VOCABULARY, ds_config, full_gradients, reference, tiny_llama


def train_case(
    lengths: list[int], budgets: list[int], accumulation: int, zero: int, distca: dict, loader: dict, seed: int
) -> dict:
    """One optimizer step over all documents; errors against the reference, the same on every rank."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, VOCABULARY, size=n).tolist() for n in lengths]
    expected_loss, expected = reference(tiny_llama(seed), [dict(enumerate(documents))])

    engine, *_ = deepspeed.initialize(model=tiny_llama(seed), config=ds_config(zero, accumulation, distca))
    engine.train()
    loader = {"config": config(accumulation, **{**distca, "cost_model": by_pairs()}), **loader}
    batches = GlobalPackedLoader(documents, budgets, **loader)
    as_packed = [batch["layout"] for batch in GlobalPackedLoader(documents, budgets, regroup=False, **loader)]
    losses, gradients, tokens, pieces, regrouped = [], {}, 0, 0, False
    for index, batch in enumerate(batches):
        regrouped |= batch["layout"] != as_packed[index]
        tokens += batch["input_ids"].numel()
        pieces = max(pieces, len(batch["layout"].rank(dist.get_rank())))
        loss = engine(**batch).loss
        losses.append(loss.detach())
        engine.backward(loss)
        if index == accumulation - 1:
            gradients = full_gradients(engine)
        engine.step()
    total = torch.stack(losses).mean()
    dist.all_reduce(total)
    scale = max(float(g.norm()) for g in expected.values())
    errors = {
        name: float((gradients[name] - g).norm()) / max(float(g.norm()), 1e-3 * scale) for name, g in expected.items()
    }
    stats = engine.distca.stats
    return {
        "micro_batches": len(losses),
        "loss_error": abs(float(total) / dist.get_world_size() - expected_loss) / expected_loss,
        "gradient_error": max(errors.values()),
        "parameters": len(errors),
        "tokens": tokens,
        "pieces": pieces,
        "regrouped": regrouped,
        "bytes_moved": stats.bytes_moved,
        "balance_before": stats.balance_before,
        "predicted_seconds": stats.predicted_server_seconds[dist.get_rank()],
    }


def train_cases(cases: list[dict]) -> list[dict]:
    deepspeed.init_distributed("gloo")
    return [train_case(**case) for case in cases]


def _loader() -> GlobalPackedLoader:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, VOCABULARY, size=n).tolist() for n in rng.integers(1, 150, size=40)]
    return GlobalPackedLoader(documents, 64, config(2))


class _Record(TrainerCallback):
    """Losses, and the loader's states when checkpoints are written."""

    def __init__(self, loader: GlobalPackedLoader) -> None:
        self.losses: list[float] = []
        self.states: list[dict] = []
        self._loader = loader

    def on_save(self, args, state, control, **kwargs) -> None:
        self.states.append(self._loader.state_dict())

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def _train_with_trainer(folder: str, state: dict | None, checkpoint: str | None) -> tuple[list[float], list[dict]]:
    loader = _loader()
    if state is not None:
        loader.load_state_dict(state)

    class Training(Trainer):
        def get_train_dataloader(self) -> GlobalPackedLoader:
            return loader

    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        deepspeed=ds_config(1, 2, {"advanced": {"granularity": 8}}),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=6,
        learning_rate=1e-3,
        weight_decay=0.0,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=3,
        ignore_data_skip=True,
        report_to="none",
        disable_tqdm=True,
    )
    record = _Record(loader)
    trainer = Training(model=tiny_llama(), args=arguments, train_dataset=[], callbacks=[record])
    trainer.train(resume_from_checkpoint=checkpoint)
    return record.losses, record.states


def trainer_and_engine() -> dict:
    """Losses of six steps of the bare engine, of Trainer, and of a Trainer that resumed after the third."""
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=tiny_llama(), config=ds_config(1, 2, {"advanced": {"granularity": 8}}))
    losses = []
    for batch in _loader():
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    means = torch.stack(losses).view(-1, 2).mean(1)
    dist.all_reduce(means)
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    folder = name[0]
    whole, states = _train_with_trainer(folder, None, None)
    resumed, _ = _train_with_trainer(folder, states[0], f"{folder}/checkpoint-3")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {"engine": (means / dist.get_world_size()).tolist()[:6], "trainer": whole, "resumed": resumed}


def planned_ahead(num_workers: int = 0, node_size: int | None = None) -> dict:
    """Losses of an epoch with plans made by the loader and by the engine; the engine cannot plan in the former, of
    which the loader learns the nodes, too. But over nodes, where the first micro-batch runs whole, for which others
    are not planned."""
    deepspeed.init_distributed("gloo")
    found = {}
    for ahead in (False, True):
        block = {"advanced": {"granularity": 8, "node_size": node_size}}
        engine, *_ = deepspeed.initialize(model=tiny_llama(), config=ds_config(1, 2, block))
        rng = np.random.default_rng(0)
        documents = [rng.integers(0, VOCABULARY, size=n).tolist() for n in rng.integers(1, 150, size=20)]
        given = config(2) if ahead else config(2, advanced={"node_size": node_size})
        loader = GlobalPackedLoader(documents, 64, given, num_workers=num_workers)
        if ahead:
            loader.plan_ahead(pickle.loads(pickle.dumps(engine.distca.planner)))
        losses, moved = [], 0
        for batch in loader:
            if ahead and len(losses) == (node_size is not None):
                for planner in engine.distca.server._phase_planners.values():
                    planner.plan = None
            assert ("planned" in batch) == ahead
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
            moved += engine.distca.stats.bytes_moved
        found["ahead" if ahead else "asked for"] = losses
        found["bytes moved"] = moved
        engine.distca.detach()
    return found
