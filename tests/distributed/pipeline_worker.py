# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of the pipeline tests: PipelineEngine with the plugin against documents run alone in one
process."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.utils import groups, safe_get_full_grad
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from deepspeed_distca import Layout, PackedSequenceCollator
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.pipeline import DecoderPipeline, pipeline_batch, runtime
from tests.distributed.engine_worker import VOCABULARY, ds_config, reference

LR = 0.3


def documents_of_steps(
    replicas: int, micro_batches: int, steps: int, seed: int, static: bool = False
) -> list[list[list[list[list[int]]]]]:
    """documents[step][micro_batch][replica]: token ids of each document; some long, some of one token, some none."""
    rng = np.random.default_rng([seed, replicas, micro_batches])

    def row(index: int) -> list[list[int]]:
        kinds = [[150], [48, 1, 5], [7, 9, 3, 1], [90, 23], [1, 1], []]
        if static:  # as many tokens in each
            kinds = [[60], [30, 29, 1], [59, 1], [13, 47], [60], [7, 11, 42]]
        lengths = kinds[int(rng.integers(6)) if index else int(rng.integers(4))]
        return [rng.integers(0, VOCABULARY, size=n).tolist() for n in lengths]

    return [[[row(replica + m) for replica in range(replicas)] for m in range(micro_batches)] for _ in range(steps)]


def make_model(seed: int, tied: bool, layers: int, family: str, options: str) -> PreTrainedModel:
    """A tiny model, the same on every rank; ``options`` is JSON."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "tie_word_embeddings": tied,
            "use_cache": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **json.loads(options),
        },
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


@cache
def expected(
    replicas: int, micro_batches: int, steps: int, static: bool, *model_arguments
) -> list[tuple[float, dict]]:
    """Of every step: the loss and the gradients, without any pipeline."""
    model, seed = make_model(*model_arguments), model_arguments[0]
    results = []
    for step in documents_of_steps(replicas, micro_batches, steps, seed, static):
        batch = {
            (m, r, i): d for m, rows in enumerate(step) for r, docs in enumerate(rows) for i, d in enumerate(docs)
        }
        loss, gradients = reference(model, [batch])
        results.append((loss, gradients))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= LR * gradients[name]
    return results


def loader(documents: list, replica: int, form: str) -> Iterator:
    """Micro-batches of one replica, step after step: "mapping" as the collator makes them, "pair" as PipelineEngine
    takes them, "shared" with the same documents cut such that all replicas have the same number of tokens."""
    collate = PackedSequenceCollator()
    for step in documents:
        for rows in step:
            if form == "shared":
                yield batch_from_layout(*evenly_cut(rows), replica)
                continue
            batch = collate([{"input_ids": d} for d in rows[replica]])
            if form == "mapping":
                yield batch
            else:
                yield (batch["input_ids"], batch["position_ids"]), batch["shift_labels"]


def evenly_cut(rows: list[list[list[int]]]) -> tuple[dict[int, list[int]], Layout]:
    """The documents of all replicas laid over them one after another, equally many tokens each."""
    documents = dict(enumerate(d for row in rows for d in row))
    share = max(1, -(-sum(map(len, documents.values())) // len(rows)))
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in rows]
    at = 0
    for document, tokens in documents.items():
        start = 0
        while start < len(tokens):
            length = min(len(tokens) - start, share - at % share)
            ranks[at // share].append((document, start, length))
            start, at = start + length, at + length
    return documents, Layout.from_ranks(ranks)


def parameters_by_name(module: DecoderPipeline) -> dict[str, torch.nn.Parameter]:
    """This stage's parameters under their HuggingFace names."""
    named = {}
    for index, layer in enumerate(module.forward_funcs):
        if not isinstance(layer, partial):
            inner, outer = module._names[module._local_start + index]
            named.update({outer + n.removeprefix(inner): p for n, p in layer.named_parameters()})
    return named


def make_engine(stages: int, micro_batches: int, case: SimpleNamespace, optimizer: str = "sgd", **config):
    model = make_model(*model_arguments(case))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case.frozen))
    module = DecoderPipeline(model, stages, dynamic_shape=not case.static)
    distca = None if case.distca is None else {"advanced": {"granularity": 8}, **case.distca}
    settings = ds_config(case.zero, micro_batches, distca, **config)
    pipeline = {"activation_checkpoint_interval": case.interval, "use_reentrant": case.reentrant}
    settings["pipeline"] = pipeline
    given = {}
    if optimizer == "sgd":
        del settings["optimizer"]
        settings["zero_allow_untested_optimizer"] = True
        given["optimizer"] = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=LR)
    engine, *_ = deepspeed.initialize(model=module, config=settings, **given)
    return engine


