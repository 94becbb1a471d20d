# SPDX-License-Identifier: Apache-2.0
"""Exact attention in plain PyTorch, in memory linear in the sequence: what CPU training and fp32 use, and what every
other kernel is tested against.

Queries are taken in blocks, keys in chunks with an online softmax; key/value heads are never repeated (the query
heads of one group are stacked as rows of one matrix product). Short tasks of similar length share one batched
product, since on a CPU a document of a few tokens costs its calls, not its arithmetic. Blocks are small on a CPU, for
its caches, and large on other devices, where every operation costs a launch. Products are never taken in TF32 or bf16,
whatever PyTorch is set to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_distca.attention_server.kernels.api import (
    BackwardInputs,
    Gradients,
    check_backward,
    check_forward,
    check_heads,
    check_spec,
    new_outputs,
)
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch

# Tasks of at most this many keys are batched with others of their size.
SMALL_TASK = 128
# A masked score. Finite, so that a row whose first chunk is masked altogether needs no special case: what it adds to
# the running sum is multiplied by exp(MASKED - max) = 0 as soon as a visible key comes, and each query sees its own.
MASKED = -1e30


@dataclass(frozen=True)
class Blocking:
    """How much is computed at a time.

    Attributes:
        queries: rows of a query block.
        keys: rows of a key chunk, at most.
        scores: elements of the score buffer, at most: bounds the memory whatever the number of heads or of batched
            tasks. Forward holds one such buffer, backward two (three with a softcap).
    """

    queries: int
    keys: int
    scores: int

    def query_rows(self, window: int | None) -> int:
        """Rows of a query block. With a window much shorter than the block nearly all scores would be masked ones."""
        if window is None:
            return self.queries
        return min(self.queries, max(CPU_BLOCKING.queries, window))


CPU_BLOCKING = Blocking(queries=128, keys=512, scores=1 << 21)
# 128K tokens of 2 heads take 272 steps instead of 131 thousand; 256 MiB of fp32 scores.
DEVICE_BLOCKING = Blocking(queries=4096, keys=8192, scores=1 << 26)


def blocking(device: torch.device) -> Blocking:
    """The one for tensors on that device."""
    return CPU_BLOCKING if device.type == "cpu" else DEVICE_BLOCKING


class ReferenceKernel:
    """Attention in fp32 arithmetic for bf16, fp16 and fp32 input, in float64 for float64 input, on any device."""

    name = "reference"

    def missing(self) -> str | None:
        return None

    def load(self) -> None:
        pass

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return _math_dtype(dtype)

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
        check_heads(self.name, q_heads, kv_heads)
        check_spec(self.name, spec)

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
        math = _math_dtype(q.dtype)
        out, lse = new_outputs(q, v) if into is None else into
        scratch = _Scratch(q.device, math)
        rows = scratch.blocking.query_rows(spec.window)
        with _exact_products(q.device):
            for group in tasks.once(_groups, q.device, q.shape[1], spec.window):
                keys, values = group.key_rows(k, math), group.key_rows(v, math)
                for block in group.query_blocks(rows):
                    queries = block.query_rows(q, k.shape[1], math)
                    o, row_lse = _forward_block(queries, keys, values, block, spec, scratch)
                    block.write_queries(out, o)
                    block.write_row_scalars(lse, row_lse)
        return out, lse

    @torch.no_grad()
    def backward(self, inputs: BackwardInputs, tasks: TaskBatch, spec: AttentionSpec, grads: Gradients) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        check_backward(self.name, inputs, tasks, grads, self.grad_dtype(q.dtype))
        math, kv_heads = _math_dtype(q.dtype), k.shape[1]
        scratch = _Scratch(q.device, math)
        rows = scratch.blocking.query_rows(spec.window)
        with _exact_products(q.device):
            for group in tasks.once(_groups, q.device, q.shape[1], spec.window):
                keys, values = group.key_rows(k, math), group.key_rows(v, math)
                dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
                for block in group.query_blocks(rows):
                    queries, douts = (block.query_rows(t, kv_heads, math) for t in (q, inputs.dout))
                    lse = block.row_scalars(inputs.lse, kv_heads, math)
                    if inputs.delta is not None:
                        delta = block.row_scalars(inputs.delta, kv_heads, math)
                    else:
                        delta = (douts * block.query_rows(inputs.out, kv_heads, math)).sum(-1)
                    sums = Gradients(torch.zeros_like(queries), dkeys, dvalues)
                    given = BackwardInputs(queries, keys, values, douts, lse, delta=delta)
                    _backward_block(given, block, spec, scratch, sums)
                    block.write_queries(grads.dq, sums.dq)
                group.write_keys(grads.dk, dkeys)
                group.write_keys(grads.dv, dvalues)


def _math_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def _exact_products(device: torch.device) -> Iterator[None]:
    """fp32 products in fp32, under autocast too."""
    with torch.autocast(device.type, enabled=False), _ieee_products(device):
        yield


@contextmanager
def _ieee_products(device: torch.device) -> Iterator[None]:
    """PyTorch may be set to take fp32 products in TF32, or on a CPU in bf16."""
    matmul = torch.backends.mkldnn.matmul if device.type == "cpu" else torch.backends.cuda.matmul
    given = matmul.fp32_precision
    if given not in ("tf32", "bf16"):
        yield
        return
    try:
        everywhere = torch.get_float32_matmul_precision()
    except RuntimeError:  # PyTorch's way of saying that it was set through fp32_precision, not by the older switches
        everywhere = None
    if everywhere in (None, "highest"):
        matmul.fp32_precision = "ieee"
    else:
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if everywhere in (None, "highest"):
            matmul.fp32_precision = given
        else:
            torch.set_float32_matmul_precision(everywhere)


class _Scratch:
    """Buffers that live for one call: a fresh score buffer for every chunk would cost more in page faults."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.blocking = blocking(device)
        self._device, self._dtype = device, dtype
        self._buffers: dict[str, torch.Tensor] = {}

    def get(self, name: str, *shape: int) -> torch.Tensor:
        size = int(np.prod(shape))
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = torch.empty(size, device=self._device, dtype=self._dtype)
        return buffer[:size].view(shape)


