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
from deepspeed_distca.huggingface.attention_function import FIRST, NAME, PLAN
from deepspeed_distca.huggingface.decoders import UnsupportedModelError
from deepspeed_distca.layout import Layout


class AttentionNames:
    """Switches the configurations of attention modules, and takes itself out again.

    Args:
        modules: attention modules, each with its ``config``. Where one names a function of ours already (a
            configuration that was saved so), it is given "sdpa".

    Attributes:
        unplanned: whether one of these modules was called in training without a plan, since somebody set it to False.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.unplanned = False
        configs: dict[int, Any] = {id(m.config): m.config for m in modules}
        self._configs = list(configs.values())
        for config in self._configs:
            if _is_ours(config):
                set_attention_name(config, "sdpa")
        self._switched: list[tuple[Any, str | None]] = []  # configurations, and what they name otherwise; latest last
        self._recomputed: nn.Module | None = None
        self._plans: weakref.WeakSet[object] = weakref.WeakSet()  # whose layers may still be recomputed
        self._handles = []
        for module in modules:
            self._handles += [
                module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def use(self, name: str) -> None:
        """Has all configurations name a function of ours."""
        for config in self._configs:
            self._switch(config, name)

    def expect(self, plan: object) -> None:
        """Layers with this plan may be recomputed for as long as it lives."""
        self._plans.add(plan)

    def restore(self) -> None:
        """Has them name what they named before, also where something that is no Exception left a module half-way."""
        self._recomputed = None
        while self._switched:
            set_attention_name(*self._switched.pop())

    def remove(self) -> None:
        """Leaves the configurations as they were, and the modules: at once, or when the last forward whose backward
        may recompute them is gone."""
        self.restore()
        self._let_go()

    def _let_go(self) -> None:
        plan = next(iter(self._plans), None)
        if plan is not None:
            weakref.finalize(plan, self._let_go).atexit = False
            return
        for handle in self._handles:
            handle.remove()

    def _switch(self, config: Any, name: str) -> None:
        self._switched.append((config, attention_name(config)))
        set_attention_name(config, name)

    def _enter(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        config: Any = module.config
        if PLAN not in kwargs:
            layout = kwargs.get("layout")
            if isinstance(layout, Layout) and layout.num_ranks > 1:
                raise UnsupportedModelError(
                    f"{type(module).__name__} was given a layout of {layout.num_ranks} ranks, but no plan for it: "
                    "call the engine, or the model that was given to deepspeed.initialize, and no part of it alone"
                )
            if module.training:  # gradients may be off, where a checkpointed layer will be recomputed
                self.unplanned = True
        elif not _is_ours(config):
            self._recomputed = module
            self._switch(config, NAME)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if module is self._recomputed:
            self.restore()


def _is_ours(config: Any) -> bool:
    return attention_name(config) in (NAME, FIRST)
