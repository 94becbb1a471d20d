# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: transformers' Trainer and TRL's trainers, with the block against without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.huggingface.compared import Run, apart, config_of, end, gradients_of, outcomes
from tests.huggingface.texts import PREFERENCES, PROMPTS, TEXTS, tokenizer
from tests.tiny_llama import llama

STEPS = 3
ARGUMENTS: dict[str, Any] = dict(
    use_cpu=True,
    bf16=False,
    max_steps=STEPS,
    learning_rate=0.1,
    weight_decay=0.0,
    max_grad_norm=0.0,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    per_device_train_batch_size=2,
    gradient_checkpointing=False,
)


class Recorder(TrainerCallback):
    """Notes losses, and before every optimizer step the gradients."""

    def __init__(self) -> None:
        self.run = Run()
        self.trainer: Any = None
        self.batches = 0

    def on_train_begin(self, *given: Any, **more: Any) -> None:
        engine = self.trainer.model_wrapped
        own, self.run = engine.step, Run(moved=False)

        def step(*args: Any, **kwargs: Any) -> Any:
            self.batches += 1
            if engine.is_gradient_accumulation_boundary():
                self.run.gradients.append(gradients_of(engine))
            distca = getattr(engine, "distca", None)
            self.run.moved = self.run.moved or (distca is not None and distca.stats.bytes_moved > 0)
            return own(*args, **kwargs)

        engine.step = step

    def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" in logs:
            self.run.losses.append(logs["loss"])


def trained(make: Callable[[dict[str, Any], Recorder], Any], block: bool) -> Run:
    """One trainer from its start to its end."""
    recorder = Recorder()
    try:
        # Trainer fills in what is its own to say.
        auto: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        auto["zero_allow_untested_optimizer"] = True
        auto["optimizer"] = {"type": "SGD", "params": {"lr": ARGUMENTS["learning_rate"]}}
        made = make({**ARGUMENTS, "deepspeed": config_of(block, 1, **auto)}, recorder)
        recorder.trainer = made
        made.train()
        engine = made.model_wrapped
        assert hasattr(engine, "distca") == block
        recorder.run.parameters = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        end(engine)
        return recorder.run
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        unset_hf_deepspeed_config()


def compared(make: Callable[[dict[str, Any], Recorder], Any]) -> dict[str, Any]:
    run = trained(make, True)
    return {**apart(run, trained(make, False)), "steps": len(run.losses)}


# -- transformers -------------------------------------------------------------------------------------------------


def trainer(
    folder: str, arguments: dict[str, Any], recorder: Recorder, collator: Any = None, **options: Any
) -> Trainer:
    """Documents of very different lengths, packed by transformers' own collator."""
    chosen = TrainingArguments(output_dir=folder, **{**arguments, **options})
    features = [{"input_ids": d, "labels": list(d)} for d in documents()]
    collator = collator or DataCollatorWithFlattening()
    return Trainer(llama(), chosen, collator, features, callbacks=[recorder])


def documents() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    lengths = [150, 3, 9, 30, 2, 77, 12, 5, 120, 21, 4, 60, 33, 7, 90, 11, 6, 45, 19]
    return [torch.randint(1, 97, (n,), generator=draw).tolist() for n in lengths]


def short_of_memory(folder: str, arguments: dict[str, Any], recorder: Recorder) -> Trainer:
    """The first micro-batch of training does not fit on any rank."""
    made = trainer(folder, arguments, recorder, auto_find_batch_size=True)
    tried = []

    def out_of_memory(*given: Any) -> None:
        if torch.is_grad_enabled() and not tried:
            tried.append(True)
            raise RuntimeError("CUDA out of memory.")

    made.model.model.layers[1].register_forward_pre_hook(out_of_memory)
    return made


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "padded": dict(collator=DataCollatorForSeq2Seq(tokenizer())),
    "gradient_accumulation_steps": dict(gradient_accumulation_steps=2),
    "group_by_length": dict(train_sampling_strategy="group_by_length"),
    "neftune_noise_alpha": dict(neftune_noise_alpha=5.0),
    "label_smoothing_factor": dict(label_smoothing_factor=0.1),
    "dataloader_drop_last": dict(dataloader_drop_last=True, max_steps=-1, num_train_epochs=1),
    "a short last batch": dict(max_steps=-1, num_train_epochs=1),
    "average_tokens_across_devices": dict(average_tokens_across_devices=False),
    "include_num_input_tokens_seen": dict(include_num_input_tokens_seen=True),
    "gradient_checkpointing": dict(gradient_checkpointing=True),
    # What becomes of the graphs is engine.compile()'s to test, in layers_worker.py.
    "torch_compile": dict(torch_compile=True, torch_compile_backend="eager"),
}


