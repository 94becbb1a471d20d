# SPDX-License-Identifier: Apache-2.0
"""A batch of CA-tasks as a kernel wants it: row ranges of a query and a key/value buffer, on host and device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

Made = TypeVar("Made")


@dataclass(frozen=True)
class AttentionSpec:
    """What the model asks of core attention, the same for every task of a layer.

    Attributes:
        scale: factor on QK^T before the softmax.
        window: keys a query sees, its own included, or None for no limit; for causal tasks only.
        softcap: scores become softcap * tanh(scores / softcap) before the mask; None leaves them alone.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None

    def for_tasks(self, tasks: TaskBatch) -> AttentionSpec:
        """The same for a batch: full tiles have no window, as there are none where a window would hide a key."""
        return self if tasks.causal or self.window is None else replace(self, window=None)


@dataclass(frozen=True)
class TaskBatch:
    """Tasks for one kernel call. Task i attends from rows [q_start[i], q_start[i] + q_len[i]) of the query buffer to
    rows [k_start[i], k_start[i] + k_len[i]) of the key/value buffer. All tasks are causal and aligned bottom-right:
    the last query sees the last key. Or all are full tiles: every query sees every key of its task, and the results
    are merged with those of other tasks that have the same queries (see ``merging``). Query ranges are disjoint; key
    ranges may overlap in forward, not in backward.

    Attributes:
        q_start, q_len, k_start, k_len: int64 [num_tasks], on the host, at least 1; q_len <= k_len in causal tasks.
        q_rows, k_rows: rows of the two buffers.
        causal: whether the tasks are causal, or full tiles.
    """

    q_start: np.ndarray
    q_len: np.ndarray
    k_start: np.ndarray
    k_len: np.ndarray
    q_rows: int
    k_rows: int
    causal: bool = field(default=True, kw_only=True)
    _made: dict[tuple[Hashable, ...], Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self):
            return
        wrong = np.flatnonzero((self.q_len < 1) | (self.k_len < (self.q_len if self.causal else 1)))
        if len(wrong):
            i = int(wrong[0])
            needs = (
                "a task needs 1 <= queries <= keys (kernels return zeros for leading queries without keys)"
                if self.causal
                else "a full tile needs at least one of each"
            )
            raise ValueError(f"task {i}: {self.q_len[i]} queries against {self.k_len[i]} keys; {needs}")
        if (self.q_start < 0).any() or (self.q_start + self.q_len > self.q_rows).any():
            raise ValueError(f"query ranges leave the buffer of {self.q_rows} rows")
        if (self.k_start < 0).any() or (self.k_start + self.k_len > self.k_rows).any():
            raise ValueError(f"key ranges leave the buffer of {self.k_rows} rows")

    def __len__(self) -> int:
        return len(self.q_start)

    @cached_property
    def max_q(self) -> int:
        return int(self.q_len.max(initial=0))

    @cached_property
    def max_k(self) -> int:
        return int(self.k_len.max(initial=0))

    @cached_property
    def key_spans(self) -> list[slice]:
        """The key rows of all tasks, as ascending ranges that do not touch each other."""
        return _spans(self.k_start, self.k_len)

    @cached_property
    def query_spans(self) -> list[slice]:
        """The query rows, likewise."""
        return _spans(self.q_start, self.q_len)

    @cached_property
    def key_overlap(self) -> tuple[int, int] | None:
        """Two tasks that share a key row, or None."""
        order = np.argsort(self.k_start, kind="stable")
        ends = (self.k_start + self.k_len)[order]
        shared = np.flatnonzero(self.k_start[order][1:] < ends[:-1])
        return (int(order[shared[0]]), int(order[shared[0] + 1])) if len(shared) else None

    @cached_property
    def area(self) -> int:
        """Query-key pairs that are visible without a window."""
        hidden = self.q_len * (self.q_len - 1) // 2 if self.causal else 0
        return int((self.q_len * self.k_len - hidden).sum())

    def once(self, make: Callable[..., Made], *arguments: Hashable) -> Made:
        """``make(self, *arguments)``, called once and kept with the batch: one batch serves every layer.

        Whatever a kernel derives from a batch alone (index tensors, cu_seqlens, host lists) goes through here.
        """
        key = (make, *arguments)
        if key not in self._made:
            self._made[key] = make(self, *arguments)
        return self._made[key]

    def on(self, device: torch.device) -> DeviceTasks:
        """The int32 metadata on a device; made once."""
        return self.once(DeviceTasks.of, device)


def _spans(starts: np.ndarray, lengths: np.ndarray) -> list[slice]:
    order = np.argsort(starts, kind="stable")
    spans: list[slice] = []
    for start, length in zip(starts[order].tolist(), lengths[order].tolist(), strict=True):
        if spans and start <= spans[-1].stop:
            spans[-1] = slice(spans[-1].start, max(spans[-1].stop, start + length))
        else:
            spans.append(slice(start, start + length))
    return spans


@dataclass(frozen=True)
class DeviceTasks:
    """int32 device copies: starts [num_tasks + 1] (the last entry ends the last range) and lengths [num_tasks].

    Where the ranges tile a buffer the starts are its cu_seqlens. Each begins at a multiple of 16 bytes: others
    flash-attention 4 copies first, in every call of its backward.
    """

    q_start: torch.Tensor
    q_len: torch.Tensor
    k_start: torch.Tensor
    k_len: torch.Tensor

    @classmethod
    def of(cls, batch: TaskBatch, device: torch.device) -> DeviceTasks:
        n, apart = len(batch), len(batch) // 4 * 4 + 4  # room for n + 1, a multiple of 4
        host = torch.empty(4, apart, dtype=torch.int32, pin_memory=device.type == "cuda")
        for part, start, length in ((0, batch.q_start, batch.q_len), (2, batch.k_start, batch.k_len)):
            host[part, :n] = torch.from_numpy(start)
            host[part, n] = int(start[-1] + length[-1]) if n else 0
            host[part + 1, :n] = torch.from_numpy(length)
        rows = host.to(device, non_blocking=True)
        return cls(rows[0, : n + 1], rows[1, :n], rows[2, : n + 1], rows[3, :n])
