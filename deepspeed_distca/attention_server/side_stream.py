# SPDX-License-Identifier: Apache-2.0
"""A second stream for the tasks in the workspace, so that a GPU has something to do whichever rows come first.

Both batches of tasks are queued at once: those at home on the caller's stream, those in the workspace on this one,
behind the rows that they wait for. Until those are there, tasks at home run. From then on the workspace's go first,
since others wait for their results: the stream has a high priority, and a GPU gives a multiprocessor that becomes free
to the kernel of the highest one. What is left of the tasks at home covers the way back. Nothing has to be divided in
advance, and a rank that is early does not wait for one that is late while it has tasks of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Work beside the caller's: on GPUs a stream of high priority, made once; elsewhere the caller's own turn.

    A tensor of the caller's may be used aside if it is kept until the caller has joined. One that was made aside may
    be used by the caller after joining, since what runs aside later follows a later point of the caller's stream.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def mark(self, device: torch.device) -> torch.cuda.Event | None:
        """A point behind all that is queued on the caller's stream by now."""
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    @contextmanager
    def aside(self, after: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
        """What is queued within runs aside, behind that point and what ran aside before."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        stream = self._streams[device]
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield

    def join(self, device: torch.device) -> None:
        """What the caller queues from now on follows everything that ran aside."""
        if device in self._streams:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])
