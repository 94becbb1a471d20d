# SPDX-License-Identifier: Apache-2.0
"""Trains a HuggingFace causal language model on packed documents with DeepSpeed and balanced core attention.

    deepspeed --num_accelerators 2 examples/hf_llama/train.py --deepspeed_config configs/ds_config/zero1.json

Two lines make it a distca run: `import deepspeed_distca` here, and the block `"distca": {"enabled": true}` in the
DeepSpeed config. Without arguments it trains a small Llama from scratch on the Python standard library's sources.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from corpus import load_texts
from tokenizer import load_tokenizer, train_tokenizer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import deepspeed_distca  # noqa: F401  reads the `distca` block when deepspeed.initialize is called
from deepspeed_distca.data import AccumulationLoader, PackedRows, PackedSequenceCollator, RowSampler, pack_documents

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "ds_config"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="name or folder of a HuggingFace model; left out: a small Llama from scratch")
    model.add_argument("--hidden-size", type=int, default=128)
    model.add_argument("--layers", type=int, default=2)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--kv-heads", type=int, default=2)
    model.add_argument("--vocab-size", type=int, default=4096)
    model.add_argument("--gradient-checkpointing", choices=["off", "non-reentrant", "reentrant"], default="off")
    data = parser.add_argument_group("data")
    data.add_argument("--text-dir", help="folder of text files, one document each; left out: the standard library")
    data.add_argument("--documents", type=int, default=300, help="how many files to read at most")
    data.add_argument("--tokens-per-rank", type=int, default=8192, help="tokens of a packed row")
    data.add_argument("--overflow", choices=["split", "drop", "error"], default="split", help="of longer documents")
    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=int, default=20)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--gradient-accumulation-steps", type=int, help="left out: what the DeepSpeed config says")
    train.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="left out: on GPUs yes, on CPUs no")
    train.add_argument("--output-dir", type=Path, default=Path("output/hf_llama"), help="tokenizer and checkpoints")
    train.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; 0: none")
    train.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --output-dir")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(CONFIGS / "zero1.json"))
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    start_processes()
    torch.manual_seed(args.seed)

    config = load_config(args)
    accumulation = config["gradient_accumulation_steps"]

    # Text -> token ids of each document -> rows of documents that fill the token budget.
    texts = load_texts(args.text_dir, args.documents, args.seed)
    tokenizer = make_tokenizer(args, texts)
    documents = [ids + [tokenizer.eos_token_id] for ids in tokenizer(texts, verbose=False)["input_ids"]]
    packing = pack_documents(
        [len(ids) for ids in documents], args.tokens_per_rank, overflow=args.overflow, seed=args.seed
    )
    rows = PackedRows(documents, packing)
    if dist.get_rank() == 0:
        print(
            f"{len(documents)} documents, {sum(map(len, documents))} tokens, the longest {max(map(len, documents))}; "
            f"{len(rows)} rows, {packing.fill:.1%} full; {packing.split_documents} documents split, "
            f"{packing.dropped_documents} dropped ({packing.dropped_tokens} tokens)",
            flush=True,
        )

    model = make_model(args, config, len(tokenizer))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    # Ranks that hold one model among them (`tensor_parallel` in the config) read the same rows.
    replicas = engine.data_parallel_group
    rank, num_ranks = dist.get_rank(replicas), dist.get_world_size(replicas)

    first_step, rows_read = load_checkpoint(engine, args) if args.resume else (0, 0)
    sampler = RowSampler(
        len(rows),
        rank=rank,
        num_ranks=num_ranks,
        micro_batches=max(0, args.steps - first_step) * accumulation,
        seed=args.seed,
        start=rows_read,
    )
    collator = PackedSequenceCollator(max_tokens=args.tokens_per_rank)
    loader = DataLoader(rows, batch_size=None, sampler=sampler, collate_fn=collator)
    micro_batches = iter(AccumulationLoader(loader, accumulation))

    engine.train()
    for step in range(first_step + 1, args.steps + 1):
        started = time.perf_counter()
        losses, tokens = [], 0
        for _ in range(accumulation):
            batch = to_device(next(micro_batches), engine.device)
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().float())
            tokens += batch["input_ids"].numel()
        rows_read += num_ranks * accumulation
        report(engine, step, args.steps, torch.stack(losses).mean(), tokens, started)
        if args.save_every and step % args.save_every == 0:
            state = {"step": step, "rows_read": rows_read, "data": data_settings(args)}
            engine.save_checkpoint(str(args.output_dir), tag=f"step{step}", client_state=state)

    engine.destroy()
    dist.destroy_process_group()


def start_processes() -> None:
    """Joins the process group: NCCL on GPUs, gloo on CPUs."""
    if not torch.cuda.is_available():
        # DeepSpeed would first spend most of a minute compiling its shared-memory collectives for CPUs, which leave
        # a buffer of 69 MB in /dev/shm for every process; gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def load_config(args: argparse.Namespace) -> dict:
    """The DeepSpeed config with what the command line says otherwise."""
    config = json.loads(Path(args.deepspeed_config).read_text())
    config.setdefault("gradient_accumulation_steps", 1)
    if args.gradient_accumulation_steps is not None:
        config["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    if args.bf16 is not None:
        config["bf16"] = {"enabled": args.bf16}
    elif "fp16" not in config:
        config.setdefault("bf16", {"enabled": torch.cuda.is_available()})
    return config


def make_tokenizer(args: argparse.Namespace, texts: list[str]):
    """The model's own tokenizer, or one trained on the texts by the first rank and kept in --output-dir."""
    if args.model:
        return AutoTokenizer.from_pretrained(args.model)
    path = args.output_dir / f"tokenizer-{args.vocab_size}.json"
    if dist.get_rank() == 0 and not path.exists():
        train_tokenizer(texts, args.vocab_size, path)
    dist.barrier()
    return load_tokenizer(path)


