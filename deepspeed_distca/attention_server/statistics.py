# SPDX-License-Identifier: Apache-2.0
"""What the last step looked like: balance, bytes, planning time and the time the kernels took on this rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from deepspeed_distca.attention_server.kernels import Kernel


@dataclass
class StepStatistics:
    """Of the micro-batches of one optimizer step, all layers together.

    Attributes:
        balance_before, balance_after: largest over mean predicted load of the servers, with every task at home and
            as planned. Layers wait for each other, so it is the sum of the largest over the sum of the means.
        bytes_sent: what this rank sends, forward and backward, as home and as server.
        bytes_sent_max, bytes_sent_mean: the same over the servers of the group.
        planning_ms: agreeing and planning, on this rank.
        predicted_server_seconds: predicted seconds of core attention of each server.
        server_seconds: measured seconds of this rank's attention kernels, recomputation included.
        micro_batches: how many of them there were.
    """

    balance_before: float = 1.0
    balance_after: float = 1.0
    bytes_sent: int = 0
    bytes_sent_max: int = 0
    bytes_sent_mean: float = 0.0
    planning_ms: float = 0.0
    predicted_server_seconds: list[float] = field(default_factory=list)
    server_seconds: float = 0.0
    micro_batches: int = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes that all servers of the group together send."""
        return round(self.bytes_sent_mean * max(1, len(self.predicted_server_seconds)))


class KernelTimer:
    """Sums the time of kernels: device events on GPUs, read only when asked for; the host's clock on CPU."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def reset(self) -> None:
        self._seconds, self._events = 0.0, []

    @property
    def seconds(self) -> float:
        """Seconds so far. On a GPU it waits for the last kernel."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3
        self._events = []
        return self._seconds

    def __call__(self, tensor: torch.Tensor) -> _Interval:
        return _Interval(self, tensor.is_cuda)


class _Interval:
    def __init__(self, timer: KernelTimer, on_gpu: bool) -> None:
        self._timer, self._on_gpu = timer, on_gpu

    def __enter__(self) -> None:
        if self._on_gpu:
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record()
        else:
            self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._on_gpu:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._timer._events.append((self._start, end))
        else:
            self._timer._seconds += time.perf_counter() - self._start


class TimedKernel:
    """A kernel whose calls are timed."""

    def __init__(self, kernel: Kernel, timer: KernelTimer) -> None:
        self._kernel, self._timer = kernel, timer
        self.name, self.grad_dtype = kernel.name, kernel.grad_dtype

    def forward(self, q, *arguments, **keywords):
        with self._timer(q):
            return self._kernel.forward(q, *arguments, **keywords)

    def backward(self, dout, *arguments, **keywords):
        with self._timer(dout):
            return self._kernel.backward(dout, *arguments, **keywords)
