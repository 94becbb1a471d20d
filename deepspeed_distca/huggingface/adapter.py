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
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from deepspeed_distca.attention_server.coordination.agreement import MicroBatch
from deepspeed_distca.attention_server.plan_request import PlanRequest
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.compat.torch import recomputation_is_over
from deepspeed_distca.compat.transformers import own_loss_function
from deepspeed_distca.huggingface.attention_function import FIRST, KEPT, NAME, PLAN, WITNESS
from deepspeed_distca.huggingface.attention_names import AttentionNames
from deepspeed_distca.huggingface.contract import Contract
from deepspeed_distca.huggingface.decoders import UnsupportedModelError, attention_windows, takes
from deepspeed_distca.huggingface.first_forward import FirstForward
from deepspeed_distca.huggingface.front_door import DESCRIPTION, Admitted, Limits, admit, names_documents
from deepspeed_distca.huggingface.front_door.claims import unread_description
from deepspeed_distca.huggingface.kept_attention import KeptAttention
from deepspeed_distca.huggingface.probe import borders
from deepspeed_distca.huggingface.row_rope import RowRope
from deepspeed_distca.layout import Layout, LayoutError

logger = logging.getLogger(__name__)

#: What describes documents to kernels of transformers' own; the plan says it all.
_KERNEL_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
#: What a model may do without; the contract says how it then reads the rest.
_OPTIONAL = {"position_ids", "attention_mask", "shift_labels", "num_items_in_batch", "use_cache"}
#: From these some models make masks that differ from batch to batch: attention both ways among an image's tokens.
_MASK_ARGUMENTS = ("token_type_ids", "mm_token_type_ids")
#: Micro-batches in which ranks compare their tokens: a loader without a sampler shows in the first.
_COMPARED = 4


class Planner(Protocol):
    """What makes plans: see ``deepspeed_distca.engine_runtime.Runtime``.

    Attributes:
        place: this rank's among the servers that share a layout, and how many these are.
    """

    place: tuple[int, int]

    def request(self, given: MicroBatch | Exception, device: torch.device) -> PlanRequest:
        """Collective: asks for the plan of a training micro-batch. Raises the error that was given; one of another
        rank may come with the plan's first use."""

    def plan_alone(self, layout: Layout) -> StepPlan:
        """Everything on this rank, without a word to the others: for evaluation."""

    def kept(self, kept: KeptAttention) -> None:
        """A training forward has ended: what is kept of it for recomputation."""

    def failed(self, error: BaseException) -> None:
        """A forward failed after its plan was asked for: the other ranks must know, and are not to wait for it."""


@dataclass
class _Forward:
    """A planned forward under way.

    Attributes:
        plan: in training a request for it.
        nothing: it has no real token, so it may have no part in any loss.
        weight: own targets and the divisor by which a loss that is a mean over them is scaled afterwards.
        witness: who looks on, in a model's first one.
        kept: of its attention, for recomputation.
    """

    plan: StepPlan | PlanRequest
    nothing: bool
    weight: tuple[int, torch.Tensor] | None = None
    witness: FirstForward | None = None
    kept: KeptAttention | None = None

    @property
    def request(self) -> PlanRequest | None:
        """For its plan, in training."""
        return self.plan if isinstance(self.plan, PlanRequest) else None


