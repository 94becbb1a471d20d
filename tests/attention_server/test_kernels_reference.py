# SPDX-License-Identifier: Apache-2.0
"""The reference kernel against a dense float64 softmax whose mask is written out, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_distca.attention_server.kernels import (
    AttentionShape,
    BackwardInputs,
    Gradients,
    Kernel,
    KernelError,
    make_kernel,
)
from deepspeed_distca.attention_server.kernels import reference as reference_module
from deepspeed_distca.attention_server.kernels.blocks import CPU_BLOCKING, DEVICE_BLOCKING, Single, groups_of
from deepspeed_distca.attention_server.kernels.reference import ReferenceKernel
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch

SENTINEL = 7.0


def scattered(
    pairs: list[tuple[int, int]], rng: np.random.Generator, max_gap: int = 5, causal: bool = True
) -> TaskBatch:
    """Tasks of (queries, keys) in random places: both buffers in their own random order, with gaps."""

    def place(lengths: np.ndarray) -> tuple[np.ndarray, int]:
        start, row = np.zeros(len(lengths), dtype=np.int64), 0
        for i in rng.permutation(len(lengths)):
            row += int(rng.integers(0, max_gap + 1))
            start[i] = row
            row += int(lengths[i])
        return start, row + int(rng.integers(0, max_gap + 1))

    q_len, k_len = (np.array(x, dtype=np.int64) for x in zip(*pairs, strict=True))
    (q_start, q_rows), (k_start, k_rows) = place(q_len), place(k_len)
    return TaskBatch(q_start, q_len, k_start, k_len, q_rows, k_rows, causal=causal)


def covered(start: np.ndarray, length: np.ndarray, rows: int) -> torch.Tensor:
    mask = torch.zeros(rows, dtype=torch.bool)
    for s, n in zip(start, length, strict=True):
        mask[s : s + n] = True
    return mask


def dense(q, k, v, dout, tasks: TaskBatch, spec: AttentionSpec, dlse=None):
    """out, lse, dq, dk, dv in float64, task by task, by autograd through an explicit softmax."""
    q, k, v = (x.double().detach().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=torch.float64)
    lse = torch.zeros(q.shape[1], len(q), dtype=torch.float64)
    loss = 0
    for qs, ql, ks, kl in zip(tasks.q_start, tasks.q_len, tasks.k_start, tasks.k_len, strict=True):
        keys, values = (x[ks : ks + kl].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[qs : qs + ql], keys) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        position = torch.arange(kl - ql, kl)[:, None]
        key = torch.arange(kl)
        visible = (key <= position) | (not tasks.causal)
        if spec.window is not None:
            visible &= key > position - spec.window
        scores = scores.masked_fill(~visible, -torch.inf)
        task_out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        task_lse = scores.logsumexp(-1)
        out[qs : qs + ql], lse[:, qs : qs + ql] = task_out.detach(), task_lse.detach()
        loss = loss + (task_out * dout[qs : qs + ql].double()).sum()
        if dlse is not None:
            loss = loss + (task_lse * dlse[:, qs : qs + ql].double()).sum()
    return out, lse, *torch.autograd.grad(loss, (q, k, v))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in norm. The floor is for gradients that are exactly zero, such as dq of a one-token document."""
    return float((got.double() - expected).norm() / expected.norm().clamp_min(0.02 * expected.numel() ** 0.5))


