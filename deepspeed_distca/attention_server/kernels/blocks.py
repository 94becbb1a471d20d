# SPDX-License-Identifier: Apache-2.0
"""Which rows of a batch form one matrix product of the reference kernel, and how they are gathered and written back.

A product has B = tasks x key/value heads, M = group heads x query rows, N = keys. A task of its own is cut into blocks
of queries and chunks of keys (:class:`Single`); short tasks of similar length are padded to one size and share one
product (:class:`Batched`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_distca.attention_server.task_batch import TaskBatch

# Tasks of at most this many queries and keys are batched with others of their size.
SMALL_TASK = 128
# A masked score. Finite, so that a row whose first chunk is masked altogether needs no special case: what it adds to
# the running sum is multiplied by exp(MASKED - max) = 0 as soon as a visible key comes, and each query sees its own.
MASKED = -1e30


@dataclass(frozen=True)
class Blocking:
    """How much is computed at a time.

    Attributes:
        queries: rows of a query block.
        keys: rows of a key chunk, at most.
        scores: elements of the score buffer, at most: bounds the memory whatever the number of heads or of batched
            tasks. Forward holds one such buffer, backward two (three with a softcap).
    """

    queries: int
    keys: int
    scores: int

    def query_rows(self, window: int | None) -> int:
        """Rows of a query block. With a window much shorter than the block nearly all scores would be masked ones."""
        if window is None:
            return self.queries
        return min(self.queries, max(CPU_BLOCKING.queries, window))


CPU_BLOCKING = Blocking(queries=128, keys=512, scores=1 << 21)
# 128K tokens of 2 heads take 272 steps instead of 131 thousand; 256 MiB of fp32 scores.
DEVICE_BLOCKING = Blocking(queries=4096, keys=8192, scores=1 << 26)


@dataclass(frozen=True)
class Block:
    """Query rows [first, first + rows) of one task against its keys."""

    task: Single
    first: int
    rows: int

    @property
    def start(self) -> int:
        return self.task.q_start + self.first

    def query_rows(self, x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """[T, Hq, D] -> [Hkv, group * rows, D]."""
        x = x[self.start : self.start + self.rows].to(dtype)
        x = x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        return x.reshape(kv_heads, -1, x.shape[-1])

    def row_scalars(self, x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """[Hq, T] -> [Hkv, group * rows]."""
        return x[:, self.start : self.start + self.rows].to(dtype).reshape(kv_heads, -1)

    def write_queries(self, x: torch.Tensor, value: torch.Tensor) -> None:
        rows = value.unflatten(1, (-1, self.rows)).permute(2, 0, 1, 3)
        x[self.start : self.start + self.rows].unflatten(1, rows.shape[1:3]).copy_(rows)

    def write_row_scalars(self, x: torch.Tensor, value: torch.Tensor) -> None:
        x[:, self.start : self.start + self.rows].copy_(value.reshape(-1, self.rows))

    def chunks(self, score_rows: int, blocking: Blocking) -> Iterator[tuple[int, int]]:
        """Key ranges that some query of the block sees, in chunks."""
        first = self.first + self.task.shift
        low = 0 if self.task.window is None else max(0, first - self.task.window + 1)
        high = min(first + self.rows, self.task.k_len)
        size = max(1, min(blocking.keys, blocking.scores // score_rows))
        for start in range(low, high, size):
            yield start, min(high, start + size)

    def mask(self, scores: torch.Tensor, start: int, end: int) -> None:
        """Overwrite the scores [B, M, N] of keys [start, end) that the causal mask or the window hides."""
        first = self.first + self.task.shift
        last = first + self.rows - 1
        window = self.task.window
        if window is not None and start > last - window:
            window = None  # hides none of these keys
        if window is None and end - 1 <= first:
            return
        query = torch.arange(first, last + 1, device=scores.device)[:, None]
        # Columns before the first hidden one need no pass: with the causal mask alone only the diagonal has any.
        skip = 0 if window is not None else max(0, first + 1 - start)
        key = torch.arange(start + skip, end, device=scores.device)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        scores.unflatten(1, (-1, self.rows))[..., skip:].masked_fill_(hidden, MASKED)


@dataclass(frozen=True)
class Single:
    """One task on its own rows, cut into blocks and chunks.

    Attributes:
        q_start, q_len, k_start, k_len: its rows.
        shift: key position of its first query: see `_shifts`.
        window: keys a query sees, or None.
    """

    q_start: int
    q_len: int
    k_start: int
    k_len: int
    shift: int
    window: int | None

    def key_rows(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[S, Hkv, D] -> [Hkv, keys, D], contiguous."""
        return x[self.k_start : self.k_start + self.k_len].transpose(0, 1).to(dtype).contiguous()

    def query_blocks(self, size: int) -> Iterator[Block]:
        for first in range(0, self.q_len, size):
            yield Block(self, first, min(size, self.q_len - first))

    def write_keys(self, x: torch.Tensor, value: torch.Tensor) -> None:
        x[self.k_start : self.k_start + self.k_len].copy_(value.transpose(0, 1))


