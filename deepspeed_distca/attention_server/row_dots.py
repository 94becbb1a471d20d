# SPDX-License-Identifier: Apache-2.0
"""Dot products of rows, rowsum(a * b): one pass by Triton on GPUs where it is installed, else in blocks by PyTorch."""

from __future__ import annotations

import torch

from deepspeed_distca.attention_server.fused import Fused, tl, triton

# Rows taken to fp32 at a time by PyTorch: bounds the temporaries to some tens of MiB.
_ROWS = 4096
_BLOCK = 64


def row_dots(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """rowsum(a * b) over the last dimension, in fp32 at least.

    Args:
        a, b: [T, heads, dim], of one dtype.
        rows: int64 [n], of which rows; None: all of them, n = T.

    Returns:
        [heads, n], a transposed view.
    """
    dtype, n = torch.promote_types(a.dtype, torch.float32), len(a) if rows is None else len(rows)
    out = a.new_empty((n, a.shape[1]), dtype=dtype)
    fits = a.is_cuda and dtype == torch.float32 and a.is_contiguous() and b.is_contiguous()
    if fits and out.numel() and _fused(a, b, out, rows):
        return out.t()
    for i in range(0, n, _ROWS):
        part = slice(i, i + _ROWS)
        which = part if rows is None else rows[part]
        torch.sum(a[which].to(dtype) * b[which], dim=-1, out=out[part])
    return out.t()


def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """The Triton kernel: a and b [T, heads, dim], out fp32 [n, heads] and rows int64 [n], all contiguous."""
    _, heads, dim = a.shape
    grid = (triton.cdiv(out.numel(), _BLOCK),)
    given, indexed = (a, False) if rows is None else (rows, True)
    _dots[grid](a, b, out, given, out.numel(), heads, dim, triton.next_power_of_2(dim), _BLOCK, indexed)


_fused = Fused(launch, "rows are multiplied by PyTorch")


if triton is not None:
    # Triton would take annotations for types of its own.
    @triton.jit
    def _dots(  # type: ignore[no-untyped-def]
        a,
        b,
        out,
        rows,
        n,
        heads: tl.constexpr,
        dim: tl.constexpr,
        columns: tl.constexpr,
        block: tl.constexpr,
        indexed: tl.constexpr,
    ):
        to = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        source = to
        if indexed:
            source = tl.load(rows + to // heads, mask=to < n, other=0) * heads + to % heads
        cols = tl.arange(0, columns)
        at = source[:, None] * dim + cols[None, :]
        mask = (to < n)[:, None] & (cols < dim)[None, :]
        x = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(b + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + to, tl.sum(x * y, axis=1), mask=to < n)
