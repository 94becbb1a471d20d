# SPDX-License-Identifier: Apache-2.0
"""How the flash-attention kernels call their libraries, on a CPU: stand-ins compute with the reference kernel what
they are told by cu_seqlens, seqused, windows and dlse, and refuse what the real libraries get wrong."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepspeed_distca.attention_server.kernels import BackwardInputs, Gradients, KernelError, make_kernel
from deepspeed_distca.attention_server.kernels import packed as packed_module
from deepspeed_distca.attention_server.kernels.api import new_outputs
from deepspeed_distca.attention_server.kernels.libraries import out_from_delta
from deepspeed_distca.attention_server.kernels.packed import PackedRows
from deepspeed_distca.attention_server.kernels.reference import ReferenceKernel
from deepspeed_distca.attention_server.task_batch import AttentionSpec, DeviceTasks, TaskBatch

SENTINEL = 7.0
REFERENCE = ReferenceKernel()


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


# ---------------------------------------------------------------------------------------------------------------
# Stand-ins for the libraries


def stand_in_forward(q, k, v, q_start, q_len, k_start, k_len, scale, mask, softcap, into=None):
    causal, window = mask
    tasks = TaskBatch(q_start, q_len, k_start, k_len, len(q), len(k), causal=causal)
    return REFERENCE.forward(q, k, v, tasks, AttentionSpec(scale, window, softcap), into)


def stand_in_backward(dout, q, k, v, out, lse, dlse, q_start, q_len, k_start, k_len, scale, mask, softcap, dq, dk, dv):
    causal, window = mask
    tasks = TaskBatch(q_start, q_len, k_start, k_len, len(q), len(k), causal=causal)
    delta = (dout.float() * out.float()).sum(-1).t()
    if dlse is not None:
        delta = delta - dlse
    wide_dk, wide_dv = dk.float(), dv.float()
    inputs = BackwardInputs(q, k, v, dout, lse, delta=delta.contiguous())
    REFERENCE.backward(inputs, tasks, AttentionSpec(scale, window, softcap), Gradients(dq, wide_dk, wide_dv))
    dk.copy_(wide_dk)
    dv.copy_(wide_dv)


def host(x: torch.Tensor) -> np.ndarray:
    assert x.dtype == torch.int32 and x.is_contiguous()
    return x.numpy().astype(np.int64)


def mask_of(causal: bool, left: int | None, right: int | None) -> tuple[bool, int | None]:
    """How the libraries read their mask arguments: whether tasks are causal or full, and the window; all but causal,
    with or without a window, and full without any is a mistake."""
    left, right = (-1 if x is None else x for x in (left, right))
    if not causal and left == right == -1:
        return False, None
    assert right == 0 or (causal and right == -1)
    assert causal or left >= 0
    return True, None if left < 0 else left + 1


class StandIn4:
    """flash_attn.cute.interface."""

    def __init__(self):
        self.calls = []

    def _flash_attn_fwd(
        self,
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        softcap,
        window_size_left,
        window_size_right,
        out,
        lse,
    ):
        self.calls.append("forward")
        assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(seqused_q) + 1
        assert max_seqlen_q >= max(256, int(seqused_q.max())) and max_seqlen_k >= max(256, int(seqused_k.max()))
        ranges = [host(x) for x in (cu_seqlens_q[:-1], seqused_q, cu_seqlens_k[:-1], seqused_k)]
        mask = mask_of(causal, window_size_left, window_size_right)
        stand_in_forward(q, k, v, *ranges, softmax_scale, mask, softcap, (out, lse))

    def _flash_attn_bwd(
        self,
        q,
        k,
        v,
        out,
        dout,
        lse,
        *,
        softmax_scale,
        causal,
        softcap,
        window_size_left,
        window_size_right,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        dq,
        dk,
        dv,
        dlse,
    ):
        self.calls.append("backward")
        assert dout.is_contiguous() and lse.is_contiguous() and lse.shape == (q.shape[1], len(q))
        assert max_seqlen_q >= 256 and max_seqlen_k >= 256
        ranges = [host(x) for x in (cu_seqlens_q[:-1], seqused_q, cu_seqlens_k[:-1], seqused_k)]
        for tile in (64, 128):
            assert_work_rows_apart(*ranges[:2], tile)
            assert_work_rows_apart(*ranges[2:], tile)
        mask = mask_of(causal, window_size_left, window_size_right)
        stand_in_backward(dout, q, k, v, out, lse, dlse, *ranges, softmax_scale, mask, softcap or None, dq, dk, dv)


def assert_work_rows_apart(start: np.ndarray, length: np.ndarray, tile: int) -> None:
    """Task i of the library works on rows of an fp32 buffer from (start // tile + i) tiles on."""
    first = start // tile + np.arange(len(start))
    last = first + -(-length // tile)
    order = np.argsort(first)
    assert (first[order][1:] >= last[order][:-1]).all(), "two tasks share work rows"


class StandIn2:
    """flash_attn.flash_attn_interface, 2.7 and later."""

    def __init__(self):
        self.calls = []

    def _ranges(self, q, k, v, cu_q, cu_k, max_q, max_k, max_sequences=65_535):
        cu_q, cu_k = host(cu_q), host(cu_k)
        assert len(cu_q) == len(cu_k) and len(cu_q) - 1 <= max_sequences
        assert cu_q[-1] == len(q) and cu_k[-1] == len(k) == len(v)
        assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] % 8 == 0
        assert max_q != 1, "one query per sequence: the library would drop the mask"
        assert max_q >= np.diff(cu_q).max() and max_k >= np.diff(cu_k).max()
        return cu_q[:-1], np.diff(cu_q), cu_k[:-1], np.diff(cu_k)

    def _flash_attn_varlen_forward(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
    ):
        self.calls.append("forward")
        ranges = self._ranges(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        mask = mask_of(causal, window_size_left, window_size_right)
        assert dropout_p == 0 and alibi_slopes is None
        return *stand_in_forward(q, k, v, *ranges, softmax_scale, mask, softcap or None), None, None

    def _flash_attn_varlen_backward(
        self,
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
    ):
        self.calls.append("backward")
        assert all(x.is_contiguous() for x in (dout, q, k, v, out, softmax_lse))
        ranges = self._ranges(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        mask = mask_of(causal, window_size_left, window_size_right)
        stand_in_backward(
            dout, q, k, v, out, softmax_lse, None, *ranges, softmax_scale, mask, softcap or None, dq, dk, dv
        )


def stand_in_3(style: str) -> types.SimpleNamespace:
    """flash_attn_interface, in the two styles of argument names that are about."""
    two = StandIn2()

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, left, right, softcap):
        two.calls.append("forward")
        ranges = two._ranges(q, k, v, cu_q, cu_k, max(2, max_q), max_k, max_sequences=10**9)
        mask = mask_of(causal, left, right)
        return *stand_in_forward(q, k, v, *ranges, scale, mask, softcap or None), None, None

    def backward(dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, max_q, max_k, scale, causal, left, right, softcap):
        two.calls.append("backward")
        ranges = two._ranges(q, k, v, cu_q, cu_k, max(2, max_q), max_k, max_sequences=10**9)
        mask = mask_of(causal, left, right)
        stand_in_backward(dout, q, k, v, out, lse, None, *ranges, scale, mask, softcap or None, dq, dk, dv)

    if style == "new":

        def _flash_attn_forward(
            q,
            k,
            v,
            k_new=None,
            out_=None,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            max_seqlen_q=None,
            max_seqlen_k=None,
            softmax_scale=None,
            causal=False,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
        ):
            left, right = window_size_left, window_size_right
            common = (max_seqlen_q, max_seqlen_k, softmax_scale, causal, left, right, softcap)
            return forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *common)

        def _flash_attn_backward(
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            sequed_q=None,
            sequed_k=None,
            max_seqlen_q=None,
            max_seqlen_k=None,
            dq=None,
            dk=None,
            dv=None,
            softmax_scale=None,
            is_causal=False,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            deterministic=False,
        ):
            assert sequed_q is None and sequed_k is None
            cu, most = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
            mask = (is_causal, window_size_left, window_size_right, softcap)
            backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *cu, *most, softmax_scale, *mask)

    else:

        def _flash_attn_forward(
            q,
            k,
            v,
            k_new,
            v_new,
            qv,
            out,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale,
            causal,
            window_size=(-1, -1),
            softcap=0.0,
        ):
            assert k_new is v_new is qv is None
            common = (max_seqlen_q, max_seqlen_k, softmax_scale, causal, *window_size, softcap)
            return forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *common)

        def _flash_attn_backward(
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            cu_seqlens_q,
            cu_seqlens_k,
            sequed_q,
            sequed_k,
            max_seqlen_q,
            max_seqlen_k,
            dq,
            dk,
            dv,
            softmax_scale,
            causal,
            window_size=(-1, -1),
            softcap=0.0,
            deterministic=False,
        ):
            assert sequed_q is None and sequed_k is None
            cu, most = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
            mask = (causal, *window_size, softcap)
            backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *cu, *most, softmax_scale, *mask)

    return types.SimpleNamespace(
        calls=two.calls, _flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward
    )


