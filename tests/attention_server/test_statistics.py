# SPDX-License-Identifier: Apache-2.0
"""Timers of kernels and of waiting: what is counted, when a step's sum becomes the previous one's."""

from __future__ import annotations

import time

import pytest
import torch

from deepspeed_distca.attention_server import statistics
from deepspeed_distca.attention_server.statistics import EVERY, FIRST, DeviceTimer, TimedExchange, TimedKernel

DELAY = 0.05


class SlowExchange:
    """Finishes when it is waited for, and takes its time."""

    def __init__(self) -> None:
        self.waits, self.given = 0, []

    def for_sizes(self, sizes):
        self.given.append(sizes)
        return self

    def start(self, sends, receives=None, then=None):
        self.given.append((sends, receives))
        return self

    def expect(self, receives, *, sends):
        return self

    def wait(self) -> None:
        self.waits += 1
        time.sleep(DELAY)


def test_only_the_first_wait_for_an_exchange_is_timed_and_passed_on() -> None:
    inner, timer = SlowExchange(), DeviceTimer()
    exchange = TimedExchange(inner, timer)
    sends, receives = [(1, torch.zeros(2))], [(1, torch.ones(3))]
    pending = exchange.start(sends, receives)
    time.sleep(DELAY)  # what runs meanwhile is not exposed
    assert timer.seconds == (0.0, 0.0)
    pending.wait()
    kernels, once = timer.seconds
    assert kernels == 0.0
    assert DELAY <= once < 3 * DELAY
    pending.wait()
    assert timer.seconds == (0.0, once) and inner.waits == 1
    exchange.start([], receives).wait()
    assert timer.seconds[1] >= once + DELAY
    assert inner.given == [(sends, receives), ([], receives)]
    inner.given.clear()
    exchange.for_sizes("sizes").start(sends, receives).wait()
    assert inner.given == ["sizes", (sends, receives)] and timer.seconds[1] >= once + 2 * DELAY


def test_an_exchange_of_nothing_is_not_timed() -> None:
    timer = DeviceTimer()
    TimedExchange(SlowExchange(), timer).start([], []).wait()
    assert timer.seconds == (0.0, 0.0)


def test_reset_makes_the_sums_the_previous_ones() -> None:
    timer, tensor = DeviceTimer(), torch.zeros(1)
    with timer.kernel(tensor):  # before the first step: no step's time
        time.sleep(0.001)
    timer.reset()
    assert timer.seconds == (0.0, 0.0) and timer.previous == (None, None)
    with timer.kernel(tensor):
        time.sleep(0.001)
    with timer.wait(tensor):
        time.sleep(0.001)
    first = timer.seconds
    timer.reset()
    assert timer.seconds == (0.0, 0.0) and timer.previous == first and min(first) > 0.0
    timer.reset()
    assert timer.previous == (0.0, 0.0)


def steps(timer: DeviceTimer, count: int) -> list[bool]:
    """Which of the next steps are timed."""
    found = []
    for _ in range(count):
        timer.reset()
        found.append(timer.on)
    return found


def test_the_first_steps_and_one_in_ten_are_timed() -> None:
    assert steps(DeviceTimer(), 34) == [i < FIRST or i % EVERY == 0 for i in range(34)]
    assert (FIRST, EVERY) == (3, 10)  # as the statistics' docs say


def test_a_step_is_timed_where_the_sums_of_the_one_before_were_read() -> None:
    timer = DeviceTimer()
    steps(timer, 5)
    _ = timer.seconds
    assert steps(timer, 2) == [True, False]
    _ = timer.previous  # what a monitor reads in every step
    assert steps(timer, 1) == [False]


def test_sums_are_of_the_last_timed_step() -> None:
    timer, tensor = DeviceTimer(), torch.zeros(1)
    sums = []
    for _ in range(FIRST):
        timer.reset()
        with timer.kernel(tensor):
            time.sleep(0.001)
        sums.append(timer.seconds)
    assert timer.previous == sums[-2]
    timer.reset()  # read: timed
    assert timer.seconds == (0.0, 0.0) and timer.previous == sums[-1]
    timer = DeviceTimer()
    steps(timer, FIRST)
    with timer.wait(tensor):
        time.sleep(0.001)
    last = timer._now.read()
    assert steps(timer, 2) == [False, False]
    assert timer.previous == last == timer.seconds and last[1] > 0.0


