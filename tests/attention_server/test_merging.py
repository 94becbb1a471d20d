# SPDX-License-Identifier: Apache-2.0
"""Attention over tiles of the keys, merged, against attention over all of them: PyTorch's way, and the Triton kernel
in Triton's interpreter where Triton is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from deepspeed_distca.attention_server import merging
from deepspeed_distca.attention_server.kernels import BackwardInputs, Gradients
from deepspeed_distca.attention_server.kernels.reference import ReferenceKernel
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch

Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out [n, heads, dim] and lse [heads, n] of queries that see all keys."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm().clamp_min(1e-9))


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_tiles(
    merge: Merge, cuts: list[int], given: torch.dtype, wide: torch.dtype, tolerance: float, n=70, heads=3, dim=24
) -> None:
    """Tiles of keys end at `cuts`; their outputs are `given`, what they are merged into is `wide`."""
    q, k, v = (random(i, rows, heads, dim) for i, rows in enumerate((n, cuts[-1], cuts[-1])))
    expected_out, expected_lse = attention(q, k, v)
    math = torch.promote_types(given, torch.float32)
    tiles = [attention(q, k[a:b], v[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
    (out, lse), *others = [(o.to(given), s.to(math)) for o, s in tiles]
    out = out.to(wide)
    for other_out, other_lse in others:
        merge(out, lse, other_out, other_lse)
    assert out.dtype == wide and error(out, expected_out) < tolerance
    assert error(lse, expected_lse) < (1e-12 if math == torch.float64 else 1e-6)


DTYPES = [
    (torch.float64, torch.float64, 1e-12),
    (torch.float32, torch.float32, 1e-6),
    (torch.bfloat16, torch.float32, 3e-3),
    (torch.bfloat16, torch.bfloat16, 6e-3),
    (torch.float16, torch.float16, 1e-3),
]


@pytest.mark.parametrize("cuts", [[40, 100], [1, 64], [30, 50, 51], [99, 100, 300]])
@pytest.mark.parametrize(("given", "wide", "tolerance"), DTYPES)
def test_tiles_merge_into_the_whole(
    given: torch.dtype, wide: torch.dtype, tolerance: float, cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_tiles(merging.merge, cuts, given, wide, tolerance)
    monkeypatch.setattr(merging, "_ROWS", 16)
    check_tiles(merging.merge, cuts, given, wide, tolerance)


def check_rows_without_keys(merge: Merge, dtype: torch.dtype, device: str = "cpu") -> None:
    """Rows 0 and 1 lack one of the two, row 2 both, rows 3 and 4 hardly weigh in one; the last has both."""
    out, more_out = (random(seed, 6, 2, 8).to(device, dtype) for seed in (1, 2))
    lse, more_lse = (random(seed, 2, 6).to(device, torch.promote_types(dtype, torch.float32)) for seed in (3, 4))
    lse[:, [0, 2]] = -torch.inf
    more_lse[:, [1, 2]] = -torch.inf
    lse[:, 3], more_lse[:, 4] = -3e4, -3e4
    old = out.clone(), lse.clone()
    merge(out, lse, more_out, more_lse)
    assert torch.equal(out[[0, 3]], more_out[[0, 3]]) and torch.equal(lse[:, [0, 3]], more_lse[:, [0, 3]])
    assert torch.equal(out[[1, 4]], old[0][[1, 4]]) and torch.equal(lse[:, [1, 4]], old[1][:, [1, 4]])
    assert not out[2].any() and (lse[:, 2] == -torch.inf).all()
    share = torch.exp(old[1][:, 5].double() - torch.logaddexp(old[1], more_lse)[:, 5].double())[:, None]
    expected = old[0][5].double() * share + more_out[5].double() * (1 - share)
    assert error(out[5], expected) < 6e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_without_keys_take_the_other_ones(dtype: torch.dtype) -> None:
    check_rows_without_keys(merging.merge, dtype)


def check_views(merge: Merge, dtype: torch.dtype, wide: torch.dtype, device: str = "cpu") -> None:
    """Rows of larger buffers, heads last, a transposed lse: merged as such, and all else is left alone."""
    heads, dim, rows = 3, 20, slice(9, 76)
    math = torch.promote_types(dtype, torch.float32)
    out, lse = random(1, 90, heads, dim).to(device, wide), random(2, heads, 90).to(device, math)
    more_out = random(3, 67, dim, heads).to(device, dtype).transpose(1, 2)
    more_lse = random(4, 67, 2 * heads).to(device, math).t()[::2]
    expected_out, expected_lse = out.clone(), lse.clone()
    merged_lse = torch.logaddexp(lse[:, rows], more_lse)
    share, more_share = ((x - merged_lse).exp().t()[..., None] for x in (lse[:, rows], more_lse))
    expected_out[rows] = (out[rows] * share + more_out * more_share).to(wide)
    expected_lse[:, rows] = merged_lse
    transposed, again = lse.t().contiguous(), out.clone()
    merge(out[rows], lse[:, rows], more_out, more_lse)
    merge(again[rows], transposed.t()[:, rows], more_out, more_lse)
    for got_out, got_lse in ((out, lse), (again, transposed.t())):
        torch.testing.assert_close(got_out, expected_out)
        torch.testing.assert_close(got_lse, expected_lse)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_tiles_add_up_to_those_of_whole_tasks(
    seed: int, softcap: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    """Causal tasks whose leading keys are cut off into two full tiles."""
    rng, kernel, spec = np.random.default_rng(seed), ReferenceKernel(), AttentionSpec(0.3, softcap=softcap)
    q_len = rng.integers(1, 200, 5)
    one, two, own = rng.integers(1, 150, 5), rng.integers(1, 300, 5), q_len + rng.integers(0, 20, 5)
    keys = one + two + own
    q_start, k_start = np.cumsum(q_len) - q_len, np.cumsum(keys) - keys
    rows = int(q_len.sum()), int(keys.sum())
    whole = TaskBatch(q_start, q_len, k_start, keys, *rows)
    parts = [
        TaskBatch(q_start, q_len, k_start + one + two, own, *rows),
        TaskBatch(q_start, q_len, k_start, one, *rows, causal=False),
        TaskBatch(q_start, q_len, k_start + one, two, *rows, causal=False),
    ]
    q, dout = (random(i, rows[0], 4, 16).to(dtype) for i in range(2))
    k, v = (random(i, rows[1], 2, 16).to(dtype) for i in range(2, 4))
    expected_out, expected_lse = kernel.forward(q, k, v, whole, spec)
    out, lse = kernel.forward(q, k, v, parts[0], spec)
    for part in parts[1:]:
        merging.merge(out, lse, *kernel.forward(q, k, v, part, spec))
    assert error(out, expected_out.double()) < tolerance and error(lse, expected_lse.double()) < tolerance

    given = BackwardInputs(q, k, v, dout, lse, delta=(dout * out).sum(-1).t())
    expected, sums = (Gradients(*(torch.zeros_like(x) for x in (q, k, v))) for _ in range(2))
    kernel.backward(BackwardInputs(q, k, v, dout, expected_lse, expected_out), whole, spec, expected)
    for part in parts:
        grads = Gradients(*(torch.zeros_like(x) for x in (q, k, v)))
        kernel.backward(given, part, spec, grads)
        for name in ("dq", "dk", "dv"):
            getattr(sums, name).add_(getattr(grads, name))
    for name in ("dq", "dk", "dv"):
        assert error(getattr(sums, name), getattr(expected, name).double()) < tolerance, name


@pytest.mark.parametrize(("given", "wide"), [x[:2] for x in DTYPES])
def test_views_are_merged_in_place(given: torch.dtype, wide: torch.dtype) -> None:
    check_views(merging.merge, given, wide)


def test_nothing_is_merged_with_nothing() -> None:
    for shape in ((0, 3, 8), (4, 0, 8)):
        out, lse = torch.zeros(shape), torch.zeros(shape[1], shape[0])
        merging.merge(out, lse, out.clone(), lse.clone())


def test_shapes_that_do_not_fit_are_refused() -> None:
    out, lse = torch.zeros(5, 2, 8), torch.zeros(2, 5)
    for more_out, more_lse in ((torch.zeros(6, 2, 8), lse), (out, lse.t()), (out, torch.zeros(1, 5))):
        with pytest.raises(ValueError, match=r"\(5, 2, 8\), \(2, 5\), "):
            merging.merge(out, lse, more_out, more_lse)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_fused_kernel_in_the_interpreter() -> None:
    # Triton reads the variable when it is imported.
    run = subprocess.run(
        [sys.executable, "-c", "from tests.attention_server.test_merging import interpret; interpret()"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def interpret() -> None:
    for given, wide, tolerance in DTYPES[1:]:
        check_tiles(merging.launch, [40, 100], given, wide, tolerance)
        check_tiles(merging.launch, [1, 5, 64], given, wide, tolerance, n=5, heads=2, dim=40)
        check_views(merging.launch, given, wide)
    for dtype in (torch.float32, torch.bfloat16):
        check_rows_without_keys(merging.launch, dtype)