def stand_in_torch(library: torch.library.Library) -> types.SimpleNamespace:
    """torch's operators, implemented for the CPU under their real schemas."""
    two = StandIn2()

    def forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right, **_
    ):
        two.calls.append("forward")
        mask = mask_of(causal, window_size_left, window_size_right)
        ranges = two._ranges(q, k, v, cu_q, cu_k, max_q, max_k)
        out, lse = stand_in_forward(q, k, v, *ranges, scale, mask, None)
        empty = torch.empty(0)
        return out, lse, empty, empty, empty

    def backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        cu_q,
        cu_k,
        max_q,
        max_k,
        dropout,
        causal,
        rng_state,
        unused,
        *,
        scale,
        window_size_left,
        window_size_right,
    ):
        two.calls.append("backward")
        mask = mask_of(causal, window_size_left, window_size_right)
        ranges = two._ranges(q, k, v, cu_q, cu_k, max_q, max_k)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        stand_in_backward(dout, q, k, v, out, lse, None, *ranges, scale, mask, None, dq, dk, dv)
        return dq, dk, dv

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return types.SimpleNamespace(calls=two.calls)


LIBRARIES = ("flash_attn_4", "flash_attn_3:new", "flash_attn_3:old", "flash_attn_2", "torch_varlen")


@pytest.fixture
def install(monkeypatch):
    """Puts a stand-in in a library's place; returns the kernel and the list of calls that it received."""
    library = torch.library.Library("aten", "IMPL")

    def put(name: str):
        name, _, style = name.partition(":")
        if name == "torch_varlen":
            return make_kernel(name), stand_in_torch(library).calls
        stand_in, module = {
            "flash_attn_4": (StandIn4, "flash_attn.cute.interface"),
            "flash_attn_3": (lambda: stand_in_3(style), "flash_attn_interface"),
            "flash_attn_2": (StandIn2, "flash_attn.flash_attn_interface"),
        }[name]
        stand_in = stand_in()
        for i, part in enumerate(module.split(".")[:-1]):
            parent = ".".join(module.split(".")[: i + 1])
            assert part
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        monkeypatch.setitem(sys.modules, module, stand_in)
        return make_kernel(name), stand_in.calls

    yield put
    library._destroy()