def capture_gradients(engine) -> list[dict[str, torch.Tensor]]:
    """Collects the averaged gradients of each step just before it is taken."""
    steps: list[dict[str, torch.Tensor]] = []
    take = engine._INSTRUCTION_MAP[ds.OptimizerStep]

    def look_and_take(self):
        zero = engine.zero_optimization_stage()
        named = {n: p for n, p in parameters_by_name(engine.module).items() if p.requires_grad}
        steps.append({n: (safe_get_full_grad(p) if zero else p.grad).clone() for n, p in named.items()})
        take(self)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, ds.OptimizerStep: look_and_take}
    return steps


def count_relayed(engine) -> list[int]:
    """Of every tick of training from now on, the runs that this rank gets from a relay."""
    found: list[int] = []
    planner = engine.distca._planner
    plan = planner._plan

    def plan_and_count(tick):
        parts = plan(tick)
        found.append(sum(len(p.plan.routes.relay_in) for part in parts if part is not None for p in part.parts))
        return parts

    planner._plan = plan_and_count
    return found


def nodes_of(engine) -> list[int] | None:
    """By which this rank's ticks are planned: the node of each server; None is one node."""
    nodes = engine.distca.server.planner().nodes
    return nodes and list(nodes.nodes)


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
            "static": False,
            "family": "llama",
            "options": {},
            "frozen": [],
            "distca": {},
            **case,
        }
    )


def model_arguments(case: SimpleNamespace) -> tuple:
    return case.seed, case.tied, case.layers, case.family, json.dumps(case.options)


def train(stages: int, case: dict) -> dict:
    """Three steps with an evaluation before the first; the worst errors of losses and gradients on this rank."""
    case = defaults(case)
    replicas = dist.get_world_size() // stages
    wanted = expected(replicas, case.micro_batches, case.steps, case.static, *model_arguments(case))
    engine = make_engine(stages, case.micro_batches, case)
    replica = engine.grid.get_data_parallel_rank()
    documents = documents_of_steps(replicas, case.micro_batches, case.steps, case.seed, case.static)
    evaluation = engine.eval_batch(loader(documents[:1], replica, case.form))
    gradients, relayed = capture_gradients(engine), count_relayed(engine)
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
        "nodes": nodes_of(engine),
        "relayed": sum(relayed),
        "in_two": engine.distca._planner._in_two,
    }
    engine.destroy()
    return result


@contextmanager
def own_groups() -> Iterator[None]:
    """Ends the process groups that were made inside: each has threads of its own, and PipelineModule makes many."""
    before = set(dist.distributed_c10d._world.pg_map)
    yield
    gc.collect()
    shared = {id(value) for value in vars(groups).values()}  # what DeepSpeed keeps for the next engine
    made = [group for group in dist.distributed_c10d._world.pg_map if group not in before and id(group) not in shared]
    dist.barrier()
    for group in made:
        dist.destroy_process_group(group)


def train_cases(stages: int, cases: list[dict]) -> list[dict]:
    deepspeed.init_distributed("gloo")
    results = []
    for case in cases:
        with own_groups():
            results.append(train(stages, case))
    return results


