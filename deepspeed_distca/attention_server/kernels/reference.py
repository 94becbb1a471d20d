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
from typing import Any

import numpy as np
import torch

from deepspeed_distca.attention_server.kernels.api import (
    AttentionShape,
    BackwardInputs,
    Gradients,
    check_backward,
    check_forward,
    check_shape,
    new_outputs,
)
from deepspeed_distca.attention_server.kernels.blocks import (
    CPU_BLOCKING,
    DEVICE_BLOCKING,
    Batched,
    Block,
    Blocking,
    groups_of,
)
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch


class ReferenceKernel:
    """Attention in fp32 arithmetic for bf16, fp16 and fp32 input, in float64 for float64 input, on any device."""

    name = "reference"

    def missing(self) -> str | None:
        return None

    def load(self) -> None:
        pass

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return _math_dtype(dtype)

    def check(self, shape: AttentionShape, spec: AttentionSpec) -> None:
        check_shape(self.name, shape, spec)

    @staticmethod
    def blocking(device: torch.device) -> Blocking:
        """How much is computed at a time on a device."""
        return CPU_BLOCKING if device.type == "cpu" else DEVICE_BLOCKING

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
        math = _math_dtype(q.dtype)
        out, lse = new_outputs(q, v) if into is None else into
        blocking = self.blocking(q.device)
        scratch = _Scratch(blocking, q.device, math)
        rows = blocking.query_rows(spec.window)
        with _exact_products(q.device):
            for group in tasks.once(groups_of, q.device, q.shape[1], spec.window, blocking):
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
        check_backward(self.name, inputs, tasks, spec, grads, self.grad_dtype(q.dtype))
        math, kv_heads = _math_dtype(q.dtype), k.shape[1]
        blocking = self.blocking(q.device)
        scratch = _Scratch(blocking, q.device, math)
        rows = blocking.query_rows(spec.window)
        with _exact_products(q.device):
            for group in tasks.once(groups_of, q.device, q.shape[1], spec.window, blocking):
                keys, values = group.key_rows(k, math), group.key_rows(v, math)
                dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
                for block in group.query_blocks(rows):
                    queries, douts = (block.query_rows(t, kv_heads, math) for t in (q, inputs.dout))
                    lse = block.row_scalars(inputs.lse, kv_heads, math)
                    if inputs.delta is not None:
                        delta = block.row_scalars(inputs.delta, kv_heads, math)
                    elif inputs.out is not None:
                        delta = (douts * block.query_rows(inputs.out, kv_heads, math)).sum(-1)
                    sums = Gradients(torch.zeros_like(queries), dkeys, dvalues)
                    given = BackwardInputs(queries, keys, values, douts, lse)
                    _backward_block(given, delta, block, spec, scratch, sums)
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
    backends: Any = torch.backends  # whose modules replace themselves by objects: no checker sees those
    matmul = backends.mkldnn.matmul if device.type == "cpu" else backends.cuda.matmul
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

    def __init__(self, blocking: Blocking, device: torch.device, dtype: torch.dtype) -> None:
        self.blocking = blocking
        self._device, self._dtype = device, dtype
        self._buffers: dict[str, torch.Tensor] = {}

    def get(self, name: str, *shape: int) -> torch.Tensor:
        size = int(np.prod(shape))
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = torch.empty(size, device=self._device, dtype=self._dtype)
        return buffer[:size].view(shape)


# ---------------------------------------------------------------------------------------------------------------
# The arithmetic of one block, in the shapes of its products: see `blocks`.


def _scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    block: Block | Batched,
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
    block: Block | Batched,
    spec: AttentionSpec,
    scratch: _Scratch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, M, Dv] and lse [B, M] of one query block."""
    chunks = block.chunks(queries.shape[0] * queries.shape[1], scratch.blocking)
    start, end = next(chunks)
    scores = _scores(queries, keys, block, start, end, spec, scratch)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    acc = torch.bmm(weights, values[:, start:end])
    for start, end in chunks:
        scores = _scores(queries, keys, block, start, end, spec, scratch)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        decay = (top - new_top).exp_()
        top = new_top
        weights = scores.sub_(top).exp_()
        total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        acc.mul_(decay).baddbmm_(weights, values[:, start:end])
    return acc.div_(total), (top + total.log()).squeeze(-1)


def _backward_block(
    given: BackwardInputs,
    delta: torch.Tensor,
    block: Block | Batched,
    spec: AttentionSpec,
    scratch: _Scratch,
    sums: Gradients,
) -> None:
    """Adds the gradients of one query block, all in the shapes of the products: q, dout and dq [B, M, D], lse and
    delta [B, M], k, v, dk and dv [B, keys, D]."""
    queries, keys, values, douts = given.q, given.k, given.v, given.dout
    lse, delta = given.lse[..., None], delta[..., None]
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
