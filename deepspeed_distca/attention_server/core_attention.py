# SPDX-License-Identifier: Apache-2.0
"""Core attention of a layer over all servers, as one autograd Function that takes the steps of a phase in a row."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_distca.attention_server.coordination.watch import backward_of_layer
from deepspeed_distca.attention_server.kernels import Kernel
from deepspeed_distca.attention_server.steps import BackwardSteps, ForwardSteps, Given, LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec


def core_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGE: torch.Tensor,
    plan: LayerPlan,
    spec: AttentionSpec,
    kernel: Kernel,
    kept: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every document of the layout within itself, causal or along a tree's branches, over all servers.

    Args:
        q_THD: [T, q_heads, head_dim], this rank's queries in storage order, after RoPE.
        k_TGD, v_TGE: [T, kv_heads, head_dim] and [T, kv_heads, v_head_dim]; kv_heads divides q_heads.
        plan: made for exactly these rows, in one part. Collective over the servers of its group.
        spec: scale, window and softcap.
        kernel: what computes the tasks, the same on every server.
        kept: out and lse of an earlier call with the same rows, in recomputation: nothing is exchanged or computed.

    Returns:
        out [T, q_heads, v_head_dim] in q's dtype and lse [q_heads, T] in fp32 (natural logarithm of the sum of
        exponentials of the scaled scores); both differentiable.

    Raises:
        ValueError: rows that are not the plan's.
    """
    rows = plan.forward.home_rows
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
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: LayerPlan,
        spec: AttentionSpec,
        kernel: Kernel,
        kept: tuple[torch.Tensor, ...] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        if kept is None:
            steps = ForwardSteps(plan, spec, kernel)
            steps.dispatch(0, q, k, v)
            steps.serve(0)
            *_, out, lse = steps.collect(0)
        else:
            # A Function must return tensors of its own: views of what was kept.
            out, lse = (t.view_as(t) for t in kept)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.spec, ctx.kernel = plan, spec, kernel
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        refuse_second_order()
        with backward_of_layer(ctx.plan.watch):
            q, k, v, out, lse = ctx.saved_tensors
            dout = torch.zeros_like(out) if dout is None else dout.contiguous()
            steps = BackwardSteps(ctx.plan, ctx.spec, ctx.kernel)
            steps.dispatch(0, Given(q, k, v, out, lse, dout, dlse))
            steps.serve(0)
            dq, dk, dv = steps.gradients(0)
        return dq, dk, dv, None, None, None, None
