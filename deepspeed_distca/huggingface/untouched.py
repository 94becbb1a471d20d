# SPDX-License-Identifier: Apache-2.0
"""Runs a model without leaving a trace in it: no state, mode, random number or gradient is another afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from deepspeed_distca.compat.deepspeed import is_count
from deepspeed_distca.compat.torch import buffers, version_of

#: Attributes of modules that are put back; others (submodules, hooks, caches of any kind) are not looked at.
_PLAIN = (bool, int, float, str, type(None), torch.Tensor)


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts back what forwards of a model may change: buffers, modes, plain attributes, configurations, random numbers.

    Activation checkpointing is off meanwhile, which needs gradients to be of any use.
    """
    configs = {
        id(m.config): m.config for m in model.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)
    }
    kept = [_Kept(config.__dict__, lambda key, value: True) for config in configs.values()]
    module: Any
    for module in model.modules():
        kept += [_Kept(buffers(module), lambda key, value: True), _Kept(module.__dict__, _is_plain)]
    host = random.getstate(), np.random.get_state()
    devices = [device] if device.type != "cpu" else []
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad():
            for module in model.modules():
                if getattr(module, "gradient_checkpointing", False) is True:
                    module.gradient_checkpointing = False
            yield
    finally:
        for values in kept:
            values.restore()
        random.setstate(host[0])
        np.random.set_state(host[1])


def _is_plain(key: str, value: Any) -> bool:
    # DeepSpeed counts its own hooks' calls in attributes of modules: they are right as they are.
    return isinstance(value, _PLAIN) and not is_count(key)


class _Kept:
    """Some values of a dictionary, tensors with what is in them, as they are now."""

    def __init__(self, values: dict[str, Any], which: Callable[[str, Any], bool]) -> None:
        self._values, self._which = values, which
        self._kept = {k: v for k, v in values.items() if which(k, v)}
        self._tensors = [
            (v, v.detach().clone(), version_of(v)) for v in self._kept.values() if torch.is_tensor(v) and not v.is_meta
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, before, version in self._tensors:
            if version_of(tensor) != version:
                tensor.copy_(before)
        for key in [k for k, v in self._values.items() if k not in self._kept and self._which(k, v)]:
            del self._values[key]
        self._values.update(self._kept)
