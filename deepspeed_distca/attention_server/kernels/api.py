# SPDX-License-Identifier: Apache-2.0
"""What every attention kernel looks like: the `Kernel` protocol, its error, and the checks that all kernels share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from deepspeed_distca.attention_server import borrowed
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch

Made = TypeVar("Made")

# Flash-attention kernels address a buffer with 32-bit element offsets in places; a larger buffer is refused.
MAX_ELEMENTS = 2**31


class KernelError(ValueError):
    """A kernel was asked for something that it cannot do. The message names the value, what is allowed, the remedy."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What q, k and v of a model's attention are like, whatever their number of rows."""

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class BackwardInputs:
    """What a backward call reads. See :class:`Kernel` for shapes.

    Attributes:
        q, k, v: as in forward.
        dout: [T, Hq, Dv] gradient of the forward's output, in q's dtype.
        lse: [Hq, T] of the forward. Where queries have several tasks, here and in out and delta: what is merged of
            all of them. Each task then adds its part to the gradients.
        out: [T, Hq, Dv], the forward's output, or None if delta is given.
        delta: [Hq, T] rowsum(dout * out) - dlse, where dlse is the gradient of lse (zero for plain attention), or
            None if out is given. Exactly one of the two is given: delta is Dv times fewer bytes to send.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    out: torch.Tensor | None = None
    delta: torch.Tensor | None = None
    _made: dict[Callable[..., Any], Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def once(self, make: Callable[[BackwardInputs], Made]) -> Made:
        """``make(self)``, called once and kept with the inputs: a server's calls for tasks that share keys have the
        same ones. Nobody may write what it gives."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]


@dataclass(frozen=True, slots=True)
class Gradients:
    """Where a backward call writes. See :class:`Kernel` for which rows.

    Attributes:
        dq: [T, Hq, D] in q's dtype.
        dk, dv: [S, Hkv, D] and [S, Hkv, Dv] in ``Kernel.grad_dtype(q.dtype)``.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


@runtime_checkable
class Kernel(Protocol):
    """Core attention over a batch of CA-tasks: causal and aligned bottom-right in every task, or without a mask where
    the batch is not causal.

    Shapes: tensors are token-major, q [T, Hq, D], k [S, Hkv, D], v [S, Hkv, Dv], out and dout [T, Hq, Dv]; lse and
    delta are [Hq, T]. T and S are the batch's q_rows and k_rows.

    Dtypes: q, k, v, out, dout and dq have one, dk and dv that of `grad_dtype`; lse and delta are fp32 (float64 for
    the reference kernel on float64 input).

    Rows outside the tasks' ranges: those of inputs never influence a result, but kernels that work in tiles may load
    them, so they must be finite (not uninitialised memory): 0 * NaN is NaN inside a tile. Those of results are left
    as they are. Rows inside are overwritten, whatever they held: nothing is added to, and nobody has to zero anything.

    No method waits for the device. What a call derives from the batch alone is made once, by `TaskBatch.once`.
    """

    name: str

    def missing(self) -> str | None:
        """Why the kernel's library is not there, with the remedy, or None. Imports nothing."""

    def load(self) -> None:
        """Import the library. Raises KernelError if it is installed but does not import."""

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which `backward` writes dk and dv for inputs of `dtype`."""

    def check(self, shape: AttentionShape, spec: AttentionSpec) -> None:
        """Raise KernelError if this kernel cannot compute such attention. Called once, not in every layer."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tasks: TaskBatch,
        spec: AttentionSpec,
        into: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of every task. Key ranges may overlap.

        Args:
            into: out and lse, whose rows of the tasks are written; None allocates them, and then their other rows
                hold anything.

        Returns:
            out and lse, the natural logarithm of the sum of exponentials of the scaled scores.

        Raises:
            KernelError: a tensor's shape or dtype is not the one above; there is a window and the tasks are full.
        """

    def backward(self, inputs: BackwardInputs, tasks: TaskBatch, spec: AttentionSpec, grads: Gradients) -> None:
        """Gradients of every task, written into the tasks' query rows of dq and key rows of dk and dv.

        Raises:
            KernelError: two tasks share a key row (their gradients would overwrite each other); both or neither of
                out and delta are given; a tensor's shape or dtype is not the one above; there is a window and the
                tasks are full.
        """


def new_outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a forward call, without a value."""
    rows, heads, _ = q.shape
    out = borrowed.empty((rows, heads, v.shape[2]), dtype=q.dtype, device=q.device)
    return out, borrowed.empty((heads, rows), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)


