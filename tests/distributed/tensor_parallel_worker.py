# SPDX-License-Identifier: Apache-2.0
"""Training under DeepSpeed's AutoTP on every rank, with the plugin and without it, against one dense process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import groups

from deepspeed_distca import PackedSequenceCollator
from deepspeed_distca.data import GlobalPackedLoader
from tests.distributed.engine_worker import enable_checkpointing, full_gradients, reference, tiny_llama
from tests.tiny_llama import VOCABULARY

LR = 0.5
BLOCK = {"timeout_seconds": 60, "advanced": {"granularity": 8}}
#: Of the documents of each of two data-parallel ranks: attention moves from the first to the second.
LENGTHS = [[90, 3], [9] * 4]

Documents = list[list[list[int]]]


def documents_of(seed: int, lengths: Sequence[Sequence[int]] = LENGTHS) -> Documents:
    """Token ids, by data-parallel rank and document."""
    rng = np.random.default_rng(seed)
    return [[rng.integers(0, VOCABULARY, size=n).tolist() for n in row] for row in lengths]


def batch_of(documents: list[list[int]]) -> dict[str, Any]:
    return PackedSequenceCollator()([{"input_ids": d} for d in documents])


def engine_of(tp: int = 2, model: torch.nn.Module | None = None, distca: dict | None = BLOCK, **config: Any) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "steps_per_print": 10**9,
        "tensor_parallel": {"autotp_size": tp},
        **config,
    }
    if distca is not None:
        settings["distca"] = distca
    engine, *_ = deepspeed.initialize(model=tiny_llama() if model is None else model, config=settings)
    engine.train()
    return engine


# -- three steps


def dense(model_options: dict, steps: list[list[Documents]]) -> list[tuple[float, dict, dict]]:
    """Loss, gradients and then parameters of every step, of documents that are run alone in one process."""
    model, found = tiny_llama(**model_options), []
    for micro_batches in steps:
        loss, gradients = reference(model, [dict(enumerate(d for row in b for d in row)) for b in micro_batches])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= LR * gradients[name]
        found.append((loss, gradients, {n: p.detach().clone() for n, p in model.named_parameters()}))
    return found


def shard_of(whole: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """The part of a dense tensor that this rank's shard is to be. Collective over the tensor-parallel ranks."""
    group = groups.get_tensor_model_parallel_group()
    shapes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shapes, tuple(mine.shape), group=group)
    for dim, size in enumerate(whole.shape):
        if mine.shape[dim] != size:
            assert sum(shape[dim] for shape in shapes) == size
            return whole.narrow(dim, sum(s[dim] for s in shapes[: dist.get_rank(group)]), mine.shape[dim])
    return whole


def worst(mine: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a rank's shards."""
    assert mine.keys() == wanted.keys()
    scale, errors = max(float(t.norm()) for t in wanted.values()), [0.0]
    for name, whole in wanted.items():
        part = shard_of(whole, mine[name])
        errors.append(float((mine[name] - part).norm()) / max(float(part.norm()), 1e-3 * scale))
    return max(errors)


def train(
    zero: int = 0,
    accumulation: int = 1,
    checkpointing: str = "off",
    model_options: dict | None = None,
    distca: dict | None = BLOCK,
    recorded: bool = False,
    lengths: Sequence[Sequence[int]] = LENGTHS,
    **config: Any,
) -> dict:
    """Three optimizer steps, against dense.

    Args:
        recorded: by ``deepspeed.tp_model_init``, and not by the configuration.
    """
    model_options = model_options or {}
    steps = [[documents_of(10 * step + i, lengths) for i in range(accumulation)] for step in range(3)]
    wanted, model = dense(model_options, steps), tiny_llama(**model_options)
    enable_checkpointing(model, checkpointing)
    if recorded:
        model = deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32)
        config["tensor_parallel"] = {}
    zero_optimization = {"stage": zero, "stage3_param_persistence_threshold": 0}
    engine = engine_of(
        model=model,
        distca=distca,
        zero_optimization=zero_optimization,
        gradient_accumulation_steps=accumulation,
        **config,
    )
    group = engine.data_parallel_group
    replicas, place = dist.get_world_size(group), dist.get_rank(group)
    found: dict[str, Any] = {"losses": [], "loss": 0.0, "gradients": 0.0, "parameters": 0.0, "moved": []}
    for micro_batches, (loss, gradients, parameters) in zip(steps, wanted, strict=True):
        targets, total = sum(len(d) - 1 for b in micro_batches for row in b for d in row), torch.zeros(())
        for documents in micro_batches:
            batch = batch_of(documents[place])
            if distca is None:
                batch = {k: batch[k] for k in ("input_ids", "position_ids", "labels", "shift_labels")}
                batch["num_items_in_batch"] = targets / replicas / accumulation
            else:
                batch["step_targets"] = sum(len(d) - 1 for b in micro_batches for d in b[place])
            out = engine(**batch).loss
            total += out.detach() / replicas / accumulation
            engine.backward(out)
            if documents is micro_batches[-1]:
                mine = full_gradients(engine)
                found["gradients"] = max(found["gradients"], worst(mine, gradients))
                found["rows"] = [len(mine[f"model.layers.0.self_attn.{n}_proj.weight"]) for n in ("q", "k")]
            engine.step()
        dist.all_reduce(total, group=group)
        found["losses"].append(float(total))
        found["loss"] = max(found["loss"], abs(float(total) - loss) / loss)
        found["moved"].append(0 if distca is None else engine.distca.stats.bytes_moved)
        if zero < 3:
            mine = {n: p.detach() for n, p in engine.module.named_parameters()}
            found["parameters"] = max(found["parameters"], worst(mine, parameters))
    found["data_parallel"] = dist.get_process_group_ranks(group)
    return found


