# SPDX-License-Identifier: Apache-2.0
"""What the last step looked like: balance, bytes, planning time, and the time that kernels and waiting took here."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from deepspeed_distca.attention_server.exchange.base import Exchange, Expected, Messages, Pending, Round
from deepspeed_distca.attention_server.kernels import AttentionShape, BackwardInputs, Gradients, Kernel
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch


@dataclass
class StepStatistics:
    """Of the micro-batches of one optimizer step, all layers together.

    Attributes:
        balance_before, balance_after: largest over mean predicted load of the servers, with every task at home and
            as planned. Layers wait for each other, so it is the sum of the largest over the sum of the means. With
            `server_weights` parts are unequal on purpose: it is then 1 and by how much the last server's load exceeds
            its intended part, by its speed and over the mean.
        moved_share: share of the servers' predicted load that those with too much give away.
        tokens: of all servers of the group, padding included; 0 with pipelines.
        bytes_sent: what this rank sends, forward and backward, as home and as server.
        bytes_sent_max, bytes_sent_mean: the same over the servers of the group.
        planning_ms: milliseconds of this rank's host: planning.
        predicted_server_seconds: predicted seconds of core attention of each server.
        server_seconds: measured seconds in which attention kernels ran on this rank, recomputation included. Of the
            last step that was timed: the first three are, every tenth, and those after a step in which it was read.
        exposed_seconds: of that step, measured seconds in which this rank (on CPU: its host) waited for an exchange
            and no attention kernel ran, be it for the transfer itself or for a server that was not ready to send.
        micro_batches: how many of them there were.
        kept_layers: checkpointed layers whose attention was kept for recomputation, in the last of them. Pipelines and
            nano-batches keep all, which does not count.
        previous_server_seconds, previous_exposed_seconds: the same two of the last timed step before this one, as far
            as they can be told without waiting for the device; None where they cannot. To read them has no step timed.
        step: its number.
        seconds: of the host, from its first plan to the next step's; None: not known yet.
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
    kept_layers: int = 0
    moved_share: float = 0.0
    tokens: int = 0
    previous_server_seconds: float | None = None
    previous_exposed_seconds: float | None = None
    step: int = 0
    seconds: float | None = None

    def __str__(self) -> str:
        """One line to print."""
        return (
            f"balance {self.balance_before:.2f} -> {self.balance_after:.2f}, {self.bytes_sent / 2**20:.1f} MiB sent, "
            f"planned in {self.planning_ms:.1f} ms, attention {self.server_seconds * 1e3:.1f} ms, exposed "
            f"{self.exposed_seconds * 1e3:.1f} ms"
        )

    @property
    def bytes_moved(self) -> int:
        """Bytes that all servers of the group together send."""
        return round(self.bytes_sent_mean * max(1, len(self.predicted_server_seconds)))


#: Steps that are timed in any case: so many first ones (kernels compile in the first), and one in so many.
FIRST, EVERY = 3, 10


class DeviceTimer:
    """Adds up intervals of attention kernels and of waiting, on all streams: events on GPUs, read only when asked for;
    the host's clock on CPU. Kernels that run side by side count once, and waiting beside a kernel does not count.

    A moved layer has some twenty events, which small steps feel. So not every step is timed: the first ``FIRST``, one
    in ``EVERY``, and those after a step in which ``seconds`` were read.

    Attributes:
        on: whether this step is timed; before the first :meth:`reset` it is.
    """

    def __init__(self) -> None:
        self._now = _Intervals()
        self._before: _Intervals | None = None
        self._steps, self._asked = 0, False
        self.on = True

    def reset(self) -> None:
        """A step begins. If it is timed it starts at zero, and what was added up so far becomes ``previous``."""
        self.on = self._asked or self._steps < FIRST or self._steps % EVERY == 0
        if self.on:
            self._now, self._before = _Intervals(), self._now if self._steps else None
        self._steps, self._asked = self._steps + 1, False

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of the last timed step in which a kernel ran, and in which none did while something waited. On a GPU
        reading waits for the end of the last interval. The next step is timed."""
        self._asked = True
        return self._now.read()

    @property
    def previous(self) -> tuple[float, float] | tuple[None, None]:
        """The same of the last timed step before this one; None if there was none, or where the device is still at
        it."""
        before = self._before if self.on else self._now
        if before is None or not before.over():
            return None, None
        return before.read()

    def kernel(self, tensor: torch.Tensor) -> _Timing:
        """A context in which kernels run on the tensor's device."""
        return _Timing(self._now.kernels, tensor)

    def wait(self, tensor: torch.Tensor) -> _Timing:
        """A context in which the current stream waits for others."""
        return _Timing(self._now.waits, tensor)


