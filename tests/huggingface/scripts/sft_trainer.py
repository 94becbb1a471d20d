# SPDX-License-Identifier: Apache-2.0
"""TRL's SFTTrainer with its own padding-free collator; the rows are packed as its packing leaves them."""

from __future__ import annotations

import os

import common
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import deepspeed_distca

common.no_compiled_collectives()
words = {"<eos>": 0, **{f"w{i}": i for i in range(1, common.VOCABULARY)}}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<eos>")), eos_token="<eos>", pad_token="<eos>"
)
rows = [{"input_ids": [t for d in row for t in d], "seq_lengths": [len(d) for d in row]} for row in common.rows()]


class Record(TrainerCallback):
    losses: dict[int, float] = {}  # noqa: RUF012

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]


arguments = SFTConfig(
    output_dir=os.environ["TEST_FOLDER"],
    use_cpu=True,
    bf16=False,
    deepspeed=common.config(),
    packing=False,
    padding_free=True,
    max_length=None,
    dataset_kwargs={"skip_prepare_dataset": True},
    gradient_checkpointing=False,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=common.ACCUMULATION,
    max_steps=common.STEPS,
    learning_rate=common.LEARNING_RATE,
    weight_decay=0.0,
    max_grad_norm=1.0,
    lr_scheduler_type="constant",
    train_sampling_strategy="sequential",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = SFTTrainer(
    model=common.model(),
    args=arguments,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    callbacks=[Record()],
)
trainer.train()
engine = trainer.model_wrapped
assert isinstance(engine.distca, deepspeed_distca.Runtime)
common.report({"losses": Record.losses, "moved": engine.distca.stats.bytes_moved})
common.leave()