# ---------------------------------------------------------------------------------------------------------------
# Which rows form one matrix product. B = tasks x key/value heads, M = group heads x query rows, N = keys.


@dataclass(frozen=True)
class _Block:
    """Query rows [first, first + rows) of one task against its keys."""

    task: _Single
    first: int
    rows: int

    @property
    def start(self) -> int:
        return self.task.q_start + self.first

    def query_rows(self, x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """[T, Hq, D] -> [Hkv, group * rows, D]."""
        x = x[self.start : self.start + self.rows].to(dtype)
        x = x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        return x.reshape(kv_heads, -1, x.shape[-1])

    def row_scalars(self, x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """[Hq, T] -> [Hkv, group * rows]."""
        return x[:, self.start : self.start + self.rows].to(dtype).reshape(kv_heads, -1)

    def write_queries(self, x: torch.Tensor, value: torch.Tensor) -> None:
        rows = value.unflatten(1, (-1, self.rows)).permute(2, 0, 1, 3)
        x[self.start : self.start + self.rows].unflatten(1, rows.shape[1:3]).copy_(rows)

    def write_row_scalars(self, x: torch.Tensor, value: torch.Tensor) -> None:
        x[:, self.start : self.start + self.rows].copy_(value.reshape(-1, self.rows))

    def chunks(self, score_rows: int, blocking: Blocking) -> Iterator[tuple[int, int]]:
        """Key ranges that some query of the block sees, in chunks."""
        first = self.first + self.task.shift
        low = 0 if self.task.window is None else max(0, first - self.task.window + 1)
        high = first + self.rows
        size = max(1, min(blocking.keys, blocking.scores // score_rows))
        for start in range(low, high, size):
            yield start, min(high, start + size)

    def mask(self, scores: torch.Tensor, start: int, end: int) -> None:
        """Overwrite the scores [B, M, N] of keys [start, end) that the causal mask or the window hides."""
        first = self.first + self.task.shift
        last = first + self.rows - 1
        window = self.task.window
        causal = end - 1 > first
        windowed = window is not None and start <= last - window
        if not (causal or windowed):
            return
        query = torch.arange(first, last + 1, device=scores.device)[:, None]
        # Columns before the first hidden one need no pass: with the causal mask alone only the diagonal has any.
        skip = 0 if windowed else max(0, first + 1 - start)
        key = torch.arange(start + skip, end, device=scores.device)
        hidden = key > query
        if windowed:
            hidden |= key <= query - window
        scores.unflatten(1, (-1, self.rows))[..., skip:].masked_fill_(hidden, MASKED)


@dataclass(frozen=True)
class _Single:
    """One task on its own rows, cut into blocks and chunks."""

    q_start: int
    q_len: int
    k_start: int
    k_len: int
    window: int | None

    @property
    def shift(self) -> int:
        """Key position of the task's first query."""
        return self.k_len - self.q_len

    def key_rows(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[S, Hkv, D] -> [Hkv, keys, D], contiguous."""
        return x[self.k_start : self.k_start + self.k_len].transpose(0, 1).to(dtype).contiguous()

    def query_blocks(self, size: int) -> Iterator[_Block]:
        for first in range(0, self.q_len, size):
            yield _Block(self, first, min(size, self.q_len - first))

    def write_keys(self, x: torch.Tensor, value: torch.Tensor) -> None:
        x[self.k_start : self.k_start + self.k_len].copy_(value.transpose(0, 1))


@dataclass(frozen=True)
class _Batched:
    """Several short tasks, padded to one size: [tasks, q_size] query rows and [tasks, k_size] key rows.

    Padding repeats a valid row (so that nothing outside the ranges is ever read) and is masked; what it computes is
    not written. One block and one chunk each.
    """

    count: int
    q_size: int
    k_size: int
    q_index: torch.Tensor  # [count * q_size] buffer rows
    k_index: torch.Tensor
    q_valid: torch.Tensor  # positions in q_index that are no padding
    k_valid: torch.Tensor
    hidden: torch.Tensor  # bool [count, 1, 1, q_size, k_size]

    @classmethod
    def of(cls, tasks: TaskBatch, members: np.ndarray, window: int | None, device: torch.device) -> _Batched:
        q_len, k_len = tasks.q_len[members], tasks.k_len[members]
        q_size, k_size = int(q_len.max()), int(k_len.max())
        q_pos, k_pos = np.arange(q_size), np.arange(k_size)
        q_index = tasks.q_start[members, None] + np.minimum(q_pos, q_len[:, None] - 1)
        k_index = tasks.k_start[members, None] + np.minimum(k_pos, k_len[:, None] - 1)
        q_real, k_real = q_pos < q_len[:, None], k_pos < k_len[:, None]
        query = (q_pos + (k_len - q_len)[:, None])[:, :, None]
        key = k_pos[None, None, :]
        hidden = (key > query) | ~q_real[:, :, None] | ~k_real[:, None, :]
        if window is not None:
            hidden |= key <= query - window

        def on_device(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(x).to(device)

        return cls(
            len(members),
            q_size,
            k_size,
            on_device(q_index.reshape(-1)),
            on_device(k_index.reshape(-1)),
            on_device(np.flatnonzero(q_real)),
            on_device(np.flatnonzero(k_real)),
            on_device(hidden[:, None, None]),
        )

    def key_rows(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[S, Hkv, D] -> [tasks * Hkv, keys, D]."""
        x = x[self.k_index].to(dtype).unflatten(0, (self.count, self.k_size))
        return x.transpose(1, 2).reshape(-1, self.k_size, x.shape[-1])

    def query_blocks(self, size: int) -> Iterator[_Batched]:
        yield self

    def query_rows(self, x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """[T, Hq, D] -> [tasks * Hkv, group * queries, D]."""
        x = x[self.q_index].to(dtype).unflatten(1, (kv_heads, -1)).unflatten(0, (self.count, self.q_size))
        return x.permute(0, 2, 3, 1, 4).reshape(self.count * kv_heads, -1, x.shape[-1])

    def row_scalars(self, x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """[Hq, T] -> [tasks * Hkv, group * queries]."""
        x = x[:, self.q_index].to(dtype).unflatten(1, (self.count, self.q_size))
        return x.transpose(0, 1).reshape(self.count * kv_heads, -1)

    def write_queries(self, x: torch.Tensor, value: torch.Tensor) -> None:
        rows = value.view(self.count, x.shape[1], self.q_size, -1).transpose(1, 2).flatten(0, 1)
        x.index_copy_(0, self.q_index[self.q_valid], rows[self.q_valid].to(x.dtype))

    def write_row_scalars(self, x: torch.Tensor, value: torch.Tensor) -> None:
        rows = value.view(self.count, len(x), self.q_size).transpose(0, 1).flatten(1)
        x.index_copy_(1, self.q_index[self.q_valid], rows[:, self.q_valid].to(x.dtype))

    def write_keys(self, x: torch.Tensor, value: torch.Tensor) -> None:
        rows = value.unflatten(0, (self.count, -1)).transpose(1, 2).flatten(0, 1)
        x.index_copy_(0, self.k_index[self.k_valid], rows[self.k_valid].to(x.dtype))

    def chunks(self, score_rows: int, blocking: Blocking) -> Iterator[tuple[int, int]]:
        yield 0, self.k_size

    def mask(self, scores: torch.Tensor, start: int, end: int) -> None:
        shape = (self.count, -1, scores.shape[1] // self.q_size, self.q_size, self.k_size)
        scores.view(shape).masked_fill_(self.hidden, MASKED)


def _groups(tasks: TaskBatch, device: torch.device, q_heads: int, window: int | None) -> list[_Single | _Batched]:
    """How a batch is computed."""
    small = tasks.k_len <= SMALL_TASK
    groups: list[_Single | _Batched] = [
        _Single(int(tasks.q_start[i]), int(tasks.q_len[i]), int(tasks.k_start[i]), int(tasks.k_len[i]), window)
        for i in np.flatnonzero(~small)
    ]
    members = np.flatnonzero(small)
    sizes = np.stack([_bucket(tasks.k_len[members]), _bucket(tasks.q_len[members])])
    for size in np.unique(sizes, axis=1).T:
        same = members[(sizes == size[:, None]).all(0)]
        most = max(1, blocking(device).scores // (q_heads * int(size.prod())))
        groups += [_Batched.of(tasks, same[i : i + most], window, device) for i in range(0, len(same), most)]
    return groups


def _bucket(length: np.ndarray) -> np.ndarray:
    """Lengths rounded up to 1, 2, 4, 8, 16 and multiples of 16: the padding that a batch of short tasks may cost."""
    power = 2 ** np.ceil(np.log2(np.maximum(length, 1))).astype(np.int64)
    return np.where(length <= 16, power, -(-length // 16) * 16)


# ---------------------------------------------------------------------------------------------------------------
# The arithmetic of one block.


def _scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    block: _Block | _Batched,
    start: int,
    end: int,
    spec: AttentionSpec,
    scratch: _Scratch,
) -> torch.Tensor:
    """Scaled, capped and masked scores [B, M, end - start]."""
    scores = scratch.get("scores", len(queries), queries.shape[1], end - start)
    alpha = spec.scale if spec.softcap is None else spec.scale / spec.softcap
    torch.baddbmm(scores, queries, keys[:, start:end].transpose(1, 2), beta=0, alpha=alpha, out=scores)
    if spec.softcap is not None:
        scores.tanh_().mul_(spec.softcap)
    block.mask(scores, start, end)
    return scores


def _forward_block(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: _Block | _Batched,
    spec: AttentionSpec,
    scratch: _Scratch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, M, Dv] and lse [B, M] of one query block."""
    top = total = acc = None
    for start, end in block.chunks(queries.shape[0] * queries.shape[1], scratch.blocking):
        scores = _scores(queries, keys, block, start, end, spec, scratch)
        chunk_top = scores.amax(-1, keepdim=True)
        if acc is None:
            top = chunk_top
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            acc = torch.bmm(weights, values[:, start:end])
        else:
            new_top = torch.maximum(top, chunk_top)
            decay = (top - new_top).exp_()
            top = new_top
            weights = scores.sub_(top).exp_()
            total.mul_(decay).add_(weights.sum(-1, keepdim=True))
            acc.mul_(decay).baddbmm_(weights, values[:, start:end])
    return acc.div_(total), (top + total.log()).squeeze(-1)


def _backward_block(
    given: BackwardInputs,
    block: _Block | _Batched,
    spec: AttentionSpec,
    scratch: _Scratch,
    sums: Gradients,
) -> None:
    """Adds the gradients of one query block, all in the shapes of the products: q, dout and dq [B, M, D], lse and
    delta [B, M], k, v, dk and dv [B, keys, D]."""
    queries, keys, values, douts = given.q, given.k, given.v, given.dout
    lse, delta = given.lse[..., None], given.delta[..., None]
    for start, end in block.chunks(queries.shape[0] * queries.shape[1], scratch.blocking):
        scores = _scores(queries, keys, block, start, end, spec, scratch)
        slope = None
        if spec.softcap is not None:
            # d(cap * tanh(x / cap)) / dx = 1 - tanh^2, in [0, 1]. Clamped for masked scores, whose weight is 0.
            slope = scratch.get("slope", *scores.shape)
            torch.mul(scores, 1 / spec.softcap, out=slope).square_().neg_().add_(1).clamp_(min=0)
        weights = scores.sub_(lse).exp_()
        sums.dv[:, start:end].baddbmm_(weights.transpose(1, 2), douts)
        dscores = scratch.get("dscores", *weights.shape)
        torch.bmm(douts, values[:, start:end].transpose(1, 2), out=dscores)
        dscores.sub_(delta).mul_(weights)
        if slope is not None:
            dscores.mul_(slope)
        sums.dq.baddbmm_(dscores, keys[:, start:end], alpha=spec.scale)
        sums.dk[:, start:end].baddbmm_(dscores.transpose(1, 2), queries, alpha=spec.scale)
