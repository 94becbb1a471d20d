# SPDX-License-Identifier: Apache-2.0
"""Runs on both GPUs of test_compatibility_gpu.py: what DeepSpeed can do on GPUs alone, with the block and without it.

A setting changes the numbers of plain training too, by its quantization, and so does the kernel of the plugin. So
there are four trainings, with and without the setting, with and without the block, and three distances: what the
kernel does ("rounding"), what the setting does ("noise"), and what the block does under the setting ("error"). The
optimizer is SGD: its updates are as far apart as the gradients, which Adam's are not.

On its own: torchrun --nproc_per_node 2 -m tests.gpu.compatibility_worker qwZ
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from transformers import LlamaForCausalLM

from tests.huggingface.compared import batch_of, end, start, targets_of
from tests.tiny_llama import llama

#: Tokens of each rank.
TOKENS = 2048
MODEL = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
#: Rows move, whatever that saves.
BLOCK = {"advanced": {"min_gain": 0.0}}


@dataclass
class Run:
    """What a training came to.

    Attributes:
        losses: of every step, the mean over ranks.
        gradients: of every step and parameter, averaged over ranks.
        updates: what the training added to the parameters, in fp32.
        moved: whether rows moved in every step.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    updates: dict[str, torch.Tensor] = field(default_factory=dict)
    moved: bool = True


@dataclass
class Setting:
    """What is added to a ds_config of ZeRO-3, and how to see that it is used.

    Attributes:
        zero: its keys, of "zero_optimization".
        used: counts its work in the list that it gives.
        common: keys that plain training has too.
    """

    zero: dict[str, Any]
    used: Callable[[], AbstractContextManager[list[int]]]
    common: dict[str, Any] = field(default_factory=dict)


def counting(owner: Any, name: str) -> Callable[[], AbstractContextManager[list[int]]]:
    @contextmanager
    def count() -> Iterator[list[int]]:
        calls, own = [], getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return own(*args, **kwargs)

        with mock.patch.object(owner, name, counted):
            yield calls

    return count


@contextmanager
def nodes_of_one() -> Iterator[list[int]]:
    """DeepSpeed takes each GPU for a node: with a single one it reduces gradients as ever, unquantized (0.19.8)."""
    with (
        mock.patch.object(get_accelerator(), "device_count", lambda: 1),
        counting(stage3, "all_to_all_quant_reduce")() as calls,
    ):
        yield calls


# DeepSpeed's kernels read halves: gradients in bf16 would be taken for other numbers (0.19.8).
HALF = {"communication_data_type": "fp16"} if torch.cuda.is_available() else {}
SETTINGS = {
    "qwZ": Setting({"zero_quantized_weights": True}, counting(partition_parameters.CUDAQuantizer, "quantize")),
    "qgZ": Setting({"zero_quantized_gradients": True}, nodes_of_one, HALF),
}


def check(name: str, tokens: int = TOKENS) -> dict[str, Any]:
    """The distances, how often the setting did its work in each training, and errors by training; on this rank."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl" if cuda else "gloo")
    setting = SETTINGS[name]
    runs: dict[str, Run] = {}
    errors: dict[str, str] = {}
    used: dict[str, int] = {}
    for which, block, its in (
        ("plain", False, None),
        ("plugin", True, None),
        ("plain with it", False, setting),
        ("plugin with it", True, setting),
    ):
        began = time.perf_counter()
        try:
            runs[which], used[which] = train(block, setting, its is not None, tokens)
            print(f"{name}, {which}: {runs[which].losses}, {time.perf_counter() - began:.1f} s", flush=True)
        except Exception as error:
            traceback.print_exc()
            errors[which] = f"{type(error).__name__}: {str(error)[:400]}"
        gc.collect()
    distances = {
        what: apart(runs[of], runs[to])
        for what, of, to in (
            ("rounding", "plugin", "plain"),
            ("noise", "plain with it", "plain"),
            ("error", "plugin with it", "plain with it"),
        )
        if of in runs and to in runs
    }
    moved = all(run.moved for which, run in runs.items() if which.startswith("plugin"))
    return {"distances": distances, "errors": errors, "used": used, "moved": moved}


def train(block: bool, setting: Setting, with_it: bool, tokens: int) -> tuple[Run, int]:
    """An engine of its own, from its start to its end; and how often the setting did its work."""
    cuda = torch.cuda.is_available()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": cuda},
        "zero_optimization": {"stage": 3, **(setting.zero if with_it else {})},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **setting.common,
        **({"distca": BLOCK} if block else {}),
    }
    with setting.used() if with_it else nullcontext([]) as calls:
        run = _train(config, tokens)
    return run, len(calls)


def _train(config: dict[str, Any], tokens: int) -> Run:
    engine = start(model, config)
    distca = getattr(engine, "distca", None)
    try:
        parameters = dict(engine.module.named_parameters())
        before = {n: full(p) for n, p in parameters.items()}
        run = Run()
        for lengths in batches(tokens):
            batch: dict[str, Any] = {k: v.to(engine.device) for k, v in batch_of(lengths).items()}
            if distca is None:
                targets = torch.tensor(targets_of(lengths) / dist.get_world_size(), device=engine.device)
                batch["num_items_in_batch"] = targets
            loss = engine(**batch).loss
            engine.backward(loss)
            run.gradients.append({n: safe_get_full_grad(p).float().cpu() for n, p in parameters.items()})
            engine.step()
            total = loss.detach().float().clone()
            dist.all_reduce(total)
            run.losses.append(float(total) / dist.get_world_size())
            run.moved = run.moved and distca is not None and distca.stats.bytes_moved > 0
        run.updates = {n: full(p) - before[n] for n, p in parameters.items()}
        return run
    finally:
        end(engine)


def model() -> LlamaForCausalLM:
    made = llama(**MODEL)
    return made.to(torch.bfloat16) if torch.cuda.is_available() else made


def full(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Collective: the optimizer's own, in fp32, on CPU."""
    return safe_get_full_fp32_param(parameter).detach().float().cpu().clone()


def batches(tokens: int) -> list[list[list[int]]]:
    """Document lengths of both ranks in every step, as many tokens on each: a long document here, short ones there."""
    long, short = [tokens], [tokens // 8] * 8
    mixed = [tokens // 2, *[tokens // 8] * 4]
    return [[long, short], [short, long], [mixed, long]]


def apart(run: Run, other: Run) -> dict[str, Any]:
    """The largest relative error of a loss, of a gradient in the first step and in all, and of an update; with the
    tensors' names."""
    loss = max(abs(a - b) / abs(b) for a, b in zip(run.losses, other.losses, strict=True))
    steps = [worst(*pair) for pair in zip(run.gradients, other.gradients, strict=True)]
    return {
        "loss": loss,
        "first gradient": steps[0],
        "gradient": max(steps),
        "update": worst(run.updates, other.updates),
    }


def worst(own: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    assert own.keys() == wanted.keys(), sorted(own.keys() ^ wanted.keys())
    largest = max(float(t.norm()) for t in wanted.values())
    errors = {
        name: float((own[name] - tensor).norm()) / max(float(tensor.norm()), 1e-3 * largest)
        for name, tensor in wanted.items()
    }
    return max(
        ((error if error == error else float("inf")), name) for name, error in errors.items()
    )  # what is no number is the worst


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        print(json.dumps(check(chosen), indent=1), flush=True)
    os._exit(0)