def inputs(tasks, rng_seed, q_heads, kv_heads, head_dim, v_head_dim, dtype, poison=True):
    generator = torch.Generator().manual_seed(rng_seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    q, dout = normal(tasks.q_rows, q_heads, head_dim), normal(tasks.q_rows, q_heads, v_head_dim)
    k, v = normal(tasks.k_rows, kv_heads, head_dim), normal(tasks.k_rows, kv_heads, v_head_dim)
    if poison:
        q[~covered(tasks.q_start, tasks.q_len, tasks.q_rows)] = torch.nan
        dout[~covered(tasks.q_start, tasks.q_len, tasks.q_rows)] = torch.nan
        k[~covered(tasks.k_start, tasks.k_len, tasks.k_rows)] = torch.nan
        v[~covered(tasks.k_start, tasks.k_len, tasks.k_rows)] = torch.nan
    return q, k, v, dout


def check_case(pairs, spec, heads=(4, 2), dims=(16, 16), dtype=torch.float32, seed=0, tolerance=1e-5, causal=True):
    """Everything that the interface promises, for one batch."""
    rng = np.random.default_rng(seed)
    tasks = scattered(pairs, rng, causal=causal)
    kernel = ReferenceKernel()
    q, k, v, dout = inputs(tasks, seed, *heads, *dims, dtype)
    q_rows = covered(tasks.q_start, tasks.q_len, tasks.q_rows)
    k_rows = covered(tasks.k_start, tasks.k_len, tasks.k_rows)
    expected_out, expected_lse, *expected_grads = dense(q, k, v, dout, tasks, spec)

    out = torch.full((tasks.q_rows, heads[0], dims[1]), SENTINEL, dtype=dtype)
    lse = torch.full((heads[0], tasks.q_rows), SENTINEL, dtype=kernel.grad_dtype(dtype))
    got_out, got_lse = kernel.forward(q, k, v, tasks, spec, (out, lse))
    assert got_out is out and got_lse is lse
    out_tolerance = tolerance if dtype in (torch.float32, torch.float64) else 4e-3
    assert error(out[q_rows], expected_out[q_rows]) < out_tolerance
    assert error(lse[:, q_rows], expected_lse[:, q_rows]) < tolerance
    assert (out[~q_rows] == SENTINEL).all() and (lse[:, ~q_rows] == SENTINEL).all()
    fresh_out, fresh_lse = kernel.forward(q, k, v, tasks, spec)
    assert torch.equal(fresh_out[q_rows], out[q_rows]) and torch.equal(fresh_lse[:, q_rows], lse[:, q_rows])
    assert fresh_lse.dtype == kernel.grad_dtype(dtype)

    exact_delta = (dout.double() * expected_out).sum(-1).t().contiguous()
    # Two ways to the same gradients. delta is exact here; out has been rounded to the input's dtype.
    ways = {
        "out": (out, out_tolerance),
        "delta": (exact_delta.to(kernel.grad_dtype(dtype)), tolerance),
    }
    for way, (given, dk_tolerance) in ways.items():
        dq = torch.full_like(q, SENTINEL)
        dk, dv = (torch.full_like(x, SENTINEL, dtype=kernel.grad_dtype(dtype)) for x in (k, v))
        kernel.backward(BackwardInputs(q, k, v, dout, lse, **{way: given}), tasks, spec, Gradients(dq, dk, dv))
        for name, got, expected, rows, bound in (
            ("dq", dq, expected_grads[0], q_rows, out_tolerance),
            ("dk", dk, expected_grads[1], k_rows, dk_tolerance),
            ("dv", dv, expected_grads[2], k_rows, tolerance),
        ):
            assert error(got[rows], expected[rows]) < bound, (way, name)
            assert (got[~rows] == SENTINEL).all(), (way, name)


def ragged(rng: np.random.Generator, count: int, longest: int) -> list[tuple[int, int]]:
    keys = rng.integers(1, longest + 1, count)
    return [(int(rng.integers(1, n + 1)), int(n)) for n in keys]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
def test_ragged_batches(seed, heads):
    rng = np.random.default_rng(100 + seed)
    spec = AttentionSpec(scale=float(rng.uniform(0.05, 0.6)))
    check_case(ragged(rng, 12, 40) + ragged(rng, 3, 700), spec, heads=heads, seed=seed)


@pytest.mark.parametrize("window", [1, 2, 7, 64, 130, 511, 5000])
def test_windows(window):
    rng = np.random.default_rng(window)
    pairs = [(700, 700), (129, 650), (1, 600), (90, 90), (33, 97), (1, 1)]
    check_case([*pairs, *ragged(rng, 6, 60)], AttentionSpec(scale=0.25, window=window), seed=window)


@pytest.mark.parametrize("softcap", [0.5, 20.0])
@pytest.mark.parametrize("window", [None, 50])
def test_softcap(softcap, window):
    pairs = [(300, 300), (20, 200), (3, 3), (1, 1), (40, 75)]
    check_case(pairs, AttentionSpec(scale=0.4, window=window, softcap=softcap), seed=3)


@pytest.mark.parametrize("dims", [(24, 16), (16, 40), (5, 3)])
def test_value_head_dimension_differs(dims):
    check_case([(200, 260), (17, 31), (1, 1)], AttentionSpec(scale=0.3), dims=dims, seed=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 40])
