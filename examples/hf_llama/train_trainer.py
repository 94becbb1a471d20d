# SPDX-License-Identifier: Apache-2.0
"""The same training as train.py with transformers' Trainer, unmodified.

    deepspeed --num_accelerators 2 examples/hf_llama/train_trainer.py --deepspeed_config configs/ds_config/zero1.json

What makes it a distca run: the import, the `distca` block in the DeepSpeed config, and the collator, which tells
Trainer and model where documents begin. `torchrun` and `accelerate launch` start it as well.
"""

from __future__ import annotations

import deepspeed
import torch
from corpus import load_texts
from train import load_config, make_model, make_tokenizer, parse_args
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import deepspeed_distca  # noqa: F401  reads the `distca` block when Trainer calls deepspeed.initialize
from deepspeed_distca.data import PackedRows, PackedSequenceCollator, pack_documents
from deepspeed_distca.huggingface.trainer import FlatRows

EVALUATION_ROWS = 4


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    config = load_config(args)
    if not torch.cuda.is_available():
        # DeepSpeed would first spend most of a minute compiling its shared-memory collectives for CPUs.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    arguments = training_arguments(args, config)  # joins the process group

    texts = load_texts(args.text_dir, args.documents, args.seed)
    tokenizer = make_tokenizer(args, texts)
    documents = [ids + [tokenizer.eos_token_id] for ids in tokenizer(texts, verbose=False)["input_ids"]]
    lengths = [len(ids) for ids in documents]
    rows = PackedRows(documents, pack_documents(lengths, args.tokens_per_rank, overflow=args.overflow, seed=args.seed))

    if args.model:
        # The arguments above already make from_pretrained split the weights over the ranks (ZeRO-3).
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        model = make_model(args, config, len(tokenizer))
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=FlatRows(rows, EVALUATION_ROWS),
        eval_dataset=FlatRows(rows, 0, EVALUATION_ROWS),
        data_collator=PackedSequenceCollator(max_tokens=args.tokens_per_rank),
        callbacks=[Report()],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    print_once(trainer, f"evaluation: loss {trainer.evaluate()['eval_loss']:.4f}")
    trainer.model_wrapped.destroy()
    torch.distributed.destroy_process_group()


def training_arguments(args, config: dict, kind=TrainingArguments, **more) -> TrainingArguments:
    """Trainer wants to hear what the DeepSpeed config says; the two must agree."""
    optimizer = config["optimizer"]["params"]
    return kind(
        output_dir=str(args.output_dir),
        deepspeed=config,
        use_cpu=not torch.cuda.is_available(),
        bf16=config["bf16"]["enabled"],
        max_steps=args.steps,
        per_device_train_batch_size=config["train_micro_batch_size_per_gpu"],  # rows: 1
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=config["gradient_accumulation_steps"],
        learning_rate=optimizer["lr"],
        adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=config["gradient_clipping"],
        lr_scheduler_type="constant",
        gradient_checkpointing=args.gradient_checkpointing != "off",
        gradient_checkpointing_kwargs={"use_reentrant": args.gradient_checkpointing == "reentrant"},
        save_strategy="steps" if args.save_every else "no",
        save_steps=args.save_every or 1,
        logging_steps=1,
        seed=args.seed,
        report_to="none",
        disable_tqdm=True,
        **more,
    )


class Report(TrainerCallback):
    """One line for every step, on the first rank."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}/{state.max_steps} loss {float(logs['loss']):.4f}", flush=True)


def print_once(trainer: Trainer, text: str) -> None:
    if trainer.is_world_process_zero():
        stats = trainer.model_wrapped.distca.stats
        print(f"{text}; last step's balance {stats.balance_before:.2f} -> {stats.balance_after:.2f}", flush=True)


if __name__ == "__main__":
    main()
