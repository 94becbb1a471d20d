# SPDX-License-Identifier: Apache-2.0
"""Streams of several devices, simulated on the CPU: operations are queued and run later, in any allowed order."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Event:
    over: bool = False


@dataclass
class Stream:
    queue: deque = field(default_factory=deque)


class SimulatedStreams:
    """``Streams`` of one device over ordinary memory.

    Args:
        single: everything is queued on one stream, as if the hardware had a single queue.
    """

    def __init__(self, single: bool) -> None:
        self.compute = Stream()
        self.outbox = self.compute if single else Stream()
        self.inbox = self.compute if single else Stream()
        self.all = [self.compute] if single else [self.compute, self.outbox, self.inbox]

    def current(self) -> Stream:
        return self.compute

    def rescue(self) -> Stream:
        self.all.append(Stream())
        return self.all[-1]

    def record(self, stream: Stream) -> Event:
        event = Event()

        def over() -> bool:
            event.over = True
            return True

        stream.queue.append(over)
        return event

    def hold(self, stream: Stream, event: Event) -> None:
        stream.queue.append(lambda: event.over)

    def done(self, event: Event) -> bool:
        return event.over

    def copy(self, stream: Stream, to: int, source: int, size: int) -> None:
        assert size > 0
        self.call(stream, lambda: ctypes.memmove(to, source, size))

    def write(self, stream: Stream, address: int, value: int) -> None:
        self.call(stream, lambda: setattr(ctypes.c_uint32.from_address(address), "value", value & 0xFFFFFFFF))

    def wait_until(self, stream: Stream, address: int, value: int) -> None:
        def reached() -> bool:
            return ctypes.c_int32(ctypes.c_uint32.from_address(address).value - value).value >= 0

        stream.queue.append(reached)

    def call(self, stream: Stream, function: Callable[[], object]) -> None:
        """Queues a computation."""

        def run() -> bool:
            function()
            return True

        stream.queue.append(run)


def run_all(devices: list[SimulatedStreams], rng: random.Random) -> None:
    """Runs everything that is queued, in a random order; a stream stands still where it waits.

    Raises:
        AssertionError: nothing can go on, but not everything is over.
    """
    streams = [stream for device in devices for stream in device.all]
    while any(stream.queue for stream in streams):
        went_on = False
        rng.shuffle(streams)
        for stream in streams:
            for _ in range(rng.randint(1, 6)):
                if not stream.queue or not stream.queue[0]():
                    break
                stream.queue.popleft()
                went_on = True
        assert went_on, f"deadlock: {[len(stream.queue) for stream in streams]} operations left"