class DecoderHooks:
    """Gives every forward of a model its plan, and takes itself out again.

    In training (grad enabled, train mode) a micro-batch is planned together with the other ranks. In evaluation a
    packed row runs on this rank alone; anything else goes the model's ordinary way.

    Args:
        model: the decoder.
        modules: its attention modules.
        planner: makes the plans.
        contract: how the model reads its arguments.
        weight_loss: divide the model's summed loss by the divisor that comes with a plan, unless the caller gave
            ``num_items_in_batch`` himself.
        outer: what is called in training, if it is not the decoder itself but holds it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: list[nn.Module],
        planner: Planner,
        *,
        contract: Contract,
        weight_loss: bool,
        outer: nn.Module | None = None,
    ) -> None:
        self._model, self._modules, self._planner, self._weight_loss = model, modules, planner, weight_loss
        self._windows = dict(zip(modules, attention_windows(modules), strict=True))
        self._own_configuration()
        self._names = AttentionNames(modules)
        self._contract, self._limits, self._loss = contract, _limits(model), _loss_of(model)
        self._rope = RowRope(model)
        self._signature = inspect.signature(model.forward)
        self._running: _Forward | None = None
        self._entered = False  # whether the hook before a forward was called
        self._calls = self._calls_before = 0  # of that hook, until now and until the last backward
        self._checked = False
        self._in_evaluation = False  # whether the last forward was in evaluation, and yet for gradients
        self._compared = 0  # micro-batches whose tokens were compared over the ranks
        self._said: set[str] = set()
        self._handles = [
            # Behind hooks that others have registered: they see the caller's arguments, and DeepSpeed's tensor
            # parallelism compares those over its ranks.
            model.register_forward_pre_hook(torch.compiler.disable(self._before), with_kwargs=True),
            model.register_forward_hook(torch.compiler.disable(self._after), always_call=True),
        ]
        if outer is not None and outer is not model:
            self._outer, self._before_outer = outer, 0
            self._handles += [
                outer.register_forward_pre_hook(torch.compiler.disable(self._enter_outer)),
                outer.register_forward_hook(torch.compiler.disable(self._leave_outer)),
            ]

    def remove(self) -> None:
        """Leaves the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._end()
        self._rope.remove()
        self._names.remove()

    def _own_configuration(self) -> None:
        """Gives the model a configuration object of its own, so that another one built from the very same object (a
        teacher) has its own attention even inside this one's forward. Models of several parts have theirs already.
        """
        shared: Any = self._model.config
        if shared.sub_configs or any(m.config is not shared for m in self._modules):
            return
        own = copy.copy(shared)
        module: Any
        for module in self._model.modules():
            if getattr(module, "config", None) is shared:
                module.config = own

    def _before(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if model is not self._model:
            return None  # a copy, which brought this hook along: not the engine's
        self._entered = True
        self._calls += 1
        self._end()  # of a forward that failed where its hook was not called
        kwargs = {**self._bind(args), **kwargs}
        device = next(model.parameters()).device
        self._in_evaluation = not model.training and torch.is_grad_enabled()
        if model.training and torch.is_grad_enabled():
            kwargs = self._training(kwargs, device)
        elif _is_packed(kwargs):
            kwargs = self._evaluation(kwargs)
        else:
            kwargs = {key: value for key, value in kwargs.items() if key not in DESCRIPTION}
        kwargs = {k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in kwargs.items()}
        return (), kwargs

    def _enter_outer(self, outer: nn.Module, args: tuple) -> None:
        if outer is self._outer:
            self._before_outer, self._names.unplanned = self._calls, False

    def _leave_outer(self, outer: nn.Module, args: tuple, output: Any) -> None:
        """Raises UnsupportedModelError where what is around the model has gone past its hooks: attention would be
        computed without a plan, and the loss not be weighted, without a word."""
        planned = self._calls > self._before_outer or not self._names.unplanned
        if outer is not self._outer or planned or not (outer.training and torch.is_grad_enabled()):
            return
        name = type(self._model).__name__
        error = UnsupportedModelError(
            f"{type(outer).__name__} computes the attention of {name} without calling {name} itself: it calls its "
            "`forward`, or a part of it alone, past the hooks that give it a plan (as AdaLoRA and adaption prompts of "
            "PEFT do). Have it call the model as a function, or set `distca.enabled` to false for this model"
        )
        self._planner.failed(error)
        raise error

    def backward_begins(self) -> None:
        """Warns, once, where parts of the model were called alone since the last backward, and the model was not."""
        name = type(self._model).__name__
        if self._names.unplanned and self._calls == self._calls_before:
            self._say(
                f"parts of {name} were called alone in training, and {name} was not: their attention is computed "
                "without a plan, and the loss is not weighted over ranks; call the engine, and take what you need of "
                "its output (output_hidden_states=True gives hidden states)"
            )
        if self._in_evaluation:
            self._say(
                f"a backward follows a forward of {name} in evaluation (`eval()`): each rank computes its own "
                "attention there, and the loss is not weighted over ranks; to go without dropout stay in train mode, "
                "and set it to zero"
            )
        self._names.unplanned, self._calls_before, self._in_evaluation = False, self._calls, False

    def _is_watched(self, kwargs: Mapping[str, Any]) -> bool:
        return not self._checked or any(kwargs.get(key) is not None for key in _MASK_ARGUMENTS)

    def _start(self, running: _Forward, admitted: Admitted, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Switches the model to its plan; what it is called with."""
        self._running = running
        looked_at = self._is_watched(kwargs)
        self._names.use(FIRST if looked_at else NAME)
        if self._rope.rules:
            self._rope.begin(admitted.lengths)
        summed = self._contract.weighting == "num_items_in_batch" and kwargs.get("labels") is not None
        if running.nothing and summed and kwargs.get("num_items_in_batch") is None:
            kwargs["num_items_in_batch"] = torch.ones(())  # a mean over no targets would be no number
        for key in _KERNEL_ARGUMENTS:
            kwargs.pop(key, None)
        if self._contract.rows == "told" and len(admitted.pieces[0]) > admitted.shape[0]:
            kwargs |= borders(admitted.pieces[0], admitted.shape)
        kwargs["use_cache"] = False
        for key in _OPTIONAL:
            # Of what batches carry and the plugin adds, a model gets what it has a parameter for.
            if not takes(self._signature, key):
                kwargs.pop(key, None)
        kwargs[PLAN] = plan = running.plan
        if isinstance(plan, PlanRequest):
            self._names.expect(plan)
            kwargs[KEPT] = running.kept = KeptAttention(lambda: plan.kept_layers)
        if looked_at:
            running.witness = FirstForward(self._model, self._windows, kwargs.get("position_ids"))
            running.witness.start()
            kwargs[WITNESS] = running.witness
        return kwargs

    def _admitted(self, kwargs: dict[str, Any]) -> Admitted | Exception:
        try:
            self._refuse(kwargs)
            return admit(
                kwargs,
                self._contract,
                self._limits,
                place=self._planner.place,
                count=self._weight_loss,
                digest=self._compared < _COMPARED,
                say=self._say,
            )
        except Exception as error:  # whatever it is, all ranks must know
            return error

    def _training(self, kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
        admitted = self._admitted(kwargs)
        self._compared += 1
        if isinstance(admitted, Exception):
            self._planner.request(admitted, device)
            raise admitted
        # A forward that is watched runs whole.
        micro_batch = replace(admitted.micro_batch, in_two=not self._is_watched(kwargs))
        plan = self._planner.request(micro_batch, device)
        running, arguments = _Forward(plan, admitted.nothing), admitted.arguments
        weighing = self._weight_loss and arguments.get("labels") is not None
        if weighing and arguments.get("num_items_in_batch") is None:
            if self._contract.weighting == "num_items_in_batch":
                arguments["num_items_in_batch"] = plan.divisor
            elif self._contract.weighting == "mean":
                running.weight = admitted.micro_batch.targets, plan.divisor
        return self._start(running, admitted, arguments)

    def _evaluation(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        admitted = admit(kwargs, self._contract, self._limits, place=self._planner.place, count=False, say=self._say)
        plan = self._planner.plan_alone(admitted.micro_batch.layout)
        return self._start(_Forward(plan, admitted.nothing), admitted, admitted.arguments)

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Called after every forward, with None for an output when it failed."""
        if model is not self._model:
            return None
        entered, self._entered = self._entered, False
        running = self._end()
        if output is None and not entered and model.training and torch.is_grad_enabled():
            # A hook before ours has refused the arguments, as DeepSpeed's does where tensor-parallel ranks have
            # different ones: the other ranks are told in the place of this rank's micro-batch.
            with suppress(Exception):  # the very error is raised anyway
                self._planner.request(_current_error(), next(model.parameters()).device)
        if running is None:
            return None
        if output is None:
            error = _current_error()
            if running.request is not None and recomputation_is_over(error):
                running.request.finish()  # the model is in a checkpoint as a whole: all went well
            elif running.request is not None:
                self._planner.failed(error)
            return None
        if running.witness is not None:
            try:
                running.witness.finish()
            except UnsupportedModelError as error:
                if running.request is not None:
                    self._planner.failed(error)
                raise
            self._checked = True
        if running.request is not None:
            if not running.request.answered:
                raise self._without_attention()
            running.request.finish()
        if running.kept is not None:
            self._planner.kept(running.kept)
        if running.nothing or (running.weight is not None and not running.weight[0]):
            return _without_losses(output)
        if running.weight is not None:
            targets, divisor = running.weight
            return _weighted(output, targets / divisor)
        return None

    def _without_attention(self) -> UnsupportedModelError:
        """A forward in which no layer came to its attention: it is over, and what its loss was divided by is not known
        before the ranks have agreed, which they do in the first of them."""
        error = UnsupportedModelError(
            f"{type(self._model).__name__} went through none of its {len(self._modules)} attention layers in this "
            "forward, so that it was neither planned nor its loss divided by the targets of all ranks; leave at least "
            "one layer in, the same number of layers on all ranks"
        )
        self._planner.failed(error)
        return error

    def _end(self) -> _Forward | None:
        """Ends a forward's switches; gives the forward."""
        self._names.restore()
        self._rope.end()
        running, self._running = self._running, None
        if running is not None and running.witness is not None:
            running.witness.stop()
        return running

    def _say(self, message: str) -> None:
        """A warning, once for what it says but its numbers."""
        kind = "".join(c for c in message if not c.isdigit())
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("distca: %s", message)

    def _bind(self, args: tuple) -> dict[str, Any]:
        return dict(self._signature.bind_partial(*args).arguments) if args else {}

    def _refuse(self, kwargs: Mapping[str, Any]) -> None:
        unread = unread_description(kwargs, {*DESCRIPTION, *_KERNEL_ARGUMENTS, *self._signature.parameters})
        if unread is not None and not names_documents(kwargs):
            raise LayoutError(
                f"{unread} tells of several documents in a row, but nothing reads it, and no other description was "
                "given: a row would be one document. Tell documents apart by cu_seqlens, position_ids, seq_idx, a "
                "mask that numbers them or a layout"
            )
        weighed = self._weight_loss and self._contract.weighting is not None and kwargs.get("labels") is not None
        if weighed and _loss_of(self._model) != self._loss:
            raise UnsupportedModelError(
                f"the loss_function of {type(self._model).__name__} is another one than when deepspeed.initialize "
                "was called, which found how it is weighted over ranks. Set it before that, or have all ranks call "
                "engine.distca.detach() and deepspeed_distca.attach(engine), which look at it again"
            )
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


def _is_packed(kwargs: Mapping[str, Any]) -> bool:
    """Whether evaluation is to go by a plan; anything else goes the model's own way."""
    cached = kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None
    return not cached and not kwargs.get("output_attentions") and names_documents(kwargs)


def _loss_of(model: Any) -> tuple[Any, Any]:
    """By what transformers finds a model's loss: a function that was set, or a name."""
    return own_loss_function(model), getattr(model, "loss_type", None)


def _current_error() -> Exception:
    """For which a forward ends."""
    error = sys.exc_info()[1]
    return error if isinstance(error, Exception) else RuntimeError("its forward did not end")


def _limits(model: PreTrainedModel) -> Limits:
    """What the embeddings of a model have room for, as its configuration says; modules may be sharded."""
    config = model.config.get_text_config()
    size, stand_in = getattr(config, "vocab_size", None), int(getattr(config, "pad_token_id", None) == 0)
    if model.config is not config or size is None:
        return Limits(stand_in=stand_in)  # models of several parts may put ids of images beyond their vocabulary
    if model.get_output_embeddings() is None:
        return Limits(size, getattr(model, "num_labels", None), labels_are_tokens=False, stand_in=stand_in)
    return Limits(size, size, stand_in=stand_in)


def _weighted(output: Any, factor: torch.Tensor) -> Any:
    """A model's output with its loss times a factor."""
    if isinstance(output, ModelOutput):
        if torch.is_tensor(output.get("loss")):
            output["loss"] = output["loss"] * factor.to(output["loss"].dtype)
        return output
    if isinstance(output, tuple) and torch.is_tensor(output[0]) and output[0].ndim == 0:
        return (output[0] * factor.to(output[0].dtype), *output[1:])
    return output


def _without_losses(output: Any) -> Any:
    """A model's output whose losses, whichever they are, are 0 and have gradients of 0 for every parameter: what
    stands in for tokens has no part in them. A mean over nothing would be no number, which no factor makes one."""
    values = output.values() if isinstance(output, ModelOutput) else output
    anchor = next((t for t in values if torch.is_tensor(t) and t.ndim > 1 and t.requires_grad), None)

    def zero(value: Any) -> Any:
        if not torch.is_tensor(value) or value.ndim or not value.is_floating_point():
            return value
        if not value.requires_grad:
            return torch.zeros_like(value)
        return value * 0 if anchor is None else (anchor.reshape(-1)[:1] * 0).sum().to(value.dtype)

    if isinstance(output, ModelOutput):
        for key, value in list(output.items()):
            output[key] = zero(value)
        return output
    return tuple(map(zero, output)) if isinstance(output, tuple) else output
