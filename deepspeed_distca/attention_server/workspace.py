# SPDX-License-Identifier: Apache-2.0
"""Backward of the tasks in a server's workspace."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepspeed_distca.attention_server import borrowed
from deepspeed_distca.attention_server.kernels import BackwardInputs, Gradients, Kernel
from deepspeed_distca.attention_server.parts import Parts
from deepspeed_distca.attention_server.serving import add_spans, sum_dtype
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch


def serve_backward(
    part: int, work: list[torch.Tensor], sums: WorkspaceGradients, spec: AttentionSpec, kernel: Kernel
) -> torch.Tensor:
    """dq [rows, q_heads, head_dim] of a part's tasks in the workspace; their dk and dv are added to `sums`.

    Args:
        work: q, dout, stats [rows, 2, q_heads] (lse and delta), k and v of the workspace.
    """
    q, dout, stats, k, v = work
    lse, delta = permuted(stats, 1, 2, 0).unbind()
    inputs, tasks_per_row = BackwardInputs(q, k, v, dout, lse, delta=delta), sums.tasks_per_row
    dq = borrowed.empty_like(q, dtype=sum_dtype(q.dtype, tasks_per_row))
    if tasks_per_row > 1:
        dq.zero_()

    def run(tasks: TaskBatch, dk: torch.Tensor, dv: torch.Tensor) -> None:
        found = dq if tasks_per_row == 1 else borrowed.empty_like(q)
        kernel.backward(inputs, tasks, spec.for_tasks(tasks), Gradients(found, dk, dv))
        if found is not dq:
            add_spans(dq, tasks.query_spans, found)

    sums.add(part, run)
    return in_dtype(dq, q.dtype)


class WorkspaceGradients:
    """dk and dv of the workspace's rows, added up over the tasks that share keys and rounded once.

    Attributes:
        totals: dk and dv.
        tasks_per_row: see ``Routes``.
    """

    def __init__(self, phase: Parts, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> None:
        self._phase, self._sums, self._dtype = phase, phase.sums, dtype
        self.tasks_per_row = phase.parts[0].plan.routes.tasks_per_row
        wide = torch.promote_types(dtype, torch.float32)
        # One addition is computed in fp32 and rounded once in any case; a sum of more is kept in fp32.
        self._in_place = self._sums.most <= 2 or wide == dtype
        if self._in_place:
            self.totals = tuple(borrowed.empty_like(t, dtype=dtype) for t in (k, v))
            for gap in self._sums.gaps:
                for total in self.totals:
                    total[gap].zero_()
        else:
            self.totals = tuple(borrowed.zeros_like(t, dtype=wide) for t in (k, v))
        self._apart: tuple[torch.Tensor, ...] = ()

    def add(self, part: int, run: Callable[[TaskBatch, torch.Tensor, torch.Tensor], None]) -> None:
        """Runs the waves of a part; `run` writes dk and dv of its tasks' rows, and of no others."""
        for tasks, fresh in zip(self._phase.parts[part].plan.waves, self._sums.fresh[part], strict=True):
            if fresh and self._in_place:
                run(tasks, *self.totals)
                continue
            if not self._apart:
                self._apart = tuple(borrowed.empty_like(t, dtype=self._dtype) for t in self.totals)
            run(tasks, *self._apart)
            for total, contribution in zip(self.totals, self._apart, strict=True):
                for span in tasks.key_spans:
                    total[span].add_(contribution[span])  # += would also assign


def in_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same in a dtype."""
    return x if x.dtype == dtype else borrowed.empty_like(x, dtype=dtype).copy_(x)


def permuted(x: torch.Tensor, *order: int) -> torch.Tensor:
    """Its dimensions in another order, contiguous."""
    x = x.permute(order)
    return borrowed.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
