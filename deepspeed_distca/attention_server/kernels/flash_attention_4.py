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

import itertools
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from deepspeed_distca.attention_server import borrowed
from deepspeed_distca.attention_server.kernels.api import (
    AttentionShape,
    BackwardInputs,
    Gradients,
    KernelError,
    check_backward,
    check_elements,
    check_forward,
    new_outputs,
)
from deepspeed_distca.attention_server.kernels.libraries import (
    check_flash,
    load_module,
    missing_distribution,
    out_from_delta,
)
from deepspeed_distca.attention_server.kernels.packed import PackedCall, packed_calls
from deepspeed_distca.attention_server.kernels.repeated import Call, Repeated, no_programs
from deepspeed_distca.attention_server.task_batch import AttentionSpec, DeviceTasks, TaskBatch

DISTRIBUTION = "flash-attn-4"
# The library compiles a variant of its own where the longest range fits one tile (at most 128 rows, or 192 on
# Hopper). A larger maximum than the true one changes nothing else, so short batches say this and share the kernel.
MIN_MAX_SEQLEN = 256
#: Tasks and rows of each with which launches are tried out, see `repeated`: of more tasks than 256 the library has
#: other ones.
_MOST_TRIED, _ROWS_TRIED = 300, 4
_SEEDS = itertools.count()


