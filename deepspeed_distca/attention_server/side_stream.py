# SPDX-License-Identifier: Apache-2.0
"""A second stream for the tasks in the workspace, so that a GPU has something to do whichever rows come first.

Both batches of tasks are queued at once: those at home on the caller's stream, those in the workspace on this one,
behind the rows that they wait for. Until those are there, tasks at home run. From then on the workspace's go first,
since others wait for their results: the stream has a high priority, and a GPU gives a multiprocessor that becomes free
to the kernel of the highest one. What is left of the tasks at home covers the way back. Nothing has to be divided in
advance, and a rank that is early does not wait for one that is late while it has tasks of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from deepspeed_distca.attention_server.borrowed import Lender
from deepspeed_distca.attention_server.exchange.base import Done, Pending

Result = TypeVar("Result")


class SideStream:
    """Work beside the caller's: on GPUs a stream of high priority, made once; elsewhere the caller's own turn."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def run(self, at_home: Callable[[], None], away: Callable[[], Result], device: torch.device) -> Result:
        """Queues both, `away` on the side stream; what the caller queues from now on follows both.

        Tensors of the caller's may be used aside if they are kept until this returns, and those made aside may be used
        by the caller then.
        """
        if device.type != "cuda":
            at_home()
            return away()
        side, caller = self._behind_caller(device)
        lender = Lender(caller, side)
        try:
            # First: whatever memory is free by now is free behind the point that the side stream waits for. What the
            # tasks at home free, though, is free behind their kernels only.
            torch.cuda.set_stream(side)
            try:
                with lender if _can_borrow() else nullcontext():
                    result = away()
            finally:
                torch.cuda.set_stream(caller)
            at_home()
        finally:
            # Also after an error: what is unwound goes back to the caller's memory while the side stream is at work.
            caller.wait_stream(side)
            lender.release()
        return result

    def behind(self, work: Callable[[], None], device: torch.device) -> Pending:
        """Queues work on the side stream, behind what the caller has queued. Until the result is waited for, tensors
        that it uses must be kept, and nothing of the caller's follows it."""
        if device.type != "cuda":
            work()
            return Done()
        side, caller = self._behind_caller(device)
        lender = Lender(caller, side)
        torch.cuda.set_stream(side)
        try:
            with lender if _can_borrow() else nullcontext():
                work()
        finally:
            torch.cuda.set_stream(caller)
        return _Behind(side.record_event(), lender)

    def _behind_caller(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The side stream, which waits for what the caller's has by now, and the caller's."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        side, caller = self._streams[device], torch.cuda.current_stream(device.index)
        side.wait_stream(caller)
        return side, caller


class _Behind:
    """A point of the side stream."""

    def __init__(self, event: torch.cuda.Event, lender: Lender) -> None:
        self._event, self._lender = event, lender

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
        self._lender.release()


def _can_borrow() -> bool:
    """Not where torch fills new tensors, which it does on their own stream, too late for the other one; nor with an
    allocator that orders memory by its own streams' time."""
    deterministic: Any = torch.utils.deterministic  # replaces itself by an object: no checker sees that
    fills = torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory
    return not fills and torch.cuda.memory.get_allocator_backend() == "native"
