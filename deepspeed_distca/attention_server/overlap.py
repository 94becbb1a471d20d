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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepspeed_distca.attention_server.exchange import Pending
from deepspeed_distca.attention_server.kernels import Kernel
from deepspeed_distca.attention_server.nano_batches import NanoLayerPlan, NanoPart
from deepspeed_distca.attention_server.row_dots import row_dots
from deepspeed_distca.attention_server.rows import (
    accumulate,
    add_rows,
    consecutive,
    give_back,
    keep,
    moved_delta,
    receive,
    relay,
    send,
    stats_dtype,
    take_back,
)
from deepspeed_distca.attention_server.tasks import AttentionSpec, TaskBatch


class OverlapError(RuntimeError):
    """Two nano-batches that cannot go on; the message says why and what to do."""


@dataclass(frozen=True)
class PingPongPlan:
    """A micro-batch's layers in two nano-batches.

    Attributes:
        cut: this rank's rows before it are nano-batch 0.
        rows: of this rank.
        layers: by window.
        kernel: gives the kernel for q, k, v and a spec.
    """

    cut: int
    rows: int
    layers: dict[int | None, NanoLayerPlan]
    kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec], Kernel]


class NanoPair:
    """The two nano-batches of one forward; :attr:`plans` stand for the micro-batch's plan in either.

    Args:
        plan: of the micro-batch.
        hand_over: called by a nano-batch, with its number, to let the other one run; returns when it is its turn.
    """

    def __init__(self, plan: PingPongPlan, hand_over: Callable[[int], None]) -> None:
        self.plan, self.hand_over = plan, hand_over
        self.plans = (NanoPlan(self, 0), NanoPlan(self, 1))
        self.token: torch.Tensor | None = None
        self._layers: list[_Layer] = []  # of which nano-batch 1 has not started yet

    @property
    def rows(self) -> tuple[int, int]:
        """Of this rank, of each nano-batch."""
        return self.plan.cut, self.plan.rows - self.plan.cut

    def layer(self, nano: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> _Layer:
        """The next layer of a nano-batch. Nano-batch 0 comes to it first."""
        if nano == 0:
            if spec.window not in self.plan.layers:
                raise ValueError(
                    f"a layer asks for a window of {spec.window} keys, but plans were made for "
                    f"{list(self.plan.layers)}; the model's attention modules must carry their window as "
                    "`sliding_window`"
                )
            self._layers.append(_Layer(self.plan.layers[spec.window], spec, self.plan.kernel(q, k, v, spec)))
            return self._layers[-1]
        layer = self._layers.pop(0) if self._layers else None
        if layer is None or layer.spec != spec:
            raise OverlapError("the two nano-batches went through different attention layers; use another `overlap`")
        return layer

    def close(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Ends nano-batch 0: in backward its outputs get their gradients once nano-batch 1 has sent its own rows."""
        if self.token is None or not self.token.requires_grad or not tensors:
            return tensors
        *tensors, self.token = _Close.apply(self.token, *tensors)
        return tensors


class NanoPlan:
    """What the layers of one nano-batch take for the micro-batch's plan."""

    #: Another forward of the same model runs inside of ``attend``.
    hands_over = True

    def __init__(self, pair: NanoPair, nano: int) -> None:
        self._pair, self._nano = pair, nano

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        kept: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Core attention of one layer for the rows of this nano-batch: see ``core_attention``.

        A nano-batch without rows comes with one that stands in for them; its results are zero.

        Args:
            kept: results of the same rows, in recomputation.

        Raises:
            OverlapError: called where the nano-batches cannot take turns.
            ValueError: rows that are not the plan's, or a window that was not planned.
        """
        pair, nano = self._pair, self._nano
        rows = pair.rows[nano]
        if not len(q) == len(k) == len(v) == max(rows, 1):
            raise ValueError(f"nano-batch {nano} has {rows} tokens on this rank, got {len(q)}, {len(k)} and {len(v)}")
        q, k, v = (t[:rows].contiguous() for t in (q, k, v))
        if kept is not None:
            out, lse = _Recomputed.apply(q, k, v, *(t.narrow(d, 0, rows) for t, d in zip(kept, (0, 1), strict=True)))
            return _padded(out, lse)
        if not torch.is_grad_enabled():
            raise OverlapError(
                "reentrant activation checkpointing cannot be combined with two nano-batches: it computes gradients "
                "of parameters once for each. Set use_reentrant=False (transformers: "
                'gradient_checkpointing_kwargs={"use_reentrant": False}), or another `overlap` than "ping_pong"'
            )
        if torch._C._current_graph_task_id() != -1:
            raise OverlapError(
                "a layer is recomputed in backward, but its core attention was not kept. Checkpoint layers by "
                'transformers or torch with use_reentrant=False, or set another `overlap` than "ping_pong"'
            )
        layer = pair.layer(nano, q, k, v, spec)
        if pair.token is None:
            # The value is never read: it is there because gradients without one leave the device's own thread.
            pair.token = torch.zeros((), device=q.device)
        pair.token = _Dispatch.apply(q, k, v, pair.token, layer, nano)
        pair.hand_over(nano)
        pair.token = _Serve.apply(pair.token, layer, nano)
        pair.hand_over(nano)
        out, lse, pair.token = _Collect.apply(pair.token, layer, nano)
        return _padded(out, lse)


def _padded(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if len(out):
        return out, lse
    return (
        torch.cat([out, out.new_zeros((1, *out.shape[1:]))]),
        torch.cat([lse, lse.new_zeros((len(lse), 1))], dim=1),
    )


class _Layer:
    """One layer's core attention on its way through forward, and later through backward."""

    def __init__(self, plan: NanoLayerPlan, spec: AttentionSpec, kernel: Kernel) -> None:
        self.plan, self.spec, self.kernel = plan, spec, kernel
        self.forward: _Forward | None = _Forward(plan, spec, kernel)
        self.backward: _Backward | None = None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, token, layer: _Layer, nano: int):
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.nano = layer, nano
        layer.forward.dispatch(nano, q, k, v)
        return token.view_as(token)

    @staticmethod
    def backward(ctx, dtoken):
        dq, dk, dv = ctx.layer.backward.gradients(ctx.nano)
        if ctx.nano == 0:
            ctx.layer.backward = None
        return dq, dk, dv, dtoken, None, None


class _Serve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, layer: _Layer, nano: int):
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.nano = layer, nano
        layer.forward.serve(nano)
        return token.view_as(token)

    @staticmethod
    def backward(ctx, dtoken):
        ctx.layer.backward.serve(ctx.nano)
        return dtoken, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, layer: _Layer, nano: int):
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.nano = layer, nano
        q, k, v, out, lse = layer.forward.collect(nano)
        if nano == 1:
            layer.forward = None
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse, token.view_as(token)

    @staticmethod
    def backward(ctx, dout, dlse, dtoken):
        layer = ctx.layer
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        if ctx.nano == 1:
            layer.backward = _Backward(layer.plan, layer.spec, layer.kernel)
        layer.backward.dispatch(ctx.nano, _Given(q, k, v, out, lse, dout, dlse))
        # The last one in forward gets no gradient for its token.
        return torch.zeros((), device=out.device) if dtoken is None else dtoken, None, None


