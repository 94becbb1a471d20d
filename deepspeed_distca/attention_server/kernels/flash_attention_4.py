# SPDX-License-Identifier: Apache-2.0
"""flash-attention 4 (the distribution `flash-attn-4`, imported as flash_attn.cute): in place, nothing is packed.

cu_seqlens carries the first row of every task and seqused its length, so tasks may lie anywhere in the buffers and
rows between them are not written. Its backward is the exception. It keeps fp32 work rows for task i from row
(start // tile + i) * tile on, which are apart only if the starts ascend; a batch whose query or key ranges do not
ascend in one common order is packed for the backward.

The first call of each kind compiles for some seconds. The library keeps compiled kernels on disk if the environment
sets FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 before it is first imported; that is the user's choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_distca.attention_server.kernels.api import (
    KernelError,
    check_backward,
    check_elements,
    check_forward,
)
from deepspeed_distca.attention_server.kernels.libraries import (
    check_flash,
    load_module,
    missing_distribution,
    out_from_delta,
)
from deepspeed_distca.attention_server.kernels.packed_rows import packed_calls
from deepspeed_distca.attention_server.task_batch import AttentionSpec, DeviceTasks, TaskBatch

DISTRIBUTION = "flash-attn-4"
# The library compiles a variant of its own where the longest range fits one tile (at most 128 rows, or 192 on
# Hopper). A larger maximum than the true one changes nothing else, so short batches say this and share the kernel.
MIN_MAX_SEQLEN = 256


class FlashAttention4Kernel:
    """flash-attention 4 on Hopper and Blackwell data-center GPUs."""

    name = "flash_attn_4"

    def missing(self) -> str | None:
        return missing_distribution(DISTRIBUTION, "pip install 'flash-attn-4[cu13]'")

    def load(self) -> None:
        self._library()

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def check(
        self,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        spec: AttentionSpec,
        device: torch.device,
    ) -> None:
        check_flash(self.name, q_heads, kv_heads, head_dim, v_head_dim, dtype, spec, device, capabilities=(9, 10, 11))
        if head_dim % 8 or v_head_dim % 8:
            raise KernelError(
                f"{self.name}: head dimensions ({head_dim}, {v_head_dim}); both must be multiples of 8. "
                "Use 'torch_varlen' or 'flash_attn_2', which pad"
            )
        major = torch.cuda.get_device_capability(device)[0]
        widest = max(head_dim, v_head_dim)
        if major == 9 and widest > 192:
            raise KernelError(
                f"{self.name}: head dimensions ({head_dim}, {v_head_dim}); on Hopper its backward is trusted up to "
                "192 only. Use 'flash_attn_3', 'flash_attn_2' or 'torch_varlen'"
            )
        if major == 9 and head_dim != v_head_dim and q_heads != kv_heads:
            raise KernelError(
                f"{self.name}: head dimensions ({head_dim}, {v_head_dim}), {q_heads} query and {kv_heads} key/value"
                " heads; on Hopper its grouped-query backward needs equal head dimensions. Use 'torch_varlen'"
            )
        if major != 9 and widest > 128 and (head_dim, v_head_dim) not in ((192, 128), (256, 256)):
            raise KernelError(
                f"{self.name}: head dimensions ({head_dim}, {v_head_dim}); on Blackwell it takes up to 128, "
                "(192, 128) and (256, 256). Use 'flash_attn_2' or 'torch_varlen'"
            )

    @torch.no_grad()
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tasks: TaskBatch,
        spec: AttentionSpec,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_forward(self.name, q, k, v, tasks, out, lse)
        _check_sizes(self.name, q, v)
        if out is None:
            out = q.new_empty((len(q), q.shape[1], v.shape[2]))
        if lse is None:
            lse = q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
        if len(tasks):
            self._library()._flash_attn_fwd(
                q,
                k,
                v,
                **_ranges(tasks.on(q.device), tasks.max_q, tasks.max_k),
                **_mask(spec),
                softmax_scale=spec.scale,
                softcap=spec.softcap,
                out=out,
                lse=lse,
            )
        return out, lse

    @torch.no_grad()
    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor,
        tasks: TaskBatch,
        spec: AttentionSpec,
        *,
        out: torch.Tensor | None,
        delta: torch.Tensor | None,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        check_backward(self.name, dout, q, k, v, lse, tasks, out, delta, dq, dk, dv, self.grad_dtype(q.dtype))
        _check_sizes(self.name, q, v)
        if not len(tasks):
            return
        order = _backward_order(tasks, q.device)
        if order.ranges is not None:
            self._launch_backward(dout, q, k, v, lse, order.ranges, tasks, spec, out, delta, dq, dk, dv)
            return
        (call,) = packed_calls(tasks, q.device)
        ranges = DeviceTasks(call.q.cu_seqlens, tasks.on(q.device).q_len, call.k.cu_seqlens, tasks.on(q.device).k_len)
        packed_q, packed_k, packed_v = call.q.take(q), call.k.take(k), call.k.take(v)
        packed_dq, packed_dk, packed_dv = (torch.empty_like(x) for x in (packed_q, packed_k, packed_v))
        self._launch_backward(
            call.q.take(dout),
            packed_q,
            packed_k,
            packed_v,
            call.q.take(lse, dim=1),
            ranges,
            tasks,
            spec,
            None if out is None else call.q.take(out),
            None if delta is None else call.q.take(delta, dim=1),
            packed_dq,
            packed_dk,
            packed_dv,
        )
        call.q.put(dq, packed_dq)
        call.k.put(dk, packed_dk)
        call.k.put(dv, packed_dv)

    def _launch_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor,
        ranges: DeviceTasks,
        tasks: TaskBatch,
        spec: AttentionSpec,
        out: torch.Tensor | None,
        delta: torch.Tensor | None,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        # A dout with strides has given wrong gradients where its offsets pass 2^31.
        dout = dout.contiguous()
        dlse = None
        if out is None:
            if _has_no_dlse(q, v):
                out = out_from_delta(dout, delta)
            else:
                # The library forms rowsum(dout * out) - dlse: with out = 0 and dlse = -delta that is delta, exactly.
                out = torch.zeros_like(dout)
                dlse = torch.neg(delta, out=torch.empty_like(delta, dtype=torch.float32))
        self._library()._flash_attn_bwd(
            q,
            k,
            v,
            out.contiguous(),
            dout,
            lse.contiguous(),
            **_ranges(ranges, tasks.max_q, tasks.max_k),
            **_mask(spec),
            softmax_scale=spec.scale,
            softcap=spec.softcap or 0.0,
            dq=dq,
            dk=dk,
            dv=dv,
            dlse=dlse,
        )

    def _library(self):
        return load_module(self.name, "flash_attn.cute.interface")


@dataclass(frozen=True)
class _BackwardOrder:
    """The batch in an order in which both starts ascend, or None where there is none."""

    ranges: DeviceTasks | None


def _backward_order(tasks: TaskBatch, device: torch.device) -> _BackwardOrder:
    """Made once per batch and device."""
    cache = tasks.__dict__.setdefault("_ascending", {})
    if device not in cache:
        order = np.argsort(tasks.q_start, kind="stable")
        if (np.diff(tasks.k_start[order]) < 0).any():
            cache[device] = _BackwardOrder(None)
        elif (np.diff(order) > 0).all():
            cache[device] = _BackwardOrder(tasks.on(device))
        else:
            fields = (x[order] for x in (tasks.q_start, tasks.q_len, tasks.k_start, tasks.k_len))
            cache[device] = _BackwardOrder(TaskBatch(*fields, tasks.q_rows, tasks.k_rows).on(device))
    return cache[device]


def _check_sizes(name: str, q: torch.Tensor, v: torch.Tensor) -> None:
    widest = max(q.shape[2], v.shape[2])
    check_elements(name, len(q), q.shape[1], widest)
    check_elements(name, len(v), v.shape[1], widest)


def _ranges(ranges: DeviceTasks, max_q: int, max_k: int) -> dict:
    return {
        "cu_seqlens_q": ranges.q_start,
        "cu_seqlens_k": ranges.k_start,
        "seqused_q": ranges.q_len,
        "seqused_k": ranges.k_len,
        "max_seqlen_q": max(MIN_MAX_SEQLEN, max_q),
        "max_seqlen_k": max(MIN_MAX_SEQLEN, max_k),
    }


def _mask(spec: AttentionSpec) -> dict:
    """Causal, with a window of `left` keys before the query's own."""
    left = None if spec.window is None else spec.window - 1
    return {"causal": True, "window_size_left": left, "window_size_right": None if left is None else 0}


def _has_no_dlse(q: torch.Tensor, v: torch.Tensor) -> bool:
    """The kernel for head dimension 256 on Blackwell takes no gradient of the lse."""
    if not (q.is_cuda and q.shape[2] == v.shape[2] == 256):
        return False
    return torch.cuda.get_device_capability(q.device)[0] != 9