# ---------------------------------------------------------------------------------------------------------------
# Batches


def packed_batch() -> TaskBatch:
    q_len, k_len = int64(5, 1, 200, 33), int64(5, 9, 300, 33)
    q_rows, k_rows = int(q_len.sum()), int(k_len.sum())
    return TaskBatch(np.cumsum(q_len) - q_len, q_len, np.cumsum(k_len) - k_len, k_len, q_rows, k_rows)


def ascending_batch() -> TaskBatch:
    """Gaps on both sides, both in order."""
    return TaskBatch(int64(3, 10, 150), int64(7, 130, 1), int64(0, 9, 300), int64(8, 280, 40), 155, 350)


def reordered_batch() -> TaskBatch:
    """The same tasks in another order, common to queries and keys."""
    a, order = ascending_batch(), [2, 0, 1]
    fields = (x[order] for x in (a.q_start, a.q_len, a.k_start, a.k_len))
    return TaskBatch(*fields, a.q_rows, a.k_rows)


def crossed_batch() -> TaskBatch:
    """Queries ascend where keys descend: no order serves both."""
    return TaskBatch(int64(0, 140, 300), int64(130, 130, 50), int64(400, 180, 0), int64(200, 210, 170), 355, 600)


def one_query_batch() -> TaskBatch:
    return TaskBatch(int64(2, 0, 1), int64(1, 1, 1), int64(0, 9, 20), int64(9, 1, 30), 3, 55)