class FlashAttention4Kernel:
    """flash-attention 4 on Hopper and Blackwell data-center GPUs."""

    name = "flash_attn_4"

    def missing(self) -> str | None:
        return missing_distribution(DISTRIBUTION, "pip install 'flash-attn-4[cu13]'")

    def load(self) -> None:
        _ = self._library

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def check(self, shape: AttentionShape, spec: AttentionSpec) -> None:
        check_flash(self.name, shape, spec, capabilities=(9, 10, 11))
        head_dim, v_head_dim = shape.head_dim, shape.v_head_dim
        if head_dim % 8 or v_head_dim % 8:
            raise KernelError(
                f"{self.name}: head dimensions ({head_dim}, {v_head_dim}); both must be multiples of 8. "
                "Use 'torch_varlen' or 'flash_attn_2', which pad"
            )
        major = torch.cuda.get_device_capability(shape.device)[0]
        widest = max(head_dim, v_head_dim)
        if major == 9 and widest > 192:
            raise KernelError(
                f"{self.name}: head dimensions ({head_dim}, {v_head_dim}); on Hopper its backward is trusted up to "
                "192 only. Use 'flash_attn_3', 'flash_attn_2' or 'torch_varlen'"
            )
        if major == 9 and head_dim != v_head_dim and shape.q_heads != shape.kv_heads:
            raise KernelError(
                f"{self.name}: head dimensions ({head_dim}, {v_head_dim}), {shape.q_heads} query and {shape.kv_heads} "
                "key/value heads; on Hopper its grouped-query backward needs equal head dimensions. Use 'torch_varlen'"
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
        into: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_forward(self.name, q, k, v, tasks, spec, into)
        _check_sizes(self.name, q, v)
        out, lse = new_outputs(q, v) if into is None else into
        if len(tasks):
            call = _forward_call(q, k, v, tasks.on(q.device), tasks, spec, out, lse)
            self._forward(call, tasks.once(no_programs), partial(_forward_example, q, v, tasks, spec))
        return out, lse

    @torch.no_grad()
    def backward(self, inputs: BackwardInputs, tasks: TaskBatch, spec: AttentionSpec, grads: Gradients) -> None:
        check_backward(self.name, inputs, tasks, spec, grads, self.grad_dtype(inputs.q.dtype))
        _check_sizes(self.name, inputs.q, inputs.v)
        if not len(tasks):
            return
        places = tasks.once(_backward_places, inputs.q.device)
        if places.packed is None:
            self._launch_backward(inputs, places.ranges, tasks, spec, grads)
            return
        q_rows, k_rows = places.packed.q, places.packed.k
        packed = BackwardInputs(
            q=q_rows.take(inputs.q),
            k=k_rows.take(inputs.k),
            v=k_rows.take(inputs.v),
            dout=q_rows.take(inputs.dout),
            lse=q_rows.take(inputs.lse, dim=1),
            out=None if inputs.out is None else q_rows.take(inputs.out),
            delta=None if inputs.delta is None else q_rows.take(inputs.delta, dim=1),
        )
        results = Gradients(*(borrowed.empty_like(x) for x in (packed.q, packed.k, packed.v)))
        self._launch_backward(packed, places.ranges, tasks, spec, results)
        q_rows.put(grads.dq, results.dq)
        k_rows.put(grads.dk, results.dk)
        k_rows.put(grads.dv, results.dv)

    def _launch_backward(
        self, inputs: BackwardInputs, ranges: DeviceTasks, tasks: TaskBatch, spec: AttentionSpec, grads: Gradients
    ) -> None:
        out, dlse = inputs.once(_out_and_dlse)
        call = _backward_call(inputs, out, dlse, ranges, tasks, spec, grads)
        example = partial(_backward_example, inputs, dlse is not None, tasks, spec)
        self._backward(call, tasks.once(no_programs), example)

    @cached_property
    def _forward(self) -> Repeated:
        return Repeated(self._library._flash_attn_fwd)

    @cached_property
    def _backward(self) -> Repeated:
        return Repeated(self._library._flash_attn_bwd)

    @cached_property
    def _library(self) -> ModuleType:
        return load_module(self.name, "flash_attn.cute.interface")


@dataclass(frozen=True)
class _BackwardPlaces:
    """Where the backward finds the tasks.

    Attributes:
        ranges: of the tasks, in an order in which the starts of both sides ascend.
        packed: where there is no such order, how rows are packed for it; else None, and they are taken in place.
    """

    ranges: DeviceTasks
    packed: PackedCall | None


def _backward_places(tasks: TaskBatch, device: torch.device) -> _BackwardPlaces:
    order = np.argsort(tasks.q_start, kind="stable")
    if (np.diff(tasks.k_start[order]) < 0).any():
        (call,) = packed_calls(tasks, device)
        lengths = tasks.on(device)
        return _BackwardPlaces(DeviceTasks(call.q.cu_seqlens, lengths.q_len, call.k.cu_seqlens, lengths.k_len), call)
    if (np.diff(order) > 0).all():
        return _BackwardPlaces(tasks.on(device), None)
    ranges = {name: getattr(tasks, name)[order] for name in ("q_start", "q_len", "k_start", "k_len")}
    return _BackwardPlaces(replace(tasks, **ranges).on(device), None)


def _out_and_dlse(inputs: BackwardInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What stands for the two where delta is given."""
    if inputs.delta is None:
        assert inputs.out is not None  # check_backward
        return inputs.out.contiguous(), None
    dout = inputs.dout.contiguous()
    if _has_no_dlse(inputs.q, inputs.v):
        return out_from_delta(dout, inputs.delta), None
    # The library forms rowsum(dout * out) - dlse: with out = 0 and dlse = -delta that is delta, exactly.
    dlse = torch.neg(inputs.delta, out=borrowed.empty_like(inputs.delta, dtype=torch.float32))
    return borrowed.zeros_like(dout), dlse


def _check_sizes(name: str, q: torch.Tensor, v: torch.Tensor) -> None:
    widest = max(q.shape[2], v.shape[2])
    check_elements(name, len(q), q.shape[1], widest)
    check_elements(name, len(v), v.shape[1], widest)


def _forward_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: DeviceTasks,
    tasks: TaskBatch,
    spec: AttentionSpec,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Call:
    options = {**_ranges(ranges, tasks), **_mask(spec, tasks.causal), "softcap": spec.softcap, "out": out, "lse": lse}
    return Call((q, k, v), options, (out, lse))


def _backward_call(
    inputs: BackwardInputs,
    out: torch.Tensor,
    dlse: torch.Tensor | None,
    ranges: DeviceTasks,
    tasks: TaskBatch,
    spec: AttentionSpec,
    grads: Gradients,
) -> Call:
    # A dout with strides has given wrong gradients where its offsets pass 2^31.
    dout, lse = inputs.dout.contiguous(), inputs.lse.contiguous()
    options = {
        **_ranges(ranges, tasks),
        **_mask(spec, tasks.causal),
        "softcap": spec.softcap or 0.0,
        "dq": grads.dq,
        "dk": grads.dk,
        "dv": grads.dv,
        "dlse": dlse,
    }
    return Call((inputs.q, inputs.k, inputs.v, out, dout, lse), options, (grads.dq, grads.dk, grads.dv))


def _ranges(ranges: DeviceTasks, tasks: TaskBatch) -> dict[str, Any]:
    return {
        "cu_seqlens_q": ranges.q_start,
        "cu_seqlens_k": ranges.k_start,
        "seqused_q": ranges.q_len,
        "seqused_k": ranges.k_len,
        "max_seqlen_q": max(MIN_MAX_SEQLEN, tasks.max_q),
        "max_seqlen_k": max(MIN_MAX_SEQLEN, tasks.max_k),
    }


def _mask(spec: AttentionSpec, causal: bool) -> dict[str, Any]:
    """Causal, with a window of `left` keys before the query's own, or none; and the scale."""
    left, right = (None, None) if spec.window is None else (spec.window - 1, 0)
    return {"causal": causal, "window_size_left": left, "window_size_right": right, "softmax_scale": spec.scale}


def _forward_example(q: torch.Tensor, v: torch.Tensor, tasks: TaskBatch, spec: AttentionSpec) -> Call:
    """Of a call of forward: see :class:`Repeated`."""
    small = _small(tasks)
    q, k, v = (_random(small.q_rows, x, heads) for x, heads in ((q, q), (q, v), (v, v)))
    return _forward_call(q, k, v, small.on(q.device), tasks, spec, *new_outputs(q, v))


def _backward_example(inputs: BackwardInputs, dlse: bool, tasks: TaskBatch, spec: AttentionSpec) -> Call:
    """Of a call of backward."""
    small, (q, v) = _small(tasks), (inputs.q, inputs.v)
    q, k, v, out, dout = (_random(small.q_rows, x, heads) for x, heads in ((q, q), (q, v), (v, v), (v, q), (v, q)))
    lse, gradient = (_normal((q.shape[1], len(q)), torch.float32, q.device).add_(4.0) for _ in range(2))
    given = BackwardInputs(q, k, v, dout, lse, out)
    grads = Gradients(*map(borrowed.empty_like, (q, k, v)))
    return _backward_call(given, out, gradient if dlse else None, small.on(q.device), tasks, spec, grads)


def _small(tasks: TaskBatch) -> TaskBatch:
    """As many tasks of a few rows each."""
    count = min(len(tasks), _MOST_TRIED)
    start, length = np.arange(count) * _ROWS_TRIED, np.full(count, _ROWS_TRIED)
    rows = count * _ROWS_TRIED
    return TaskBatch(start, length, start, length, rows, rows, causal=tasks.causal)


def _random(rows: int, like: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Rows of as many heads as one tensor's, of another one's dimension."""
    return _normal((rows, heads.shape[1], like.shape[2]), like.dtype, like.device)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers, other ones each time, which are none of the training's."""
    generator = torch.Generator(device).manual_seed(next(_SEEDS))
    return borrowed.empty(shape, dtype=dtype, device=device).normal_(generator=generator)


def _has_no_dlse(q: torch.Tensor, v: torch.Tensor) -> bool:
    """The kernel for head dimension 256 on Blackwell takes no gradient of the lse."""
    if not (q.is_cuda and q.shape[2] == v.shape[2] == 256):
        return False
    return torch.cuda.get_device_capability(q.device)[0] != 9
