# SPDX-License-Identifier: Apache-2.0
"""A rank that fails, ends, stops or hangs is known to the others, by name, wherever they wait.

Once a plan is made, ranks depend on each other in every layer: what one of them does not send, others wait for, in a
collective of ours, of DeepSpeed's, or on their devices. So each process has two threads beside its training: a
:class:`~.lookout.Lookout`, by which whoever fails raises the alarm, and so does whoever finds that another one has
gone; and a :class:`~.guard.Guard`, which acts on it.

A micro-batch that fails before its plan is made leaves nothing half done, so that is told apart: others that wait for
it raise an error too, and all of them may go on to the next one.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from deepspeed_distca.attention_server.coordination.alarm import Alarm
from deepspeed_distca.attention_server.coordination.board import Board
from deepspeed_distca.attention_server.coordination.errors import (
    AgreementError,
    RankFailedError,
    error_in_words,
    is_connection_error,
)
from deepspeed_distca.attention_server.coordination.guard import Guard
from deepspeed_distca.attention_server.coordination.lookout import Lookout
from deepspeed_distca.attention_server.coordination.position import BACKWARD, BETWEEN, FORWARD, OUTSIDE, Position
from deepspeed_distca.attention_server.coordination.signs import EVERY
from deepspeed_distca.compat.torch import after_backward


class Watch:
    """Of one engine, on one rank: what training calls. Nothing but counting where there is a single rank.

    All of it is called by the training's threads, and by the interpreter's at its end.

    Args:
        name: of the engine, the same on all ranks, and of no other engine.
        seconds: after which a rank without a sign of life counts as gone.
    """

    def __init__(self, name: str, seconds: float) -> None:
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._position, self._alarm = Position(0 if alone else dist.get_rank()), Alarm()
        self._closing, self._process = threading.Event(), os.getpid()
        self._lookout: Lookout | None = None
        self._guard: Guard | None = None
        if alone:
            return
        # Below some looks a busy machine would pass for a dead one.
        common = max(seconds, 4 * EVERY), self._position, self._alarm, self._closing
        self._lookout = Lookout(Board(name), *common)
        self._guard = Guard(self._lookout, *common)
        self._lookout.start()
        self._guard.start()
        atexit.register(self._at_exit)

    def cover(self, group: dist.ProcessGroup) -> None:
        """Waits in this gloo group end when there is an alarm."""
        if self._guard is not None:
            self._guard.groups.append(group)

    def cover_device(self, release: Callable[[], None]) -> None:
        """Called after an alarm, once the training's thread knows of it: lets this rank's device go on."""
        if self._guard is not None:
            self._guard.releases.append(release)

    # -- where training is

    def begin(self) -> None:
        """A training micro-batch begins.

        Raises:
            RankFailedError: there has been an alarm.
        """
        self.check()
        self._alarm.told = False  # of this one
        here = self._position
        here.layers = here.layer = 0
        here.number, here.phase = here.number + 1, FORWARD

    def check(self) -> None:
        """Raises RankFailedError if there has been an alarm."""
        if self._alarm.text is not None:
            self._alarm.told = True
            raise RankFailedError(
                f"{self._alarm.text}. This engine runs no further training micro-batch: what its ranks exchange no "
                "longer fits together. Begin anew from a checkpoint, or call engine.distca.detach() and "
                "deepspeed_distca.attach(engine) on all ranks if all of them are still there"
            )

    def planned(self, layers: int) -> None:
        """The micro-batch's plan is made, for so many attention layers: from now on the ranks need each other."""
        self._position.layers = layers

    def attending(self) -> None:
        """The next attention layer begins."""
        if self._position.phase == FORWARD:
            self._position.layer += 1

    @property
    def layers(self) -> str:
        """How many attention layers this rank's forward has gone through, in words."""
        return f"{self._position.layer} attention layers of {self._position.layers}"

    def other_layers(self, ranks: Sequence[int]) -> str | None:
        """At the end of a planned forward that went through another number of attention layers than there are: which
        of the ranks went through yet another one, in words; None: none did, or this forward went through all. Ranks
        that go through all say nothing: they are seen to be elsewhere.

        Args:
            ranks: with which rows are exchanged in every layer.

        Raises:
            RankFailedError: there has been an alarm.
        """
        here = self._position
        if self._lookout is None or here.phase != FORWARD or here.layer == here.layers:
            return None
        found = self._lookout.other_layers([rank for rank in ranks if rank != here.rank])
        if found is None:
            self.check()
        return found

    def forward_over(self) -> None:
        """The micro-batch's forward is through."""
        if self._position.phase == FORWARD:
            self._position.phase = BETWEEN

    def given_up(self) -> None:
        """All ranks have given the micro-batch up alike."""
        self._position.phase = OUTSIDE

    @contextmanager
    def backward_of_layer(self, *, last: bool = True) -> Iterator[None]:
        """Around our part in a layer's backward; `last` if it is the layer's only one."""
        if self._position.phase in (FORWARD, BETWEEN, OUTSIDE):
            # Not through the engine: the end comes by autograd's own callback.
            self._position.phase = BACKWARD
            after_backward(self.given_up)
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            self.failed(error)
            raise
        self._position.layer -= last

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a part of the step in which the ranks need each other. What it raises is told to the others.

        Raises:
            RankFailedError: in the place of torch's own errors of connections.
        """
        self._position.phase = name
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if is_connection_error(error):
                raise self.explain(error) from error
            self.failed(error)
            raise
        self._position.phase = OUTSIDE

    # -- what went wrong

    def failed(self, error: BaseException) -> None:
        """This rank's micro-batch, or its step, has failed: the others are told, and this rank goes its own way.
        Nothing to tell: errors that all ranks have agreed on, and any outside of a micro-batch."""
        here, planned = self._position, self._position.layers > 0
        if isinstance(error, AgreementError) and not planned:
            self.given_up()
        if not here.unfinished or isinstance(error, AgreementError):
            return
        if is_connection_error(error):
            self.explain(error)
            return
        text = f"rank {here.rank} failed {here.where()}: {error_in_words(error)}"
        self._alarm.told = True
        if self._lookout is not None:
            left = here.phase == FORWARD and not planned
            (self._lookout.leave_note if left else self._lookout.raise_alarm)(text)
        self.given_up()

    def left_by_others(self, seconds: float = 0.0) -> str | None:
        """Why another rank left the micro-batch at which this one is, before its plan was made.

        Args:
            seconds: for which to wait for it.
        """
        return None if self._lookout is None else self._lookout.left_by_others(seconds)

    def explain(self, error: BaseException) -> RankFailedError:
        """In the place of an error by which a wait for others ended: which rank is to blame, and why. Raises the alarm
        if nobody else has. Takes up to some seconds."""
        self._alarm.told = True
        where, why = self._position.where(), error_in_words(error)
        if self._alarm.text is None and self._lookout is not None:
            self._lookout.find_out(f"rank {self._position.rank} waited in vain {where}", why)
        return RankFailedError(
            self._alarm.text
            or f"the connection to another rank was lost {where}, and the store of torch.distributed, which rank 0 or "
            f"the launcher holds, does not answer: look for an earlier error there ({why})"
        )

    # -- the end

    def close(self) -> None:
        """Ends the watch; the others are told that this rank has left. Again: nothing."""
        if not self._closing.is_set() and os.getpid() == self._process:
            self._position.detach()
            self._leave()

    def _at_exit(self) -> None:
        """The script is over. Python has kept the exception that ended it, unless that was SystemExit."""
        if os.getpid() != self._process:
            return
        error = getattr(sys, "last_value", None)
        if error is not None and self._alarm.text is None and not isinstance(error, AgreementError):
            if is_connection_error(error):
                self.explain(error)
            elif self._lookout is not None:
                text = f"rank {self._position.rank} ended {self._position.where()}: {error_in_words(error)}"
                self._lookout.raise_alarm(text)
        if self._alarm.text is not None and error is not None and not isinstance(error, RankFailedError):
            print(f"distca: {self._alarm.text}", file=sys.stderr, flush=True)
        self._leave()

    def _leave(self) -> None:
        self._closing.set()
        if self._lookout is not None:
            self._lookout.leave()
        if self._guard is not None:
            self._guard.leave()
        atexit.unregister(self._at_exit)


def backward_of_layer(watch: Watch | None, *, last: bool = True) -> Any:
    """See :meth:`Watch.backward_of_layer`."""
    return nullcontext() if watch is None else watch.backward_of_layer(last=last)


def explained(watch: Watch | None, error: Exception) -> AgreementError:
    """What to raise in the place of an error by which waiting for others ended."""
    if watch is not None:
        return watch.explain(error)
    return RankFailedError(f"the connection to another rank was lost; look for an earlier error there ({error})")
