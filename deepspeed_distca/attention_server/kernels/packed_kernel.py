# SPDX-License-Identifier: Apache-2.0
"""What kernels of packed libraries (flash-attention 2 and 3, torch varlen) have in common: packing, padding of head
dimensions, calls of bounded size, and delta in place of out."""

from __future__ import annotations

from abc import ABC, abstractmethod

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
from deepspeed_distca.attention_server.kernels.packed_rows import PackedCall, packed_calls
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch


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
        check_forward(self.name, q, k, v, tasks, into)
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
        check_backward(self.name, inputs, tasks, grads, self.grad_dtype(q.dtype))
        head_dim, v_head_dim = q.shape[2], v.shape[2]
        width = _common_width(q, v)
        for call in self._calls(q, k, tasks, width):
            dout = call.q.take(inputs.dout)
            if inputs.out is not None:
                out = call.q.take(inputs.out)
            else:
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
