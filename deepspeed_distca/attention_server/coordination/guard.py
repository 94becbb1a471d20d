# SPDX-License-Identifier: Apache-2.0
"""The thread that acts on an alarm: it ends this process's waits, or the process."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from deepspeed_distca.attention_server.coordination.alarm import Alarm
from deepspeed_distca.attention_server.coordination.lookout import Lookout
from deepspeed_distca.attention_server.coordination.position import Position, Unchanged
from deepspeed_distca.attention_server.coordination.signs import EVERY
from deepspeed_distca.attention_server.coordination.store import close_connections

#: Seconds that a rank has to come to an error of its own, before an alarm ends its waits: ranks often fail alike.
_ALIKE = 1.0
#: Seconds that a process which ends after an alarm waits for this thread.
_LEAVING = 5.0


class Guard:
    """Waits for an alarm, or raises it where the store does not answer. Then it gives training a moment to raise an
    error of its own, ends its waits in gloo groups, and the process if training stays where it is.

    Attributes:
        groups, releases: what training has covered; written by its thread, read after an alarm.

    Args:
        lookout: whose signs are looked at.
        seconds: after which a store that does not answer counts as gone.
        position: read.
        alarm: read, and raised where the lookout cannot.
        closing: set when this rank leaves.
    """

    def __init__(
        self, lookout: Lookout, seconds: float, position: Position, alarm: Alarm, closing: threading.Event
    ) -> None:
        self.groups: list[dist.ProcessGroup] = []
        self.releases: list[Callable[[], None]] = []
        self._seconds, self._position, self._alarm = seconds, position, alarm
        self._lookout, self._closing = lookout, closing
        self._thread = threading.Thread(target=self._run, name="distca-guard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """Nothing is watched any more. Waits, after an alarm, until this thread has let go of its works in gloo
        groups: in an interpreter that ends, their destructors would end the process by a signal."""
        self.groups, self.releases = [], []
        if self._alarm.text is not None and self._thread is not threading.current_thread():
            self._thread.join(_LEAVING)

    def _run(self) -> None:
        if not self._until_alarm() or self._closing.wait(_ALIKE):
            return
        for group in self.groups:
            close_connections(group)
        stayed = Unchanged(EVERY / 2)
        while not self._alarm.told and not self._closing.wait(EVERY / 2):
            spot = self._position.spot()
            if spot is None:
                return
            if stayed.seconds(spot) >= self._alarm.patience - _ALIKE:
                self._end_process()
        for release in self.releases:
            with suppress(Exception):
                release()

    def _until_alarm(self) -> bool:
        """False: this rank leaves."""
        missed = Unchanged(EVERY)
        while not self._alarm.wait(EVERY):
            if self._closing.is_set():
                return False
            seconds = missed.seconds(self._lookout.sign.count)
            if seconds > self._seconds and self._lookout.is_alive():
                self._alarm.sound(
                    f"the store of torch.distributed has not answered for {seconds:g} s: rank 0 or the launcher, "
                    "whichever holds it, was stopped or hangs"
                )
        return True

    def _end_process(self) -> None:
        """The training's thread waits where it cannot be reached."""
        stack = traceback.extract_stack(self._position.frame())
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        flushing.join(EVERY)  # the training's thread may be in the midst of printing
        where = "".join(f"\n  {f.filename}:{f.lineno} in {f.name}" for f in stack[-3:])
        print(
            f"distca: {self._alarm.text}. Rank {self._position.rank}, {self._position.where()}, waits for it and ends "
            f"now, at{where}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