BATCHES = (packed_batch, ascending_batch, reordered_batch, crossed_batch, one_query_batch)


def tall_batch() -> TaskBatch:
    """Full tiles with more queries than keys, out of order."""
    return TaskBatch(
        int64(150, 3, 160), int64(1, 140, 33), int64(60, 0, 70), int64(1, 50, 200), 200, 280, causal=False
    )


def rows_of(start: np.ndarray, length: np.ndarray, rows: int) -> torch.Tensor:
    mask = torch.zeros(rows, dtype=torch.bool)
    for s, n in zip(start, length, strict=True):
        mask[s : s + n] = True
    return mask


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in norm; the floor is for gradients that cancel to zero, as under a window of 1."""
    floor = 0.2 * expected.numel() ** 0.5
    return float((got.float() - expected.float()).norm() / expected.float().norm().clamp_min(floor))


def check_kernel(kernel, tasks: TaskBatch, spec: AttentionSpec, dims=(16, 16), heads=(4, 2), seed=0) -> None:
    """The kernel against the reference: values inside the ranges, nothing outside, out and delta."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    q, dout = normal(tasks.q_rows, heads[0], dims[0]), normal(tasks.q_rows, heads[0], dims[1])
    k, v = normal(tasks.k_rows, heads[1], dims[0]), normal(tasks.k_rows, heads[1], dims[1])
    q_rows = rows_of(tasks.q_start, tasks.q_len, tasks.q_rows)
    k_rows = rows_of(tasks.k_start, tasks.k_len, tasks.k_rows)
    wanted_out, wanted_lse = REFERENCE.forward(q, k, v, tasks, spec)
    # Only where they are defined: allocated rows outside the ranges may hold anything.
    delta = torch.zeros(heads[0], tasks.q_rows)
    delta[:, q_rows] = (dout.float() * wanted_out.float()).sum(-1).t()[:, q_rows]
    wanted = Gradients(q.clone(), k.float(), v.float())
    REFERENCE.backward(BackwardInputs(q, k, v, dout, wanted_lse, delta=delta), tasks, spec, wanted)

    out, lse = torch.full_like(dout, SENTINEL), torch.full((heads[0], tasks.q_rows), SENTINEL)
    got = kernel.forward(q, k, v, tasks, spec, (out, lse))
    assert got[0] is out and got[1] is lse
    fresh_out, fresh_lse = kernel.forward(q, k, v, tasks, spec)
    assert fresh_out.shape == out.shape and fresh_lse.shape == lse.shape and fresh_out.is_contiguous()
    for got_out, got_lse in ((out, lse), (fresh_out, fresh_lse)):
        assert error(got_out[q_rows], wanted_out[q_rows]) < 4e-3
        assert error(got_lse[:, q_rows], wanted_lse[:, q_rows]) < 1e-5
    assert (out[~q_rows] == SENTINEL).all() and (lse[:, ~q_rows] == SENTINEL).all()

    for way in ({"out": out}, {"delta": delta}):
        wide = kernel.grad_dtype(q.dtype)
        grads = Gradients(*(torch.full_like(x, SENTINEL, dtype=t) for x, t in ((q, q.dtype), (k, wide), (v, wide))))
        kernel.backward(BackwardInputs(q, k, v, dout, lse, **way), tasks, spec, grads)
        for name, rows in (("dq", q_rows), ("dk", k_rows), ("dv", k_rows)):
            assert error(getattr(grads, name)[rows], getattr(wanted, name)[rows]) < 6e-3, (name, *way)
            assert (getattr(grads, name)[~rows] == SENTINEL).all(), name


