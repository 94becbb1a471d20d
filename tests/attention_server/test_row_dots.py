# SPDX-License-Identifier: Apache-2.0
"""rowsum(a * b): PyTorch's way, and the Triton kernel in Triton's interpreter where Triton is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from deepspeed_distca.attention_server import row_dots as module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 4097, 9000])
def test_products_are_added_exactly(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    a, b = (torch.randn(rows, 3, 40, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    dots = module.row_dots(a, b)
    assert dots.shape == (3, rows) and dots.dtype == torch.promote_types(dtype, torch.float32)
    exact = (a.double() * b.double()).sum(-1).t()
    assert torch.allclose(dots.double(), exact, rtol=1e-5, atol=1e-5)
    lse = torch.randn(3, rows, generator=generator, dtype=dots.dtype)
    some = torch.randperm(rows, generator=generator)[: rows // 2 + 1]
    stats = module.row_stats(a, b, lse, some)
    assert stats.shape == (len(some), 2, 3) and stats.is_contiguous() and torch.equal(stats[:, 0].t(), lse[:, some])
    assert torch.allclose(stats[:, 1].t().double(), exact[:, some], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_fused_kernel_in_the_interpreter() -> None:
    # Triton reads the variable when it is imported.
    run = subprocess.run(
        [sys.executable, "-c", "from tests.attention_server.test_row_dots import interpret; interpret()"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def interpret() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for rows, heads, dim in ((1, 1, 8), (5, 3, 40), (67, 4, 128), (2, 64, 96)):
            generator = torch.Generator().manual_seed(rows)
            a, b = (torch.randn(rows, heads, dim, generator=generator).to(dtype) for _ in range(2))
            out = torch.full((rows, heads), torch.nan)
            module.launch(a, b, out)
            exact = (a.double() * b.double()).sum(-1)
            assert (out - exact).abs().max() <= 1e-5 * dim, (dtype, rows, heads, dim)
            some, lse = torch.randperm(rows, generator=generator)[: rows // 2 + 1], torch.randn(heads, rows)
            out = torch.full((len(some), 2, heads), torch.nan)
            module.launch(a, b, out, lse, some)
            assert torch.equal(out[:, 0].t(), lse[:, some])
            assert (out[:, 1] - exact[some]).abs().max() <= 1e-5 * dim, (dtype, rows, heads, dim)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_fused_kernel_is_used_on_gpus() -> None:
    a, b = (torch.randn(5000, 8, 128, device="cuda").bfloat16() for _ in range(2))
    dots = module.row_dots(a, b)
    assert module._fused.usable
    exact = (a.double() * b.double()).sum(-1)
    assert (dots.t().double() - exact).abs().max() < 1e-3
    some = torch.randperm(5000, device="cuda")[:777]
    lse = torch.randn(8, 5000, device="cuda")
    stats = module.row_stats(a, b, lse, some)
    assert torch.equal(stats[:, 0].t(), lse[:, some]) and (stats[:, 1].double() - exact[some]).abs().max() < 1e-3
    assert module._fused.usable