# -- TRL ----------------------------------------------------------------------------------------------------------


def saved(folder: str) -> Any:
    """A model that trainers can load once more, as their reference."""
    if dist.get_rank() == 0 and not Path(folder, "model").exists():
        llama().save_pretrained(Path(folder, "model"))
    dist.barrier()
    model = llama()
    model.config._name_or_path = str(Path(folder, "model"))
    return model


def sft(folder: str, arguments: dict[str, Any], recorder: Recorder, **options: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    chosen = SFTConfig(output_dir=folder, **{**arguments, "max_length": 128, **options})
    data = Dataset.from_list([{"text": text} for text in TEXTS])
    return SFTTrainer(llama(), chosen, train_dataset=data, processing_class=tokenizer(), callbacks=[recorder])


def completions(folder: str, arguments: dict[str, Any], recorder: Recorder, **options: Any) -> Any:
    """Loss on what answers a prompt alone."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    chosen = SFTConfig(output_dir=folder, **{**arguments, "max_length": 256, "completion_only_loss": True, **options})
    data = Dataset.from_list([{"prompt": p["prompt"], "completion": p["chosen"]} for p in PREFERENCES])
    return SFTTrainer(llama(), chosen, train_dataset=data, processing_class=tokenizer(), callbacks=[recorder])


def dpo(folder: str, arguments: dict[str, Any], recorder: Recorder, peft: bool = False) -> Any:
    """With PEFT the model without its adapters is the reference, otherwise a second engine is."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    torch.manual_seed(3)
    adapters = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if peft else None
    return DPOTrainer(
        saved(folder),
        args=DPOConfig(output_dir=folder, **arguments),
        train_dataset=Dataset.from_list(PREFERENCES),
        processing_class=tokenizer(),
        callbacks=[recorder],
        peft_config=adapters,
    )


def reward(folder: str, arguments: dict[str, Any], recorder: Recorder, **options: Any) -> Any:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    model = llama(LlamaForSequenceClassification, num_labels=1, pad_token_id=0)
    chosen = RewardConfig(output_dir=folder, **{**arguments, **options})
    data = Dataset.from_list(PREFERENCES)
    return RewardTrainer(model, chosen, train_dataset=data, processing_class=tokenizer(), callbacks=[recorder])


def grpo(folder: str, arguments: dict[str, Any], recorder: Recorder, **options: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def longer(completions: list[str], **more: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    own = {"num_generations": 2, "max_completion_length": 12, "beta": 0.0, "shuffle_dataset": False, **options}
    chosen = GRPOConfig(output_dir=folder, **{**arguments, **own})
    data = Dataset.from_list([{"prompt": text} for text in PROMPTS])
    return GRPOTrainer(
        saved(folder), longer, args=chosen, train_dataset=data, processing_class=tokenizer(), callbacks=[recorder]
    )


MAKERS: dict[str, Callable[..., Any]] = {
    **{f"Trainer, {name}": functools.partial(trainer, **options) for name, options in OPTIONS.items()},
    "Trainer, auto_find_batch_size": short_of_memory,
    "SFT": functools.partial(sft, gradient_checkpointing=True),
    "SFT, packing": functools.partial(sft, packing=True),
    "SFT, padding_free": functools.partial(sft, padding_free=True, max_length=None),
    "SFT, dft": functools.partial(sft, padding_free=True, max_length=None, loss_type="dft"),
    "SFT, completions": functools.partial(completions, packing=True),
    "DPO": dpo,
    "DPO, PEFT": functools.partial(dpo, peft=True),
    "reward": reward,
    "GRPO": grpo,
    "GRPO, beta": functools.partial(grpo, beta=0.1),
}


def run(folder: str, only: list[str] | None = None) -> dict[str, Any]:
    deepspeed.init_distributed("gloo")
    chosen = {n: m for n, m in MAKERS.items() if not only or n in only}
    return outcomes({n: functools.partial(compared, functools.partial(make, folder)) for n, make in chosen.items()})
