# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of the pipeline tests: PipelineEngine with the plugin against documents run alone in one
process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache, partial
from types import SimpleNamespace

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.utils import safe_get_full_grad
from transformers import LlamaForCausalLM

from deepspeed_distca import PackedSequenceCollator
from deepspeed_distca.integrations.pipeline import DecoderPipeline
from tests.distributed.engine_worker import VOCABULARY, ds_config, reference, tiny_llama

LR = 0.3


def documents_of_steps(replicas: int, micro_batches: int, steps: int, seed: int) -> list[list[list[list[list[int]]]]]:
    """documents[step][micro_batch][replica]: token ids of each document; some long, some of one token, some none."""
    rng = np.random.default_rng([seed, replicas, micro_batches])

    def row(index: int) -> list[list[int]]:
        kinds = [[150], [48, 1, 5], [7, 9, 3, 1], [90, 23], [1, 1], []]
        lengths = kinds[int(rng.integers(6)) if index else int(rng.integers(4))]
        return [rng.integers(0, VOCABULARY, size=n).tolist() for n in lengths]

    return [
        [[row(replica + m) for replica in range(replicas)] for m in range(micro_batches)] for _ in range(steps)
    ]


@cache
def expected(replicas: int, micro_batches: int, steps: int, seed: int, tied: bool, layers: int) -> list:
    """Of every step: the loss, the gradients and the evaluation loss before it, without any pipeline."""
    model = tiny_llama(seed, num_hidden_layers=layers, tie_word_embeddings=tied)
    results = []
    for step in documents_of_steps(replicas, micro_batches, steps, seed):
        batch = {(m, r, i): d for m, rows in enumerate(step) for r, docs in enumerate(rows) for i, d in enumerate(docs)}
        loss, gradients = reference(model, [batch])
        results.append((loss, gradients))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= LR * gradients[name]
    return results


def loader(documents: list, replica: int, form: str) -> Iterator:
    """Micro-batches of one replica, step after step, as the collator makes them or as PipelineEngine takes them."""
    collate = PackedSequenceCollator()
    for step in documents:
        for rows in step:
            batch = collate([{"input_ids": d} for d in rows[replica]])
            if form == "mapping":
                yield batch
            else:
                yield (batch["input_ids"], batch["position_ids"]), batch["shift_labels"]


def parameters_by_name(module: DecoderPipeline) -> dict[str, torch.nn.Parameter]:
    """This stage's parameters under their HuggingFace names."""
    named = {}
    for index, layer in enumerate(module.forward_funcs):
        if not isinstance(layer, partial):
            inner, outer = module._names[module._local_start + index]
            named.update({outer + n.removeprefix(inner): p for n, p in layer.named_parameters()})
    return named


def make_engine(stages: int, micro_batches: int, case: SimpleNamespace, optimizer: str = "sgd", **config):
    model = tiny_llama(case.seed, num_hidden_layers=case.layers, tie_word_embeddings=case.tied)
    module = DecoderPipeline(model, stages)
    settings = ds_config(case.zero, micro_batches, {"enabled": True, "granularity": 8, **case.distca}, **config)
    pipeline = {"activation_checkpoint_interval": case.interval, "use_reentrant": case.reentrant}
    settings["pipeline"] = pipeline
    given = {}
    if optimizer == "sgd":
        del settings["optimizer"]
        settings["zero_allow_untested_optimizer"] = True
        given["optimizer"] = torch.optim.SGD(module.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(model=module, config=settings, **given)
    return engine


def capture_gradients(engine) -> list[dict[str, torch.Tensor]]:
    """Collects the averaged gradients of each step just before it is taken."""
    steps: list[dict[str, torch.Tensor]] = []
    take = engine._INSTRUCTION_MAP[ds.OptimizerStep]

    def look_and_take(self):
        zero = engine.zero_optimization_stage()
        named = parameters_by_name(engine.module)
        steps.append({n: (safe_get_full_grad(p) if zero else p.grad).clone() for n, p in named.items()})
        take(self)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, ds.OptimizerStep: look_and_take}
    return steps


