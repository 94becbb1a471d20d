# SPDX-License-Identifier: Apache-2.0
"""The same training as train.py with TRL's SFTTrainer, which tokenizes and packs by itself.

    deepspeed --num_accelerators 2 examples/hf_llama/train_trl.py --deepspeed_config configs/ds_config/zero1.json

What makes it a distca run: the import, and the `distca` block in the DeepSpeed config. TRL's own collator says where
documents begin.
"""

from __future__ import annotations

import deepspeed
import torch
from corpus import load_texts
from datasets import Dataset
from train import load_config, make_model, make_tokenizer, parse_args
from train_trainer import Report, print_once, training_arguments
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

import deepspeed_distca  # noqa: F401  reads the `distca` block when SFTTrainer calls deepspeed.initialize


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    config = load_config(args)
    if not torch.cuda.is_available():
        # DeepSpeed would first spend most of a minute compiling its shared-memory collectives for CPUs.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    arguments = training_arguments(
        args,
        config,
        SFTConfig,
        packing=True,  # documents longer than a row are cut, as with `--overflow split`
        packing_strategy="bfd_split",
        max_length=args.tokens_per_rank,
    )
    texts = load_texts(args.text_dir, args.documents, args.seed)
    tokenizer = make_tokenizer(args, texts)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        model = make_model(args, config, len(tokenizer))
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        callbacks=[Report()],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    print_once(trainer, "done")
    trainer.model_wrapped.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
