# SPDX-License-Identifier: Apache-2.0
"""Batches of tasks on one set of buffers, one kernel call each. Batches may have the same queries (in trees): their
outputs are merged by lse then, and their gradients added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from deepspeed_distca.attention_server import borrowed
from deepspeed_distca.attention_server.kernels import BackwardInputs, Gradients, Kernel
from deepspeed_distca.attention_server.kernels.api import new_outputs
from deepspeed_distca.attention_server.merging import merge
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch


def sum_dtype(dtype: torch.dtype, tasks_per_row: int) -> torch.dtype:
    """In which results of so many tasks of one row come together: two are computed in fp32 and rounded once in any
    case, more are kept in fp32."""
    return dtype if tasks_per_row <= 2 else torch.promote_types(dtype, torch.float32)


def results_of(q: torch.Tensor, v: torch.Tensor, tasks_per_row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """out [rows, q_heads, v_head_dim] and lse [q_heads, rows] for :func:`attend` to write into."""
    out, lse = new_outputs(q, v)
    if tasks_per_row == 1:
        return out, lse
    wide = sum_dtype(out.dtype, tasks_per_row)
    out = out if out.dtype == wide else borrowed.empty_like(out, dtype=wide)
    return out.zero_(), lse.fill_(-torch.inf)  # no key seen yet


def attend(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batches: Sequence[TaskBatch],
    spec: AttentionSpec,
    into: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Attention of all batches into out and lse, as :func:`results_of` gave them."""
    out, lse = into
    for tasks, first in _with_first(batches):
        if first and out.dtype == q.dtype:
            kernel.forward(q, k, v, tasks, spec.for_tasks(tasks), into)
            continue
        more_out, more_lse = kernel.forward(q, k, v, tasks, spec.for_tasks(tasks))
        for span in tasks.query_spans:
            merge(out[span], lse[:, span], more_out[span], more_lse[:, span])


def add_gradients(
    kernel: Kernel, inputs: BackwardInputs, batches: Sequence[TaskBatch], spec: AttentionSpec, sums: Gradients
) -> None:
    """Gradients of all batches, added to dq, and those of dk and dv that the first batch does not write added to them.
    dq of rows that several batches have starts from zero."""
    for tasks, first in _with_first(batches):
        in_place = first and sums.dq.dtype == inputs.q.dtype
        dq = sums.dq if in_place else borrowed.empty_like(inputs.q)
        dk, dv = (sums.dk, sums.dv) if first else map(borrowed.empty_like, (sums.dk, sums.dv))
        kernel.backward(inputs, tasks, spec.for_tasks(tasks), Gradients(dq, dk, dv))
        if not in_place:
            add_spans(sums.dq, tasks.query_spans, dq)
        if not first:
            add_spans(sums.dk, tasks.key_spans, dk)
            add_spans(sums.dv, tasks.key_spans, dv)


def add_spans(total: torch.Tensor, spans: Sequence[slice], rows: torch.Tensor) -> None:
    """Adds these rows; each sum is computed in fp32 at least and rounded once."""
    for span in spans:
        total[span].add_(rows[span])


def _with_first(batches: Sequence[TaskBatch]) -> Iterator[tuple[TaskBatch, bool]]:
    """Batches that have tasks, and whether one is the first of them."""
    filled = [tasks for tasks in batches if len(tasks)]
    return zip(filled, [True, *[False] * len(filled)], strict=False)