def make_model(args: argparse.Namespace, config: dict, vocab_size: int):
    """A pretrained model, or a small Llama; the same weights on every rank."""
    if args.model:
        # While this object lives, from_pretrained splits the weights over the ranks as it reads them (ZeRO-3).
        zero3 = HfDeepSpeedConfig(config)
        # DeepSpeed converts to the config's precision; without one it expects fp32, whatever the checkpoint holds.
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        del zero3
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=args.hidden_size,
                intermediate_size=args.hidden_size * 3,
                num_hidden_layers=args.layers,
                num_attention_heads=args.heads,
                num_key_value_heads=args.kv_heads,
                max_position_embeddings=args.tokens_per_rank,
            )
        )
    model.config.use_cache = False
    if args.gradient_checkpointing != "off":
        model.gradient_checkpointing_enable({"use_reentrant": args.gradient_checkpointing == "reentrant"})
    return model


def to_device(batch: dict, device: torch.device) -> dict:
    return {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}


def report(engine, step: int, steps: int, loss: torch.Tensor, tokens: int, started: float) -> None:
    """One line on rank 0. The mean of the loss over ranks and micro-batches is the mean over all target tokens."""
    totals = torch.stack([loss, torch.tensor(float(tokens), device=loss.device)])
    dist.all_reduce(totals, group=engine.data_parallel_group)
    loss, tokens = totals[0].item() / dist.get_world_size(engine.data_parallel_group), totals[1].item()
    rate = tokens / (time.perf_counter() - started)
    line = f"step {step}/{steps} loss {loss:.4f} tokens/s {rate:.0f}"
    distca = getattr(engine, "distca", None)
    if distca is not None:
        line += f" balance {distca.stats.balance_before:.2f} -> {distca.stats.balance_after:.2f}"
    if dist.get_rank() == 0:
        print(line, flush=True)


def data_settings(args: argparse.Namespace) -> dict:
    """What the order of the data depends on: a resumed run must agree in all of it."""
    names = ("model", "text_dir", "documents", "tokens_per_rank", "overflow", "vocab_size", "seed")
    return {name: getattr(args, name) for name in names}


def load_checkpoint(engine, args: argparse.Namespace) -> tuple[int, int]:
    """Loads the last checkpoint; returns the steps that were taken and the rows that all ranks together read."""
    path, state = engine.load_checkpoint(str(args.output_dir))
    if path is None:
        raise SystemExit(f"--resume: no checkpoint in {args.output_dir}")
    if state["data"] != data_settings(args):
        raise SystemExit(f"--resume: the checkpoint was made with {state['data']}, now it is {data_settings(args)}")
    return state["step"], state["rows_read"]


if __name__ == "__main__":
    main()
