# SPDX-License-Identifier: Apache-2.0
"""Core attention over all servers, as one autograd Function: dispatch rows, serve tasks, return results.

Home keeps q, k, v, out and lse of its own tokens, as attention always does; the servers keep nothing between forward
and backward, so memory does not depend on the plan and backward may follow another plan than forward.

In backward a server needs, beside q, k and v, the gradient of out and two numbers per query row and head: lse and
delta = rowsum(dout * out) - dlse. Home computes delta and sends it in the place of out, which is head_dim / 2 times
larger in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from deepspeed_distca.attention_server.exchange.base import Exchange, Messages, Pending
from deepspeed_distca.attention_server.kernels import BackwardInputs, Gradients, Kernel
from deepspeed_distca.attention_server.row_dots import row_dots
from deepspeed_distca.attention_server.server_plan import ServerPlan
from deepspeed_distca.attention_server.side_stream import SideStream
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch
from deepspeed_distca.attention_server.transfers import (
    accumulate,
    consecutive,
    dispatch,
    give_back,
    moved_delta,
    stats_dtype,
    take_back,
)
from deepspeed_distca.attention_server.watch import Watch, backward_of_layer

Result = TypeVar("Result")


@dataclass(frozen=True)
class LayerPlan:
    """How the layers of one kind (one window) compute core attention for a micro-batch.

    Attributes:
        forward, backward: this rank's part of the plan of either phase.
        exchange: how rows travel.
        side: where tasks in the workspace run, so that those at home hide the exchange; None: wait for it.
        watch: tells the other ranks when a layer fails in backward.
    """

    forward: ServerPlan
    backward: ServerPlan
    exchange: Exchange
    side: SideStream | None
    watch: Watch | None = None


def core_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGE: torch.Tensor,
    plan: LayerPlan,
    spec: AttentionSpec,
    kernel: Kernel,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of every document of the layout, each within itself, computed over all servers.

    Args:
        q_THD: [T, q_heads, head_dim], this rank's queries in storage order, after RoPE.
        k_TGD, v_TGE: [T, kv_heads, head_dim] and [T, kv_heads, v_head_dim]; kv_heads divides q_heads.
        plan: made for exactly these rows. Collective over the servers of its group.
        spec: scale, window and softcap.
        kernel: what computes the tasks, the same on every server.
        kept: out and lse of an earlier call with the same rows, in recomputation: nothing is exchanged or computed.

    Returns:
        out [T, q_heads, v_head_dim] in q's dtype and lse [q_heads, T] in fp32 (natural logarithm of the sum of
        exponentials of the scaled scores); both differentiable.

    Raises:
        ValueError: rows that are not the plan's.
    """
    rows = plan.forward.plan.home_rows
    if not q_THD.shape[0] == k_TGD.shape[0] == v_TGE.shape[0] == rows:
        raise ValueError(
            f"the plan was made for {rows} tokens on this rank, got q {list(q_THD.shape)}, k {list(k_TGD.shape)}, "
            f"v {list(v_TGE.shape)}; the layout of a micro-batch must describe the very tokens of its input_ids"
        )
    return _CoreAttention.apply(q_THD.contiguous(), k_TGD.contiguous(), v_TGE.contiguous(), plan, spec, kernel, kept)