def check_shape(name: str, shape: AttentionShape, spec: AttentionSpec) -> None:
    """What no kernel can give a meaning to."""
    if shape.kv_heads < 1 or shape.q_heads % shape.kv_heads:
        raise KernelError(
            f"{name}: {shape.q_heads} query heads over {shape.kv_heads} key/value heads; the number of query heads "
            "must be a multiple of the number of key/value heads"
        )
    if spec.window is not None and spec.window < 1:
        raise KernelError(
            f"{name}: window {spec.window}; a window counts the query's own key, so it is at least 1 "
            "(None sets no limit)"
        )
    if spec.softcap is not None and not spec.softcap > 0:
        raise KernelError(f"{name}: softcap {spec.softcap}; it must be positive (None switches it off)")


def check_forward(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tasks: TaskBatch,
    spec: AttentionSpec,
    into: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Shapes and mask of a forward call, from host metadata only."""
    _check_inputs(name, q, k, v, tasks, spec)
    if into is not None:
        out, lse = into
        _expect(name, "out", out, (len(q), q.shape[1], v.shape[2]), q.dtype)
        _expect(name, "lse", lse, (q.shape[1], len(q)))


def check_backward(
    name: str,
    inputs: BackwardInputs,
    tasks: TaskBatch,
    spec: AttentionSpec,
    grads: Gradients,
    grad_dtype: torch.dtype,
) -> None:
    """Shapes, mask and key ranges of a backward call, from host metadata only."""
    q, k, v, out, delta = inputs.q, inputs.k, inputs.v, inputs.out, inputs.delta
    if (out is None) == (delta is None):
        raise KernelError(f"{name}: backward takes out or delta, exactly one of the two; give the other as None")
    _check_inputs(name, q, k, v, tasks, spec)
    rows, heads = (len(q), q.shape[1], v.shape[2]), (q.shape[1], len(q))
    _expect(name, "dout", inputs.dout, rows, q.dtype)
    _expect(name, "lse", inputs.lse, heads)
    if out is not None:
        _expect(name, "out", out, rows, q.dtype)
    if delta is not None:
        _expect(name, "delta", delta, heads)
    _expect(name, "dq", grads.dq, q.shape, q.dtype)
    _expect(name, "dk", grads.dk, k.shape, grad_dtype)
    _expect(name, "dv", grads.dv, v.shape, grad_dtype)
    if tasks.key_overlap is not None:
        # In backward every key row has one owner: kernels write dk and dv, they do not add to them.
        a, b = (f"task {i} [{tasks.k_start[i]}, {tasks.k_start[i] + tasks.k_len[i]})" for i in tasks.key_overlap)
        raise KernelError(
            f"{name}: the key ranges of {a} and {b} overlap; backward overwrites dk and dv, so such tasks need "
            "separate calls whose results are added"
        )


def check_elements(name: str, rows: int, heads: int, head_dim: int) -> None:
    """Whether a buffer is small enough for 32-bit element offsets."""
    elements = rows * heads * head_dim
    if elements >= MAX_ELEMENTS:
        raise KernelError(
            f"{name}: a buffer of {rows} rows x {heads} heads x head dimension {head_dim} has {elements} elements; "
            f"the kernel's 32-bit offsets allow fewer than {MAX_ELEMENTS}. Use fewer tokens per rank"
        )


def _check_inputs(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tasks: TaskBatch, spec: AttentionSpec
) -> None:
    _, q_heads, head_dim = q.shape
    _, kv_heads, v_head_dim = v.shape
    _expect(name, "q", q, (tasks.q_rows, q_heads, head_dim))
    _expect(name, "k", k, (tasks.k_rows, kv_heads, head_dim))
    _expect(name, "v", v, (tasks.k_rows, kv_heads, v_head_dim))
    if spec.window is not None and not tasks.causal:
        raise KernelError(
            f"{name}: window {spec.window} and a batch with causal=False; a window is counted from a query's own key, "
            "which full tiles do not have. Use causal tasks, or no window"
        )


def _expect(
    name: str, what: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    if tensor.shape != shape:
        raise KernelError(f"{name}: {what} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise KernelError(f"{name}: {what} has dtype {tensor.dtype}, expected {dtype}")
