# SPDX-License-Identifier: Apache-2.0
"""Task ranges as packed buffers with cu_seqlens, for libraries that know nothing else.

A range that lies behind its predecessor in the buffer is taken as it is; other ranges are gathered and scattered.
Index arrays are made on the host and kept with the batch, so that no layer synchronises the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_distca.attention_server.task_batch import TaskBatch


@dataclass(frozen=True)
class PackedRows:
    """The rows of some ranges of one buffer, in the order of the ranges: a slice of it, or a gather.

    Attributes:
        rows: how many.
        cu_seqlens: int32 [num_tasks + 1] on the device, within the packed rows.
        max_seqlen: longest range.
        start: first row where the ranges are one slice of the buffer, else None.
        index: int64 [rows] on the device where they are not, else None.
    """

    rows: int
    cu_seqlens: torch.Tensor
    max_seqlen: int
    start: int | None
    index: torch.Tensor | None

    @classmethod
    def of(cls, start: np.ndarray, length: np.ndarray, device: torch.device) -> PackedRows:
        ends = np.cumsum(length)
        rows = int(ends[-1])
        cu_seqlens = _to_device(np.concatenate(([0], ends)).astype(np.int32), device)
        shift = start - (ends - length)  # buffer row minus packed row, per range
        if (shift == shift[0]).all():
            return cls(rows, cu_seqlens, int(length.max()), int(start[0]), None)
        index = np.arange(rows, dtype=np.int64) + np.repeat(shift, length)
        return cls(rows, cu_seqlens, int(length.max()), None, _to_device(index, device))

    def take(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The packed rows of x along `dim`; a view where they are a slice."""
        if self.index is None:
            return x.narrow(dim, self.start, self.rows)
        return x.index_select(dim, self.index)

    def put(self, x: torch.Tensor, value: torch.Tensor, dim: int = 0) -> None:
        """Write packed rows back into x along `dim`; converts to x's dtype. The ranges must be disjoint."""
        if self.index is None:
            x.narrow(dim, self.start, self.rows).copy_(value)
        else:
            x.index_copy_(dim, self.index, value.to(x.dtype))


@dataclass(frozen=True)
class PackedCall:
    """The tasks of one library call, packed on both sides."""

    q: PackedRows
    k: PackedRows


def packed_calls(
    tasks: TaskBatch, device: torch.device, max_sequences: int | None = None, max_rows: int | None = None
) -> list[PackedCall]:
    """The batch as library calls, in order; none for an empty batch.

    Args:
        max_sequences: most tasks in a call.
        max_rows: most packed query or key rows in a call. Key rows that several tasks share are packed once for each,
            so there can be more of them than the buffer has. A task of its own that is larger still gets a call.
    """
    return tasks.once(_packed_calls, device, max_sequences, max_rows)


def _packed_calls(
    tasks: TaskBatch, device: torch.device, max_sequences: int | None, max_rows: int | None
) -> list[PackedCall]:
    return [
        PackedCall(
            PackedRows.of(tasks.q_start[part], tasks.q_len[part], device),
            PackedRows.of(tasks.k_start[part], tasks.k_len[part], device),
        )
        for part in _parts(tasks, max_sequences, max_rows)
    ]


def _parts(tasks: TaskBatch, max_sequences: int | None, max_rows: int | None) -> Iterator[slice]:
    # A task has at most as many queries as keys, so key rows bound both.
    ends = np.cumsum(tasks.k_len)
    first = 0
    while first < len(tasks):
        last = len(tasks)
        if max_sequences is not None:
            last = min(last, first + max_sequences)
        if max_rows is not None:
            before = int(ends[first] - tasks.k_len[first])
            last = min(last, max(first + 1, int(np.searchsorted(ends, before + max_rows, side="right"))))
        yield slice(first, last)
        first = last


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    # Pinned: a copy from pageable memory would wait for the stream.
    return host.pin_memory().to(device, non_blocking=True)