#: A time of the host in seconds, or an event of the device.
Moment = float | torch.cuda.Event
Interval = tuple[Moment, Moment]


class _Intervals:
    """Intervals of one step, some of which may still be events that are to be read."""

    def __init__(self) -> None:
        self.kernels: list[Interval] = []
        self.waits: list[Interval] = []
        self._first: torch.cuda.Event | None = None

    def over(self) -> bool:
        """Whether the device has reached the last event."""
        return all(end.query() for end in self._ends())

    def read(self) -> tuple[float, float]:
        """Seconds of kernels, and of waiting alone. Waits for the last event."""
        for end in self._ends():
            end.synchronize()
        kernels, waits = self._seconds(self.kernels), self._seconds(self.waits)
        self.kernels[:], self.waits[:] = kernels, waits
        busy = _length(kernels)
        return busy, _length([*kernels, *waits]) - busy

    def _ends(self) -> list[torch.cuda.Event]:
        return [end for _, end in (*self.kernels, *self.waits) if isinstance(end, torch.cuda.Event)]

    def _seconds(self, intervals: list[Interval]) -> list[tuple[float, float]]:
        return [(self._at(start), self._at(end)) for start, end in intervals]

    def _at(self, moment: Moment) -> float:
        """In seconds after the first event that is read; host times stay as they are."""
        if not isinstance(moment, torch.cuda.Event):
            return moment
        if self._first is None:
            self._first = moment
        return self._first.elapsed_time(moment) / 1e3


def _length(intervals: list[tuple[float, float]]) -> float:
    """Of the union."""
    length, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


class _Timing:
    def __init__(self, intervals: list[Interval], tensor: torch.Tensor) -> None:
        # Of the device alone: the tensor must not live longer than an exchange does.
        self._intervals, self._gpu = intervals, tensor.get_device() if tensor.is_cuda else None

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_: object) -> None:
        self._intervals.append((self._start, self._now()))

    def _now(self) -> Moment:
        if self._gpu is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._gpu))  # torch is slow to find out the device by itself
        return event


class TimedKernel:
    """A kernel whose calls are timed while the timer is on."""

    def __init__(self, kernel: Kernel, timer: DeviceTimer) -> None:
        self._kernel, self._timer = kernel, timer
        self.name, self.grad_dtype = kernel.name, kernel.grad_dtype

    def missing(self) -> str | None:
        """See :class:`Kernel`, and so for the others."""
        return self._kernel.missing()

    def load(self) -> None:
        self._kernel.load()

    def check(self, shape: AttentionShape, spec: AttentionSpec) -> None:
        self._kernel.check(shape, spec)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tasks: TaskBatch,
        spec: AttentionSpec,
        into: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._timer.on:
            return self._kernel.forward(q, k, v, tasks, spec, into)
        with self._timer.kernel(q):
            return self._kernel.forward(q, k, v, tasks, spec, into)

    def backward(self, inputs: BackwardInputs, tasks: TaskBatch, spec: AttentionSpec, grads: Gradients) -> None:
        if not self._timer.on:
            return self._kernel.backward(inputs, tasks, spec, grads)
        with self._timer.kernel(inputs.dout):
            self._kernel.backward(inputs, tasks, spec, grads)


class TimedExchange:
    """An exchange whose waiting is timed while the timer is on: what of it is not hidden under computation."""

    def __init__(self, exchange: Exchange, timer: DeviceTimer) -> None:
        self._exchange, self._timer = exchange, timer

    @property
    def name(self) -> str:
        """See :class:`Exchange`."""
        return self._exchange.name

    @property
    def early(self) -> bool:
        """See :class:`Exchange`."""
        return self._exchange.early

    def for_sizes(self, sizes: np.ndarray) -> TimedExchange:
        """See :class:`Exchange`."""
        return TimedExchange(self._exchange.for_sizes(sizes), self._timer)

    def start(self, sends: Messages, receives: Messages, then: Round | None = None) -> Pending:
        """See :class:`Exchange`."""
        pending = self._exchange.start(sends, receives, then)
        return self._timed(pending, (sends, receives, *(then or ()))) if self._timer.on else pending

    def expect(self, receives: Messages, *, sends: bool) -> Expected:
        """See :class:`Exchange`."""
        expected = self._exchange.expect(receives, sends=sends)
        return _TimedExpected(self, expected, receives) if self._timer.on else expected

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
        self._interval = timer.wait(like)

    def wait(self) -> None:
        if self._pending is None:
            return
        with self._interval:
            self._pending.wait()
        self._pending = None
