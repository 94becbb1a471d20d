# SPDX-License-Identifier: Apache-2.0
"""Which attention function a model's configuration names: ours while a forward has a plan, the model's own otherwise.

A recomputed layer looks the name up again, in backward, when the forward is long over. Its attention modules bring the
name back for as long as they run, if they are given a plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from deepspeed_distca.compat.transformers import attention_name, set_attention_name
from deepspeed_distca.huggingface.attention_function import FIRST, NAME, PLAN, UnsupportedModelError
from deepspeed_distca.layout import Layout


class AttentionNames:
    """Switches the configurations of attention modules, and takes itself out again.

    Args:
        modules: attention modules, each with its ``config``. Where one names a function of ours already (a
            configuration that was saved so), it is given "sdpa".
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        configs: dict[int, Any] = {id(m.config): m.config for m in modules}
        self._configs = list(configs.values())
        for config in self._configs:
            if _is_ours(config):
                set_attention_name(config, "sdpa")
        self._own: list[str | None] | None = None  # while a forward has a plan: what the configurations name otherwise
        #: Modules that are recomputed, their configurations, and what these name otherwise.
        self._recomputing: list[tuple[nn.Module, Any, str | None]] = []
        self._plans: weakref.WeakSet[object] = weakref.WeakSet()  # whose layers may still be recomputed
        self._waiting = 0  # for so many of them once removed
        self._handles = []
        for module in modules:
            self._handles += [
                module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def use(self, name: str) -> None:
        """Has all configurations name a function of ours."""
        if self._own is None:
            self._own = [attention_name(config) for config in self._configs]
        for config in self._configs:
            set_attention_name(config, name)

    def expect(self, plan: object) -> None:
        """Layers with this plan may be recomputed for as long as it lives."""
        self._plans.add(plan)

    def restore(self) -> None:
        """Has them name what they named before, also where something that is no Exception left a module half-way."""
        while self._recomputing:
            _, config, name = self._recomputing.pop()
            set_attention_name(config, name)
        for config, name in zip(self._configs, self._own or (), strict=False):
            set_attention_name(config, name)
        self._own = None

    def remove(self) -> None:
        """Leaves the configurations as they were, and the modules: at once, or when the last forward whose backward
        may recompute them is gone."""
        self.restore()
        plans = list(self._plans)
        self._waiting = len(plans)
        for plan in plans:
            weakref.finalize(plan, self._let_go).atexit = False
        if not plans:
            self._remove_handles()

    def _let_go(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._remove_handles()

    def _remove_handles(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        config: Any = module.config
        if PLAN not in kwargs:
            layout = kwargs.get("layout")
            if isinstance(layout, Layout) and layout.num_ranks > 1:
                raise UnsupportedModelError(
                    f"{type(module).__name__} was given a layout of {layout.num_ranks} ranks, but no plan for it: "
                    "call the engine, or the model that was given to deepspeed.initialize, and no part of it alone"
                )
        elif not _is_ours(config):
            self._recomputing.append((module, config, attention_name(config)))
            set_attention_name(config, NAME)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._recomputing and self._recomputing[-1][0] is module:
            _, config, name = self._recomputing.pop()
            set_attention_name(config, name)


def _is_ours(config: Any) -> bool:
    return attention_name(config) in (NAME, FIRST)
