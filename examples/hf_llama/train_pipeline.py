# SPDX-License-Identifier: Apache-2.0
"""Trains a HuggingFace model of the Llama family over pipeline stages, the attention of all stages shared.

    deepspeed --num_accelerators 2 examples/hf_llama/train_pipeline.py --stages 2

The block `"distca": {"enabled": true}` of the DeepSpeed config does it; the script makes the layers with
`DecoderPipeline` and calls `train_batch` as any script for PipelineEngine. Without arguments it trains a small Llama
from scratch on the Python standard library's sources. `--save-model` writes the whole model as `from_pretrained` reads
it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from corpus import load_texts
from torch.utils.data import DataLoader
from train import CONFIGS, data_settings, load_checkpoint, load_config, make_model, make_tokenizer, start_processes

import deepspeed_distca  # noqa: F401  reads the `distca` block when deepspeed.initialize is called
from deepspeed_distca.data import PackedRows, PackedSequenceCollator, RowSampler, pack_documents
from deepspeed_distca.pipeline import DecoderPipeline, pipeline_batch


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--stages", type=int, default=2, help="pipeline stages; the other ranks are replicas")
    model.add_argument("--model", help="name or folder of a HuggingFace model; left out: a small Llama from scratch")
    model.add_argument("--hidden-size", type=int, default=128)
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--kv-heads", type=int, default=2)
    model.add_argument("--vocab-size", type=int, default=4096)
    model.add_argument("--checkpoint-layers", type=int, default=0, help="layers recomputed together; 0: none")
    data = parser.add_argument_group("data")
    data.add_argument("--text-dir", help="folder of text files, one document each; left out: the standard library")
    data.add_argument("--documents", type=int, default=300, help="how many files to read at most")
    data.add_argument("--tokens-per-rank", type=int, default=2048, help="tokens of a micro-batch")
    data.add_argument("--overflow", choices=["split", "drop", "error"], default="split", help="of longer documents")
    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=int, default=20)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--gradient-accumulation-steps", type=int, help="micro-batches; left out: as the config says")
    train.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="left out: on GPUs yes, on CPUs no")
    train.add_argument("--output-dir", type=Path, default=Path("output/pipeline"), help="tokenizer and checkpoints")
    train.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; 0: none")
    train.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --output-dir")
    train.add_argument("--save-model", type=Path, help="folder for the trained model, as HuggingFace stores it")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(CONFIGS / "pipeline.json"), gradient_checkpointing="off")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    start_processes()
    torch.manual_seed(args.seed)
    config = load_config(args)
    micro_batches = config["gradient_accumulation_steps"]
    if args.checkpoint_layers:
        config.setdefault("pipeline", {})["activation_checkpoint_interval"] = args.checkpoint_layers

    texts = load_texts(args.text_dir, args.documents, args.seed)
    tokenizer = make_tokenizer(args, texts)
    documents = [ids + [tokenizer.eos_token_id] for ids in tokenizer(texts, verbose=False)["input_ids"]]
    packing = pack_documents(
        [len(ids) for ids in documents], args.tokens_per_rank, overflow=args.overflow, seed=args.seed
    )
    rows = PackedRows(documents, packing)

    # The whole model on the host of every rank, of which each keeps its stage.
    module = DecoderPipeline(make_model(args, config, len(tokenizer)), args.stages)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    engine.set_batch_fn(pipeline_batch)

    first_step, rows_read = load_checkpoint(engine, args) if args.resume else (0, 0)
    # Replicas read different rows; the stages of one replica read the same.
    replica, replicas = engine.grid.get_data_parallel_rank(), engine.grid.get_data_parallel_world_size()
    sampler = RowSampler(
        len(rows),
        rank=replica,
        num_ranks=replicas,
        micro_batches=max(0, args.steps - first_step) * micro_batches,
        seed=args.seed,
        start=rows_read,
    )
    collator = PackedSequenceCollator(max_tokens=args.tokens_per_rank)
    batches = iter(DataLoader(rows, batch_size=None, sampler=sampler, collate_fn=collator))

    for step in range(first_step + 1, args.steps + 1):
        started = time.perf_counter()
        loss = engine.train_batch(batches).item()
        rows_read += replicas * micro_batches
        report(engine, step, args.steps, loss, time.perf_counter() - started)
        if args.save_every and step % args.save_every == 0:
            state = {"step": step, "rows_read": rows_read, "data": data_settings(args)}
            engine.save_checkpoint(str(args.output_dir), tag=f"step{step}", client_state=state)

    if args.save_model:
        module.save_pretrained(args.save_model)
        if dist.get_rank() == 0:
            tokenizer.save_pretrained(args.save_model)
    engine.destroy()
    dist.destroy_process_group()


def report(engine, step: int, steps: int, loss: float, seconds: float) -> None:
    """One line on rank 0; the loss is the mean over all target tokens of the batch."""
    line = f"step {step}/{steps} loss {loss:.4f} seconds {seconds:.2f}"
    distca = getattr(engine, "distca", None)
    if distca is not None:
        line += f" balance {distca.stats.balance_before:.2f} -> {distca.stats.balance_after:.2f}"
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