def test_half_precision_inputs_are_computed_in_fp32(dtype, window):
    rng = np.random.default_rng(8)
    pairs = [(300, 300), (60, 500), (1, 333), *ragged(rng, 10, 50)]
    check_case(pairs, AttentionSpec(scale=0.25, window=window), dtype=dtype, seed=5, dims=(32, 32), tolerance=2e-5)


def test_float64_is_computed_in_float64():
    check_case([(300, 300), (60, 500), (9, 20)], AttentionSpec(scale=0.25), dtype=torch.float64, tolerance=1e-13)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 11, 13, 127, 128, 129, 131, 257, 509, 521, 1031])
def test_single_documents_around_the_block_sizes(length):
    check_case([(length, length)], AttentionSpec(scale=0.3), heads=(2, 1), dims=(8, 8), seed=length)


@pytest.mark.parametrize("window", [None, 40, 3000])
def test_the_large_blocks_of_other_devices(window, monkeypatch):
    monkeypatch.setattr(ReferenceKernel, "blocking", lambda self, device: DEVICE_BLOCKING)
    rng = np.random.default_rng(17)
    # More queries than a block, more keys than a chunk.
    pairs = [(4200, 4300), (60, 9000), (129, 650), *ragged(rng, 20, 100)]
    check_case(pairs, AttentionSpec(scale=0.25, window=window), heads=(1, 1), dims=(8, 8), seed=17)
    check_case([(300, 9000), (200, 200)], AttentionSpec(scale=0.3, window=window), heads=(6, 2), seed=18)


def tiles(rng: np.random.Generator, count: int, longest: int) -> list[tuple[int, int]]:
    """Any number of queries against any number of keys."""
    return [(int(q), int(k)) for q, k in rng.integers(1, longest + 1, (count, 2))]


# On both sides of the block and chunk sizes, and of what is batched.
TILES = [(1, 1), (1, 900), (900, 1), (700, 90), (90, 700), (300, 300), (128, 128), (129, 128), (128, 129)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
def test_full_tiles(seed, heads):
    rng = np.random.default_rng(200 + seed)
    spec = AttentionSpec(scale=float(rng.uniform(0.05, 0.6)))
    check_case([*tiles(rng, 12, 40), *tiles(rng, 3, 700), *TILES[seed::4]], spec, heads=heads, seed=seed, causal=False)


@pytest.mark.parametrize("dims", [(24, 16), (16, 40), (5, 3)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_full_tiles_with_a_softcap_and_other_value_dimensions(softcap, dims):
    check_case(TILES, AttentionSpec(scale=0.4, softcap=softcap), dims=dims, seed=6, causal=False)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-5), (torch.float64, 1e-13)])
def test_full_tiles_in_other_dtypes(dtype, tolerance):
    check_case(TILES, AttentionSpec(scale=0.3), dtype=dtype, seed=7, tolerance=tolerance, causal=False)


def test_full_tiles_in_chunks_with_large_scores():
    spec = AttentionSpec(scale=30.0)
    pairs = [(300, 2000), (2000, 300)]
    check_case(pairs, spec, heads=(2, 2), seed=9, tolerance=3e-4, causal=False)


def test_full_tiles_in_the_large_blocks_of_other_devices(monkeypatch):
    monkeypatch.setattr(ReferenceKernel, "blocking", lambda self, device: DEVICE_BLOCKING)
    pairs = [(4200, 300), (60, 9000), *tiles(np.random.default_rng(17), 20, 100)]
    check_case(pairs, AttentionSpec(scale=0.25), heads=(2, 1), dims=(8, 8), seed=17, causal=False)


