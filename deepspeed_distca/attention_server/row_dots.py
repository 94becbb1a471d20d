# SPDX-License-Identifier: Apache-2.0
"""Dot products of rows, rowsum(a * b), and the lse beside them: one pass by Triton on GPUs where it is installed, else
in blocks by PyTorch."""

from __future__ import annotations

import torch

from deepspeed_distca.attention_server.fused import Fused, tl, triton

# Rows taken to fp32 at a time by PyTorch: bounds the temporaries to some tens of MiB.
_ROWS = 4096
_BLOCK = 64


def row_dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """rowsum(a * b) over the last dimension, in fp32 at least.

    Args:
        a, b: [T, heads, dim], of one dtype.

    Returns:
        [heads, T], a transposed view.
    """
    out = a.new_empty(a.shape[:2], dtype=torch.promote_types(a.dtype, torch.float32))
    if not (_fits(a, b, out) and _fused(a, b, out)):
        for i in range(0, len(a), _ROWS):
            part = slice(i, i + _ROWS)
            torch.sum(a[part].to(out.dtype) * b[part], dim=-1, out=out[part])
    return out.t()


def row_stats(a: torch.Tensor, b: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """lse and rowsum(a * b) of some rows, as servers get them.

    Args:
        a, b: [T, heads, dim], of one dtype.
        lse: [heads, T], in fp32 at least.
        rows: int64 [n].

    Returns:
        [n, 2, heads], in the dtype of lse.
    """
    out = lse.new_empty((len(rows), 2, a.shape[1]))
    if not (_fits(a, b, out) and lse.is_contiguous() and _fused(a, b, out, lse, rows)):
        out[:, 0] = lse.index_select(1, rows).t()
        for i in range(0, len(rows), _ROWS):
            part = slice(i, i + _ROWS)
            out[part, 1] = torch.sum(a[rows[part]].to(out.dtype) * b[rows[part]], dim=-1)
    return out


def _fits(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    return a.is_cuda and out.dtype == torch.float32 and a.is_contiguous() and b.is_contiguous() and out.numel() > 0


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> None:
    """The Triton kernel: a and b [T, heads, dim] and out fp32 [T, heads]; or, with lse fp32 [heads, T] and rows int64
    [n], out [n, 2, heads]. All contiguous."""
    total, heads, dim = a.shape
    count = (total if rows is None else len(rows)) * heads
    given = (a, a, False) if lse is None else (lse, rows, True)
    _dots[(triton.cdiv(count, _BLOCK),)](
        a, b, out, *given, count, total, heads, dim, triton.next_power_of_2(dim), _BLOCK
    )


_fused = Fused(launch, "rows are multiplied by PyTorch")


if triton is not None:
    # Triton would take annotations for types of its own.
    @triton.jit
    def _dots(  # type: ignore[no-untyped-def]
        a,
        b,
        out,
        lse,
        rows,
        with_lse: tl.constexpr,
        n,
        total,
        heads: tl.constexpr,
        dim: tl.constexpr,
        columns: tl.constexpr,
        block: tl.constexpr,
    ):
        to = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        some = to < n
        source, target = to, to
        if with_lse:
            row, head = tl.load(rows + to // heads, mask=some, other=0), to % heads
            source, target = row * heads + head, to + (to // heads + 1) * heads
            tl.store(out + target - heads, tl.load(lse + head * total + row, mask=some, other=0.0), mask=some)
        cols = tl.arange(0, columns)
        at = source[:, None] * dim + cols[None, :]
        mask = some[:, None] & (cols < dim)[None, :]
        x = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(b + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + target, tl.sum(x * y, axis=1), mask=some)
