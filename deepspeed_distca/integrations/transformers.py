# SPDX-License-Identifier: Apache-2.0
"""HuggingFace models: the hooks that hand every forward its plan.

Nothing of transformers is replaced. A name is registered with its attention interface, and a model's configuration
points to that name only while a forward has a plan, and while a layer of such a forward is recomputed; at any other
time the model runs as it always does, by its own attention and masks, and so do its copies. The plan travels as a
keyword argument of forward, so that recomputation finds the right one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from deepspeed_distca.integrations.attention_function import (
    FIRST,
    KEPT,
    NAME,
    PLAN,
    WITNESS,
    Plan,
    UnsupportedModelError,
    watched_by,
)
from deepspeed_distca.integrations.attention_names import AttentionNames
from deepspeed_distca.integrations.batch_layout import (
    DESCRIPTION,
    batch_layout,
    count_targets,
    filled,
    with_position_ids,
)
from deepspeed_distca.integrations.decoders import attention_modules, attention_windows, find_decoder
from deepspeed_distca.integrations.first_forward import FirstForward
from deepspeed_distca.integrations.kept_attention import KeptAttention
from deepspeed_distca.layout import Layout

__all__ = [
    "DecoderHooks",
    "Description",
    "Planner",
    "UnsupportedModelError",
    "attention_modules",
    "attention_windows",
    "find_decoder",
]

#: What describes documents to kernels of transformers' own; the plan says it all.
_KERNEL_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
#: From these some models make masks that differ from batch to batch: attention both ways among an image's tokens.
_MASK_ARGUMENTS = ("token_type_ids", "mm_token_type_ids")


class Planner(Protocol):
    """What makes plans: see ``deepspeed_distca.engine_hooks.Runtime``.

    Attributes:
        place: this rank's among the servers that share a layout, and how many these are.
    """

    place: tuple[int, int]

    def plan(self, description: Description | Exception, device: torch.device) -> tuple[Plan, torch.Tensor]:
        """Collective: the plan of a training micro-batch, and the divisor of its summed loss, a scalar on the device
        that has its value once the plan was used. An error may come with the plan's first use."""

    def plan_alone(self, layout: Layout, device: torch.device) -> Plan:
        """Everything on this rank, without a word to the others: for evaluation."""


@dataclass(frozen=True)
class Description:
    """A micro-batch as its batch describes it: see :class:`deepspeed_distca.attention_server.agreement.MicroBatch`."""

    layout: Layout
    targets: int
    step_targets: int | None


