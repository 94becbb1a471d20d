# SPDX-License-Identifier: Apache-2.0
"""How exact an attention kernel is on this device."""

from __future__ import annotations

import torch

from deepspeed_distca.attention_server.kernels import BackwardInputs, Gradients, Kernel, make_kernel
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.routes import home_routes

_LENGTHS = [300, 1, 129, 594]


def kernel_error(kernel: Kernel, heads: Heads, device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative error of a kernel's out, dq, dk and dv on a few packed documents, against the reference in
    fp64; infinite where it is no number."""
    generator = torch.Generator().manual_seed(0)
    tasks = RankPlan(home_routes(Layout.from_lengths([_LENGTHS]), 0)).local[0]
    spec = AttentionSpec(heads.head_dim**-0.5)

    def drawn(count: int, dim: int) -> torch.Tensor:
        return torch.randn(sum(_LENGTHS), count, dim, generator=generator).to(device, dtype)

    def run(by: Kernel, wide: torch.dtype) -> tuple[torch.Tensor, ...]:
        q, k, v, dout = (t.to(wide) for t in given)
        out, lse = by.forward(q, k, v, tasks, spec)
        dk, dv = (torch.empty_like(t, dtype=by.grad_dtype(wide)) for t in (k, v))
        dq = torch.empty_like(q)
        by.backward(BackwardInputs(q, k, v, dout, lse, out), tasks, spec, Gradients(dq, dk, dv))
        return out, dq, dk, dv

    query, key_value, dim, value_dim = heads.query, heads.key_value, heads.head_dim, heads.value_dim or heads.head_dim
    given = drawn(query, dim), drawn(key_value, dim), drawn(key_value, value_dim), drawn(query, value_dim)
    pairs = zip(run(kernel, dtype), run(make_kernel("reference"), torch.float64), strict=True)
    errors = [float((one.double() - other).norm() / other.norm()) for one, other in pairs]
    return max(error if error == error else float("inf") for error in errors)