class Kernel:
    """Gives what it is given."""

    name, grad_dtype = "some", None

    def forward(self, *given):
        return given

    def backward(self, *given) -> None:
        self.given = given


def test_in_other_steps_nothing_is_timed_and_everything_passed_on() -> None:
    timer, inner, tensor = DeviceTimer(), SlowExchange(), torch.ones(2)
    steps(timer, FIRST + 1)
    assert not timer.on
    exchange, kernel, own = TimedExchange(inner, timer), Kernel(), object()
    timed = TimedKernel(kernel, timer)
    assert timed.forward(tensor, 2, 3, 4, 5, 6) == (tensor, 2, 3, 4, 5, 6)
    timed.backward(own, 1, 2, 3)
    assert kernel.given == (own, 1, 2, 3)
    assert exchange.start([(1, tensor)], []) is inner
    assert exchange.expect([(1, tensor)], sends=True).start([]) is inner
    assert inner.given == [([(1, tensor)], []), ([], None)]
    assert timer.seconds == (0.0, 0.0)


class FakeEvent:
    """A device event at a given time, which the device reaches when it is told to, or when somebody waits."""

    made: list[FakeEvent] = []  # noqa: RUF012
    times: list[float] = []  # noqa: RUF012

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.reached, self.waited = False, False
        self.made.append(self)

    def record(self, stream: str) -> None:
        assert stream == "stream of 0"
        self.time = self.times.pop(0)

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.waited = not self.reached
        self.reached = True

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.time - self.time


class OnDevice:
    is_cuda = True

    def get_device(self) -> int:
        return 0


@pytest.fixture
def events(monkeypatch) -> type[FakeEvent]:
    monkeypatch.setattr(statistics.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(statistics.torch.cuda, "current_stream", lambda device: f"stream of {device}")
    FakeEvent.made.clear()
    FakeEvent.times.clear()
    return FakeEvent


def test_device_events_are_waited_for_only_where_the_current_sum_is_asked_for(events) -> None:
    timer = DeviceTimer()
    timer.reset()
    events.times.extend([0.0, 250.0, 400.0, 650.0])
    for _ in range(2):
        with timer.kernel(OnDevice()):
            pass
    timer.reset()
    assert timer.previous == (None, None)  # the device is behind
    for event in events.made:
        event.reached = True
    assert timer.previous == (pytest.approx(0.5), 0.0) == timer.previous
    assert not any(event.waited for event in events.made)
    events.times.extend([700.0, 950.0])
    with timer.kernel(OnDevice()):
        pass
    assert timer.seconds == (pytest.approx(0.25), 0.0)
    assert events.made[-1].waited


def test_what_runs_side_by_side_counts_once_and_hides_waiting(events) -> None:
    timer = DeviceTimer()
    intervals = [("kernel", 10, 40), ("wait", 5, 30), ("kernel", 30, 50), ("wait", 45, 60), ("kernel", 0, 2)]
    for kind, start, end in intervals:
        events.times.extend([start, end])
        with getattr(timer, kind)(OnDevice()):
            pass
    kernels, waits = timer.seconds
    assert kernels == pytest.approx(0.042)  # 0 to 2, 10 to 50
    assert waits == pytest.approx(0.015)  # 5 to 10, 50 to 60
    # What comes later is added to what was read.
    events.times.extend([60, 70])
    with timer.kernel(OnDevice()):
        pass
    assert timer.seconds == (pytest.approx(0.052), pytest.approx(0.015))


def test_statistics_print_as_one_line() -> None:
    step = statistics.StepStatistics(balance_before=1.386, balance_after=1.0041, bytes_sent=3 << 19, planning_ms=0.26)
    assert str(step) == ("balance 1.39 -> 1.00, 1.5 MiB sent, planned in 0.3 ms, attention 0.0 ms, exposed 0.0 ms")