def defaults(case: dict) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "micro_batches": 3,
            "zero": 0,
            "tied": False,
            "layers": 4,
            "interval": 0,
            "reentrant": False,
            "seed": 0,
            "steps": 3,
            "form": "mapping",
            "distca": {},
            **case,
        }
    )


def train(stages: int, case: dict) -> dict:
    """Three steps with an evaluation before the first; the worst errors of losses and gradients on this rank."""
    case = defaults(case)
    replicas = dist.get_world_size() // stages
    wanted = expected(replicas, case.micro_batches, case.steps, case.seed, case.tied, case.layers)
    engine = make_engine(stages, case.micro_batches, case)
    replica = engine.grid.get_data_parallel_rank()
    documents = documents_of_steps(replicas, case.micro_batches, case.steps, case.seed)
    evaluation = engine.eval_batch(loader(documents[:1], replica, case.form))
    gradients = capture_gradients(engine)
    batches = loader(documents, replica, case.form)
    losses = [float(engine.train_batch(batches)) for _ in range(case.steps)]
    worst, which = 0.0, ""
    for step, (_, truth) in enumerate(wanted):
        scale = max(float(g.norm()) for g in truth.values())
        for name, gradient in gradients[step].items():
            error = float((gradient - truth[name]).norm()) / max(float(truth[name].norm()), 1e-3 * scale, 1e-30)
            if error >= worst:
                worst, which = error, f"{name}, step {step}"
    stats = engine.distca.stats
    result = {
        "losses": losses,
        "expected": [loss for loss, _ in wanted],
        "evaluation": float(evaluation),
        "gradient_error": worst,
        "parameter": which,
        "parameters": sorted(gradients[0]),
        "bytes_moved": stats.bytes_moved,
        "balance": [stats.balance_before, stats.balance_after],
        "micro_batches": stats.micro_batches,
    }
    engine.destroy()
    del engine
    gc.collect()
    return result


def train_cases(stages: int, cases: list[dict]) -> list[dict]:
    deepspeed.init_distributed("gloo")
    return [train(stages, case) for case in cases]


def save_and_resume(stages: int, folder: str, case: dict) -> dict:
    """Four steps of AdamW, saved after two; the last two again from the checkpoint; the whole model saved."""
    deepspeed.init_distributed("gloo")
    case = defaults(case)
    replicas = dist.get_world_size() // stages
    documents = documents_of_steps(replicas, case.micro_batches, 4, case.seed)

    engine = make_engine(stages, case.micro_batches, case, optimizer="adamw")
    replica = engine.grid.get_data_parallel_rank()
    batches = loader(documents, replica, "mapping")
    losses = [float(engine.train_batch(batches)) for _ in range(2)]
    engine.save_checkpoint(folder, tag="middle")
    losses += [float(engine.train_batch(batches)) for _ in range(2)]

    case.seed += 1  # other weights to start from: all must come from the checkpoint
    resumed = make_engine(stages, case.micro_batches, case, optimizer="adamw")
    resumed.load_checkpoint(folder, tag="middle")
    batches = loader(documents[2:], replica, "mapping")
    again = [float(resumed.train_batch(batches)) for _ in range(2)]

    resumed.module.save_pretrained(f"{folder}/model")
    after = float(resumed.eval_batch(loader(documents[:1], replica, "mapping")))
    model = LlamaForCausalLM.from_pretrained(f"{folder}/model", attn_implementation="sdpa")
    flat = {(m, r, i): d for m, rows in enumerate(documents[0]) for r, ds_ in enumerate(rows) for i, d in enumerate(ds_)}
    whole, _ = reference(model, [flat])
    return {"losses": losses, "again": again, "evaluation": after, "of the saved model": whole}