def refuse_second_order() -> None:
    """In backward: kernels have no derivative of their gradients, which would count as constants.

    Raises:
        RuntimeError: autograd was asked for a graph of the gradients.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "core attention has no second derivative: create_graph=True was asked for; leave it out, or set "
            "`distca.enabled` to false"
        )


class _CoreAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan: LayerPlan, spec: AttentionSpec, kernel: Kernel, kept):
        ctx.set_materialize_grads(False)
        # A Function must return tensors of its own: views of what was kept.
        out, lse = _forward(q, k, v, plan, spec, kernel) if kept is None else (t.view_as(t) for t in kept)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.spec, ctx.kernel = plan, spec, kernel
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        refuse_second_order()
        with backward_of_layer(ctx.plan.watch):
            q, k, v, out, lse = ctx.saved_tensors
            dout = torch.zeros_like(out) if dout is None else dout.contiguous()
            dq, dk, dv = _backward(dout, dlse, q, k, v, out, lse, ctx.plan, ctx.spec, ctx.kernel)
        return dq, dk, dv, None, None, None, None


def _forward(q, k, v, plan: LayerPlan, spec: AttentionSpec, kernel: Kernel) -> tuple[torch.Tensor, torch.Tensor]:
    p = plan.forward
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=stats_dtype(q))
    if p.is_local:
        return kernel.forward(q, k, v, p.local, spec, (out, lse))

    q_work, k_work, v_work = _workspace(p, q, k, v)
    dispatched = dispatch(plan.exchange, p, [(q, q_work)], [(k, k_work), (v, v_work)])
    lse_back = lse.new_empty((len(p.returned_rows(q.device)), q.shape[1]))
    stats = list(consecutive(lse_back, p.returned))
    returning = plan.exchange.expect([*take_back(out, p.q_out), *stats[: len(p.q_out)]], sends=bool(p.q_in))

    def at_home() -> None:
        if len(p.local):
            kernel.forward(q, k, v, p.local, spec, (out, lse))

    def away() -> tuple[torch.Tensor, torch.Tensor, Messages, Pending | None]:
        dispatched.wait()
        out_work, lse_work = kernel.forward(q_work, k_work, v_work, p.remote, spec)
        lse_work = _transposed(lse_work)
        results = [*give_back(out_work, p.q_in), *give_back(lse_work, p.q_in)]
        return out_work, lse_work, results, returning.start(results) if plan.exchange.early else None

    out_work, lse_work, results, giving_back = _run(plan, p, dispatched, at_home, away, q.device)
    giving_back = giving_back or returning.start(results)
    for run, (_, row) in zip(p.q_keep, stats[len(p.q_out) :], strict=True):
        out[run.at_home].copy_(out_work[run.at_work])
        row.copy_(lse_work[run.at_work])
    giving_back.wait()
    lse.index_copy_(1, p.returned_rows(q.device), lse_back.t())
    return out, lse


def _backward(dout, dlse, q, k, v, out, lse, plan: LayerPlan, spec: AttentionSpec, kernel: Kernel):
    p = plan.backward
    grad_dtype = kernel.grad_dtype(q.dtype)
    # Rows that no task in place writes start from zero: contributions are added to them.
    new = torch.empty_like if p.covers_home else torch.zeros_like
    dq = torch.empty_like(q)
    dk, dv = new(k, dtype=grad_dtype), new(v, dtype=grad_dtype)
    delta = None if dlse is None else row_dots(dout, out) - dlse

    def at_home() -> None:
        if len(p.local):
            given = BackwardInputs(q, k, v, dout, lse, out if delta is None else None, delta)
            kernel.backward(given, p.local, spec, Gradients(dq, dk, dv))

    if p.is_local:
        at_home()
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    rows = p.returned_rows(q.device)
    moved = moved_delta(dout, out, p.returned, q.shape[1]) if delta is None else delta[:, rows].t()
    stats = torch.stack([lse[:, rows].t(), moved], dim=1)  # [rows, 2, q_heads]
    q_work, k_work, v_work = _workspace(p, q, k, v)
    dout_work = dout.new_empty((len(q_work), *dout.shape[1:]))
    stats_work = stats.new_empty((len(q_work), *stats.shape[1:]))
    queries, keys = [(q, q_work), (dout, dout_work)], [(k, k_work), (v, v_work)]
    dispatched = dispatch(plan.exchange, p, queries, keys, (stats, stats_work))
    kv_rows = sum(run.rows for run in p.kv_out)
    dk_back, dv_back = (t.new_empty((kv_rows, *t.shape[1:]), dtype=grad_dtype) for t in (k, v))
    returning = plan.exchange.expect(
        [*take_back(dq, p.q_out), *consecutive(dk_back, p.kv_out), *consecutive(dv_back, p.kv_out)],
        sends=bool(p.q_in or p.kv_in),
    )

    def away() -> tuple[tuple[torch.Tensor, ...], Messages, Pending | None]:
        dispatched.wait()
        work = _serve_backward(p, kernel, spec, dout_work, q_work, k_work, v_work, stats_work)
        results = [*give_back(work[0], p.q_in), *give_back(work[1], p.kv_in), *give_back(work[2], p.kv_in)]
        return work, results, returning.start(results) if plan.exchange.early else None

    (dq_work, dk_work, dv_work), results, giving_back = _run(plan, p, dispatched, at_home, away, q.device)
    giving_back = giving_back or returning.start(results)
    for run in p.q_keep:
        dq[run.at_home].copy_(dq_work[run.at_work])
    giving_back.wait()
    accumulate(p, dk, (dk_back, dk_work))
    accumulate(p, dv, (dv_back, dv_work))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _serve_backward(p: ServerPlan, kernel: Kernel, spec, dout, q, k, v, stats):
    """Gradients of the tasks in the workspace: (dq, dk, dv), dk and dv summed over the tasks that share keys."""
    lse, delta = (_transposed(t) for t in stats.unbind(1))
    grad_dtype = kernel.grad_dtype(q.dtype)
    dq = torch.empty_like(q)
    given = BackwardInputs(q, k, v, dout, lse, delta=delta)

    def run(tasks: TaskBatch, dk, dv) -> None:
        kernel.backward(given, tasks, spec, Gradients(dq, dk, dv))

    dk, dv = torch.empty_like(k, dtype=grad_dtype), torch.empty_like(v, dtype=grad_dtype)
    # Within a wave no two tasks share keys: it writes the rows of its tasks, and no others.
    if p.waves:
        run(p.waves[0], dk, dv)
    if len(p.waves) <= 1:
        return dq, dk, dv
    for gap in p.waves[0].key_gaps:
        dk[gap].zero_()
        dv[gap].zero_()
    sums = dk, dv
    if len(p.waves) > 2:
        # One addition is computed in fp32 and rounded once in any case; a sum of more is kept in fp32.
        wide = torch.promote_types(grad_dtype, torch.float32)
        sums = tuple(t if t.dtype == wide else torch.empty_like(t, dtype=wide).copy_(t) for t in sums)
    parts = torch.empty_like(dk), torch.empty_like(dv)
    for tasks in p.waves[1:]:
        run(tasks, *parts)
        for total, part in zip(sums, parts, strict=True):
            for span in tasks.key_spans:
                total[span] += part[span]
    return dq, *(t if t.dtype == grad_dtype else torch.empty_like(t, dtype=grad_dtype).copy_(t) for t in sums)


def _run(
    plan: LayerPlan,
    p: ServerPlan,
    dispatched: Pending,
    at_home: Callable[[], None],
    away: Callable[[], Result],
    device: torch.device,
) -> Result:
    """Tasks in place and tasks in the workspace, beside each other where there are both a side stream and the latter.

    A rank without any in its workspace only waits for its results, behind its own tasks: NCCL's receive would hold
    multiprocessors until they come.
    """
    if plan.side is not None and len(p.remote):
        return plan.side.run(at_home, away, device)
    if plan.side is None:
        dispatched.wait()
    at_home()
    return away()


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """Its transpose, contiguous. Made empty first: see :class:`~.side_stream.BorrowedMemory`."""
    return x.new_empty(x.shape[::-1]).copy_(x.t())


def _workspace(p: ServerPlan, q, k, v) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q_rows, kv_rows = p.plan.work_q_rows, p.plan.work_kv_rows
    return tuple(t.new_empty((rows, *t.shape[1:])) for t, rows in ((q, q_rows), (k, kv_rows), (v, kv_rows)))
