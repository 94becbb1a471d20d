# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of the engine tests: DeepSpeed training with the plugin against documents run alone."""

from __future__ import annotations

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed_distca
from deepspeed_distca import Layout
from deepspeed_distca.data.from_layout import batch_from_layout

VOCABULARY = 97


def tiny_llama(seed: int = 0, **options) -> LlamaForCausalLM:
    """A Llama of two layers with grouped-query attention, in fp32, the same on every rank."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 4096,
            "attn_implementation": "sdpa",
            "use_cache": False,
            **options,
        }
    )
    return LlamaForCausalLM(config)


def ds_config(zero: int, accumulation: int, distca: dict | None, lr: float = 1e-3, **more) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0, "torch_adam": True}},
        "steps_per_print": 10**9,
        **more,
    }
    return config if distca is None else {**config, "distca": distca}


def documents_of(layout: Layout, rng: np.random.Generator) -> dict[int, list[int]]:
    lengths: dict[int, int] = {}
    for _, document, start, length in layout.segments.tolist():
        lengths[document] = max(lengths.get(document, 0), start + length)
    return {d: rng.integers(0, VOCABULARY, size=n).tolist() for d, n in sorted(lengths.items())}


def reference(model, micro_batches: list[dict[int, list[int]]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Token-weighted loss and gradients with every document run alone, in one process."""
    model.train()
    model.zero_grad()
    documents = [d for batch in micro_batches for d in batch.values()]
    targets = max(1, sum(len(d) - 1 for d in documents))
    total = 0.0
    for tokens in documents:
        if len(tokens) < 2:
            continue  # no target
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(tokens[1:]), reduction="sum") / targets
        loss.backward()
        total += float(loss.detach())
    return total, {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def full_gradients(engine) -> dict[str, torch.Tensor]:
    """Averaged gradients of every parameter, before the optimizer's step."""
    from deepspeed.utils import safe_get_full_grad

    if engine.zero_optimization_stage() == 0:
        return {n: p.grad.clone() for n, p in engine.module.named_parameters()}
    return {n: safe_get_full_grad(p).clone() for n, p in engine.module.named_parameters()}


def train_once(
    zero: int, accumulation: int, checkpointing: str, layouts: list, seed: int, distca: dict, model_options: dict
) -> dict:
    """One optimizer step over the layouts (one per micro-batch); errors against the reference on this rank."""
    rng = np.random.default_rng(seed)
    layouts = [Layout.from_ranks(ranks).validate() for ranks in layouts]
    batches = [documents_of(layout, rng) for layout in layouts]
    expected_loss, expected = reference(tiny_llama(seed, **model_options), batches)

    model = tiny_llama(seed, **model_options)
    if checkpointing != "off":
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    engine, *_ = deepspeed.initialize(model=model, config=ds_config(zero, accumulation, distca))
    engine.train()
    rank = dist.get_rank()
    parts = [batch_from_layout(d, layout, rank) for d, layout in zip(batches, layouts, strict=True)]
    step_targets = sum(part["num_targets"] for part in parts)
    losses, gradients = [], {}
    for index, part in enumerate(parts):
        loss = engine(**part, step_targets=step_targets).loss
        losses.append(loss.detach())
        engine.backward(loss)
        if index == len(parts) - 1:
            gradients = full_gradients(engine)
        engine.step()
    total = torch.stack(losses).mean()
    dist.all_reduce(total)
    worst, which = 0.0, ""
    scale = max(float(g.norm()) for g in expected.values())
    for name, gradient in expected.items():
        error = float((gradients[name].cpu() - gradient).norm()) / max(float(gradient.norm()), 1e-3 * scale, 1e-30)
        if error >= worst:
            worst, which = error, name
    return {
        "loss": float(total) / dist.get_world_size(),
        "expected": expected_loss,
        "gradient_error": worst,
        "parameter": which,
        "bytes_moved": engine.distca.stats.bytes_moved,
    }


def train_cases(cases: list[dict]) -> list[dict]:
    deepspeed.init_distributed("gloo")
    return [train_once(**case) for case in cases]