def train_cases(cases: list[dict]) -> list[dict]:
    deepspeed.init_distributed("gloo")
    return [train(**case) for case in cases]


# -- what ranks are told


def words_of(call: Callable[[], Any]) -> str:
    try:
        call()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def comparisons() -> Iterator[list[list[str]]]:
    """The names of arguments that DeepSpeed has compared over tensor-parallel ranks."""
    found, own = [], deepspeed.runtime.engine.compare_tensors_in_structures

    def compare(mine: Any, other: Any) -> bool:
        found.append(sorted(mine))
        return own(mine, other)

    with mock.patch.object(deepspeed.runtime.engine, "compare_tensors_in_structures", compare):
        yield found


def bad_batches(tied: bool) -> dict[str, Any]:
    """One rank of four is given something else in its first micro-batch and in later ones; every second micro-batch is
    right, and its loss is that of dense."""
    deepspeed.init_distributed("gloo")
    engine = engine_of(model=tiny_llama(tie_word_embeddings=tied))
    place, one = dist.get_rank(engine.data_parallel_group), dist.get_rank() == 1
    good, other = documents_of(0)[place], documents_of(1)[place]
    loss, _ = reference(tiny_llama(tie_word_embeddings=tied), [dict(enumerate(d for r in documents_of(0) for d in r))])
    found: dict[str, Any] = {}
    with comparisons() as compared:
        for name, given in {
            "first": batch_of(other) if one else batch_of(good),
            "tokens": batch_of(other) if one else batch_of(good),
            "documents": batch_of([[5] * 7]) if one else batch_of(good),
            "unusable": batch_of([[10**6] * 7]) if one else batch_of(good),
            "targets": {**batch_of(good), "step_targets": 1000} if one else batch_of(good),
        }.items():
            words = words_of(lambda given=given: engine(**given))
            out = engine(**batch_of(good)).loss
            engine.backward(out)  # nothing is left half done
            total = out.detach().clone()
            dist.all_reduce(total, group=engine.data_parallel_group)
            found[name] = [words, abs(float(total) / 2 - loss) / loss]
    return {**found, "compared": compared, "argument names": sorted(batch_of(good))}


def planned_ahead() -> dict[str, Any]:
    """Batches whose plans come along, made by a loader of data-parallel ranks; a document continues on the other."""
    deepspeed.init_distributed("gloo")
    engine = engine_of()
    group = engine.data_parallel_group
    documents = [d for row in documents_of(0) for d in row]
    loader = GlobalPackedLoader(
        documents,
        -(-sum(map(len, documents)) // 2),
        {"train_micro_batch_size_per_gpu": 1, "distca": BLOCK},
        rank=dist.get_rank(group),
        num_ranks=dist.get_world_size(group),
        placement="contiguous",
    )
    loader.plan_ahead(engine.distca.planner)
    loss, gradients = reference(tiny_llama(), [dict(enumerate(documents))])
    with comparisons() as compared:
        (batch,) = loader
        out = engine(**batch).loss
    engine.backward(out)
    total = out.detach().clone()
    dist.all_reduce(total, group=group)
    return {
        "loss": abs(float(total) / 2 - loss) / loss,
        "gradients": worst(full_gradients(engine), gradients),
        "moved": engine.distca.stats.bytes_moved,
        "compared": compared,
    }


class Apart:
    """An mpu whose tensor-parallel ranks are no neighbours."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        self._data = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        self._model = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]

    def __getattr__(self, name: str) -> Callable[[], Any]:
        what, _, of = name.removeprefix("get_").partition("_parallel_")
        if what not in ("data", "model"):
            raise AttributeError(name)
        group = self._data if what == "data" else self._model
        return lambda: {"group": group, "rank": dist.get_rank(group), "world_size": dist.get_world_size(group)}[of]


def refused() -> dict[str, str]:
    """Fewer key/value heads than tensor-parallel ranks, and an mpu's groups."""
    deepspeed.init_distributed("gloo")
    settings = {"train_micro_batch_size_per_gpu": 1, "distca": BLOCK}
    apart = words_of(lambda: deepspeed.initialize(model=tiny_llama(), config=settings, mpu=Apart()))
    return {"mpu": apart, "heads": words_of(lambda: engine_of(model=tiny_llama(num_key_value_heads=1)))}
