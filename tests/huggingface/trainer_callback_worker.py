# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: a Trainer with DistCACallback, and what its reporters got."""

from __future__ import annotations

import dataclasses
from typing import Any

import deepspeed
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from deepspeed_distca import DistCACallback
from tests.huggingface.compared import config_of, end
from tests.huggingface.trainers_worker import ARGUMENTS, documents
from tests.tiny_llama import llama

STEPS, EVERY, EVALUATED = 6, 2, 3


class Reporter(TrainerCallback):
    """Stands where Trainer puts those of ``report_to``: before the callbacks that are added later."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.trainer: Any = None

    def on_step_end(self, *given: Any, **more: Any) -> None:
        runtime = getattr(self.trainer.model_wrapped, "distca", None)
        if runtime is not None:
            self.steps.append(dataclasses.asdict(runtime.stats))

    def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.logs.append(dict(logs))


def trained(folder: str, block: bool) -> dict[str, Any]:
    auto: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    given = {
        **ARGUMENTS,
        "max_steps": STEPS,
        "logging_steps": EVERY,
        "eval_strategy": "steps",
        "eval_steps": EVALUATED,
    }
    given["optim"] = "sgd"
    config = config_of(block, 1, **auto, zero_allow_untested_optimizer=True)
    del config["optimizer"]
    arguments = TrainingArguments(output_dir=folder, deepspeed=config, **given)
    reporter = Reporter()
    features = [{"input_ids": d, "labels": list(d)} for d in documents()]
    trainer = Trainer(
        llama(), arguments, DataCollatorWithFlattening(), features, eval_dataset=features[:4], callbacks=[reporter]
    )
    reporter.trainer = trainer
    trainer.add_callback(DistCACallback(trainer))
    trainer.train()
    history = trainer.state.log_history
    end(trainer.model_wrapped)
    unset_hf_deepspeed_config()
    return {"reported": reporter.logs, "history": history, "steps": reporter.steps}


def run(folder: str) -> dict[str, Any]:
    deepspeed.init_distributed("gloo")
    return {"with": trained(folder, True), "without": trained(folder, False)}
