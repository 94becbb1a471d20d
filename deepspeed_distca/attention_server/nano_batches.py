# SPDX-License-Identifier: Apache-2.0
"""Core attention of two nano-batches that take turns: one's rows travel while the other computes.

A layer's core attention is three autograd nodes for each nano-batch, and after the first and the second the turn goes
to the other one, whose linear layers and tasks then cover what has just been sent:

    forward      Dispatch: rows leave            Serve: tasks, results leave      Collect: results are there
    backward     Dispatch: gradients are there   Serve: tasks, gradients leave    Collect: rows leave

A token without a value passes through the nodes in the order in which they ran. So backward runs them, and all that
lies between them, in the exact reverse order, the same on every rank, without anybody waiting for a turn:

    forward      D0 .. D1 S0 S1 C0 ..linear.. D0 C1 ..linear.. D1 S0 S1 C0 ..
    backward     C1 ..linear.. C0 S1 S0 D1 ..linear.. C1 D0 ..linear.. C0 S1 S0 ..

Under activation checkpointing a nano-batch's layer is recomputed while the other one's is not there any more, or not
yet. Where its core attention was not kept it is computed again by itself, and what is sent for it is hidden by its own
tasks at home only. The keys of the other one that its queries may need were kept for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from deepspeed_distca.attention_server.coordination.watch import backward_of_layer
from deepspeed_distca.attention_server.core_attention import refuse_second_order
from deepspeed_distca.attention_server.kernels import Kernel
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.attention_server.steps import BackwardSteps, ForwardSteps, Given, LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.compat.torch import in_backward

#: Why such checkpointing and two nano-batches cannot be combined, and what to do.
REENTRANT = (
    "reentrant activation checkpointing (also of parts of a layer, as tiled MLPs do) cannot be combined with two "
    "nano-batches: it computes gradients of parameters once for each. Checkpoint by transformers or torch with "
    'use_reentrant=False (gradient_checkpointing_kwargs={"use_reentrant": False}), or set `distca.overlap` to '
    '"local_first"'
)


class OverlapError(RuntimeError):
    """Two nano-batches that cannot go on; the message says why and what to do."""


class NanoPair:
    """The two nano-batches of one forward.

    Args:
        plan: of the micro-batch, in two parts.
        hand_over: called by a nano-batch, with its number, to let the other one run; returns when it is its turn.

    Attributes:
        awaited: after the forward, called for something as long as its backward may come, and for None from then on.
    """

    def __init__(self, plan: StepPlan, hand_over: Callable[[int], None]) -> None:
        self.plan, self.hand_over = plan, hand_over
        self.awaited: Callable[[], Awaited | None] = lambda: None
        self.token: torch.Tensor | None = None
        self._layers: list[_Layer] = []  # of which nano-batch 1 has not started yet

    @property
    def plans(self) -> tuple[HalfPlan, HalfPlan]:
        """What stands for the micro-batch's plan in either."""
        return HalfPlan(self, 0), HalfPlan(self, 1)

    def layer(self, nano: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> _Layer:
        """The next layer of a nano-batch. Nano-batch 0 comes to it first."""
        if nano == 0:
            kernel = self.plan.kernel(q, k, v, spec)
            self._layers.append(_Layer(self.plan.layer(spec.window), spec, kernel))
            return self._layers[-1]
        layer = self._layers.pop(0) if self._layers else None
        if layer is None or layer.spec != spec:
            raise OverlapError(
                'the two nano-batches went through different attention layers. Set `distca.overlap` to "local_first"'
            )
        return layer

    def pass_on(self, token: torch.Tensor) -> None:
        """From one node to the next. One without a gradient is of a layer that backward does not come to, and must not
        for the sake of the other nano-batch's token."""
        if self.token is None or token.requires_grad:
            self.token = token

    def close(self, nano: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Ends a nano-batch with its outputs, 0 first. In backward that of nano-batch 1 is the first of all nodes,
        whichever outputs the loss reads, and nano-batch 0 begins once nano-batch 1 has sent its own rows."""
        token, awaited = self.token, Awaited()
        if nano == 1:
            # A token leads to the whole graph, and recomputation in the graph back to here.
            self.token = None
        first = next((i for i, t in enumerate(tensors) if t.requires_grad), None)
        if token is None or not token.requires_grad or first is None:
            return tensors
        end, token = _Close.apply(awaited, token, tensors[first])
        if nano == 0:
            self.token = token
        else:
            self.awaited = weakref.ref(awaited)
        others = (_Tie.apply(token, t) if t.requires_grad else t for t in tensors[first + 1 :])
        return [*tensors[:first], end, *others]


class Awaited:
    """Lives as long as a graph whose backward has not begun."""


class HalfPlan:
    """What the layers of one nano-batch take for the micro-batch's plan. Another forward of the same model runs inside
    of ``attend``.

    Attributes:
        nano: the nano-batch.
    """

    def __init__(self, pair: NanoPair, nano: int) -> None:
        self._pair, self.nano = pair, nano

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        kept: tuple[torch.Tensor, ...] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Core attention of one layer for the rows of this nano-batch: see ``core_attention``.

        A nano-batch without rows comes with one that stands in for them; its results are zero.

        Args:
            kept: results of the same rows, in recomputation.

        Raises:
            OverlapError: called where the nano-batches cannot take turns.
            ValueError: rows that are not the plan's, or a window that was not planned.
        """
        pair, nano = self._pair, self.nano
        q, k, v = self._own(q, k, v)
        if kept is not None:
            rows = len(q)
            out, lse = _Recomputed.apply(q, k, v, *(t.narrow(d, 0, rows) for t, d in zip(kept, (0, 1), strict=True)))
            return _padded(out, lse)
        if not torch.is_grad_enabled():
            raise OverlapError(REENTRANT)
        if in_backward():
            raise OverlapError(
                "a layer is recomputed in backward, but nothing of its core attention is kept: in two nano-batches it "
                "is recomputed once only. Checkpoint layers by transformers or torch with use_reentrant=False, and go "
                'backward through them once (without retain_graph), or set `distca.overlap` to "local_first"'
            )
        layer = pair.layer(nano, q, k, v, spec)
        if pair.token is None:
            # The value is never read: it is there because gradients without one leave the device's own thread.
            pair.token = torch.zeros((), device=q.device)
        with torch.set_grad_enabled(any(t.requires_grad for t in (q, k, v))):
            pair.pass_on(_Dispatch.apply(q, k, v, pair.token, layer, nano))
            pair.hand_over(nano)
            pair.pass_on(_Serve.apply(pair.token, layer, nano))
            pair.hand_over(nano)
            out, lse, token = _Collect.apply(pair.token, layer, nano)
            pair.pass_on(token)
        return _padded(out, lse)

    def attend_again(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        other: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`attend` in recomputation, where no results were kept.

        Args:
            other: of the other nano-batch, what :meth:`for_other` gave there.
        """
        nano, plan = self.nano, self._pair.plan
        q, k, v = self._own(q, k, v)
        with torch.no_grad():
            steps = ForwardSteps(plan.layer(spec.window), spec, plan.kernel(q, k, v, spec))
            steps.dispatch(nano, q, k, v)
            if other:
                steps.lend(1 - nano, *(t[: plan.rows[1 - nano]].contiguous() for t in other))
            steps.serve(nano)
            *_, out, lse = steps.collect(nano)
            steps.wait()
        return _padded(*_Recomputed.apply(q, k, v, out, lse))

    def for_other(self, k: torch.Tensor, v: torch.Tensor, window: int | None) -> tuple[torch.Tensor, ...]:
        """What the other nano-batch needs of this one to be recomputed: k and v, or nothing where no query of it, on
        any rank, may read them."""
        return (k, v) if self._pair.plan.layer(window).forward.crossed[1 - self.nano] else ()

    def _own(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Without the row that stands in where there is none."""
        rows = self._pair.plan.rows[self.nano]
        counts = [len(t) for t in tensors]
        if counts != 3 * [max(rows, 1)]:
            raise ValueError(
                f"nano-batch {self.nano} has {rows} tokens on this rank, got {counts[0]}, {counts[1]} and {counts[2]}"
            )
        return tuple(t[:rows].contiguous() for t in tensors)


def _padded(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if len(out):
        return out, lse
    return (
        torch.cat([out, out.new_zeros((1, *out.shape[1:]))]),
        torch.cat([lse, lse.new_zeros((len(lse), 1))], dim=1),
    )


class _Layer:
    """One layer's core attention on its way through forward, and later through backward."""

    def __init__(self, plan: LayerPlan, spec: AttentionSpec, kernel: Kernel) -> None:
        self.plan, self.spec, self.kernel = plan, spec, kernel
        self.forward = ForwardSteps(plan, spec, kernel)  # deleted when it is over
        self.backward: BackwardSteps | None = None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, token: torch.Tensor, layer: _Layer, nano: int
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.nano = layer, nano
        layer.forward.dispatch(nano, q, k, v)
        return token.view_as(token)

    @staticmethod
    def backward(ctx: Any, dtoken: Any) -> tuple[Any, ...]:
        with backward_of_layer(ctx.layer.plan.watch, last=ctx.nano == 0):
            dq, dk, dv = ctx.layer.backward.gradients(ctx.nano)
        if ctx.nano == 0:
            ctx.layer.backward = None
        return dq, dk, dv, dtoken, None, None


class _Serve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, layer: _Layer, nano: int) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.nano = layer, nano
        layer.forward.serve(nano)
        return token.view_as(token)

    @staticmethod
    def backward(ctx: Any, dtoken: Any) -> tuple[Any, ...]:
        with backward_of_layer(ctx.layer.plan.watch, last=False):
            ctx.layer.backward.serve(ctx.nano)
        return dtoken, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, layer: _Layer, nano: int) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.nano = layer, nano
        q, k, v, out, lse = layer.forward.collect(nano)
        if nano == 1:
            del layer.forward
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse, token.view_as(token)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, dtoken: Any) -> tuple[Any, ...]:
        refuse_second_order()
        layer = ctx.layer
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        with backward_of_layer(layer.plan.watch, last=False):
            if ctx.nano == 1:
                layer.backward = BackwardSteps(layer.plan, layer.spec, layer.kernel)
            layer.backward.dispatch(ctx.nano, Given(q, k, v, out, lse, dout, dlse))
        return dtoken, None, None


class _Recomputed(torch.autograd.Function):
    """Stands for Collect in recomputation: saves the same five tensors, for Collect's own backward."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, out, lse = tensors
        # A Function must return tensors of its own: views of what was kept.
        out, lse = out.view_as(out), lse.view_as(lse)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> NoReturn:
        raise OverlapError("the graph of a recomputation was run backward; it only gives back what was saved")


class _Close(torch.autograd.Function):
    """The end of a nano-batch and one of its outputs, whose gradient is zero where only others are read."""

    @staticmethod
    def forward(ctx: Any, awaited: Awaited, token: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.awaited = awaited
        return x.view_as(x), token.view_as(token)

    @staticmethod
    def backward(ctx: Any, dx: Any, dtoken: Any) -> tuple[Any, ...]:
        ctx.awaited = None
        return None, dtoken, dx


class _Tie(torch.autograd.Function):
    """An output beside it: who reads it begins at the end."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Any) -> tuple[Any, Any]:
        return torch.zeros((), device=dx.device), dx
