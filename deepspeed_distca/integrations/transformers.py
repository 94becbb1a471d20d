# SPDX-License-Identifier: Apache-2.0
"""HuggingFace models: the attention function "distca", and the hooks that hand every forward its plan.

Nothing of transformers is replaced. A name is registered with its attention interface, and a model's configuration
points to that name only while a forward has a plan; without one the model runs as it always does, by its own attention
and masks. The plan travels as a keyword argument of forward, so that recomputation finds the right one.

No mask function is registered under the name: transformers then builds no mask at all, which is right (documents are
in the plan) and costs neither memory nor a synchronisation. What a mask could have said is looked at before.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from deepspeed_distca.attention_server.tasks import AttentionSpec
from deepspeed_distca.layout import Layout, LayoutError

NAME = "distca"
PLAN = "distca_plan"
#: Keys of a collated batch that describe it and are not arguments of a model.
DESCRIPTION = ("layout", "cu_seqlens", "max_seqlen", "num_targets", "step_targets")


class UnsupportedModelError(ValueError):
    """A model, or an argument of its forward, whose attention the plugin cannot honour exactly."""


class Plan(Protocol):
    """What the attention function needs of a micro-batch's plan."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token-major q, k, v to (out [T, heads, v_head_dim], lse [heads, T])."""


class Planner(Protocol):
    """What makes plans: see ``deepspeed_distca.engine_hooks.Runtime``."""

    def plan(self, description: Description | Exception, device: torch.device) -> tuple[Plan, float]:
        """Collective: the plan of a training micro-batch, and the divisor of its summed loss."""

    def plan_alone(self, layout: Layout, device: torch.device) -> Plan:
        """Everything on this rank, without a word to the others: for evaluation."""


@dataclass(frozen=True)
class Description:
    """A micro-batch as its batch describes it: see :class:`deepspeed_distca.attention_server.agreement.MicroBatch`."""

    layout: Layout
    targets: int
    step_targets: int | None


