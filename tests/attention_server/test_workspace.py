# SPDX-License-Identifier: Apache-2.0
"""Gradients of keys that many tasks of a server share: summed over kernel calls without rounding in between."""

from __future__ import annotations

import pytest
import torch

from deepspeed_distca.attention_server.kernels import BackwardInputs, Gradients
from deepspeed_distca.attention_server.kernels.reference import ReferenceKernel
from deepspeed_distca.attention_server.parts import Parts
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch
from deepspeed_distca.attention_server.workspace import WorkspaceGradients, serve_backward
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import task_rows
from deepspeed_distca.scheduler.units import Units

HEADS, KV_HEADS, DIM = 4, 2, 16


class RoundedGradients(ReferenceKernel):
    """Gives gradients in the rows' own dtype, as flash-attention does, and writes the rows of its tasks only."""

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def backward(self, inputs: BackwardInputs, tasks: TaskBatch, spec: AttentionSpec, grads: Gradients) -> None:
        wide = Gradients(grads.dq, *(torch.empty_like(t, dtype=torch.float32) for t in (grads.dk, grads.dv)))
        ReferenceKernel().backward(inputs, tasks, spec, wide)
        for span in tasks.key_spans:
            grads.dk[span], grads.dv[span] = wide.dk[span], wide.dv[span]


@pytest.mark.parametrize("ranges", [2, 3, 24])
def test_sums_are_rounded_once(ranges: int) -> None:
    rows = 16
    layout = Layout.from_lengths([[2 * ranges * rows], [], []])
    # Servers 1 and 2 take turns, so that no two ranges of one of them are one task.
    pieces = torch.tensor([[0, i * rows, (i + 1) * rows, 1 + i % 2] for i in range(2 * ranges)]).numpy()
    plan = RankPlan(RouteCompiler(layout, task_rows(pieces, Units(layout, None))).rank(1))
    (tasks,) = plan.remote
    assert len(plan.waves) == len(tasks) == ranges

    generator = torch.Generator().manual_seed(ranges)
    spec, exact = AttentionSpec(DIM**-0.5), ReferenceKernel()
    q, dout = (torch.randn(tasks.q_rows, HEADS, DIM, generator=generator).bfloat16() for _ in range(2))
    k, v = (torch.randn(tasks.k_rows, KV_HEADS, DIM, generator=generator).bfloat16() for _ in range(2))
    out, lse = exact.forward(q, k, v, tasks, spec)
    stats = torch.stack([lse.t(), (dout.float() * out.float()).sum(-1)], dim=1)

    def served(kernel, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        sums = WorkspaceGradients(Parts.whole(plan), k, v, kernel.grad_dtype(dtype))
        return serve_backward(0, [q, dout, stats, k, v], sums, spec, kernel), *sums.totals

    dq, dk, dv = served(RoundedGradients(), q.dtype)
    expected = served(exact, q.dtype)
    # The sum of more than two is kept wide until it is sent.
    assert dk.dtype == dv.dtype == (torch.bfloat16 if ranges == 2 else torch.float32)
    dk, dv = dk.bfloat16(), dv.bfloat16()
    assert torch.equal(dq, expected[0])
    # Rows that the first call does not write: of the longest task only, so that two roundings are all there are.
    shorter = int(tasks.k_len[:-1].max())
    for found, wanted in zip((dk, dv), expected[1:], strict=True):
        error = (found.float() - wanted).norm() / wanted.norm()
        assert error < 2.6e-3, error  # each part is rounded, and the sum
        alone = (found[shorter:].float() - wanted[shorter:]).abs()
        assert bool((alone <= 2**-8 * wanted[shorter:].abs() + 1e-9).all())
