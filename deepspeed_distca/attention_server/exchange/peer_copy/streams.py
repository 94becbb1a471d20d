# SPDX-License-Identifier: Apache-2.0
"""Streams that copy, write a number and wait for a number, without a kernel: CUDA's driver, called directly.

torch has no call that lets a stream wait for a value in memory other than a kernel that spins, and such a kernel would
need a place on a multiprocessor that attention kernels fill. The driver's stream memory operations need none.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """What an exchange by peer copies asks of a device. Streams and events are opaque; addresses are integers."""

    outbox: Any  # packs what compute does not
    inbox: Any  # pulls

    def current(self) -> Any:
        """The caller's stream."""

    def rescue(self) -> Any:
        """A new stream, to which nothing was ever queued."""

    def record(self, stream: Any) -> Any:
        """An event behind all that is queued on the stream."""

    def hold(self, stream: Any, event: Any) -> None:
        """What is queued on the stream from now on waits for the event."""

    def done(self, event: Any) -> bool:
        """Whether the event is over; does not wait."""

    def copy(self, stream: Any, to: int, source: int, size: int) -> None:
        """Copies bytes."""

    def write(self, stream: Any, address: int, value: int) -> None:
        """Writes 32 bits, behind all that was queued before and visible to every device after it."""

    def wait_until(self, stream: Any, address: int, value: int) -> None:
        """What is queued on the stream from now on waits until the number there, unsigned 32 bits that wrap around,
        has reached the value."""


_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
#: Queues from the host to a device, by default. With fewer, streams share one that is expected to run while another
#: of them waits for a peer, and two ranks could wait for each other.
_ENOUGH_CONNECTIONS = 8


class DriverError(RuntimeError):
    """The driver refused a call, or lacks it."""


class CudaStreams:
    """Streams of high priority on a GPU.

    Raises:
        DriverError: a driver without stream memory operations, or too few connections to the device.
    """

    def __init__(self, device: torch.device) -> None:
        connections = os.environ.get(_CONNECTIONS, "")
        if connections.isdigit() and int(connections) < _ENOUGH_CONNECTIONS:
            raise DriverError(
                f"{_CONNECTIONS}={connections} makes streams wait for each other; leave it out, or set "
                f"{_ENOUGH_CONNECTIONS} or more"
            )
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
            self._copy = self._driver.cuMemcpyDtoDAsync_v2
            self._write = self._driver.cuStreamWriteValue32_v2
            self._wait = self._driver.cuStreamWaitValue32_v2
        except (OSError, AttributeError) as error:
            raise DriverError(f"the CUDA driver lacks stream memory operations ({error})") from error
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        for call in (self._write, self._wait):
            call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        for call in (self._copy, self._write, self._wait):
            call.restype = ctypes.c_int
        self.device = device
        self.outbox = torch.cuda.Stream(device, priority=-1)
        self.inbox = torch.cuda.Stream(device, priority=-1)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device.index)

    def rescue(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def hold(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def done(self, event: torch.cuda.Event) -> bool:
        # On a thread of its own the query would otherwise set up the first device.
        with torch.cuda.device(self.device):
            return event.query()

    def copy(self, stream: torch.cuda.Stream, to: int, source: int, size: int) -> None:
        self._check(self._copy(to, source, size, stream.cuda_stream), "copying")

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        self._check(self._write(stream.cuda_stream, address, value & 0xFFFFFFFF, 0), "writing to memory")

    def wait_until(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        # Flag 0: greater or equal, as a signed difference.
        self._check(self._wait(stream.cuda_stream, address, value & 0xFFFFFFFF, 0), "waiting for memory")

    def _check(self, code: int, what: str) -> None:
        if code:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(name))
            raise DriverError(f"{what} on a stream failed with {(name.value or b'error').decode()} ({code})")