@pytest.mark.parametrize("make_batch", BATCHES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_batches(install, library, make_batch):
    kernel, calls = install(library)
    check_kernel(kernel, make_batch(), AttentionSpec(scale=0.3))
    assert calls == ["forward", "forward", "backward", "backward"]


@pytest.mark.parametrize("make_batch", [*BATCHES, tall_batch])
@pytest.mark.parametrize("library", LIBRARIES)
def test_full_tiles(install, library, make_batch):
    """The stand-ins mask, or refuse more queries than keys, where they are not told that there is no mask."""
    kernel, calls = install(library)
    check_kernel(kernel, replace(make_batch(), causal=False), AttentionSpec(scale=0.3))
    assert calls == ["forward", "forward", "backward", "backward"]


@pytest.mark.parametrize("library", [x for x in LIBRARIES if x != "torch_varlen"])
def test_full_tiles_with_a_softcap(install, library):
    kernel, _ = install(library)
    check_kernel(kernel, tall_batch(), AttentionSpec(scale=0.5, softcap=3.0))


@pytest.mark.parametrize("library", [x for x in LIBRARIES if x != "flash_attn_4"])
def test_full_tiles_with_padded_heads(install, library):
    kernel, _ = install(library)
    check_kernel(kernel, tall_batch(), AttentionSpec(scale=0.3), dims=(20, 12))


@pytest.mark.parametrize("library", LIBRARIES)
def test_full_tiles_with_a_window_are_refused(install, library):
    kernel, calls = install(library)
    tasks, spec = tall_batch(), AttentionSpec(scale=0.3, window=40)
    q, k = (torch.ones(n, 2, 8).bfloat16() for n in (tasks.q_rows, tasks.k_rows))
    with pytest.raises(KernelError, match="window 40 and a batch with causal=False"):
        kernel.forward(q, k, k, tasks, spec)
    inputs = BackwardInputs(q, k, k, q, torch.zeros(2, tasks.q_rows), out=q)
    with pytest.raises(KernelError, match="window 40 and a batch with causal=False"):
        kernel.backward(inputs, tasks, spec, Gradients(*map(torch.empty_like, (q, k, k))))
    assert calls == []


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("window", [1, 40])
def test_windows(install, library, window):
    kernel, _ = install(library)
    check_kernel(kernel, ascending_batch(), AttentionSpec(scale=0.3, window=window))


@pytest.mark.parametrize("library", [x for x in LIBRARIES if x != "torch_varlen"])
def test_softcap(install, library):
    kernel, _ = install(library)
    check_kernel(kernel, ascending_batch(), AttentionSpec(scale=0.5, softcap=3.0))


@pytest.mark.parametrize("library", [x for x in LIBRARIES if x != "flash_attn_4"])
@pytest.mark.parametrize("dims", [(24, 16), (16, 40), (20, 12), (5, 5)])
def test_head_dimensions_are_padded_to_one_multiple_of_eight(install, library, dims):
    kernel, _ = install(library)
    check_kernel(kernel, ascending_batch(), AttentionSpec(scale=0.3), dims=dims)


@pytest.mark.parametrize("library", LIBRARIES)
def test_empty_batch_calls_no_library(install, library):
    kernel, calls = install(library)
    tasks = TaskBatch(int64(), int64(), int64(), int64(), 3, 2)
    q, k, v = torch.ones(3, 2, 8).bfloat16(), torch.ones(2, 1, 8).bfloat16(), torch.ones(2, 1, 8).bfloat16()
    out, lse = torch.full_like(q, SENTINEL), torch.full((2, 3), SENTINEL)
    kernel.forward(q, k, v, tasks, AttentionSpec(1.0), (out, lse))
    kernel.forward(q, k, v, tasks, AttentionSpec(1.0))
    grads = Gradients(*(torch.full_like(x, SENTINEL) for x in (q, k, v)))
    kernel.backward(BackwardInputs(q, k, v, q, lse, out), tasks, AttentionSpec(1.0), grads)
    assert calls == [] and all((x == SENTINEL).all() for x in (out, lse, grads.dq, grads.dk, grads.dv))


@pytest.mark.parametrize("library", LIBRARIES)
def test_overlapping_keys_are_refused_in_backward(install, library):
    kernel, calls = install(library)
    tasks = TaskBatch(int64(0, 2), int64(2, 2), int64(0, 0), int64(2, 4), 4, 4)
    q, k, v = torch.ones(4, 2, 8).bfloat16(), torch.ones(4, 1, 8).bfloat16(), torch.ones(4, 1, 8).bfloat16()
    out, lse = kernel.forward(q, k, v, tasks, AttentionSpec(1.0))
    with pytest.raises(KernelError, match="overlap"):
        grads = Gradients(*(torch.zeros_like(x) for x in (q, k, v)))
        kernel.backward(BackwardInputs(q, k, v, q, lse, out), tasks, AttentionSpec(1.0), grads)
    assert calls == ["forward"]


def test_flash_attention_4_runs_in_place_unless_no_order_ascends(install):
    """In place means that the library sees the buffers themselves."""
    kernel, _ = install("flash_attn_4")
    library = sys.modules["flash_attn.cute.interface"]
    seen = []
    original = library._flash_attn_bwd

    def spy(q, *args, **kwargs):
        seen.append(q.data_ptr())
        return original(q, *args, **kwargs)

    library._flash_attn_bwd = spy
    for make_batch, in_place in (
        (packed_batch, True),
        (ascending_batch, True),
        (reordered_batch, True),
        (crossed_batch, False),
    ):
        tasks, spec = make_batch(), AttentionSpec(0.3)
        q, k, v = (torch.ones(n, 2, 8).bfloat16() for n in (tasks.q_rows, tasks.k_rows, tasks.k_rows))
        out, lse = kernel.forward(q, k, v, tasks, spec)
        grads = Gradients(*(torch.zeros_like(x) for x in (q, k, v)))
        kernel.backward(BackwardInputs(q, k, v, q, lse, out), tasks, spec, grads)
        assert (seen[-1] == q.data_ptr()) == in_place, make_batch.__name__


def test_flash_attention_4_prepares_delta_once_for_all_tasks_that_share_keys(install):
    """A server calls it for one wave of them after the other, with the same inputs."""
    kernel, _ = install("flash_attn_4")
    library = sys.modules["flash_attn.cute.interface"]
    seen, original = [], library._flash_attn_bwd

    def spy(q, k, v, out, *args, dlse, **kwargs):
        seen.append((out, dlse))
        return original(q, k, v, out, *args, dlse=dlse, **kwargs)

    library._flash_attn_bwd = spy
    waves = [TaskBatch(int64(first), int64(40), int64(0), int64(100), 80, 100) for first in (0, 40)]
    q, k, v = (torch.randn(n, 2, 8).bfloat16() for n in (80, 100, 100))
    dout, spec = torch.randn_like(q), AttentionSpec(0.3)
    out, lse = new_outputs(q, v)
    for tasks in waves:
        kernel.forward(q, k, v, tasks, spec, (out, lse))
    delta = (dout.float() * out.float()).sum(-1).t().contiguous()
    inputs = BackwardInputs(q, k, v, dout, lse, delta=delta.clone())
    for tasks in waves:
        got, expected = (Gradients(*(torch.zeros_like(x) for x in (q, k, v))) for _ in range(2))
        kernel.backward(inputs, tasks, spec, got)
        kernel.backward(BackwardInputs(q, k, v, dout, lse, out=out), tasks, spec, expected)
        for name in ("dq", "dk", "dv"):
            assert error(getattr(got, name), getattr(expected, name)) < 1e-2, name
    first, _, second, _ = seen
    assert first[0] is second[0] and first[1] is second[1]
    assert not first[0].any() and torch.equal(first[1], -delta) and torch.equal(inputs.delta, delta)


@pytest.mark.parametrize("make_batch", [reordered_batch, crossed_batch])
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_a_batch_says_is_made_for_the_first_layer_only(install, monkeypatch, library, make_batch):
    kernel, _ = install(library)
    tasks, spec, made = make_batch(), AttentionSpec(0.3), []
    monkeypatch.setattr(PackedRows, "of", counted(PackedRows.of, made))
    monkeypatch.setattr(DeviceTasks, "of", counted(DeviceTasks.of, made))
    q, k, v = (torch.ones(n, 2, 8).bfloat16() for n in (tasks.q_rows, tasks.k_rows, tasks.k_rows))

    def layer() -> None:
        out, lse = kernel.forward(q, k, v, tasks, spec)
        kernel.backward(
            BackwardInputs(q, k, v, q, lse, out), tasks, spec, Gradients(*map(torch.zeros_like, (q, k, v)))
        )

    layer()
    first = len(made)
    layer()
    assert 0 < first == len(made)


def counted(make, calls: list):
    def of(*arguments):
        calls.append(arguments)
        return make(*arguments)

    return of


def test_the_stand_in_notices_shared_work_rows():
    with pytest.raises(AssertionError, match="share work rows"):
        assert_work_rows_apart(int64(1000, 0), int64(500, 1000), 64)


def test_more_sequences_than_a_call_may_have_are_split(install, monkeypatch):
    kernel, calls = install("flash_attn_2")
    count = 70_000
    rows, ones = np.arange(count), np.ones(count, dtype=np.int64)
    tasks = TaskBatch(rows, ones, rows, ones, count, count)
    q, k, v = (torch.randn(count, 1, 8, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    out, lse = kernel.forward(q, k, v, tasks, AttentionSpec(0.3))
    assert torch.equal(out, v) and calls == ["forward", "forward"]
    grads = Gradients(*(torch.full_like(x, SENTINEL) for x in (q, k, v)))
    kernel.backward(BackwardInputs(q, k, v, q, lse, out), tasks, AttentionSpec(0.3), grads)
    assert torch.equal(grads.dv, q) and calls == ["forward", "forward", "backward", "backward"]


def test_packed_rows_beyond_32_bit_offsets_are_split_or_refused(install, monkeypatch):
    kernel, calls = install("flash_attn_2")
    monkeypatch.setattr(packed_module, "MAX_ELEMENTS", 300 * 4 * 16 + 1)
    check_kernel(kernel, packed_batch(), AttentionSpec(0.3))
    assert calls == ["forward"] * 6 + ["backward"] * 6


@pytest.mark.parametrize("library", ["flash_attn_4", "flash_attn_2"])
def test_a_buffer_beyond_32_bit_offsets_is_refused(install, library):
    kernel, calls = install(library)
    rows = 2**31 // (64 * 128)
    tasks = TaskBatch(int64(0), int64(rows), int64(0), int64(rows), rows, rows)
    q = torch.empty(rows, 64, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(rows, 8, 128, dtype=torch.bfloat16, device="meta")
    with pytest.raises(KernelError, match=r"262144 rows x 64 heads x head dimension 128 has 2147483648 elements"):
        kernel.forward(q, k, k, tasks, AttentionSpec(0.1))
    assert calls == []


# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_out_from_delta(dtype):
    generator = torch.Generator().manual_seed(0)
    dout = torch.randn(50, 3, 64, generator=generator).to(dtype)
    out = torch.randn(50, 3, 64, generator=generator)
    dout[7] = 0
    delta = (dout.float() * out).sum(-1).t()
    stand_in = out_from_delta(dout, delta)
    assert stand_in.dtype == dtype and (stand_in[7] == 0).all()
    got = (dout.float() * stand_in.float()).sum(-1).t()
    precision = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    torch.testing.assert_close(got, delta, rtol=precision, atol=precision)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_out_from_delta_of_tiny_and_huge_gradients(size):
    """Their squares leave the range of fp32."""
    dout = torch.randn(9, 2, 16, generator=torch.Generator().manual_seed(0)) * size
    out = torch.randn(9, 2, 16, generator=torch.Generator().manual_seed(1))
    delta = (dout * out).sum(-1).t()
    got = (dout.double() * out_from_delta(dout, delta).double()).sum(-1).t()
    torch.testing.assert_close(got / size, delta.double() / size, rtol=1e-5, atol=1e-5)