class _Recomputed(torch.autograd.Function):
    """Stands for Collect in recomputation: saves the same five tensors, for Collect's own backward."""

    @staticmethod
    def forward(ctx, q, k, v, out, lse):
        # A Function must return tensors of its own: views of what was kept.
        out, lse = out.view_as(out), lse.view_as(lse)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        raise OverlapError("the graph of a recomputation was run backward; it only gives back what was saved")


class _Close(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, *tensors):
        ctx.set_materialize_grads(False)
        return (*(t.view_as(t) for t in tensors), token.view_as(token))

    @staticmethod
    def backward(ctx, *gradients):
        *gradients, dtoken = gradients
        return (dtoken, *gradients)


class _Forward:
    """Forward of one layer for both nano-batches: for each of them dispatch, serve, collect; no serving before both
    have dispatched."""

    def __init__(self, plan: NanoLayerPlan, spec: AttentionSpec, kernel: Kernel) -> None:
        self._phase, self._exchange = plan.forward, plan.exchange
        self._spec, self._kernel = spec, kernel
        self._q: list = [None, None]
        self._keys: list = [None, None]  # (k, v)
        self._results: list = [None, None]  # (out, lse, lse of rows that come back)
        self._dispatched: list[Pending | None] = [None, None]
        self._returning: list[Pending | None] = [None, None]
        self._work: tuple[torch.Tensor, ...] = ()

    def dispatch(self, nano: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Rows leave for the servers."""
        part = self._phase.parts[nano]
        p = part.server
        self._q[nano], self._keys[nano] = q, (k, v)
        if not self._work:
            self._work = _workspace(part, q, k, v)
        q_work, k_work, v_work = self._work
        self._dispatched[nano] = self._exchange.start(
            [*send(q, p.q_out), *send(k, p.kv_out_direct), *send(v, p.kv_out_direct)],
            [*receive(q_work, p.q_in), *receive(k_work, p.kv_in_direct), *receive(v_work, p.kv_in_direct)],
            relay(p, k_work, v_work),
        )
        keep(q_work, q, p.q_keep)
        keep(k_work, k, p.kv_keep)
        keep(v_work, v, p.kv_keep)

    def serve(self, nano: int) -> None:
        """Tasks whose queries are of this nano-batch, at home and in the workspace; results leave."""
        part, q = self._phase.parts[nano], self._q[nano]
        p, spec, kernel = part.server, self._spec, self._kernel
        k, v = _keys(part, nano, self._keys)
        out = q.new_empty((len(q), q.shape[1], v.shape[2]))
        lse = q.new_empty((q.shape[1], len(q)), dtype=stats_dtype(q))
        if len(part.local):
            kernel.forward(q, k, v, part.local, spec, out, lse)
        _wait(self._dispatched, nano, part.needs_other)
        lse_back = lse.new_empty((len(p.returned_rows(q.device)), q.shape[1]))
        stats = list(consecutive(lse_back, p.returned))
        out_work = lse_rows = None
        if len(p.remote):
            out_work, lse_work = kernel.forward(*self._work, p.remote, spec)
            lse_rows = {run: lse_work[:, run.at_work].t().contiguous() for run in (*p.q_in, *p.q_keep)}
        self._returning[nano] = self._exchange.start(
            [*give_back(out_work, p.q_in), *((run.peer, lse_rows[run]) for run in p.q_in)],
            [*take_back(out, p.q_out), *stats[: len(p.q_out)]],
        )
        for run, (_, row) in zip(p.q_keep, stats[len(p.q_out) :], strict=True):
            out[run.at_home].copy_(out_work[run.at_work])
            row.copy_(lse_rows[run])
        self._results[nano] = out, lse, lse_back
        if nano == 1:
            self._work = ()

    def collect(self, nano: int) -> tuple[torch.Tensor, ...]:
        """q, k, v, out and lse of this nano-batch, once its results are there."""
        part = self._phase.parts[nano]
        self._returning[nano].wait()
        out, lse, lse_back = self._results[nano]
        lse.index_copy_(1, part.server.returned_rows(out.device), lse_back.t())
        self._results[nano] = None
        return self._q[nano], *self._keys[nano], out, lse


@dataclass
class _Given:
    """What backward has of a nano-batch."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None


class _Backward:
    """Backward of one layer for both nano-batches, nano-batch 1 first: for each of them dispatch, serve, gradients; no
    serving before both have dispatched."""

    def __init__(self, plan: NanoLayerPlan, spec: AttentionSpec, kernel: Kernel) -> None:
        self._phase, self._exchange, self._late_keys = plan.backward, plan.exchange, plan.late_keys
        self._spec, self._kernel = spec, kernel
        self._given: list[_Given | None] = [None, None]
        self._delta: list[torch.Tensor | None] = [None, None]
        self._dq: list[torch.Tensor | None] = [None, None]
        self._dispatched: list[Pending | None] = [None, None]
        self._returning: list[Pending | None] = [None, None]
        self._keys_back: list[tuple[torch.Tensor, torch.Tensor] | None] = [None, None]
        self._work: tuple[torch.Tensor, ...] = ()

    def dispatch(self, nano: int, given: _Given) -> None:
        """Rows leave for the servers."""
        part = self._phase.parts[nano]
        p = part.server
        q, k, v, dout = given.q, given.k, given.v, given.dout
        self._given[nano] = given
        delta = None if given.dlse is None else row_dots(dout, given.out) - given.dlse
        self._delta[nano] = delta
        rows = p.returned_rows(q.device)
        moved = moved_delta(dout, given.out, p.returned, q.shape[1]) if delta is None else delta[:, rows].t()
        stats = torch.stack([given.lse[:, rows].t(), moved], dim=1)  # [rows, 2, q_heads]
        if not self._work:
            q_work, k_work, v_work = _workspace(part, q, k, v)
            dout_work, stats_work = (t.new_zeros((len(q_work), *t.shape[1:])) for t in (dout, stats))
            self._work = q_work, k_work, v_work, dout_work, stats_work
        q_work, k_work, v_work, dout_work, stats_work = self._work
        messages = list(consecutive(stats, p.returned))
        self._dispatched[nano] = self._exchange.start(
            [
                *send(q, p.q_out),
                *send(dout, p.q_out),
                *messages[: len(p.q_out)],
                *send(k, p.kv_out_direct),
                *send(v, p.kv_out_direct),
            ],
            [
                *receive(q_work, p.q_in),
                *receive(dout_work, p.q_in),
                *receive(stats_work, p.q_in),
                *receive(k_work, p.kv_in_direct),
                *receive(v_work, p.kv_in_direct),
            ],
            relay(p, k_work, v_work),
        )
        keep(q_work, q, p.q_keep)
        keep(dout_work, dout, p.q_keep)
        keep(k_work, k, p.kv_keep)
        keep(v_work, v, p.kv_keep)
        for run, (_, row) in zip(p.q_keep, messages[len(p.q_out) :], strict=True):
            stats_work[run.at_work].copy_(row)

    def serve(self, nano: int) -> None:
        """Tasks whose queries are of this nano-batch, at home and in the workspace; gradients leave."""
        if nano == 1:
            self._start_gradients()
        part, given = self._phase.parts[nano], self._given[nano]
        p = part.server
        self._dq[nano] = dq = torch.empty_like(given.q)
        self._at_home(nano)
        _wait(self._dispatched, nano, part.needs_other)

        dq_work = self._serve_workspace(part)
        sends: list = give_back(dq_work, p.q_in)
        receives: list = take_back(dq, p.q_out)
        for keys in self._keys_after(nano):
            runs = self._phase.parts[keys].server
            back = tuple(t.new_empty((sum(r.rows for r in runs.kv_out), *t.shape[1:])) for t in (self._dk, self._dv))
            self._keys_back[keys] = back
            for work, rows in zip((self._dk_work, self._dv_work), back, strict=True):
                sends += [(run.peer, work[run.at_work].to(rows.dtype)) for run in runs.kv_in]
                receives += consecutive(rows, runs.kv_out)
        self._returning[nano] = self._exchange.start(sends, receives)
        for run in p.q_keep:
            dq[run.at_home].copy_(dq_work[run.at_work])
        if nano == 0:
            self._work = ()

    def gradients(self, nano: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv of this nano-batch, once all of them are there."""
        part, given = self._phase.parts[nano], self._given[nano]
        _wait(self._returning, nano, nano == 1 and self._late_keys)
        rows = slice(part.first, part.first + part.rows)
        dk, dv = self._dk[rows], self._dv[rows]
        for total, back, work in zip((dk, dv), self._keys_back[nano], (self._dk_work, self._dv_work), strict=True):
            accumulate(part.server, total, (back, work))
        return self._dq[nano], dk.to(given.k.dtype), dv.to(given.v.dtype)

    def _start_gradients(self) -> None:
        """Buffers for dk and dv of the rank's rows and of the workspace. Rows that not exactly one task in place
        writes start from zero, and so does the workspace where tasks share keys: contributions are added to them."""
        k, v = self._given[1].k, self._given[1].v
        dtype = self._kernel.grad_dtype(self._given[1].q.dtype)
        home = self._phase.home_rows
        new = torch.Tensor.new_empty if self._phase.written else torch.Tensor.new_zeros
        self._dk, self._dv = (new(t, (home, *t.shape[1:]), dtype=dtype) for t in (k, v))
        works = self._work[1:3]
        if self._phase.one_wave:
            self._dk_work, self._dv_work = (torch.empty_like(t, dtype=dtype) for t in works)
        else:
            total = torch.promote_types(dtype, torch.float32)
            self._dk_work, self._dv_work = (torch.zeros_like(t, dtype=total) for t in works)

    def _at_home(self, nano: int) -> None:
        part, given = self._phase.parts[nano], self._given[nano]
        k, v = _keys(part, nano, [(g.k, g.v) for g in self._given])
        delta = self._delta[nano]

        def run(tasks: TaskBatch, dk: torch.Tensor, dv: torch.Tensor) -> None:
            results = dict(out=given.out if delta is None else None, delta=delta, dq=self._dq[nano], dk=dk, dv=dv)
            self._kernel.backward(given.dout, given.q, k, v, given.lse, tasks, self._spec, **results)

        rows = slice(part.k_first, part.first + part.rows)
        if len(part.local):
            run(part.local, self._dk[rows], self._dv[rows])
        if len(part.shared):
            dk, dv = torch.zeros_like(self._dk[rows]), torch.zeros_like(self._dv[rows])
            run(part.shared, dk, dv)
            for start, length in zip(part.shared.k_start.tolist(), part.shared.k_len.tolist(), strict=True):
                span = slice(start, start + length)
                add_rows(self._dk[rows], span, dk[span])
                add_rows(self._dv[rows], span, dv[span])

    def _serve_workspace(self, part: NanoPart) -> torch.Tensor | None:
        """dq of the tasks in the workspace; dk and dv are added to what is there."""
        p, kernel = part.server, self._kernel
        if not len(p.remote):
            return None
        q, k, v, dout, stats = self._work
        lse, delta = (t.t().contiguous() for t in stats.unbind(1))
        dq = torch.empty_like(q)
        grad_dtype = kernel.grad_dtype(q.dtype)
        for tasks in p.waves:
            dk, dv = self._dk_work, self._dv_work
            if not self._phase.one_wave:
                dk, dv = torch.zeros_like(k, dtype=grad_dtype), torch.zeros_like(v, dtype=grad_dtype)
            kernel.backward(dout, q, k, v, lse, tasks, self._spec, out=None, delta=delta, dq=dq, dk=dk, dv=dv)
            if not self._phase.one_wave:
                self._dk_work += dk
                self._dv_work += dv
        return dq

    def _keys_after(self, nano: int) -> tuple[int, ...]:
        """Whose keys have their gradients once this nano-batch was served."""
        if nano == 0:
            return (0, 1) if self._late_keys else (0,)
        return () if self._late_keys else (1,)


def _workspace(part: NanoPart, q, k, v) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeros: rows of the other nano-batch may be on their way while a tile that reaches into them is loaded, and what
    a kernel loads must be finite."""
    plan = part.server.plan
    return tuple(
        t.new_zeros((rows, *t.shape[1:]))
        for t, rows in ((q, plan.work_q_rows), (k, plan.work_kv_rows), (v, plan.work_kv_rows))
    )


def _keys(part: NanoPart, nano: int, both: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Keys and values for tasks in place: a document of both nano-batches has its first ones in nano-batch 0."""
    if part.k_first == part.first:
        return both[nano]
    return tuple(torch.cat([first[part.k_first :], second]) for first, second in zip(*both, strict=True))


def _wait(pending: list[Pending | None], nano: int, other: bool) -> None:
    pending[nano].wait()
    if other:
        pending[1 - nano].wait()
