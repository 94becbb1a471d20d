# SPDX-License-Identifier: Apache-2.0
"""Runs a model without leaving a trace in it: no state, mode, random number or gradient is another afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
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
    state: list[tuple[Any, _Attributes]] = [(module, _Attributes(module)) for module in model.modules()]
    configs = {
        id(m.config): m.config for m in model.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)
    }
    settings = [(config, dict(config.__dict__)) for config in configs.values()]
    host = random.getstate(), np.random.get_state()
    devices = [device] if device.type != "cpu" else []
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad():
            for module, _ in state:
                if getattr(module, "gradient_checkpointing", False) is True:
                    module.gradient_checkpointing = False
            yield
    finally:
        for module, attributes in state:
            attributes.restore(module)
        for config, values in settings:
            config.__dict__.clear()
            config.__dict__.update(values)
        random.setstate(host[0])
        np.random.set_state(host[1])


class _Attributes:
    """The buffers and plain attributes of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = {key: (b, _value(b)) for key, b in buffers(module).items()}
        self._plain = {key: (v, _value(v)) for key, v in _plain(module).items()}

    @torch.no_grad()
    def restore(self, module: nn.Module) -> None:
        own = buffers(module)
        for key in list(own.keys() - self._buffers.keys()):
            del own[key]
        for key, (buffer, value) in self._buffers.items():
            own[key] = _restored(buffer, value)
        for key in _plain(module).keys() - self._plain.keys():
            del module.__dict__[key]
        for key, (attribute, value) in self._plain.items():
            module.__dict__[key] = _restored(attribute, value)


def _plain(module: nn.Module) -> dict[str, Any]:
    # DeepSpeed counts its own hooks' calls in attributes of modules: they are right as they are.
    return {k: v for k, v in module.__dict__.items() if isinstance(v, _PLAIN) and not is_count(k)}


def _value(attribute: Any) -> Any:
    if not torch.is_tensor(attribute) or attribute.is_meta:
        return attribute
    return attribute.detach().clone(), version_of(attribute)


def _restored(attribute: Any, kept: Any) -> Any:
    if torch.is_tensor(attribute) and not attribute.is_meta and version_of(attribute) != kept[1]:
        attribute.copy_(kept[0])
    return attribute
