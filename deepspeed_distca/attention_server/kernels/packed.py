# SPDX-License-Identifier: Apache-2.0
"""Kernels of libraries that take packed rows with cu_seqlens (flash-attention 2 and 3, torch varlen): rows of tasks
are packed, heads padded to one dimension, calls kept small enough, and delta made to serve as out.

A range that lies behind its predecessor in the buffer is taken as it is; other ranges are gathered and scattered.
Index arrays are made on the host and kept with the batch, so that no layer synchronises the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from deepspeed_distca.attention_server.kernels.api import (
    MAX_ELEMENTS,
    BackwardInputs,
    Gradients,
    check_backward,
    check_elements,
    check_forward,
    new_outputs,
)
from deepspeed_distca.attention_server.kernels.libraries import out_from_delta
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch


@dataclass(frozen=True)
class PackedRows:
    """The rows of some ranges of one buffer, in the order of the ranges: a slice of it, or a gather.

    Attributes:
        rows: how many.
        cu_seqlens: int32 [num_tasks + 1] on the device, within the packed rows.
        max_seqlen: longest range.
        start: first row of the first range.
        index: int64 [rows] on the device; None where the ranges are one slice of the buffer.
    """

    rows: int
    cu_seqlens: torch.Tensor
    max_seqlen: int
    start: int
    index: torch.Tensor | None

    @classmethod
    def of(cls, start: np.ndarray, length: np.ndarray, device: torch.device) -> PackedRows:
        ends = np.cumsum(length)
        rows = int(ends[-1])
        cu_seqlens = _to_device(np.concatenate(([0], ends)).astype(np.int32), device)
        shift = start - (ends - length)  # buffer row minus packed row, per range
        if (shift == shift[0]).all():
            return cls(rows, cu_seqlens, int(length.max()), int(start[0]), None)
        index = np.arange(rows, dtype=np.int64) + np.repeat(shift, length)
        return cls(rows, cu_seqlens, int(length.max()), int(start[0]), _to_device(index, device))

    def take(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The packed rows of x along `dim`; a view where they are a slice."""
        if self.index is None:
            return x.narrow(dim, self.start, self.rows)
        return x.index_select(dim, self.index)

    def put(self, x: torch.Tensor, value: torch.Tensor, dim: int = 0) -> None:
        """Write packed rows back into x along `dim`; converts to x's dtype. The ranges must be disjoint."""
        if self.index is None:
            x.narrow(dim, self.start, self.rows).copy_(value)
        else:
            x.index_copy_(dim, self.index, value.to(x.dtype))


@dataclass(frozen=True)
class PackedCall:
    """The tasks of one library call, packed on both sides; all causal or all full."""

    q: PackedRows
    k: PackedRows
    causal: bool


def packed_calls(
    tasks: TaskBatch, device: torch.device, max_sequences: int | None = None, max_rows: int | None = None
) -> list[PackedCall]:
    """The batch as library calls, in order; none for an empty batch.

    Args:
        max_sequences: most tasks in a call.
        max_rows: most packed query or key rows in a call. Key rows that several tasks share are packed once for each,
            so there can be more of them than the buffer has. A task of its own that is larger still gets a call.
    """
    return tasks.once(_packed_calls, device, max_sequences, max_rows)


def _packed_calls(
    tasks: TaskBatch, device: torch.device, max_sequences: int | None, max_rows: int | None
) -> list[PackedCall]:
    return [
        PackedCall(
            PackedRows.of(tasks.q_start[part], tasks.q_len[part], device),
            PackedRows.of(tasks.k_start[part], tasks.k_len[part], device),
            tasks.causal,
        )
        for part in _parts(tasks, max_sequences, max_rows)
    ]


