# SPDX-License-Identifier: Apache-2.0
"""Where this rank's training is, and for how long something has been the same."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from types import FrameType

OUTSIDE = "outside of forward, backward and step"
FORWARD = "forward"
BETWEEN = "between forward and backward"
BACKWARD = "backward"
DETACHED = "where the plugin was detached"
_AFTER_ALL = 1 << 62
#: Where collectives of ours are called.
_OURS = str(Path(__file__).parents[1])
#: For who looks at the frames of threads.
_LOOKING = threading.Lock()


class Position:
    """Where this rank's training is. Made on the training's thread.

    Only :class:`~.watch.Watch` writes it, on the training's threads (autograd's among them), of which one at a time is
    at work. The other threads read one field at a time, and may see one of them a moment before the next.

    Attributes:
        rank: whose it is.
        number: of the micro-batch, from 1; 0: none yet.
        phase: one of the above, or another part of the step, in words.
        layers: attention layers of the micro-batch; 0: its plan is not made.
        layer: of these, begun in forward and not through in backward.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.number, self.phase = 0, OUTSIDE
        self.layers = self.layer = 0
        self._thread = threading.get_ident()

    def detach(self) -> None:
        """This rank has no part in it any more, and nobody waits for it on that account: it may have given a
        micro-batch up, as others will."""
        self.number, self.phase = _AFTER_ALL, DETACHED

    @property
    def unfinished(self) -> bool:
        """Whether the ranks need each other for what this one is at."""
        return self.phase not in (OUTSIDE, DETACHED)

    def where(self) -> str:
        """In words that follow "rank 1 is"; what is before the first comma is the phase."""
        layer = f", layer {self.layer} of {self.layers}" if self.layer else ""
        if self.phase == DETACHED:
            return DETACHED
        if self.phase == OUTSIDE:
            return f"{OUTSIDE}, after micro-batch {self.number}" if self.number else "before its first micro-batch"
        if self.phase == FORWARD:
            return f"in forward of micro-batch {self.number}{layer or ', before its first attention layer'}"
        if self.phase == BACKWARD:
            return f"in backward of micro-batch {self.number}{layer}"
        of = f" of micro-batch {self.number}" if self.number else ""
        return f"{'' if self.phase == BETWEEN else 'in '}{self.phase}{of}"

    def frame(self) -> FrameType | None:
        """What the training's thread runs; None: it has ended.

        Python holds a lock while it gathers the frames of all threads. Were garbage collected just then, as some
        versions of 3.11 do (cpython issue 106883), a finalizer that waits for another thread, as that of a dropped
        engine does, could wait forever: that thread waits for the lock, and keeps the interpreter.
        """
        with _LOOKING:
            collects = gc.isenabled()
            gc.disable()
            try:
                return sys._current_frames().get(self._thread)
            finally:
                if collects:
                    gc.enable()

    def spot(self) -> tuple | None:
        """Two that are equal: the training's thread has not moved between. None: it has ended."""
        frame = self.frame()
        return None if frame is None else (id(frame), frame.f_lasti, self.number, self.phase, self.layer)

    def in_collective(self, *, ours: bool = False) -> bool:
        """Whether the training's thread is in a collective of torch's, or (with `ours`) in anything of the attention
        server."""
        places = ("torch/distributed/", _OURS) if ours else ("torch/distributed/",)
        frame = self.frame()
        while frame is not None and not any(place in frame.f_code.co_filename for place in places):
            frame = frame.f_back
        return frame is not None


class Unchanged:
    """For how long a value has been the same, as one thread finds. By looks and not by the clock: all ranks of a job
    may have been suspended together.

    Args:
        every: seconds between two looks.
    """

    def __init__(self, every: float) -> None:
        self._every, self._seconds = every, 0.0
        self._value: object = None

    def seconds(self, value: object) -> float:
        """Of the value as it is now. To be called at each look."""
        self._seconds = self._seconds + self._every if value == self._value else 0.0
        self._value = value
        return self._seconds