def test_large_blocks_take_few_steps_and_bounded_memory():
    device = DEVICE_BLOCKING
    tokens, heads = 131_072, 2
    task = Single(0, tokens, 0, tokens, shift=0, window=None)
    blocks = list(task.query_blocks(device.query_rows(None)))
    chunks = [(b.rows, end - start) for b in blocks for start, end in b.chunks(heads * b.rows, device)]
    assert len(chunks) == 272
    assert max(heads * rows * keys for rows, keys in chunks) <= device.scores
    # A narrow window is not drowned in masked scores.
    assert device.query_rows(64) == 128 and device.query_rows(1000) == 1000 and device.query_rows(10**6) == 4096


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("through", ["older switches", "fp32_precision"])
def test_products_are_exact_whatever_pytorch_is_set_to(device, through):
    matmul = torch.backends.mkldnn.matmul if device == "cpu" else torch.backends.cuda.matmul
    everything = [torch.backends.mkldnn.matmul, torch.backends.cuda.matmul]
    untouched = [m.fp32_precision for m in everything]
    try:
        if through == "older switches":
            torch.set_float32_matmul_precision("medium")
        else:
            matmul.fp32_precision = "tf32"
        given = matmul.fp32_precision
        assert given in ("tf32", "bf16")
        with pytest.raises(ZeroDivisionError), reference_module._exact_products(torch.device(device)):
            assert matmul.fp32_precision == "ieee"
            torch.get_float32_matmul_precision()  # raises where the two ways of setting it are at odds
            raise ZeroDivisionError
        assert matmul.fp32_precision == given
        if through == "older switches":
            assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
        for m, precision in zip(everything, untouched, strict=True):
            m.fp32_precision = precision
    with reference_module._exact_products(torch.device(device)):
        assert [m.fp32_precision for m in everything] == untouched


def test_chunked_keys_with_large_scores():
    """Scores of several hundred: the running maximum has to carry the sum across chunks."""
    check_case([(300, 2000)], AttentionSpec(scale=30.0), heads=(2, 2), dims=(16, 16), seed=9, tolerance=3e-4)


def test_gradient_of_the_lse_folds_into_delta():
    rng = np.random.default_rng(11)
    tasks = scattered([(70, 200), (5, 5), (1, 30), (200, 200)], rng)
    spec = AttentionSpec(scale=0.3)
    q, k, v, dout = inputs(tasks, 11, 4, 2, 16, 16, torch.float32, poison=False)
    dlse = torch.randn(4, tasks.q_rows, generator=torch.Generator().manual_seed(1))
    _, _, *expected = dense(q, k, v, dout, tasks, spec, dlse)
    kernel = ReferenceKernel()
    out, lse = kernel.forward(q, k, v, tasks, spec)
    delta = (dout * out).sum(-1).t() - dlse
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    kernel.backward(BackwardInputs(q, k, v, dout, lse, delta=delta), tasks, spec, Gradients(dq, dk, dv))
    for got, want in zip((dq, dk, dv), expected, strict=True):
        assert error(got, want) < 1e-5


def test_tasks_may_share_keys_in_forward_only():
    """Two halves of a document in one call equal the whole; their backward is refused."""
    generator = torch.Generator().manual_seed(2)
    n, half = 300, 113
    q, k, v = (torch.randn(n, 2, 8, generator=generator) for _ in range(3))
    spec = AttentionSpec(scale=0.35)
    whole = TaskBatch(*(np.array([x]) for x in (0, n, 0, n)), n, n)
    halves = TaskBatch(np.array([half, 0]), np.array([n - half, half]), np.array([0, 0]), np.array([n, half]), n, n)
    kernel = ReferenceKernel()
    out, lse = kernel.forward(q, k, v, whole, spec)
    out_halves, lse_halves = kernel.forward(q, k, v, halves, spec)
    assert error(out_halves, out.double()) < 1e-6 and error(lse_halves, lse.double()) < 1e-6
    grads = Gradients(*(torch.zeros_like(x) for x in (q, k, v)))
    with pytest.raises(KernelError, match=r"task 0 \[0, 300\) and task 1 \[0, 113\) overlap"):
        kernel.backward(BackwardInputs(q, k, v, out, lse, out), halves, spec, grads)


