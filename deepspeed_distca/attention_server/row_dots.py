# SPDX-License-Identifier: Apache-2.0
"""Dot products of rows, rowsum(a * b): one pass by Triton on GPUs where it is installed, else in blocks by PyTorch."""

from __future__ import annotations

import logging

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

logger = logging.getLogger(__name__)

# Rows taken to fp32 at a time by PyTorch: bounds the temporaries to some tens of MiB.
_ROWS = 4096
_BLOCK = 64


def row_dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """rowsum(a * b) over the last dimension, in fp32 at least.

    Args:
        a, b: [rows, heads, dim], of one dtype.

    Returns:
        [heads, rows], a transposed view.
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and dtype == torch.float32 and a.is_contiguous() and b.is_contiguous() and _fused.usable:
        out = a.new_empty(a.shape[:2], dtype=dtype)
        if _fused(a, b, out):
            return out.t()
    out = a.new_empty(a.shape[:2], dtype=dtype)
    for i in range(0, len(a), _ROWS):
        part = slice(i, i + _ROWS)
        torch.sum(a[part].to(dtype) * b[part], dim=-1, out=out[part])
    return out.t()


class _Fused:
    """The Triton kernel, as long as it works: it is compiled at its first call, for which a machine may lack a C
    compiler."""

    def __init__(self) -> None:
        self.usable = triton is not None

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
        """Fills out [rows, heads] and says whether it could."""
        if not out.numel():
            return True
        try:
            launch(a, b, out)
        except Exception as error:  # whatever Triton or its compiler complain of: PyTorch's way is as exact
            logger.warning("distca: Triton cannot be used here (%s); rows are multiplied by PyTorch", error)
            self.usable = False
        return self.usable


_fused = _Fused()


def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The Triton kernel: a and b [rows, heads, dim] and out fp32 [rows, heads], all contiguous."""
    dim = a.shape[-1]
    _dots[(triton.cdiv(out.numel(), _BLOCK),)](a, b, out, out.numel(), dim, triton.next_power_of_2(dim), _BLOCK)


if triton is not None:
    # Triton would take annotations for types of its own.
    @triton.jit
    def _dots(a, b, out, n, dim: tl.constexpr, columns: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        rows = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        cols = tl.arange(0, columns)
        at = rows[:, None] * dim + cols[None, :]
        mask = (rows < n)[:, None] & (cols < dim)[None, :]
        x = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(b + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + rows, tl.sum(x * y, axis=1), mask=rows < n)
