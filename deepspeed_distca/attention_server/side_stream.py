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
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

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
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        side, caller = self._streams[device], torch.cuda.current_stream(device)
        side.wait_stream(caller)
        memory = BorrowedMemory(lambda: torch.cuda.stream(caller))
        try:
            # First: whatever memory is free by now is free behind the point that the side stream waits for. What the
            # tasks at home free, though, is free behind their kernels only.
            with torch.cuda.stream(side), memory if _can_borrow() else nullcontext():
                result = away()
            at_home()
        finally:
            # Also after an error: what is unwound goes back to the caller's memory while the side stream is at work.
            caller.wait_stream(side)
            memory.release()
        return result


def _can_borrow() -> bool:
    """Not where torch fills new tensors, which it does on their own stream, too late for the other one; nor with an
    allocator that orders memory by its own streams' time."""
    deterministic: Any = torch.utils.deterministic  # replaces itself by an object: no checker sees that
    fills = torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory
    return not fills and torch.cuda.memory.get_allocator_backend() == "native"


#: Calls that make tensors without a value, or of zeros, each with the one that makes the like without a value.
_MAKERS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.empty: torch.empty,
    torch.empty_like: torch.empty_like,
    torch.Tensor.new_empty: torch.Tensor.new_empty,
    torch.zeros: torch.empty,
    torch.zeros_like: torch.empty_like,
    torch.Tensor.new_zeros: torch.Tensor.new_empty,
}


class BorrowedMemory(TorchFunctionMode):
    """Within it tensors are made of the memory of another stream.

    torch's allocator keeps the memory of each stream for itself. A stream that works for some micro-batches only would
    hold the most that any of them ever asked of it, while the caller's has that much to spare at the time. Seen are
    calls from Python, such as flash-attn-4's for its work buffers; what a library makes in C++ is not.

    Args:
        owner: a context in which the other stream is current.
    """

    def __init__(self, owner: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._owner = owner
        self._kept: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        make = _MAKERS.get(func)
        if make is None:
            return func(*args, **kwargs)
        with self._owner():
            tensor = make(*args, **kwargs)
        self._kept.append(tensor)
        # Filled here: on the other stream it could be filled too late.
        return tensor if make is func else tensor.zero_()

    def release(self) -> None:
        """Lets go of the tensors, which it keeps until then: the owner must be behind what was done with them."""
        self._kept.clear()