def test_two_thousand_one_token_documents():
    n = 2000
    ones, rows = np.ones(n, dtype=np.int64), np.random.default_rng(0).permutation(n)
    tasks = TaskBatch(rows, ones, rows, ones, n, n)
    q, k, v, dout = inputs(tasks, 0, 4, 2, 8, 8, torch.float32)
    kernel, spec = ReferenceKernel(), AttentionSpec(scale=0.5)
    out, lse = kernel.forward(q, k, v, tasks, spec)
    assert torch.equal(out, v.repeat_interleave(2, 1))
    torch.testing.assert_close(lse, 0.5 * (q * k.repeat_interleave(2, 1)).sum(-1).t())
    dq, dk, dv = torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)
    kernel.backward(BackwardInputs(q, k, v, dout, lse, out), tasks, spec, Gradients(dq, dk, dv))
    torch.testing.assert_close(dq, torch.zeros_like(dq), atol=1e-5, rtol=0)
    torch.testing.assert_close(dk, torch.zeros_like(dk), atol=1e-5, rtol=0)
    torch.testing.assert_close(dv, dout.unflatten(1, (2, 2)).sum(2))
    # They share batched products instead of costing two thousand calls.
    assert len(groups_of(tasks, q.device, 4, None, CPU_BLOCKING)) == 1


def test_empty_batch_writes_nothing():
    empty = np.zeros(0, dtype=np.int64)
    tasks = TaskBatch(empty, empty, empty, empty, 3, 2)
    q, k, v = torch.randn(3, 2, 4), torch.randn(2, 1, 4), torch.randn(2, 1, 4)
    out, lse = torch.full_like(q, SENTINEL), torch.full((2, 3), SENTINEL)
    kernel, spec = ReferenceKernel(), AttentionSpec(scale=1.0)
    kernel.forward(q, k, v, tasks, spec, (out, lse))
    dq, dk, dv = (torch.full_like(x, SENTINEL) for x in (q, k, v))
    kernel.backward(BackwardInputs(q, k, v, q, lse, out), tasks, spec, Gradients(dq, dk, dv))
    assert all((x == SENTINEL).all() for x in (out, lse, dq, dk, dv))


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("window", [None, 1000])
def test_memory_is_linear_in_the_sequence(window):
    n = 16_384
    tasks = TaskBatch(*(np.array([x]) for x in (0, n, 0, n)), n, n)
    q, k, v, dout = inputs(tasks, 0, 1, 1, 16, 16, torch.float32)
    kernel, spec = ReferenceKernel(), AttentionSpec(scale=0.25, window=window)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    with LargestTensor() as largest:
        out, lse = kernel.forward(q, k, v, tasks, spec)
        kernel.backward(BackwardInputs(q, k, v, dout, lse, out), tasks, spec, Gradients(dq, dk, dv))
    assert largest.elements <= n * 16
    # Some rows of it against the dense softmax, so that the bound is that of a right result.
    for row in (0, 1, 511, 9_999, n - 1):
        low = 0 if window is None else max(0, row - window + 1)
        weights = (k[low : row + 1, 0].double() @ q[row, 0].double() * 0.25).softmax(0)
        torch.testing.assert_close(out[row, 0].double(), weights @ v[low : row + 1, 0].double(), atol=1e-5, rtol=0)


def test_score_blocks_are_bounded_for_many_queries_of_few_keys():
    n = 30_000
    tasks = TaskBatch(*(np.array([x]) for x in (0, n, 0, 16)), n, 16, causal=False)
    (group,) = groups_of(tasks, torch.device("cpu"), 8, None, CPU_BLOCKING)
    blocks = list(group.query_blocks(CPU_BLOCKING.queries))
    assert sum(b.rows for b in blocks) == n and max(b.rows for b in blocks) == CPU_BLOCKING.queries
    assert all(list(b.chunks(8 * b.rows, CPU_BLOCKING)) == [(0, 16)] for b in blocks)


