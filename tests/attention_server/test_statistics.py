# SPDX-License-Identifier: Apache-2.0
"""Timers of kernels and of waiting: what is counted, when a step's sum becomes the previous one's."""

from __future__ import annotations

import time

import pytest
import torch

from deepspeed_distca.attention_server import statistics
from deepspeed_distca.attention_server.statistics import DeviceTimer, TimedExchange

DELAY = 0.05


class SlowExchange:
    """Finishes when it is waited for, and takes its time."""

    def __init__(self) -> None:
        self.waits, self.given = 0, []

    def start(self, sends, receives, then=None):
        self.given.append((sends, receives))
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
    assert timer.seconds == 0.0
    pending.wait()
    once = timer.seconds
    assert DELAY <= once < 3 * DELAY
    pending.wait()
    assert timer.seconds == once and inner.waits == 1
    exchange.start([], receives).wait()
    assert timer.seconds >= once + DELAY
    assert inner.given == [(sends, receives), ([], receives)]


def test_an_exchange_of_nothing_is_not_timed() -> None:
    timer = DeviceTimer()
    TimedExchange(SlowExchange(), timer).start([], []).wait()
    assert timer.seconds == 0.0


def test_reset_makes_the_sum_the_previous_one() -> None:
    timer, tensor = DeviceTimer(), torch.zeros(1)
    with timer(tensor):  # before the first step: no step's time
        time.sleep(0.001)
    timer.reset()
    assert timer.seconds == 0.0 and timer.previous is None
    with timer(tensor):
        time.sleep(0.001)
    first = timer.seconds
    timer.reset()
    assert timer.seconds == 0.0 and timer.previous == first > 0.0
    timer.reset()
    assert timer.previous == 0.0


class FakeEvent:
    """A device event that the device reaches when it is told to, or when somebody waits."""

    made: list[FakeEvent] = []  # noqa: RUF012

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.reached, self.waited = False, False
        self.made.append(self)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.waited = not self.reached
        self.reached = True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.reached
        return 250.0


class OnDevice:
    is_cuda = True


def test_device_events_are_waited_for_only_where_the_current_sum_is_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(statistics.torch.cuda, "Event", FakeEvent)
    FakeEvent.made.clear()
    timer = DeviceTimer()
    timer.reset()
    for _ in range(2):
        with timer(OnDevice()):
            pass
    timer.reset()
    assert timer.previous is None  # the device is behind
    for event in FakeEvent.made:
        event.reached = True
    assert timer.previous == pytest.approx(0.5) == timer.previous
    assert not any(event.waited for event in FakeEvent.made)
    with timer(OnDevice()):
        pass
    assert timer.seconds == pytest.approx(0.25)
    assert FakeEvent.made[-1].waited