class DecoderHooks:
    """Gives every forward of a model its plan, and takes itself out again.

    In training (grad enabled, train mode) a micro-batch is planned together with the other ranks. In evaluation a
    packed row runs on this rank alone; anything else goes the model's ordinary way.

    Args:
        model: the decoder.
        modules: its attention modules.
        windows: their windows.
        planner: makes the plans.
        weight_loss: divide the model's summed loss by the divisor that comes with a plan, unless the caller gave
            ``num_items_in_batch`` himself.
        keep_attention: recomputation of layers does not repeat core attention.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: list[nn.Module],
        windows: list[int | None],
        planner: Planner,
        *,
        weight_loss: bool,
        keep_attention: bool,
    ) -> None:
        self._keep_attention = keep_attention
        self._model, self._modules, self._planner, self._weight_loss = model, modules, planner, weight_loss
        self._windows = dict(zip(modules, windows, strict=True))
        self._own_configuration()
        self._names = AttentionNames(modules)
        self._signature = inspect.signature(model.forward)
        self._first: watched_by | None = None  # while the first planned forward runs
        self._checked = False
        self._handles = [
            model.register_forward_pre_hook(torch.compiler.disable(self._before), with_kwargs=True, prepend=True),
            model.register_forward_hook(torch.compiler.disable(self._after), always_call=True),
        ]

    def remove(self) -> None:
        """Leaves the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._end()
        self._names.remove()

    def _own_configuration(self) -> None:
        """Gives the model a configuration object of its own, so that another one built from the very same object (a
        teacher) has its own attention even inside this one's forward. Models of several parts have theirs already.
        """
        shared = self._model.config
        if shared.sub_configs or any(m.config is not shared for m in self._modules):
            return
        own = copy.copy(shared)
        for module in self._model.modules():
            if getattr(module, "config", None) is shared:
                module.config = own

    def _before(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if model is not self._model:
            return None  # a copy, which brought this hook along: not the engine's
        self._end()  # of a forward that failed where its hook was not called
        kwargs = {**self._bind(args), **kwargs}
        description = {key: kwargs.pop(key, None) for key in DESCRIPTION}
        training = model.training and torch.is_grad_enabled()
        device = next(model.parameters()).device
        if training:
            plan, kwargs = self._training(kwargs, description, device)
        else:
            plan, kwargs = self._evaluation(kwargs, description, device)
        if plan is not None:
            looked_at = not self._checked or any(kwargs.get(key) is not None for key in _MASK_ARGUMENTS)
            self._names.use(FIRST if looked_at else NAME)
            if training:
                self._names.expect(plan)
            for key in _KERNEL_ARGUMENTS:
                kwargs.pop(key, None)
            kwargs["attention_mask"] = None
            kwargs["use_cache"] = False
            kwargs[PLAN] = plan
            if training and self._keep_attention:
                kwargs[KEPT] = KeptAttention()
            if looked_at:
                witness = FirstForward(model, self._windows, kwargs.get("position_ids"))
                kwargs[WITNESS] = witness
                self._first = watched_by(witness)
                self._first.start()
        kwargs = {k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in kwargs.items()}
        return (), kwargs

    def _training(self, kwargs: dict, description: dict, device: torch.device) -> tuple[Plan, dict]:
        try:
            self._refuse(kwargs)
            layout = batch_layout(kwargs, description, self._planner.place).filled()
            kwargs = with_position_ids(_countable(kwargs, filled(kwargs)), description, layout)
            targets = count_targets(kwargs, description) if self._weight_loss else 0
            given: Description | Exception = Description(layout, targets, description["step_targets"])
        except Exception as error:  # whatever it is, all ranks must know
            given = error
        plan, divisor = self._planner.plan(given, device)
        if self._weight_loss and kwargs.get("labels") is not None and kwargs.get("num_items_in_batch") is None:
            kwargs = {**kwargs, "num_items_in_batch": divisor}
        return plan, kwargs

    def _evaluation(self, kwargs: dict, description: dict, device: torch.device) -> tuple[Plan | None, dict]:
        packed = any(description[key] is not None for key in ("layout", "cu_seqlens"))
        packed = packed or kwargs.get("cu_seq_lens_q") is not None
        cached = kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None
        if not packed or cached or kwargs.get("output_attentions"):
            return None, kwargs
        layout = batch_layout(kwargs, description).filled()
        kwargs = with_position_ids(_countable(kwargs, filled(kwargs)), description, layout)
        return self._planner.plan_alone(layout, device), kwargs

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        """Called after every forward, with None for an output when it failed."""
        if model is not self._model:
            return
        first = self._end()
        if first is not None and output is not None:
            first.witness.finish()
            self._checked = True

    def _end(self) -> watched_by | None:
        """Ends a forward's switches; gives who watched it."""
        self._names.restore()
        first, self._first = self._first, None
        if first is not None:
            first.stop()
        return first

    def _bind(self, args: tuple) -> dict[str, Any]:
        return dict(self._signature.bind_partial(*args).arguments) if args else {}

    def _refuse(self, kwargs: Mapping[str, Any]) -> None:
        if kwargs.get("output_attentions"):
            raise UnsupportedModelError("output_attentions=True: core attention never forms its weights; leave it off")
        if kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None:
            raise UnsupportedModelError("a KV cache was given in training; run the forward without it")
        mask = kwargs.get("attention_mask")
        if mask is not None and (not torch.is_tensor(mask) or mask.ndim != 2):
            shape = list(mask.shape) if hasattr(mask, "shape") else type(mask).__name__
            raise UnsupportedModelError(
                f"attention_mask {shape}: only a padding mask [batch, tokens] is supported; describe packed documents "
                "by position_ids or a layout instead"
            )


def _countable(given: Mapping[str, Any], filled: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch without tokens has one that stands in, without a target: its mean over none would be no number."""
    if filled is given or filled.get("labels") is None or filled.get("num_items_in_batch") is not None:
        return filled
    return {**filled, "num_items_in_batch": torch.ones(())}