def _parts(tasks: TaskBatch, max_sequences: int | None, max_rows: int | None) -> Iterator[slice]:
    sides = [(length, np.cumsum(length)) for length in (tasks.q_len, tasks.k_len)]
    first = 0
    while first < len(tasks):
        last = len(tasks)
        if max_sequences is not None:
            last = min(last, first + max_sequences)
        if max_rows is not None:
            for length, ends in sides:
                before = int(ends[first] - length[first])
                last = min(last, max(first + 1, int(np.searchsorted(ends, before + max_rows, side="right"))))
        yield slice(first, last)
        first = last


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    # Pinned: a copy from pageable memory would wait for the stream.
    return host.pin_memory().to(device, non_blocking=True)


class PackedKernel(ABC):
    """Core attention through a library that takes packed buffers with cu_seqlens and one head dimension."""

    name: str
    # Sequences that one call may have: the batch is a CUDA grid dimension in flash-attention 2.
    max_sequences: int | None = 65_535

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    @abstractmethod
    def library_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: PackedCall, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out [rows, Hq, D] and lse fp32 [Hq, rows] of packed q, k, v with one head dimension, a multiple of 8."""

    @abstractmethod
    def library_backward(self, inputs: BackwardInputs, call: PackedCall, spec: AttentionSpec) -> Gradients:
        """Gradients, shaped like q, k, v, of packed, contiguous inputs; out is given."""

    @torch.no_grad()
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tasks: TaskBatch,
        spec: AttentionSpec,
        into: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_forward(self.name, q, k, v, tasks, spec, into)
        v_head_dim = v.shape[2]
        width = _common_width(q, v)
        for call in self._calls(q, k, tasks, width):
            packed_out, packed_lse = self.library_forward(
                _widen(call.q.take(q), width),
                _widen(call.k.take(k), width),
                _widen(call.k.take(v), width),
                call,
                spec,
            )
            packed_out = packed_out[..., :v_head_dim]
            if into is None:
                if call.q.rows == len(q) and call.q.index is None:
                    return packed_out.contiguous(), packed_lse
                into = new_outputs(q, v)
            out, lse = into
            call.q.put(out, packed_out)
            call.q.put(lse, packed_lse, dim=1)
        return new_outputs(q, v) if into is None else into

    @torch.no_grad()
    def backward(self, inputs: BackwardInputs, tasks: TaskBatch, spec: AttentionSpec, grads: Gradients) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        check_backward(self.name, inputs, tasks, spec, grads, self.grad_dtype(q.dtype))
        head_dim, v_head_dim = q.shape[2], v.shape[2]
        width = _common_width(q, v)
        for call in self._calls(q, k, tasks, width):
            dout = call.q.take(inputs.dout)
            if inputs.out is not None:
                out = call.q.take(inputs.out)
            elif inputs.delta is not None:
                out = out_from_delta(dout, call.q.take(inputs.delta, dim=1))
            packed = BackwardInputs(
                q=_widen(call.q.take(q), width).contiguous(),
                k=_widen(call.k.take(k), width).contiguous(),
                v=_widen(call.k.take(v), width).contiguous(),
                dout=_widen(dout, width).contiguous(),
                lse=call.q.take(inputs.lse, dim=1).contiguous(),
                out=_widen(out, width).contiguous(),
            )
            results = self.library_backward(packed, call, spec)
            call.q.put(grads.dq, results.dq[..., :head_dim])
            call.k.put(grads.dk, results.dk[..., :head_dim])
            call.k.put(grads.dv, results.dv[..., :v_head_dim])

    def _calls(self, q: torch.Tensor, k: torch.Tensor, tasks: TaskBatch, width: int) -> list[PackedCall]:
        # Query heads for the keys too: under grouped-query attention the backward writes dk and dv for every query
        # head before it sums them.
        q_heads = q.shape[1]
        check_elements(self.name, len(q), q_heads, width)
        check_elements(self.name, tasks.max_k, q_heads, width)
        max_rows = (MAX_ELEMENTS - 1) // (q_heads * width)
        return packed_calls(tasks, q.device, self.max_sequences, max_rows)


def _common_width(q: torch.Tensor, v: torch.Tensor) -> int:
    """One head dimension for q, k and v, a multiple of 8. Zeros behind a head change neither scores nor outputs."""
    return -(-max(q.shape[2], v.shape[2]) // 8) * 8


def _widen(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
