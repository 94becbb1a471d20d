# SPDX-License-Identifier: Apache-2.0
"""An unmodified transformers.Trainer, with evaluation during training, checkpoints, and --resume."""

from __future__ import annotations

import argparse
import os

import common
from transformers import Trainer, TrainerCallback, TrainingArguments

import deepspeed_distca
from deepspeed_distca import PackedSequenceCollator

common.no_compiled_collectives()
parser = argparse.ArgumentParser()
parser.add_argument("--stop-after", type=int, default=common.STEPS)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--local_rank", type=int)  # given by the deepspeed launcher
options = parser.parse_args()


class Record(TrainerCallback):
    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.eval_losses: dict[int, float] = {}

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]
        if "eval_loss" in logs:
            self.eval_losses[state.global_step] = logs["eval_loss"]

    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_training_stop = state.global_step >= options.stop_after


arguments = TrainingArguments(
    output_dir=os.environ["TEST_FOLDER"],
    use_cpu=True,
    deepspeed=common.config(),
    per_device_train_batch_size=1,
    per_device_eval_batch_size=1,
    gradient_accumulation_steps=common.ACCUMULATION,
    max_steps=common.STEPS,
    learning_rate=common.LEARNING_RATE,
    weight_decay=0.0,
    max_grad_norm=1.0,
    lr_scheduler_type="constant",
    train_sampling_strategy="sequential",
    logging_steps=1,
    logging_nan_inf_filter=False,
    eval_strategy="steps",
    eval_steps=5,
    save_strategy="steps",
    save_steps=10,
    report_to="none",
    disable_tqdm=True,
    remove_unused_columns=True,
)
record = Record()
trainer = Trainer(
    model=common.model(),
    args=arguments,
    train_dataset=common.features(),
    eval_dataset=common.features(7, seed=1),
    data_collator=PackedSequenceCollator(),
    callbacks=[record],
)
trainer.train(resume_from_checkpoint=options.resume)
final = trainer.evaluate()
engine = trainer.model_wrapped
assert isinstance(engine.distca, deepspeed_distca.Runtime)
common.report(
    {
        "losses": record.losses,
        "eval_losses": record.eval_losses,
        "final": final["eval_loss"],
        "moved": engine.distca.stats.bytes_moved,
    }
)
common.leave()