def distca_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function behind ``attn_implementation="distca"``, with transformers' signature.

    Args:
        query: [batch, q_heads, tokens, head_dim]; key, value: [batch, kv_heads, tokens, ...]. Rows of the batch are
            stored one after another, as the layout counts them.
        sliding_window: keys a query sees, its own included.
        s_aux: attention sinks [q_heads]: a logit that takes part in the softmax and has no value.

    Returns:
        [batch, tokens, q_heads, v_head_dim], and None for the weights.

    Raises:
        UnsupportedModelError: no plan, or something that a plan cannot honour.
    """
    plan: Plan | None = kwargs.get(PLAN)
    name = type(module).__name__
    if plan is None:
        raise UnsupportedModelError(
            f'{name}: attention "{NAME}" was called without a plan. It works inside a model given to '
            "deepspeed.initialize with a `distca` block; elsewhere choose another attn_implementation"
        )
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{name} passes an attention mask of shape {list(attention_mask.shape)}; only causal attention inside "
            "documents is supported. Leave the mask out, or set `distca.enabled` to false for this model"
        )
    if dropout:
        raise UnsupportedModelError(f"{name} uses attention dropout {dropout}; set attention_dropout to 0")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} is not causal; core attention is planned for causal decoders only")
    if query.shape[2] != key.shape[2]:
        raise UnsupportedModelError(
            f"{name}: {query.shape[2]} queries against {key.shape[2]} keys in training; run without a KV cache "
            "(use_cache=False) and without cross attention"
        )
    if torch.is_autocast_enabled(query.device.type):
        # As scaled_dot_product_attention does; RoPE may have left q and k wider than v.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch, _, tokens, head_dim = query.shape
    spec = AttentionSpec(head_dim**-0.5 if scaling is None else float(scaling), sliding_window, softcap)
    out, lse = plan.attend(*(t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)), spec)
    if s_aux is not None:
        # The sink adds exp(sink) to the softmax's denominator: out * exp(lse) / (exp(lse) + exp(sink)).
        out = out * torch.sigmoid(lse.t() - s_aux).unsqueeze(-1).to(out.dtype)
    return out.unflatten(0, (batch, tokens)), None


AttentionInterface.register(NAME, torch.compiler.disable(distca_attention))


def find_decoder(model: nn.Module) -> PreTrainedModel:
    """The outermost HuggingFace model in a module (itself, or inside wrappers such as PEFT's).

    Raises:
        UnsupportedModelError: there is none, or its attention does not go through transformers' interface.
    """
    found = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if found is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} holds no HuggingFace model; the `distca` block needs one whose attention goes "
            "through transformers' attention interface. Set `distca.enabled` to false for this model"
        )
    return found


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that call the attention interface once in every forward.

    Raises:
        UnsupportedModelError: there is none, or one of them is known not to be honoured; names the model.
    """
    name = type(model).__name__
    found = [m for m in model.modules() if _is_attention(m)]
    if not found or not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{name} ({model.config.model_type}) does not go through transformers' attention interface, so its core "
            "attention cannot be dispatched. Set `distca.enabled` to false for this model"
        )
    config = model.config.get_text_config()
    if getattr(config, "attention_chunk_size", None):
        raise UnsupportedModelError(
            f"{name} ({model.config.model_type}) uses chunked attention, which only its mask conveys; it is not "
            "supported. Set `distca.enabled` to false for this model"
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only causal decoders are supported")
    dropout = [m for m in found if getattr(m, "attention_dropout", 0.0)]
    if dropout and isinstance(dropout[0].attention_dropout, float):
        raise UnsupportedModelError(
            f"{name} uses attention dropout {dropout[0].attention_dropout}; set config.attention_dropout to 0"
        )
    return found


def _is_attention(module: nn.Module) -> bool:
    cls = type(module)
    owner = sys.modules.get(cls.__module__)
    return (
        "Attention" in cls.__name__
        and hasattr(owner, "ALL_ATTENTION_FUNCTIONS")
        and hasattr(module, "config")
        and getattr(module, "is_causal", True) is True
        and not any(_is_attention(child) for child in module.children())
    )


class DecoderHooks:
    """Gives every forward of a model its plan, and takes itself out again.

    In training (grad enabled, train mode) a micro-batch is planned together with the other ranks. In evaluation a
    packed row runs on this rank alone; anything else goes the model's ordinary way.
    """

    def __init__(self, model: PreTrainedModel, modules: list[nn.Module], planner: Planner, *, weight_loss: bool) -> None:
        self._model, self._modules, self._planner, self._weight_loss = model, modules, planner, weight_loss
        self._configs = list({id(m.config): m.config for m in modules}.values())
        self._ordinary = [c._attn_implementation for c in self._configs]
        self._ordinary = ["sdpa" if name == NAME else name for name in self._ordinary]
        self._signature = inspect.signature(model.forward)
        self._use_cache = getattr(model.config, "use_cache", None)
        self._calls: int | None = None  # attention calls so far, while the first planned forward runs
        self._checked = False
        if self._use_cache:
            # With a cache transformers ignores document borders; the cache is useless in training anyway.
            model.config.use_cache = False
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        """Leaves the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._use(False)
        if self._use_cache:
            self._model.config.use_cache = self._use_cache

    def _before(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
        kwargs = {**self._bind(args), **kwargs}
        description = {key: kwargs.pop(key, None) for key in DESCRIPTION}
        training = model.training and torch.is_grad_enabled()
        device = next(model.parameters()).device
        if training:
            plan, kwargs = self._training(kwargs, description, device)
        else:
            plan, kwargs = self._evaluation(kwargs, description, device)
        self._use(plan is not None)
        if plan is not None:
            for key in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"):
                kwargs.pop(key, None)
            kwargs["attention_mask"] = None
            kwargs["use_cache"] = False
            self._calls = None if self._checked else 0
            kwargs[PLAN] = plan if self._checked else _Counted(plan, self)
        kwargs = {k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in kwargs.items()}
        return (), kwargs

    def _training(self, kwargs: dict, description: dict, device: torch.device) -> tuple[Plan, dict]:
        try:
            self._refuse(kwargs)
            layout = _layout(kwargs, description).filled()
            kwargs = _filled(kwargs)
            targets = _targets(kwargs, description) if self._weight_loss else 0
            given: Description | Exception = Description(layout, targets, description["step_targets"])
        except (ValueError, TypeError) as error:
            given = error
        plan, divisor = self._planner.plan(given, device)
        if self._weight_loss and kwargs.get("labels") is not None and kwargs.get("num_items_in_batch") is None:
            kwargs = {**kwargs, "num_items_in_batch": divisor}
        return plan, kwargs

    def _evaluation(self, kwargs: dict, description: dict, device: torch.device) -> tuple[Plan | None, dict]:
        packed = description["layout"] is not None or kwargs.get("cu_seq_lens_q") is not None
        cached = kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None
        if not packed or cached:
            return None, kwargs
        return self._planner.plan_alone(_layout(kwargs, description).filled(), device), _filled(kwargs)

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        calls, self._calls = self._calls, None
        if calls is None:
            return
        self._checked = True
        if calls != len(self._modules):
            raise UnsupportedModelError(
                f"{type(model).__name__}: {calls} attention calls were dispatched, but there are {len(self._modules)} "
                f"attention modules ({type(self._modules[0]).__name__}); some go another way, so the plan would be "
                "wrong. Set `distca.enabled` to false for this model and report it"
            )

    def _use(self, plan: bool) -> None:
        for config, ordinary in zip(self._configs, self._ordinary, strict=True):
            name = NAME if plan else ordinary
            if config._attn_implementation != name:
                config._attn_implementation = name

    def _bind(self, args: tuple) -> dict[str, Any]:
        return dict(self._signature.bind_partial(*args).arguments) if args else {}

    def _refuse(self, kwargs: Mapping[str, Any]) -> None:
        if kwargs.get("output_attentions"):
            raise UnsupportedModelError("output_attentions=True: core attention never forms the weights; set it to False")
        if kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None:
            raise UnsupportedModelError("a KV cache was given in training; run the forward without it")
        mask = kwargs.get("attention_mask")
        if mask is not None and (not torch.is_tensor(mask) or mask.ndim != 2):
            shape = list(mask.shape) if hasattr(mask, "shape") else type(mask).__name__
            raise UnsupportedModelError(
                f"attention_mask {shape}: only a padding mask [batch, tokens] is supported; describe packed documents "
                "by position_ids or a layout instead"
            )


class _Counted:
    """A plan that counts the attention calls of the first forward."""

    def __init__(self, plan: Plan, hooks: DecoderHooks) -> None:
        self._plan, self._hooks = plan, hooks

    def attend(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self._hooks._calls is not None:
            self._hooks._calls += 1
        return self._plan.attend(*arguments)


def _layout(kwargs: Mapping[str, Any], description: Mapping[str, Any]) -> Layout:
    """Documents of this rank's rows: from the collator, else from cu_seqlens, a padding mask or position ids.

    The last three may lie on a device; reading them waits for it, once per micro-batch.
    """
    ids = kwargs.get("input_ids")
    ids = kwargs.get("inputs_embeds") if ids is None else ids
    if ids is None:
        raise LayoutError("neither input_ids nor inputs_embeds was given")
    batch, tokens = ids.shape[:2]
    layout = description["layout"]
    if layout is not None:
        if not isinstance(layout, Layout):
            raise LayoutError(f"layout must be a Layout, got {type(layout).__name__}")
        if layout.num_ranks == 1 and int(layout.tokens[0]) != batch * tokens:
            raise LayoutError(
                f"the layout has {int(layout.tokens[0])} tokens, input_ids has {batch} x {tokens}; the layout must "
                "describe the very tokens of the batch"
            )
        return layout.validate()
    for key in ("cu_seqlens", "cu_seq_lens_q"):
        cu_seqlens = description.get(key) if key in description else kwargs.get(key)
        if cu_seqlens is not None:
            cu_seqlens = torch.as_tensor(cu_seqlens).cpu().numpy()
            if cu_seqlens.size == 0 or int(cu_seqlens[-1]) != batch * tokens:
                raise LayoutError(f"{key} ends at {cu_seqlens[-1:]}, but the batch has {batch} x {tokens} tokens")
            return Layout.from_cu_seqlens(cu_seqlens)
    mask = kwargs.get("attention_mask")
    position_ids = kwargs.get("position_ids")
    if position_ids is not None and position_ids.ndim > 2:
        raise LayoutError(
            f"position_ids of shape {list(position_ids.shape)} (multi-axis) do not say where documents begin; give "
            "[batch, tokens] position ids or a layout"
        )
    if mask is not None and not bool(mask.all()):
        return _padded(mask)
    if position_ids is None:
        return Layout.from_lengths([[tokens] * batch if tokens else []])
    return Layout.from_position_ids(position_ids.expand(batch, tokens).cpu().numpy())


def _filled(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A batch without tokens gets one, without a target: see ``Layout.filled``."""
    ids = kwargs.get("input_ids")
    if ids is None or ids.shape[1]:
        return kwargs
    values = {"input_ids": 0, "position_ids": 0, "labels": -100, "shift_labels": -100}
    return {
        key: value.new_full((1, 1), values[key]) if key in values and torch.is_tensor(value) else value
        for key, value in kwargs.items()
    }


def _padded(mask: torch.Tensor) -> Layout:
    """Rows with padding: every run of real tokens is a document, and so is every run of padding, which no real token
    sees. Exact, at the price of attention among the padding; packing is faster."""
    values = mask.bool().cpu().numpy()
    lengths: list[int] = []
    for row in values:
        borders = [0, *((row[1:] != row[:-1]).nonzero()[0] + 1).tolist(), len(row)]
        if sum(bool(row[a]) for a in borders[:-1]) > 1:
            raise LayoutError("attention_mask has several runs of real tokens in a row; describe documents by position_ids")
        lengths += [b - a for a, b in zip(borders, borders[1:], strict=False)]
    return Layout.from_lengths([lengths])


def _targets(kwargs: Mapping[str, Any], description: Mapping[str, Any]) -> int:
    """Target tokens of this rank; from the collator, or counted (on a device: a wait, once per micro-batch)."""
    if description["num_targets"] is not None:
        return int(description["num_targets"])
    labels = kwargs.get("shift_labels")
    if labels is None and kwargs.get("labels") is not None:
        labels = kwargs["labels"][..., 1:]
    return 0 if labels is None else int((labels != -100).sum())


