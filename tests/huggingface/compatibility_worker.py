# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: what DeepSpeed can do beside plain training, with the block against without it."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from tests.distributed import pipeline_worker
from tests.distributed.doors_worker import alone, documents
from tests.huggingface.compared import (
    STEPS,
    Run,
    apart,
    compared,
    config_of,
    end,
    go_on,
    outcomes,
    start,
    trained,
    wanted,
)
from tests.tiny_llama import llama

CPU = {"device": "cpu"}
DEEPCOMPILE = {"deepcompile": True}


def run(folder: str, only: list[str] | None = None) -> dict[str, Any]:
    deepspeed.init_distributed("gloo")
    chosen = {n: s for n, s in SCENARIOS.items() if not only or any(word in n for word in only)}
    return outcomes({name: functools.partial(scenario, Path(folder)) for name, scenario in chosen.items()})


def plain(folder: Path) -> dict[str, Any]:
    loss, references = alone(llama(), documents(STEPS[0]))
    found = wanted()
    first = Run(found.losses[:1], found.gradients[:1])
    return apart(first, Run([loss], [dict(zip(found.gradients[0], references, strict=True))]))


def exact(zero: dict[str, Any] | int, build: Callable[[], torch.nn.Module] = llama) -> dict[str, Any]:
    """With the block, whatever DeepSpeed does beside, against plain training."""
    return apart(trained(build, config_of(True, zero)), wanted())


def zero_init(folder: Path) -> dict[str, Any]:
    """A model that is sharded while it is made."""

    def build() -> torch.nn.Module:
        with deepspeed.zero.Init(config_dict_or_path=config_of(False, 3)):
            return llama()

    return compared(build, 3)


def from_pretrained(folder: Path) -> dict[str, Any]:
    """A saved model that is sharded while it is loaded, as Trainer has it."""
    if dist.get_rank() == 0:
        llama(seed=4).save_pretrained(folder / "model")
    dist.barrier()
    sharding = HfDeepSpeedConfig(config_of(False, 3))  # alive while models are loaded

    def build() -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", use_cache=False)
        assert all(hasattr(p, "ds_id") for p in model.parameters())
        return model

    try:
        return compared(build, 3)
    finally:
        unset_hf_deepspeed_config()
        del sharding


def resumed(folder: Path, zero: int, universal: bool = False) -> dict[str, Any]:
    """A step, a checkpoint, and the other steps by another engine, against three steps in one go."""
    first = start(llama, config_of(True, zero))
    done = go_on(first, Run(), STEPS[:1])
    where = folder / f"checkpoint {zero} {universal}"
    first.save_checkpoint(str(where), tag="step1")
    end(first)
    dist.barrier()
    if universal:
        where = converted(where)
    config = config_of(True, zero, checkpoint={"load_universal": universal})
    second = start(lambda: llama(seed=9), config)
    loaded, _ = second.load_checkpoint(str(where), tag="step1")
    assert loaded is not None
    outcome = apart(go_on(second, done, STEPS[1:]), wanted())
    end(second)
    return outcome


def converted(where: Path) -> Path:
    """A checkpoint made independent of the number of ranks."""
    made = where.with_name(f"{where.name} universal")
    try:
        if dist.get_rank() == 0:
            folders = dict(input_folder=str(where / "step1"), output_folder=str(made / "step1"))
            workers = dict(num_extract_workers=1, num_merge_workers=1)
            ds_to_universal.main(
                Namespace(**folders, **workers, keep_temp_folder=False, strict=True, inject_missing_state=True)
            )
            (made / "latest_universal").write_text("step1")
    finally:
        dist.barrier()
    assert (made / "latest_universal").exists(), "rank 0 could not convert the checkpoint"
    return made


def muon(folder: Path) -> dict[str, Any]:
    """Matrices of the layers by Muon in fp32, the rest by Adam."""

    def build() -> torch.nn.Module:
        model = llama()
        for name, parameter in model.named_parameters():
            parameter.use_muon = parameter.ndim == 2 and "layers" in name
        return model

    optimizer = {"type": "Muon", "params": {"lr": 0.02, "weight_decay": 0.0}}
    # A CPU that has fp16 would run Muon's iteration in it: rounding alone is then 0.015 of a parameter.
    whole = mock.patch.object(get_accelerator(), "is_fp16_supported", lambda: False)
    # DeepSpeed's own Adam would be compiled first, two minutes of a core; the plugin has no part in it.
    with whole, mock.patch.object(deepspeed.ops.adam, "FusedAdam", plain_adam):
        return compared(build, 2, optimizer=optimizer)


def plain_adam(groups: Any, adam_w_mode: bool = True, **options: Any) -> torch.optim.Optimizer:
    """torch's in the place of DeepSpeed's."""
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(groups, **options)


def refused(make: Callable[[], Any]) -> Callable[[Path], dict[str, Any]]:
    """An engine that is not to be: ``outcomes`` has what is said instead."""

    def scenario(folder: Path) -> dict[str, Any]:
        make()
        return {"error": "not refused"}

    return scenario


def zero(**options: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: exact(options)


SCENARIOS: dict[str, Callable[[Path], Any]] = {
    "plain": plain,
    "zero.Init": zero_init,
    "from_pretrained": from_pretrained,
    "checkpoint, ZeRO-1": lambda folder: resumed(folder, 1),
    "checkpoint, ZeRO-3": lambda folder: resumed(folder, 3),
    "universal checkpoint, ZeRO-1": lambda folder: resumed(folder, 1, True),
    "universal checkpoint, ZeRO-3": lambda folder: resumed(folder, 3, True),
    "optimizer offload, ZeRO-2": zero(stage=2, offload_optimizer=CPU),
    "optimizer and parameter offload, ZeRO-3": zero(stage=3, offload_optimizer=CPU, offload_param=CPU),
    "hpZ": zero(stage=3, zero_hpz_partition_size=2),
    "Muon": muon,
    "refused: DeepCompile": refused(lambda: start(llama, config_of(True, 1, compile=DEEPCOMPILE))),
    "refused: DeepCompile, stages": refused(
        lambda: pipeline_worker.make_engine(2, 1, pipeline_worker.defaults({}), compile=DEEPCOMPILE)
    ),
}
