# SPDX-License-Identifier: Apache-2.0
"""Packing of task ranges: row by row against the ranges themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepspeed_distca.attention_server.kernels.packed import PackedRows, packed_calls
from deepspeed_distca.attention_server.task_batch import TaskBatch

CPU = torch.device("cpu")


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def rows_of(start: np.ndarray, length: np.ndarray) -> list[int]:
    return [row for s, n in zip(start, length, strict=True) for row in range(s, s + n)]


def test_ranges_behind_each_other_are_a_view():
    packed = PackedRows.of(int64(2, 5, 6), int64(3, 1, 4), CPU)
    assert (packed.rows, packed.max_seqlen, packed.start, packed.index) == (8, 4, 2, None)
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 8] and packed.cu_seqlens.dtype == torch.int32
    x = torch.arange(24.0).view(12, 2)
    view = packed.take(x)
    assert view.data_ptr() == x[2:].data_ptr() and torch.equal(view, x[2:10])
    packed.put(x, torch.zeros(8, 2, dtype=torch.float64))
    assert (x[2:10] == 0).all() and (x[[0, 1, 10, 11]] != 0).sum() == 7  # x[0, 0] was zero already


@pytest.mark.parametrize("seed", range(5))
def test_any_other_ranges_are_gathered_and_scattered(seed):
    rng = np.random.default_rng(seed)
    count = 9
    length = rng.integers(1, 7, count)
    order = rng.permutation(count)
    start = np.zeros(count, dtype=np.int64)
    start[order] = np.cumsum(length[order] + 1) - length[order]
    total = int((start + length).max()) + 2
    packed = PackedRows.of(start, length, CPU)
    rows = rows_of(start, length)
    assert packed.index.tolist() == rows and packed.rows == len(rows)
    assert packed.cu_seqlens.tolist() == [0, *np.cumsum(length).tolist()]

    x = torch.from_numpy(rng.normal(size=(total, 3)))
    assert torch.equal(packed.take(x), x[rows])
    assert torch.equal(packed.take(x.t(), dim=1), x[rows].t())
    target = torch.full((3, total), 9.0)
    value = torch.from_numpy(rng.normal(size=(3, len(rows))))
    packed.put(target, value, dim=1)
    assert torch.equal(target[:, rows], value.float())
    others = sorted(set(range(total)) - set(rows))
    assert (target[:, others] == 9).all()


def batch(q_len: np.ndarray, k_len: np.ndarray, k_start: np.ndarray | None = None, causal: bool = True) -> TaskBatch:
    q_start = np.cumsum(q_len) - q_len
    k_start = np.cumsum(k_len) - k_len if k_start is None else k_start
    q_rows, k_rows = int(q_len.sum()), int((k_start + k_len).max(initial=0))
    return TaskBatch(q_start, q_len, k_start, k_len, q_rows, k_rows, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
def test_calls_are_bounded_in_sequences_and_rows_and_cover_every_task_once(causal):
    rng = np.random.default_rng(0)
    q_len, k_len = rng.integers(1, 30, (2, 101))
    tasks = batch(np.minimum(q_len, k_len) if causal else q_len, k_len, causal=causal)
    for max_sequences, max_rows in ((None, None), (7, None), (None, 64), (7, 64), (1, None), (200, 10**9)):
        calls = packed_calls(tasks, CPU, max_sequences, max_rows)
        assert calls is packed_calls(tasks, CPU, max_sequences, max_rows)
        q_lengths = [n for call in calls for n in call.q.cu_seqlens.diff().tolist()]
        k_lengths = [n for call in calls for n in call.k.cu_seqlens.diff().tolist()]
        assert q_lengths == tasks.q_len.tolist() and k_lengths == tasks.k_len.tolist()
        # Packed buffers stay views when they are cut.
        assert all(call.q.index is None and call.k.index is None and call.causal == causal for call in calls)
        if max_sequences is not None:
            assert all(len(call.q.cu_seqlens) - 1 <= max_sequences for call in calls)
        if max_rows is not None:
            assert all(max(call.q.rows, call.k.rows) <= max_rows for call in calls)
    assert len(packed_calls(tasks, CPU)) == 1
    assert len(packed_calls(tasks, CPU, 7)) == 15


def test_a_task_above_the_row_limit_gets_its_own_call():
    tasks = batch(int64(1, 5, 2), int64(3, 50, 3))
    assert [call.k.rows for call in packed_calls(tasks, CPU, None, 10)] == [3, 50, 3]
    tall = batch(int64(3, 50, 3), int64(1, 5, 2), causal=False)
    assert [call.q.rows for call in packed_calls(tall, CPU, None, 10)] == [3, 50, 3]


def test_a_call_may_be_exactly_full():
    tasks = batch(int64(1, 1, 1), int64(4, 6, 1))
    assert [call.k.rows for call in packed_calls(tasks, CPU, None, 10)] == [10, 1]
    tall = batch(int64(4, 6, 1), int64(1, 1, 1), causal=False)
    assert [call.q.rows for call in packed_calls(tall, CPU, None, 10)] == [10, 1]


def test_shared_keys_are_packed_once_for_each_task():
    tasks = batch(int64(2, 3), int64(2, 5), k_start=int64(0, 0))
    (call,) = packed_calls(tasks, CPU)
    assert call.k.index.tolist() == [0, 1, 0, 1, 2, 3, 4]


def test_an_empty_batch_is_no_call():
    assert packed_calls(batch(int64(), int64()), CPU, 10, 10) == []
