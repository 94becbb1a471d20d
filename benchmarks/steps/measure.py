# SPDX-License-Identifier: Apache-2.0
"""Engines of the variants, and what their steps take: time, attention, exposed communication, memory, loss."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed_distca  # noqa: F401  hooks deepspeed.initialize
from steps.batches import Batch, beginning
from steps.variants import Variant

GIB, MIB = 2**30, 2**20
#: Steps on each of the batches with which an engine begins.
BEGINNING_STEPS = 2
#: Of products before the first turn on a batch.
BUSY_SECONDS = 1.0


class Budget:
    """A limit of time that all ranks keep alike: rank 0's clock decides."""

    def __init__(self, seconds: float | None, device: torch.device) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._device = device

    def over(self) -> bool:
        """Collective."""
        if self._end is None:
            return False
        answer = torch.tensor([time.monotonic() > self._end], dtype=torch.int32, device=self._device)
        dist.broadcast(answer, 0)
        return bool(answer)


def heads(args: argparse.Namespace) -> tuple[int, int, int]:
    """Query heads, key/value heads, head dimension."""
    query = args.hidden // args.head_dim
    return query, max(1, query // 4), args.head_dim


def settle(device: torch.device) -> float:
    """Frees what nobody holds any more; GiB that are still allocated on this rank."""
    gc.collect()
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / GIB


def make_engine(args: argparse.Namespace, variant: Variant, device: torch.device):
    """A DeepSpeed engine, with the same weights for every variant."""
    torch.manual_seed(0)
    query, key_value, head_dim = heads(args)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=query,
        num_key_value_heads=key_value,
        head_dim=head_dim,
        max_position_embeddings=args.tokens * dist.get_world_size(),
        rope_theta=500000.0,
        use_cache=False,
        attn_implementation=variant.attention,
    )
    on_gpu = device.type == "cuda"
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16 if on_gpu else torch.float32)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": on_gpu},
        "zero_optimization": {"stage": args.zero},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    if variant.block is not None:
        settings["distca"] = variant.block
    return deepspeed.initialize(model=model, config=settings)[0]


def destroy(engine, variant: Variant) -> None:
    """Takes an engine apart; its memory is free once nobody holds it."""
    if variant.block is not None:
        engine.distca.detach()
    else:
        variant.own.release()
    engine.destroy()


def step(engine, arguments: dict[str, Any]) -> torch.Tensor:
    """One optimizer step; the loss, detached."""
    with record_function("forward"):
        loss = engine(**arguments).loss
    with record_function("backward"):
        engine.backward(loss)
    with record_function("optimizer"):
        engine.step()
    return loss.detach()


class Measurement:
    """Steps of one variant on one batch. Its methods are collective."""

    def __init__(self, engine, variant: Variant, batch: Batch, args: argparse.Namespace) -> None:
        self._engine, self._variant, self._args = engine, variant, args
        self._batch = variant.batch(batch)
        inputs = self._batch.inputs(dist.get_rank(), args.vocabulary, engine.device)
        self._arguments = variant.arguments(self._batch, inputs)
        if variant.own is not None:
            variant.own.use(self._batch, dist.get_rank())
            self._plan = variant.own.plan
        self._taken: list[list[float]] = []
        self._when: list[tuple[float, float]] = []
        self._on_gpu = engine.device.type == "cuda"
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def step(self, count: bool) -> None:
        """One optimizer step; `count`: it is measured."""
        own = self._variant.own
        if own is not None:
            own.plan = self._plan
            own.timer.reset()
        if self._on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        began, start = time.time(), time.perf_counter()
        self._loss = step(self._engine, self._arguments)
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        # Read in every step, so that the next one is timed.
        if own is None:
            stats = self._engine.distca.stats
            measured = [stats.server_seconds, stats.exposed_seconds]
        else:
            measured = [own.timer.seconds[0], 0.0]
        if count:
            self._when.append((began, began + seconds))
            self._taken.append([seconds, *measured])

    def row(self) -> dict[str, Any]:
        """What was measured.

        Returns:
            "ms", the median of the slowest rank's steps; "steps", [rank][step] of milliseconds (whole step, attention
            kernels, exposed communication); medians of the latter two by rank; "when", the beginning and end of every
            step in seconds since 1970, of this rank; the loss before the last step, mean over ranks; memory by rank;
            what was planned.
        """
        device, own = self._engine.device, self._variant.own
        by_rank = _gather(torch.tensor(self._taken, dtype=torch.float64) * 1e3, device)  # [ranks, steps, 3]
        _, attention, exposed = by_rank.median(1).values.unbind(1)
        row: dict[str, Any] = {
            "ms": statistics.median(by_rank[:, :, 0].amax(0).tolist()),
            "attention_ms": attention.tolist(),
            "exposed_ms": exposed.tolist() if own is None else None,
            "loss": float(_gather(self._loss.double().reshape(1), device).mean()),
            "steps": by_rank.tolist(),
            "when": self._when,
        }
        if self._on_gpu:
            memory = [torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()]
            peak, held = (_gather(torch.tensor(memory, dtype=torch.float64), device) / GIB).unbind(1)
            row |= {"peak_gib": peak.tolist(), "reserved_gib": held.tolist()}
        return row | _planned(self._engine, self._variant, self._batch, self._args)