@dataclass(frozen=True)
class Batched:
    """Several short tasks, padded to one size: [tasks, q_size] query rows and [tasks, k_size] key rows.

    Padding repeats a valid row (so that nothing outside the ranges is ever read) and is masked; what it computes is
    not written. One block and one chunk each.
    """

    count: int
    q_size: int
    k_size: int
    q_index: torch.Tensor  # [count * q_size] buffer rows
    k_index: torch.Tensor
    q_valid: torch.Tensor  # positions in q_index that are no padding, and the buffer rows there
    q_written: torch.Tensor
    k_valid: torch.Tensor
    k_written: torch.Tensor
    hidden: torch.Tensor  # bool [count, 1, 1, q_size, k_size]

    @classmethod
    def of(cls, tasks: TaskBatch, members: np.ndarray, window: int | None, device: torch.device) -> Batched:
        q_len, k_len = tasks.q_len[members], tasks.k_len[members]
        q_size, k_size = int(q_len.max()), int(k_len.max())
        q_pos, k_pos = np.arange(q_size), np.arange(k_size)
        q_index = tasks.q_start[members, None] + np.minimum(q_pos, q_len[:, None] - 1)
        k_index = tasks.k_start[members, None] + np.minimum(k_pos, k_len[:, None] - 1)
        q_real, k_real = q_pos < q_len[:, None], k_pos < k_len[:, None]
        query = (q_pos + _shifts(tasks)[members, None])[:, :, None]
        key = k_pos[None, None, :]
        hidden = (key > query) | ~q_real[:, :, None] | ~k_real[:, None, :]
        if window is not None:
            hidden |= key <= query - window

        q_index, q_valid, k_index, k_valid = (x.reshape(-1) for x in (q_index, q_real, k_index, k_real))
        arrays = (
            q_index,
            k_index,
            np.flatnonzero(q_valid),
            q_index[q_valid],
            np.flatnonzero(k_valid),
            k_index[k_valid],
            hidden[:, None, None],
        )
        return cls(len(members), q_size, k_size, *(torch.from_numpy(x).to(device) for x in arrays))

    def key_rows(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[S, Hkv, D] -> [tasks * Hkv, keys, D]."""
        x = x[self.k_index].to(dtype).unflatten(0, (self.count, self.k_size))
        return x.transpose(1, 2).reshape(-1, self.k_size, x.shape[-1])

    def query_blocks(self, size: int) -> Iterator[Batched]:
        yield self

    def query_rows(self, x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """[T, Hq, D] -> [tasks * Hkv, group * queries, D]."""
        x = x[self.q_index].to(dtype).unflatten(1, (kv_heads, -1)).unflatten(0, (self.count, self.q_size))
        return x.permute(0, 2, 3, 1, 4).reshape(self.count * kv_heads, -1, x.shape[-1])

    def row_scalars(self, x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """[Hq, T] -> [tasks * Hkv, group * queries]."""
        x = x[:, self.q_index].to(dtype).unflatten(1, (self.count, self.q_size))
        return x.transpose(0, 1).reshape(self.count * kv_heads, -1)

    def write_queries(self, x: torch.Tensor, value: torch.Tensor) -> None:
        rows = value.view(self.count, x.shape[1], self.q_size, -1).transpose(1, 2).flatten(0, 1)
        x.index_copy_(0, self.q_written, rows[self.q_valid].to(x.dtype))

    def write_row_scalars(self, x: torch.Tensor, value: torch.Tensor) -> None:
        rows = value.view(self.count, len(x), self.q_size).transpose(0, 1).flatten(1)
        x.index_copy_(1, self.q_written, rows[:, self.q_valid].to(x.dtype))

    def write_keys(self, x: torch.Tensor, value: torch.Tensor) -> None:
        rows = value.unflatten(0, (self.count, -1)).transpose(1, 2).flatten(0, 1)
        x.index_copy_(0, self.k_written, rows[self.k_valid].to(x.dtype))

    def chunks(self, score_rows: int, blocking: Blocking) -> Iterator[tuple[int, int]]:
        yield 0, self.k_size

    def mask(self, scores: torch.Tensor, start: int, end: int) -> None:
        shape = (self.count, -1, scores.shape[1] // self.q_size, self.q_size, self.k_size)
        scores.view(shape).masked_fill_(self.hidden, MASKED)


def groups_of(
    tasks: TaskBatch, device: torch.device, q_heads: int, window: int | None, blocking: Blocking
) -> list[Single | Batched]:
    """How a batch is computed."""
    small = np.maximum(tasks.q_len, tasks.k_len) <= SMALL_TASK
    ranges = np.stack([tasks.q_start, tasks.q_len, tasks.k_start, tasks.k_len, _shifts(tasks)], axis=1)
    groups: list[Single | Batched] = [
        Single(q_start, q_len, k_start, k_len, shift, window)
        for q_start, q_len, k_start, k_len, shift in ranges[~small].tolist()
    ]
    members = np.flatnonzero(small)
    sizes = np.stack([_bucket(tasks.k_len[members]), _bucket(tasks.q_len[members])])
    for size in np.unique(sizes, axis=1).T:
        same = members[(sizes == size[:, None]).all(0)]
        most = max(1, blocking.scores // (q_heads * int(size.prod())))
        groups += [Batched.of(tasks, same[i : i + most], window, device) for i in range(0, len(same), most)]
    return groups


def _shifts(tasks: TaskBatch) -> np.ndarray:
    """Key position of each task's first query. The last query of a causal task is at the last key; in a full tile the
    first one is there already and the others are behind it, so a mask by position hides nothing."""
    return tasks.k_len - (tasks.q_len if tasks.causal else 1)


def _bucket(length: np.ndarray) -> np.ndarray:
    """Lengths rounded up to 1, 2, 4, 8, 16 and multiples of 16: the padding that a batch of short tasks may cost."""
    power = 2 ** np.ceil(np.log2(np.maximum(length, 1))).astype(np.int64)
    return np.where(length <= 16, power, -(-length // 16) * 16)
