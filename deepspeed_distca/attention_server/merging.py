# SPDX-License-Identifier: Apache-2.0
"""Attention of the same queries over different keys becomes attention over all of them: one pass by Triton on GPUs
where it is installed, else in blocks by PyTorch."""

from __future__ import annotations

import torch

from deepspeed_distca.attention_server.fused import Fused, tl, triton

# Rows taken to fp32 at a time by PyTorch: bounds the temporaries to some tens of MiB.
_ROWS = 4096
_BLOCK = 16


@torch.no_grad()
def merge(out: torch.Tensor, lse: torch.Tensor, more_out: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Merges attention of the same queries over other keys, in place.

    The lse becomes logaddexp(lse, more_lse), and each of the two outputs counts by its share of the sum of
    exponentials. A row whose lse is -inf has seen no key: it takes the other's values exactly, whatever finite ones
    it holds, and becomes zero where the other has seen none either. Computed in fp32 at least; rounded once.

    Args:
        out, more_out: [n, heads, dim], of any strides; ``out`` may have the wider dtype.
        lse, more_lse: [heads, n], of any strides.

    Raises:
        ValueError: shapes that are not these.
    """
    n, heads, _ = out.shape
    if more_out.shape != out.shape or not lse.shape == more_lse.shape == (heads, n):
        shapes = ", ".join(str(tuple(x.shape)) for x in (out, lse, more_out, more_lse))
        raise ValueError(f"out, lse, more_out and more_lse have the shapes {shapes}")
    wide = torch.promote_types(out.dtype, torch.float32)
    if out.is_cuda and wide == torch.float32 and out.numel() and _fused(out, lse, more_out, more_lse):
        return
    for i in range(0, n, _ROWS):
        part = slice(i, i + _ROWS)
        one, other = (x[:, part].t().to(wide) for x in (lse, more_lse))
        neither = (one == -torch.inf) & (other == -torch.inf)
        shares = (torch.sigmoid(gap).masked_fill_(neither, 0)[..., None] for gap in (one - other, other - one))
        merged_lse = torch.logaddexp(one, other)
        out[part] = sum(x[part].to(wide) * share for x, share in zip((out, more_out), shares, strict=True))
        lse[:, part] = merged_lse.t()


def launch(out: torch.Tensor, lse: torch.Tensor, more_out: torch.Tensor, more_lse: torch.Tensor) -> None:
    """The Triton kernel: what `merge` takes, but fp64."""
    n, heads, dim = out.shape
    strides = (stride for x in (out, lse, more_out, more_lse) for stride in x.stride())
    grid = (triton.cdiv(n * heads, _BLOCK),)
    columns = triton.next_power_of_2(dim)
    _merge[grid](out, lse, more_out, more_lse, n * heads, *strides, heads, dim, columns, _BLOCK)


_fused = Fused(launch, "attention is merged by PyTorch")


if triton is not None:
    # Triton would take annotations for types of its own.
    @triton.jit
    def _merge(  # type: ignore[no-untyped-def]
        out,
        lse,
        more_out,
        more_lse,
        n,
        out_row,
        out_head,
        out_column,
        lse_head,
        lse_row,
        more_out_row,
        more_out_head,
        more_out_column,
        more_lse_head,
        more_lse_row,
        heads: tl.constexpr,
        dim: tl.constexpr,
        columns: tl.constexpr,
        block: tl.constexpr,
    ):
        to = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        row, head, some = to // heads, to % heads, to < n
        lse_at = lse + row * lse_row + head * lse_head
        one = tl.load(lse_at, mask=some, other=0.0).to(tl.float32)
        other = tl.load(more_lse + row * more_lse_row + head * more_lse_head, mask=some, other=0.0).to(tl.float32)

        cols = tl.arange(0, columns).to(tl.int64)
        mask = some[:, None] & (cols < dim)[None, :]
        out_at = out + (row * out_row + head * out_head)[:, None] + (cols * out_column)[None, :]
        more_at = (row * more_out_row + head * more_out_head)[:, None] + (cols * more_out_column)[None, :]
        x = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(more_out + more_at, mask=mask, other=0.0).to(tl.float32)

        # The smaller of the two shares is rest / (1 + rest): exactly 0 where its lse is -inf, so the other is 1.
        top = tl.maximum(one, other)
        neither = top == -float("inf")
        gap = tl.where(neither, 0.0, one - other)
        rest = tl.exp(-tl.abs(gap))
        less = rest / (1 + rest)
        share = tl.where(neither, 0.0, tl.where(gap >= 0, 1 - less, less))
        more_share = tl.where(neither, 0.0, tl.where(gap >= 0, less, 1 - less))
        # Several threads may have loaded an element that only one of them stores.
        tl.debug_barrier()
        tl.store(lse_at, top + tl.log(1 + rest), mask=some)
        tl.store(out_at, x * share[:, None] + y * more_share[:, None], mask=mask)
