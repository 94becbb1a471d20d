# SPDX-License-Identifier: Apache-2.0
"""What every attention kernel looks like: the `Kernel` protocol, its error, and the checks that all kernels share."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch

from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch

# Flash-attention kernels address a buffer with 32-bit element offsets in places; a larger buffer is refused.
MAX_ELEMENTS = 2**31


class KernelError(ValueError):
    """A kernel was asked for something that it cannot do. The message names the value, what is allowed, the remedy."""


@runtime_checkable
class Kernel(Protocol):
    """Core attention over a batch of CA-tasks.

    Tensors are token-major: q [T, Hq, D], k [S, Hkv, D], v [S, Hkv, Dv], out and dout [T, Hq, Dv]; lse and delta are
    [Hq, T], fp32 (float64 for the reference kernel on float64 input). The mask is causal and aligned bottom-right in
    every task. No method synchronises the device.

    Rows of the inputs outside the task ranges never influence a result, but kernels that work in tiles may load them:
    they must be finite (not uninitialised memory), since 0 * NaN is NaN inside a tile. Rows of the outputs outside
    the ranges are left as they are.
    """

    name: str

    def missing(self) -> str | None:
        """Why the kernel's library is not there, with the remedy, or None. Imports nothing."""

    def load(self) -> None:
        """Import the library. Raises KernelError if it is installed but does not import."""

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which `backward` writes dk and dv for inputs of `dtype`."""

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
        """Raise KernelError if this kernel cannot compute such attention. Called once, not in every layer."""

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
        """Attention of every task. Writes the query rows of the tasks into `out` and `lse`.

        Key ranges may overlap. Where `out` or `lse` is None it is allocated, and its rows outside the task ranges
        hold anything.

        Returns:
            out [T, Hq, Dv] in q's dtype, and lse [Hq, T]: natural log of the sum of exp of the scaled scores.
        """

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
        """Gradients of every task. Overwrites the query rows of dq and the key rows of dk, dv.

        Args:
            out: the forward's output, or None if delta is given.
            delta: [Hq, T] rowsum(dout * out) - dlse, where dlse is the gradient of lse (zero for plain attention),
                or None if out is given. Exactly one of the two is given: delta is Dv times fewer bytes to send.
            dq: [T, Hq, D] in q's dtype.
            dk, dv: [S, Hkv, D], [S, Hkv, Dv] in `grad_dtype(q.dtype)`.

        Raises:
            KernelError: two tasks share a key row (their gradients would overwrite each other).
        """


def check_heads(name: str, q_heads: int, kv_heads: int) -> None:
    """Query heads come in equal groups, one per key/value head."""
    if kv_heads < 1 or q_heads % kv_heads:
        raise KernelError(
            f"{name}: {q_heads} query heads over {kv_heads} key/value heads; the number of query heads must be a "
            "multiple of the number of key/value heads"
        )


def check_spec(name: str, spec: AttentionSpec) -> None:
    """Values that no kernel can give a meaning to."""
    if spec.window is not None and spec.window < 1:
        raise KernelError(
            f"{name}: window {spec.window}; a window counts the query's own key, so it is at least 1 "
            "(None is full causal attention)"
        )
    if spec.softcap is not None and not spec.softcap > 0:
        raise KernelError(f"{name}: softcap {spec.softcap}; it must be positive (None switches it off)")


def check_forward(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tasks: TaskBatch,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Shapes of a forward call, from host metadata only."""
    rows, q_heads, head_dim = q.shape
    _, kv_heads, v_head_dim = v.shape
    _expect(name, "q", q, (tasks.q_rows, q_heads, head_dim))
    _expect(name, "k", k, (tasks.k_rows, kv_heads, head_dim))
    _expect(name, "v", v, (tasks.k_rows, kv_heads, v_head_dim))
    if out is not None:
        _expect(name, "out", out, (rows, q_heads, v_head_dim), q.dtype)
    if lse is not None:
        _expect(name, "lse", lse, (q_heads, rows))


def check_backward(
    name: str,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    tasks: TaskBatch,
    out: torch.Tensor | None,
    delta: torch.Tensor | None,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    grad_dtype: torch.dtype,
) -> None:
    """Shapes and key ranges of a backward call, from host metadata only."""
    if (out is None) == (delta is None):
        raise KernelError(f"{name}: backward takes out or delta, exactly one of the two; give the other as None")
    check_forward(name, q, k, v, tasks, out, lse)
    _expect(name, "dout", dout, (len(q), q.shape[1], v.shape[2]), q.dtype)
    if delta is not None:
        _expect(name, "delta", delta, (q.shape[1], len(q)))
    _expect(name, "dq", dq, q.shape, q.dtype)
    _expect(name, "dk", dk, k.shape, grad_dtype)
    _expect(name, "dv", dv, v.shape, grad_dtype)
    check_disjoint_keys(name, tasks)


def check_elements(name: str, rows: int, heads: int, head_dim: int) -> None:
    """Whether a buffer is small enough for 32-bit element offsets."""
    elements = rows * heads * head_dim
    if elements >= MAX_ELEMENTS:
        raise KernelError(
            f"{name}: a buffer of {rows} rows x {heads} heads x head dimension {head_dim} has {elements} elements; "
            f"the kernel's 32-bit offsets allow fewer than {MAX_ELEMENTS}. Use fewer tokens per rank"
        )


def check_disjoint_keys(name: str, tasks: TaskBatch) -> None:
    """In backward every key row has one owner: kernels write dk and dv, they do not add to them.

    The verdict is kept with the batch, since one batch serves every layer.
    """
    cache = tasks.__dict__.setdefault("_keys_disjoint", [])
    if not cache:
        cache.append(_first_overlap(tasks.k_start, tasks.k_len))
    overlap = cache[0]
    if overlap is not None:
        a, b = (f"task {i} [{tasks.k_start[i]}, {tasks.k_start[i] + tasks.k_len[i]})" for i in overlap)
        raise KernelError(
            f"{name}: the key ranges of {a} and {b} overlap; backward overwrites dk and dv, so such tasks need "
            "separate calls whose results are added"
        )


def _first_overlap(start: np.ndarray, length: np.ndarray) -> tuple[int, int] | None:
    order = np.argsort(start, kind="stable")
    ends = (start + length)[order]
    bad = np.flatnonzero(start[order][1:] < ends[:-1])
    return (int(order[bad[0]]), int(order[bad[0] + 1])) if len(bad) else None


def _expect(
    name: str, what: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise KernelError(f"{name}: {what} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise KernelError(f"{name}: {what} has dtype {tensor.dtype}, expected {dtype}")
