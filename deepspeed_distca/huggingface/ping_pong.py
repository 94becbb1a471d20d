# SPDX-License-Identifier: Apache-2.0
"""Two nano-batches inside one forward of an unmodified HuggingFace decoder.

The decoder's base model (what lies before the head) is called once, as ever; its instance's ``forward`` then runs the
model's own forward twice, once for each nano-batch, in turns: a layer's attention hands over to the other one while
its rows travel. The two outputs are put together again, so that whatever comes after (head, loss, labels) sees the
micro-batch as it was.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from deepspeed_distca.attention_server.nano_batches import REENTRANT, Awaited, NanoPair
from deepspeed_distca.attention_server.plan_request import PlanRequest
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.compat.torch import in_checkpoint
from deepspeed_distca.huggingface.attention_function import KEPT, PLAN, WITNESS
from deepspeed_distca.huggingface.contract import Contract
from deepspeed_distca.huggingface.decoders import UnsupportedModelError, base_of, takes
from deepspeed_distca.huggingface.front_door.values import tokens_of
from deepspeed_distca.huggingface.row_rope import row_rules
from deepspeed_distca.huggingface.turns import Turns

_OTHERWISE = 'Set `distca.overlap` to "local_first"'


class PingPong:
    """Makes a decoder run its training micro-batches as two nano-batches wherever their plan says so.

    The first training forward runs whole: it is looked on to learn how the model attends (see ``first_forward``), and
    whether its arguments can be divided.

    Args:
        decoder: the model.
        modules: its attention modules.
        contract: how it reads its arguments.
        asked: two nano-batches were asked for: what keeps this model from it is an error, and else :attr:`problem`.

    Attributes:
        base: the model whose forward is run twice.
        problem: why all micro-batches run whole; None: they need not.
        split: whether the last training forward was in two nano-batches.
        running: the nano-batch whose forward is running, or None.
        waiting: forwards of this process whose backward may come, divided or whole, whichever engine's they are.

    Raises:
        UnsupportedModelError: a model for which halves would not be exact.
    """

    waiting: ClassVar[weakref.WeakSet[Awaited]] = weakref.WeakSet()

    def __init__(
        self, decoder: PreTrainedModel, modules: list[nn.Module], contract: Contract, *, asked: bool = True
    ) -> None:
        self.base = base_of(decoder, modules)
        self.problem: str | None = None
        self.split = False
        self._seen, self._asked = False, asked
        self.running: int | None = None
        self._parameters = list(self.base.parameters())
        # Whether backward came to the first layer of inputs without gradients, and which parameters had some then.
        self._wanted: tuple[bool | None, list[bool]] = None, []
        self._name = type(decoder).__name__
        if contract.rows != "packed":
            raise UnsupportedModelError(
                f"{self._name} passes something beside core attention through a document, which the second half of a "
                f"row would not have. {_OTHERWISE}"
            )
        rules = row_rules(decoder)
        if rules:
            raise UnsupportedModelError(
                f'{self._name} uses rotary embeddings of kind "{rules[0].kind}", which depend on the longest position '
                f"of a row: the two halves of a row would not share it. {_OTHERWISE}"
            )
        self._own_forward = self.base.__dict__.get("forward")  # of a model that somebody else has patched
        self._forward: Callable[..., Any] = self.base.forward
        self._signature = inspect.signature(self._forward)

        def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if model is self.base:
                return self._run(args, kwargs)
            # A copy, which brought this along.
            return (self._own_forward or types.MethodType(type(model).forward, model))(*args, **kwargs)

        # As a method it is bound to a copy when the model is copied.
        parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        wrapped: Any = functools.wraps(self._forward)(forward)
        wrapped.__signature__ = inspect.Signature([parameter, *self._signature.parameters.values()])
        self.base.forward = types.MethodType(torch.compiler.disable(wrapped), self.base)

    @property
    def ready(self) -> bool:
        """Whether the next training micro-batch can run as two nano-batches. Not while another one waits for its
        backward, of this engine or of another one: where both go backward together, only the order in which they were
        made keeps ranks together, and of what two threads have made there is none."""
        return self._seen and self.problem is None and not self.waiting

    def remove(self) -> None:
        """Gives the base model its own forward back."""
        self.base.__dict__.pop("forward", None)
        if self._own_forward is not None:
            self.base.__dict__["forward"] = self._own_forward

    def _run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        plan = kwargs.get(PLAN)
        if not isinstance(plan, PlanRequest) or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)  # not a training forward
        bound = {**self._signature.bind_partial(*args).arguments, **kwargs}
        halves_plan: StepPlan | None = None
        if not self._seen or kwargs.get(WITNESS) is not None:
            self._try(bound)
        elif self.ready:
            halves_plan = plan.result(self._is_wanted(bound)).halves
        self.split = halves_plan is not None
        if halves_plan is None:
            with _without_gradients(self.base, look=not self._seen) as parts:
                output = self._forward(*args, **kwargs)
            if parts or bound[KEPT].reentrant:
                self._refused(UnsupportedModelError(REENTRANT))
            if in_checkpoint():
                self._refused(
                    UnsupportedModelError(
                        f"{self._name} is called in an activation checkpoint as a whole, which does not go with two "
                        f"nano-batches: checkpoint its layers, or have them whole. {_OTHERWISE}"
                    )
                )
            self._seen = True
            if not _needs_gradients(bound):
                self._wanted = plan.wanted, self._trained
            self._await(output)
            return output
        kwargs = bound
        rows = tokens_of(kwargs)
        batch, tokens = rows.shape[:2]
        planned = halves_plan.rows
        if batch * tokens != sum(planned):
            raise ValueError(f"the plan was made for {sum(planned)} tokens, got {batch} x {tokens}")
        outputs = self._both(self._halves(kwargs, rows, planned[0]), halves_plan, rows.device)
        return _merge(outputs, planned, (batch, tokens))

    def _is_wanted(self, kwargs: Mapping[str, Any]) -> bool | None:
        """Whether backward comes to the first attention layer, as far as that is known before it: see
        :meth:`PlanRequest.result`."""
        wanted, trained = self._wanted
        return True if _needs_gradients(kwargs) else wanted if trained == self._trained else None

    @property
    def _trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def _try(self, kwargs: dict[str, Any]) -> None:
        """Whether micro-batches like this one can be divided; where that was asked for, the first one that is will
        tell."""
        if self._asked:
            return
        rows = tokens_of(kwargs)
        try:
            self._halves(kwargs, rows, rows.shape[0] * rows.shape[1] // 2)
        except UnsupportedModelError as error:
            self._refused(error)

    def _refused(self, error: UnsupportedModelError) -> None:
        if self._asked:
            raise error
        self.problem = str(error)

    def _both(self, halves: tuple[dict, dict], plan: StepPlan, device: torch.device) -> tuple[Any, Any]:
        turns = Turns(device)

        def hand_over(nano: int) -> None:
            turns.hand_over(nano)
            self.running = nano

        pair = NanoPair(plan, hand_over)

        def run(nano: int) -> Any:
            self.running = nano
            output = self._forward(**{**halves[nano], PLAN: pair.plans[nano]})
            return _map(output, iter(pair.close(nano, _floating(output))))

        try:
            return turns.run(lambda: run(0), lambda: run(1))
        finally:
            self.running, awaited = None, pair.awaited()
            if awaited is not None:
                self.waiting.add(awaited)

    def _await(self, output: Any) -> None:
        """A whole forward waits for its backward until that begins, or its graph is gone."""
        awaited = Awaited()

        def begins(gradients: Any) -> None:
            self.waiting.discard(awaited)

        for tensor in _floating(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begins)
                self.waiting.add(awaited)

    def _halves(self, kwargs: dict[str, Any], rows: torch.Tensor, cut: int) -> tuple[dict, dict]:
        """The arguments of each nano-batch: all rows of the batch one after another, before and after the cut."""
        batch, tokens = rows.shape[:2]
        if kwargs.get("position_ids") is None:
            # Without them the second half would count from 0.
            if not takes(self._signature, "position_ids"):
                raise UnsupportedModelError(f"{self._name} takes no position_ids. {_OTHERWISE}")
            kwargs = {**kwargs, "position_ids": torch.arange(tokens, device=rows.device)[None]}
        halves: tuple[dict, dict] = ({}, {})
        for key, value in kwargs.items():
            parts: tuple[Any, ...] = value, value
            if torch.is_tensor(value) and value.ndim and tokens in value.shape:
                parts = self._cut(key, value, batch, tokens, cut)
            for half, part in zip(halves, parts, strict=True):
                half[key] = part
        return halves

    def _cut(self, key: str, value: torch.Tensor, batch: int, tokens: int, cut: int) -> tuple[torch.Tensor, ...]:
        if value.ndim == 1 and batch == 1 and len(value) == tokens:
            parts = value[:cut], value[cut:]
            return tuple(part if len(part) else value[:1] for part in parts)
        axes = key == "position_ids" and value.ndim > 2  # not rows, whatever their number
        if axes or value.ndim < 2 or value.shape[0] not in (1, batch) or value.shape[1] != tokens:
            raise UnsupportedModelError(
                f"{self._name}: do not know how to divide {key} {list(value.shape)} of {batch} x {tokens} tokens. "
                f"{_OTHERWISE}"
            )
        row = value.expand(batch, *value.shape[1:]).flatten(0, 1)[None]
        # A half without tokens gets one that stands in: models do not know what to make of none.
        return tuple(part if part.shape[1] else row[:, :1] for part in (row[:, :cut], row[:, cut:]))


def _needs_gradients(kwargs: Mapping[str, Any]) -> bool:
    """Whether what is given in the place of input_ids needs gradients."""
    embeddings = kwargs.get("inputs_embeds")
    return torch.is_tensor(embeddings) and embeddings.requires_grad


@contextmanager
def _without_gradients(model: nn.Module, *, look: bool) -> Iterator[list[nn.Module]]:
    """Finds parts of a model that are trained and called with gradients off: what goes backward through them runs them
    once more by itself, as reentrant checkpoints and tiled layers do."""
    found: list[nn.Module] = []

    def seen(module: nn.Module, args: tuple) -> None:
        if not torch.is_grad_enabled():
            found.append(module)

    modules = model.modules() if look else ()
    trained = [m for m in modules if any(p.requires_grad for p in m.parameters(recurse=False))]
    handles = [module.register_forward_pre_hook(seen) for module in trained]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _merge(outputs: tuple[Any, Any], rows: tuple[int, ...], shape: tuple[int, int]) -> Any:
    """One output from those of both nano-batches, for a batch of the given shape."""
    first, second = outputs
    if torch.is_tensor(first):
        given = [max(n, 1) for n in rows]
        if first.ndim > 1 and len(first) == 1 and [t.shape[1] for t in outputs] == given:
            whole = torch.cat([t[:, :n] for t, n in zip(outputs, rows, strict=True)], 1)
            return whole.unflatten(1, shape).squeeze(0)
        if first.ndim and [len(t) for t in outputs] == given:  # a router's logits: all rows of the batch
            return torch.cat([t[:n] for t, n in zip(outputs, rows, strict=True)])
        raise UnsupportedModelError(
            f"do not know how to put outputs {list(first.shape)} and {list(second.shape)} of {rows[0]} and {rows[1]} "
            f"tokens together. {_OTHERWISE}"
        )
    if isinstance(first, ModelOutput):
        return type(first)(**{k: _merge((first[k], second[k]), rows, shape) for k in first})
    if isinstance(first, tuple | list):
        return type(first)(_merge(pair, rows, shape) for pair in zip(first, second, strict=True))
    if first is None and second is None:
        return None
    raise UnsupportedModelError(
        f"do not know how to put outputs of type {type(first).__name__} together. {_OTHERWISE}"
    )


def _floating(output: Any) -> list[torch.Tensor]:
    """Tensors of an output that may have a gradient."""
    if torch.is_tensor(output):
        return [output] if output.is_floating_point() else []
    if isinstance(output, ModelOutput):
        return [t for value in output.values() for t in _floating(value)]
    return [t for value in output for t in _floating(value)] if isinstance(output, tuple | list) else []


def _map(output: Any, tensors: Any) -> Any:
    """The output with the tensors of :func:`_floating` replaced in order."""
    if torch.is_tensor(output):
        return next(tensors) if output.is_floating_point() else output
    if isinstance(output, ModelOutput):
        return type(output)(**{key: _map(value, tensors) for key, value in output.items()})
    return type(output)(_map(v, tensors) for v in output) if isinstance(output, tuple | list) else output
