# SPDX-License-Identifier: Apache-2.0
"""What the last step looked like: balance, bytes, planning time, and the time that kernels and waiting took here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deepspeed_distca.attention_server.exchange import Exchange, Expected, Messages, Pending, Round
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
        exposed_seconds: measured seconds in which this rank's compute stream (on CPU: its host) stood still until an
            exchange was over, be it for the transfer itself or for a server that was not ready to send.
        micro_batches: how many of them there were.
        previous_server_seconds, previous_exposed_seconds: the same two of the optimizer step before, as far as they
            can be told without waiting for the device; None where they cannot.
    """

    balance_before: float = 1.0
    balance_after: float = 1.0
    bytes_sent: int = 0
    bytes_sent_max: int = 0
    bytes_sent_mean: float = 0.0
    planning_ms: float = 0.0
    predicted_server_seconds: list[float] = field(default_factory=list)
    server_seconds: float = 0.0
    exposed_seconds: float = 0.0
    micro_batches: int = 0
    previous_server_seconds: float | None = None
    previous_exposed_seconds: float | None = None

    @property
    def bytes_moved(self) -> int:
        """Bytes that all servers of the group together send."""
        return round(self.bytes_sent_mean * max(1, len(self.predicted_server_seconds)))


class DeviceTimer:
    """Sums intervals: events of the current stream on GPUs, read only when asked for; the host's clock on CPU."""

    def __init__(self) -> None:
        self._now: _Sum = _Sum()
        self._before: _Sum | None = None
        self._started = False

    def reset(self) -> None:
        """Starts at zero; what was summed so far becomes ``previous``."""
        self._now, self._before = _Sum(), self._now if self._started else None
        self._started = True

    @property
    def seconds(self) -> float:
        """Seconds since the last reset. On a GPU it waits for the end of the last interval."""
        return self._now.read(wait=True)

    @property
    def previous(self) -> float | None:
        """Seconds between the last two resets; None if there were no two, or where the device is still at it."""
        return None if self._before is None else self._before.read(wait=False)

    def __call__(self, tensor: torch.Tensor) -> _Interval:
        return _Interval(self, tensor.is_cuda)


class _Sum:
    """Seconds of intervals, some of which may still be events that are to be read."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def read(self, wait: bool) -> float | None:
        """The sum; without waiting None while the device has not reached the last event."""
        if not wait and not all(end.query() for _, end in self.events):
            return None
        for start, end in self.events:
            end.synchronize()
            self.seconds += start.elapsed_time(end) / 1e3
        self.events = []
        return self.seconds


class _Interval:
    def __init__(self, timer: DeviceTimer, on_gpu: bool) -> None:
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
            self._timer._now.events.append((self._start, end))
        else:
            self._timer._now.seconds += time.perf_counter() - self._start


class TimedKernel:
    """A kernel whose calls are timed."""

    def __init__(self, kernel: Kernel, timer: DeviceTimer) -> None:
        self._kernel, self._timer = kernel, timer
        self.name, self.grad_dtype = kernel.name, kernel.grad_dtype

    def forward(self, q, *arguments, **keywords):
        with self._timer(q):
            return self._kernel.forward(q, *arguments, **keywords)

    def backward(self, dout, *arguments, **keywords):
        with self._timer(dout):
            return self._kernel.backward(dout, *arguments, **keywords)


class TimedExchange:
    """An exchange whose waiting is timed: what of it is not hidden under computation."""

    def __init__(self, exchange: Exchange, timer: DeviceTimer) -> None:
        self._exchange, self._timer = exchange, timer

    def start(self, sends: Messages, receives: Messages, then: Round | None = None) -> Pending:
        """See :class:`Exchange`."""
        return self._timed(self._exchange.start(sends, receives, then), (sends, receives, *(then or ())))

    def expect(self, receives: Messages, *, sends: bool) -> Expected:
        """See :class:`Exchange`."""
        return _TimedExpected(self, self._exchange.expect(receives, sends=sends), receives)

    def _timed(self, pending: Pending, lists: Sequence[Messages]) -> Pending:
        some = next((tensor for messages in lists for _, tensor in messages), None)
        return pending if some is None else _TimedPending(pending, self._timer, some)


class _TimedExpected:
    def __init__(self, exchange: TimedExchange, expected: Expected, receives: Messages) -> None:
        self._exchange, self._expected, self._receives = exchange, expected, receives

    def start(self, sends: Messages) -> Pending:
        return self._exchange._timed(self._expected.start(sends), (sends, self._receives))


class _TimedPending:
    def __init__(self, pending: Pending, timer: DeviceTimer, like: torch.Tensor) -> None:
        self._pending: Pending | None = pending
        # Of the device alone: the tensor must not live longer than the exchange.
        self._interval = timer(like)

    def wait(self) -> None:
        if self._pending is None:
            return
        with self._interval:
            self._pending.wait()
        self._pending = None