def _message_of(action) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals(stages: int) -> dict[str, Any]:
    """What is said, on every rank, to batches and engines that cannot be used."""
    deepspeed.init_distributed("gloo")
    case = defaults({"steps": 1})
    replicas = dist.get_world_size() // stages
    documents = documents_of_steps(replicas, case.micro_batches, 2, case.seed)
    engine = make_engine(stages, case.micro_batches, case)
    replica = engine.grid.get_data_parallel_rank()
    found = {}
    # Sampled by global rank: the first and the last stage of a replica get different documents.
    other = documents if engine.is_first_stage() else documents[1:]
    found["different data"] = _message_of(lambda: engine.eval_batch(loader(other, replica, "mapping")))
    short = [documents[0][: case.micro_batches - 1]]
    found["short data"] = _message_of(lambda: engine.eval_batch(loader(short, replica, "mapping")))
    count = case.micro_batches - replica  # of the last replica one fewer
    found["different numbers"] = _message_of(
        lambda: engine.eval_batch(loader(documents, replica, "mapping"), num_micro_batches=count)
    )
    cut = documents[:1]

    def middle_of_a_document() -> Iterator:
        for (ids, positions), labels in loader(cut, replica, "pair"):
            yield (ids, positions + (replica == 0)), labels

    found["middle of a document"] = _message_of(lambda: engine.eval_batch(middle_of_a_document()))
    # After all of these the engine is as good as new.
    loss, _ = expected(replicas, case.micro_batches, 2, False, *model_arguments(case))[0]
    found["afterwards"] = abs(float(engine.train_batch(loader(documents, replica, "mapping"))) - loss)
    engine.distca.detach()
    found["left over"] = sorted({"_exec_schedule", "_INSTRUCTION_MAP", "_next_batch"} & set(vars(engine)))
    engine.destroy()

    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    options = {"max_position_embeddings": 64, "rope_parameters": dynamic}
    engine = make_engine(stages, case.micro_batches, defaults({"options": options}))
    found["rotary"] = _message_of(lambda: engine.eval_batch(loader([[[[[5] * 65]] * replicas] * 3], replica, "pair")))
    engine.destroy()

    uneven = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}
    uneven["layer_types"] = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    windows = defaults({"family": "qwen2", "options": uneven})
    found["windows"] = _message_of(lambda: make_engine(stages, 1, windows))
    found["servers"] = _message_of(lambda: make_engine(stages, 1, defaults({"distca": {"servers": 3}})))
    weights = {"advanced": {"server_weights": [1, 1]}}
    found["weights"] = _message_of(lambda: make_engine(stages, 1, defaults({"distca": weights})))
    turns = {"distca": {"overlap": "ping_pong"}}
    recomputed = {"interval": 1, "reentrant": True}
    found["overlap"] = [
        _message_of(lambda more=more: make_engine(stages, 1, defaults({**turns, **more})))
        for more in (recomputed, {"layers": 5})
    ]
    scope = {"advanced": {"pipeline_scope": "all", "pipeline_scopes": 1}}
    found["scope"] = _message_of(lambda: make_engine(stages, 1, defaults({"distca": scope})))
    found["stages"] = _message_of(lambda: make_engine(stages, 1, defaults({"layers": 1})))
    found["family"] = _message_of(lambda: make_engine(stages, 1, defaults({"family": "gemma"})))

    def foreign() -> None:
        module = PipelineModule([LayerSpec(torch.nn.Linear, 4, 4) for _ in range(stages)], num_stages=stages)
        deepspeed.initialize(model=module, config=ds_config(0, 1, {"enabled": True}))

    found["module"] = _message_of(foreign)
    return found


def over_nodes(stages: int) -> list[list[int] | None]:
    """The nodes on one machine, and where each pair of ranks says it is on another: of the grid, and of a stage."""
    deepspeed.init_distributed("gloo")
    found = []
    pairs, halves = (f"of ranks {dist.get_rank() // 2}", f"of ranks {dist.get_rank() % 2}")
    for name, scope in (("one", "grid"), (pairs, "grid"), (pairs, "stage"), (halves, "stage")):
        with mock.patch.object(runtime, "machine", lambda name=name: name):
            engine = make_engine(stages, 1, defaults({"distca": {"advanced": {"pipeline_scope": scope}}}))
        found.append(nodes_of(engine))
        engine.destroy()
    dist.barrier()  # rank 0 holds the store, in which others may still be at their last engine
    return found


def without_the_plugin(stages: int) -> dict[str, float]:
    """DecoderPipeline under PipelineEngine alone: losses of packed micro-batches are those of documents run alone."""
    deepspeed.init_distributed("gloo")
    case = defaults({"steps": 1, "distca": None, "options": {"sliding_window": 6}, "family": "mistral"})
    replicas = dist.get_world_size() // stages
    documents = documents_of_steps(replicas, case.micro_batches, 1, case.seed)
    engine = make_engine(stages, case.micro_batches, case)
    engine.set_batch_fn(pipeline_batch)
    replica = engine.grid.get_data_parallel_rank()
    loss = float(engine.eval_batch(loader(documents, replica, "mapping")))
    trained = float(engine.train_batch(loader(documents, replica, "mapping")))
    # Every micro-batch counts the same.
    model = make_model(*model_arguments(case))
    means = [reference(model, [dict(enumerate(row))])[0] for rows in documents[0] for row in rows]
    return {"evaluation": loss, "training": trained, "expected": float(np.mean(means))}


def save_and_resume(stages: int, folder: str, cases: list[dict]) -> list[dict]:
    """Four steps of AdamW, saved after two; the last two again from the checkpoint; the whole model saved."""
    deepspeed.init_distributed("gloo")
    return [_save_and_resume(stages, f"{folder}/{index}", defaults(case)) for index, case in enumerate(cases)]


def _save_and_resume(stages: int, folder: str, case: SimpleNamespace) -> dict:
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
    flat = {
        (m, r, i): d for m, rows in enumerate(documents[0]) for r, ds_ in enumerate(rows) for i, d in enumerate(ds_)
    }
    whole, _ = reference(model, [flat])
    return {"losses": losses, "again": again, "evaluation": after, "of the saved model": whole}
