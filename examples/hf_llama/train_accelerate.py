# SPDX-License-Identifier: Apache-2.0
"""The same training as train.py as an Accelerate loop.

    accelerate launch --config_file configs/accelerate/deepspeed.yaml examples/hf_llama/train_accelerate.py

The file in configs/accelerate names the DeepSpeed config, which has the `distca` block. The loader is prepared by
Accelerate first and read by an AccumulationLoader then, which counts the targets of a whole optimizer step.
"""

from __future__ import annotations

import deepspeed
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DummyOptim
from corpus import load_texts
from torch.utils.data import DataLoader
from train import make_model, make_tokenizer, parse_args

import deepspeed_distca  # noqa: F401  reads the `distca` block when Accelerate calls deepspeed.initialize
from deepspeed_distca.data import AccumulationLoader, PackedRows, PackedSequenceCollator, pack_documents
from deepspeed_distca.huggingface.trainer import FlatRows


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        # Accelerate would start no process group on CPUs; DeepSpeed would first compile collectives of its own.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        PartialState(backend="gloo")
    accelerator = Accelerator()
    torch.manual_seed(args.seed)
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    accumulation = config["gradient_accumulation_steps"]

    texts = load_texts(args.text_dir, args.documents, args.seed)
    tokenizer = make_tokenizer(args, texts)
    documents = [ids + [tokenizer.eos_token_id] for ids in tokenizer(texts, verbose=False)["input_ids"]]
    lengths = [len(ids) for ids in documents]
    rows = PackedRows(documents, pack_documents(lengths, args.tokens_per_rank, overflow=args.overflow, seed=args.seed))
    collator = PackedSequenceCollator(max_tokens=args.tokens_per_rank)
    loader = DataLoader(FlatRows(rows), batch_size=1, shuffle=True, collate_fn=collator)

    model = make_model(args, config, len(tokenizer))
    # The optimizer is DeepSpeed's, from its config.
    model, optimizer, loader = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
    model.train()
    step, losses = 0, []
    while step < args.steps:
        for batch in AccumulationLoader(loader, accumulation):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach().float())
            if not accelerator.sync_gradients:
                continue
            step += 1
            mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
            stats = model.distca.stats
            accelerator.print(
                f"step {step}/{args.steps} loss {mean.item():.4f} "
                f"balance {stats.balance_before:.2f} -> {stats.balance_after:.2f}",
                flush=True,
            )
            losses = []
            if step == args.steps:
                break
    model.destroy()
    accelerator.end_training()


if __name__ == "__main__":
    main()