def begin(engine, variant: Variant, args: argparse.Namespace, reserved: list[float]) -> None:
    """Collective: first steps of an engine. Kernels are compiled, communicators set up and the optimizer's state is
    allocated, and every rank gives rows away once and takes some over.

    Args:
        reserved: gets the reserved memory in GiB after each step, of this rank.
    """
    as_it_is = replace(variant, documents=None)
    for batch in beginning(dist.get_world_size(), args.tokens):
        measurement = Measurement(engine, as_it_is, batch, args)
        for _ in range(BEGINNING_STEPS):
            measurement.step(count=False)
            note_reserved(reserved)


def keep_busy(device: torch.device) -> None:
    """Matrix products on a GPU, for BUSY_SECONDS: after a pause its clock is higher than its power limit allows for
    long. What they take stays reserved: if memory were given back, the next step would have to ask for it anew."""
    if device.type != "cuda":
        return
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    end = time.perf_counter() + BUSY_SECONDS
    while time.perf_counter() < end:
        for _ in range(20):
            torch.mm(a, a, out=out)
        torch.cuda.synchronize(device)


def measure(engine, variant: Variant, batch: Batch, args: argparse.Namespace, reserved: list[float]) -> dict[str, Any]:
    """Collective: steps on one batch, one after another; see :meth:`Measurement.row` and :func:`begin`."""
    measurement = Measurement(engine, variant, batch, args)
    for index in range(args.warm_up + args.steps):
        measurement.step(count=index >= args.warm_up)
        note_reserved(reserved)
    return measurement.row()


def note_reserved(reserved: list[float]) -> None:
    """Takes down the memory in GiB that torch has reserved on this rank's GPU, if it has one."""
    if torch.cuda.is_available():
        reserved.append(torch.cuda.memory_reserved() / GIB)


def timeline(engine, variant: Variant, batch: Batch, args: argparse.Namespace, path: Path) -> None:
    """Collective: a chrome trace of one step for each rank, named by it: trace.json.gz becomes trace_rank0.json.gz."""
    rank, on_gpu = dist.get_rank(), engine.device.type == "cuda"
    batch = variant.batch(batch)
    arguments = variant.arguments(batch, batch.inputs(rank, args.vocabulary, engine.device))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    step(engine, arguments)  # the batch before was another one
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=activities) as trace:
        step(engine, arguments)
        if on_gpu:
            torch.cuda.synchronize()
    stem, dot, ending = path.name.partition(".")
    trace.export_chrome_trace(str(path.with_name(f"{stem}_rank{rank}{dot}{ending}")))
    dist.barrier()


def gather_floats(values: list[float], device: torch.device) -> list[list[float]]:
    """Collective: the values of every rank, equally many."""
    return _gather(torch.tensor(values, dtype=torch.float64), device).tolist()


def _gather(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """[ranks, *values.shape] on CPU."""
    mine = values.to(device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).cpu()


def _planned(engine, variant: Variant, batch: Batch, args: argparse.Namespace) -> dict[str, Any]:
    if variant.own is not None:
        passes = 3 if args.checkpointing else 2  # forward, again in recomputation, backward
        element = 2 if engine.device.type == "cuda" else 4
        sent = variant.own.bytes_sent(batch, args.layers, heads(args), passes, element) / MIB
        return {"kernel": variant.own.kernel, "mib_sent_mean": sent, "mib_sent_max": sent}
    stats = engine.distca.stats
    planning = gather_floats([stats.planning_ms], engine.device)
    return {
        "kernel": engine.distca.server.kernel,
        "balance_before": stats.balance_before,
        "balance_after": stats.balance_after,
        "predicted_server_ms": [s * 1e3 for s in stats.predicted_server_seconds],
        "mib_sent_mean": stats.bytes_sent_mean / MIB,
        "mib_sent_max": stats.bytes_sent_max / MIB,
        "planning_ms": max(ms for (ms,) in planning),
    }