@pytest.mark.parametrize("heads", [64, 2])
def test_score_blocks_are_bounded_for_many_heads_and_many_short_tasks(heads):
    count, length = 400, 100
    starts = np.arange(count, dtype=np.int64) * length
    lengths = np.full(count, length, dtype=np.int64)
    tasks = TaskBatch(starts, lengths, starts, lengths, count * length, count * length)
    groups = groups_of(tasks, torch.device("cpu"), heads, None, CPU_BLOCKING)
    assert sum(g.count for g in groups) == count
    assert all(g.count * heads * g.q_size * g.k_size <= CPU_BLOCKING.scores for g in groups)


def test_refusals():
    kernel = ReferenceKernel()
    assert isinstance(kernel, Kernel) and make_kernel("reference").name == "reference"
    device, spec = torch.device("cpu"), AttentionSpec(scale=1.0)
    shape = AttentionShape(4, 4, 8, 8, torch.float32, device)
    with pytest.raises(KernelError, match="6 query heads over 4"):
        kernel.check(AttentionShape(6, 4, 8, 8, torch.float32, device), spec)
    with pytest.raises(KernelError, match="window 0"):
        kernel.check(shape, AttentionSpec(1.0, window=0))
    with pytest.raises(KernelError, match="softcap -1"):
        kernel.check(shape, AttentionSpec(1.0, softcap=-1.0))

    tasks = scattered([(3, 5)], np.random.default_rng(0), max_gap=0)
    q, k, v, dout = inputs(tasks, 0, 2, 2, 4, 4, torch.float32)
    with pytest.raises(KernelError, match=r"q has shape \(2, 2, 4\), expected \(3, 2, 4\)"):
        kernel.forward(q[:2], k, v, tasks, spec)
    with pytest.raises(KernelError, match="out has dtype torch.float64"):
        kernel.forward(q, k, v, tasks, spec, (torch.empty_like(dout, dtype=torch.float64), torch.empty(2, 3)))
    out, lse = kernel.forward(q, k, v, tasks, spec)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for given in ({}, {"out": out, "delta": lse}):
        with pytest.raises(KernelError, match="exactly one of the two"):
            kernel.backward(BackwardInputs(q, k, v, dout, lse, **given), tasks, spec, Gradients(dq, dk, dv))
    with pytest.raises(KernelError, match="dk has dtype torch.bfloat16, expected torch.float32"):
        kernel.backward(BackwardInputs(q, k, v, dout, lse, out), tasks, spec, Gradients(dq, dk.bfloat16(), dv))

    full, windowed = replace(tasks, causal=False), AttentionSpec(1.0, window=3)
    with pytest.raises(KernelError, match="window 3 and a batch with causal=False"):
        kernel.forward(q, k, v, full, windowed)
    with pytest.raises(KernelError, match="window 3 and a batch with causal=False"):
        kernel.backward(BackwardInputs(q, k, v, dout, lse, out), full, windowed, Gradients(dq, dk, dv))


def test_autocast_leaves_products_in_fp32() -> None:
    """Also beyond the keys of one chunk, whose results are added up in place."""
    rng, spec = np.random.default_rng(3), AttentionSpec(0.25)
    tasks = scattered([(700, 700), (30, 40)], rng)
    q, dout = (torch.randn(tasks.q_rows, 2, 16) for _ in range(2))
    k, v = (torch.randn(tasks.k_rows, 1, 16) for _ in range(2))
    kernel = ReferenceKernel()

    def run() -> list[torch.Tensor]:
        out, lse = kernel.forward(q, k, v, tasks, spec, (torch.zeros_like(q), torch.zeros(2, len(q))))
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        kernel.backward(BackwardInputs(q, k, v, dout, lse, out), tasks, spec, Gradients(dq, dk, dv))
        return [out, lse, dq, dk, dv]

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
