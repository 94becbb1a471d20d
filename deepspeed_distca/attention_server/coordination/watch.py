# SPDX-License-Identifier: Apache-2.0
"""A rank that fails, ends, stops or hangs is known to the others, by name, wherever they wait.

Once a plan is made, ranks depend on each other in every layer: what one of them does not send, others wait for, in a
collective of ours, of DeepSpeed's, or on their devices. So each process has two threads beside its training. One talks
to the store of torch.distributed twice a second: it says that this rank is alive and where it is, looks for an alarm,
and looks at one neighbour's sign of life. Whoever fails raises the alarm there, and so does whoever finds that another
one has gone. The other thread acts on an alarm: it ends this process's waits in our groups, so that they raise it as
an error, and if the training's thread is still at the same place after that, it says why and ends the process.

A micro-batch that fails before its plan is made leaves nothing half done, so that is told apart: others that wait for
it raise an error too, and all of them may go on to the next one.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_distca.attention_server.coordination.agreement import AgreementError
from deepspeed_distca.attention_server.coordination.signs import (
    OUTSIDE,
    Sign,
    error_in_words,
    gone_in_words,
    is_connection_error,
    silent_in_words,
)
from deepspeed_distca.attention_server.coordination.store import close_connections, default_store
from deepspeed_distca.compat.torch import after_backward

#: Seconds between two looks.
_EVERY = 0.5
#: Seconds that a rank has to come to an error of its own, before an alarm ends its waits: ranks often fail alike.
_ALIKE = 1.0
#: Seconds at one and the same place after which a training thread that was not reached by an alarm counts as waiting.
_STUCK = 2.0
#: Where collectives of ours are called.
_OURS = str(Path(__file__).parents[1])
#: Seconds that a process which ends after an alarm gives the others to hear of it.
_LINGER = 1.0
#: Seconds over which ranks are looked at to find one that gives no sign of life.
_SILENT = 1.5


class RankFailedError(AgreementError):
    """Some rank has failed or is gone; the message says which, where and why."""


class Watch:
    """Of one engine, on one rank. Nothing but counting where there is a single rank.

    Args:
        name: of the engine, the same on all ranks, and of no other engine.
        seconds: after which a rank without a sign of life counts as gone.
    """

    def __init__(self, name: str, seconds: float) -> None:
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._rank, self._world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        # Below some looks a busy machine would pass for a dead one.
        self._prefix, self._seconds = f"distca/watch/{name}/", max(seconds, 4 * _EVERY)
        self._store = None if alone else default_store()
        # Where this rank is.
        self._number, self._phase, self._planned, self._inside = 0, OUTSIDE, False, False
        self._attended, self._to_do, self._layers = 0, 0, 0
        # What it knows, and wants to say or ask.
        self.failure: str | None = None
        self._told = False  # the training's thread knows of the failure
        self._alarm: str | None = None
        self._note: tuple[int, str] | None = None
        self._left_note: tuple[int, str] | None = None
        self._question: tuple[str, str] | None = None
        self._known, self._hurry, self._posted = threading.Event(), threading.Event(), threading.Event()
        self._closing = threading.Event()
        self._exiting = False  # closed because the process ends
        self._looks = self._signs_given = 0
        self._patience = _STUCK
        self._sign, self._stayed_at, self._stayed = Sign(), (), 0.0
        self._groups: list[dist.ProcessGroup] = []
        self._releases: list[Callable[[], None]] = []
        self._trainer, self._process = threading.get_ident(), os.getpid()
        self._threads: list[threading.Thread] = []
        if alone:
            return
        self._peer, self._peer_count, self._peer_age = (self._rank + 1) % self._world, 0, 0.0
        for target in (self._talk, self._guard):
            thread = threading.Thread(target=target, name=f"distca-watch{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        atexit.register(self._at_exit)

    # -- called by the training's threads

    def cover(self, group: dist.ProcessGroup) -> None:
        """Waits in this gloo group end when there is an alarm."""
        self._groups.append(group)

    def cover_device(self, release: Callable[[], None]) -> None:
        """Called after an alarm, once the training's thread knows of it: lets this rank's device go on."""
        self._releases.append(release)

    def begin(self) -> None:
        """A training micro-batch begins.

        Raises:
            RankFailedError: there has been an alarm.
        """
        self.check()
        self._number, self._phase, self._planned, self._attended = self._number + 1, "forward", False, 0

    def check(self) -> None:
        """Raises RankFailedError if there has been an alarm."""
        if self.failure is not None:
            self._told = True
            raise RankFailedError(
                f"{self.failure}. This engine runs no further training micro-batch: what its ranks exchange no longer "
                "fits together. Begin anew from a checkpoint, or call engine.distca.detach() and "
                "deepspeed_distca.attach(engine) on all ranks if all of them are still there"
            )

    def planned(self, layers: int) -> None:
        """The micro-batch's plan is made, for so many attention layers: from now on the ranks need each other."""
        self._planned, self._layers, self._to_do = True, layers, layers

    def attending(self) -> None:
        """The next attention layer begins."""
        if self._phase == "forward":
            self._attended += 1

    def forward_over(self) -> None:
        """The micro-batch's forward is through."""
        if self._phase == "forward":
            self._phase = "between forward and backward"

    def given_up(self) -> None:
        """All ranks have given the micro-batch up alike."""
        self._phase = OUTSIDE

    @contextmanager
    def backward_of_layer(self, *, last: bool = True) -> Iterator[None]:
        """Around our part in a layer's backward; `last` if it is the layer's only one."""
        if not self._inside and self._phase != "backward":
            # Not through the engine: the end comes by autograd's own callback.
            self._phase = "backward"
            after_backward(self.given_up)
        try:
            yield
        except Exception as error:
            self.failed(error)
            raise
        self._to_do -= last

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a part of the step in which the ranks need each other. What it raises is told to the others.

        Raises:
            RankFailedError: in the place of torch's own errors of connections.
        """
        self._phase, self._inside = name, True
        try:
            yield
        except Exception as error:
            if is_connection_error(error):
                raise self.explain(error) from error
            self.failed(error)
            raise
        finally:
            self._inside = False
        self._phase = OUTSIDE

    def failed(self, error: BaseException) -> None:
        """This rank's micro-batch, or its step, has failed: the others are told, and this rank goes its own way.
        Nothing to tell: errors that all ranks have agreed on, and any outside of a micro-batch."""
        if isinstance(error, AgreementError) and not self._planned:
            self.given_up()
        if self._phase == OUTSIDE or isinstance(error, AgreementError):
            return
        if is_connection_error(error):
            self.explain(error)
            return
        self._told = True
        text = f"rank {self._rank} failed {self._where()}: {error_in_words(error)}"
        if self._phase == "forward" and not self._planned:
            self._post(note=(self._number, text))
        else:
            self._post(alarm=text)
        self._phase = OUTSIDE

    def left_by_others(self, seconds: float = 0.0) -> str | None:
        """Why another rank left the micro-batch at which this one is, before its plan was made.

        Args:
            seconds: for which to wait for it.
        """
        end = time.monotonic() + seconds
        while (note := self._left_note) is None or note[0] != self._number:
            if time.monotonic() >= end or not self._threads:
                return None
            self._hurry.set()
            time.sleep(0.02)
        return note[1]

    def explain(self, error: BaseException) -> RankFailedError:
        """In the place of an error by which a wait for others ended: which rank is to blame, and why. Raises the alarm
        if nobody else has. Takes up to some seconds."""
        self._told = True
        if self.failure is None and self._threads:
            self._question = f"rank {self._rank} waited in vain {self._where()}", error_in_words(error)
            self._hurry.set()
            self._known.wait(_SILENT + 4.0)
        if self.failure is not None:
            return RankFailedError(self.failure)
        return RankFailedError(
            f"the connection to another rank was lost {self._where()}, and the store of torch.distributed, which rank "
            f"0 or the launcher holds, does not answer: look for an earlier error there ({error_in_words(error)})"
        )

    def close(self) -> None:
        """Ends the watch; the others are told that this rank has left. Again: nothing."""
        if self._closing.is_set() or os.getpid() != self._process:
            return
        self._closing.set()
        self._hurry.set()
        for thread in self._threads[:1]:  # the other one touches no store, and ends by itself
            thread.join(_LINGER + 1.0)
        self._groups, self._releases = [], []
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """The script is over. Python has kept the exception that ended it, unless that was SystemExit."""
        if os.getpid() != self._process:
            return
        error = getattr(sys, "last_value", None)
        if error is not None and self.failure is None and not isinstance(error, AgreementError):
            if is_connection_error(error):
                self.explain(error)
            else:
                self._post(alarm=f"rank {self._rank} ended {self._where()}: {error_in_words(error)}")
        if self.failure is not None and error is not None and not isinstance(error, RankFailedError):
            print(f"distca: {self.failure}", file=sys.stderr, flush=True)
        self._exiting = True
        self.close()

    def _post(self, alarm: str | None = None, note: tuple[int, str] | None = None) -> None:
        """Has the store told, and waits for it for a moment."""
        if not self._threads:
            return
        self._posted.clear()
        self._alarm, self._note = alarm or self._alarm, note or self._note
        self._hurry.set()
        self._posted.wait(2.0)

    def _where(self) -> str:
        if self._phase == "forward":
            layer = (
                f"layer {self._attended} of {self._layers}" if self._attended else "before its first attention layer"
            )
            return f"in forward of micro-batch {self._number}, {layer}"
        if self._phase == "backward":
            layer = f", layer {self._to_do} of {self._layers}" if self._to_do else ""
            return f"in backward of micro-batch {self._number}{layer}"
        if self._phase == OUTSIDE:
            return f"{OUTSIDE}, after micro-batch {self._number}" if self._number else "before its first micro-batch"
        of = f" of micro-batch {self._number}" if self._number else ""
        return f"{'' if self._phase.startswith('between') else 'in '}{self._phase}{of}"

    # -- the thread that talks to the store

    def _talk(self) -> None:
        hurried = False
        try:
            while True:
                closing = self._closing.is_set()
                self._say(left=closing)
                if self._question is not None and self.failure is None:
                    self._find_out(*self._question)
                self._listen()
                self._looks += 1
                if closing or self.failure is not None:
                    break
                if not hurried:  # what is counted by looks is time
                    self._look_at_peer()
                    self._look_at_self()
                hurried = self._hurry.wait(_EVERY)
                self._hurry.clear()
            while not self._closing.wait(_EVERY):  # the others may still ask for signs of life
                self._say()
            self._say(left=True)
            if self.failure is not None:
                # The store may end with this process, and the others must have heard of it by then.
                self._until_all_have_heard()
        except Exception as error:  # the store has ended with the process that holds it
            if self._phase != OUTSIDE and not self._closing.is_set():
                # Where this rank waits for nobody, the end of rank 0's script may have been an orderly one.
                self._patience = _STUCK if self._in_collective() else max(_STUCK, self._seconds)
                self._learn(
                    "the store of torch.distributed is gone, and with it rank 0 or the launcher, whichever held it: "
                    f"it was killed or has ended; this rank is {self._where()} ({error_in_words(error)})"
                )
        finally:
            self._posted.set()

    def _say(self, *, left: bool = False) -> None:
        if self._note is not None:
            note, self._note = self._note, None
            self._store.set(self._key("note"), f"{note[0]} {note[1]}")
            self._posted.set()
        if self._alarm is not None:
            alarm, self._alarm = self._alarm, None
            self._learn(self._store.compare_set(self._key("alarm"), "", alarm).decode(), heard=True)
            self._posted.set()
        self._signs_given += 1
        if left and not self._exiting:
            sign = Sign.of_detached(self._signs_given)
        else:
            unfinished = self._phase != OUTSIDE
            sign = Sign(self._signs_given, self._number, left, unfinished, self._in_collective(), self._where())
        self._sign = sign
        self._store.set(self._key("sign", self._rank), sign.to_text())

    def _listen(self) -> None:
        if self._store.check([self._key("alarm")]):
            self._learn(self._store.get(self._key("alarm")).decode(), heard=True)
        if self._store.check([self._key("note")]):
            number, text = self._store.get(self._key("note")).decode().split(" ", 1)
            self._left_note = int(number), text
            if self.left_by_others() and self._planned and not self._told:
                self._raise_alarm(text)  # this rank is past what can be given up

    def _look_at_peer(self) -> None:
        sign = self._sign_of(self._peer)
        if sign.left:
            if self._waits_for(sign):
                # A micro-batch may have been given up, and this rank be at something else that takes its time.
                if self._in_collective(ours=True):
                    self._raise_alarm(gone_in_words(self._peer, sign))
                return
            following = (self._peer + 1) % self._world
            self._peer, self._peer_age = (self._peer if following == self._rank else following), 0.0
        elif sign.count != self._peer_count:
            self._peer_count, self._peer_age = sign.count, 0.0
        else:
            # By looks, not by the clock: all ranks of a job may have been suspended together.
            self._peer_age += _EVERY
            if self._peer_age > self._seconds:
                self._raise_alarm(silent_in_words([self._peer], {self._peer: sign}, self._seconds))

    def _look_at_self(self) -> None:
        """Whether this rank waits for the others for too long, in a collective that is not ours. A rank that hangs by
        itself is in none: the others find out."""
        frame = sys._current_frames().get(self._trainer)
        place = id(frame), frame and frame.f_lasti, self._number, self._phase, self._attended, self._to_do
        moved = place != self._stayed_at or self._phase == OUTSIDE
        self._stayed_at, self._stayed = place, 0.0 if moved else self._stayed + _EVERY
        if self._stayed > self._seconds and self._sign.waits:
            elsewhere = self._elsewhere(self._signs())
            if elsewhere:
                self._raise_alarm(
                    f"rank {self._rank} has waited for {self._stayed:g} s (`distca.timeout_seconds`) {self._where()}: "
                    f"{elsewhere}"
                )

    def _elsewhere(self, signs: dict[int, Sign]) -> str:
        """Which ranks are not at this one's place, in words; or do not wait there as it does."""
        mine = self._sign
        found = [
            f"rank {rank} is {sign.place}"
            for rank, sign in signs.items()
            if (sign.number, sign.phase) != (mine.number, mine.phase) or (mine.waits and not sign.waits)
        ]
        return "; ".join(found[:8])

    def _in_collective(self, *, ours: bool = False) -> bool:
        """Whether the training's thread is in a collective of torch's, or (with `ours`) in anything of this folder."""
        places = ("torch/distributed/", _OURS) if ours else ("torch/distributed/",)
        frame = sys._current_frames().get(self._trainer)
        while frame is not None and not any(place in frame.f_code.co_filename for place in places):
            frame = frame.f_back
        return frame is not None

    def _waits_for(self, sign: Sign) -> bool:
        """Whether this rank is at a micro-batch that one that has left did not finish."""
        unfinished = self._phase != OUTSIDE
        return self._number > sign.number or (self._number == sign.number and unfinished and sign.unfinished)

    def _find_out(self, who: str, why: str) -> None:
        """Whom a wait that ended is due to."""
        before = self._signs()
        if self._pause(_SILENT):  # an alarm may follow the error that it causes
            return
        signs = self._signs()
        silent = [r for r, sign in signs.items() if not sign.left and sign.count == before[r].count]
        gone = [r for r, sign in signs.items() if sign.left and self._waits_for(sign)]
        if silent:
            reason = silent_in_words(silent, signs)
        elif gone:
            reason = "; ".join(gone_in_words(rank, signs[rank]) for rank in gone)
        else:
            reason = self._elsewhere(signs) or "all ranks are alive and at the same place"
        if not silent:
            reason += (
                ". Every rank must run the same number of training micro-batches (an empty one where it has no "
                "documents); look for an earlier error on another rank, or raise `distca.timeout_seconds` if a rank "
                "is only slow"
            )
        self._raise_alarm(f"{who}: {reason} ({why})")

    def _pause(self, seconds: float) -> bool:
        """Goes on talking for so long; whether there is an alarm."""
        for _ in range(round(seconds / 0.25)):
            self._closing.wait(0.25)
            self._say()
            self._listen()
            if self.failure is not None:
                return True
        return False

    def _signs(self) -> dict[int, Sign]:
        return {rank: self._sign_of(rank) for rank in range(self._world) if rank != self._rank}

    def _sign_of(self, rank: int) -> Sign:
        key = self._key("sign", rank)
        return Sign.from_text(self._store.get(key).decode()) if self._store.check([key]) else Sign()

    def _raise_alarm(self, text: str) -> None:
        self._learn(self._store.compare_set(self._key("alarm"), "", text).decode(), heard=True)

    def _learn(self, text: str, *, heard: bool = False) -> None:
        """There is an alarm.

        Args:
            heard: it is in the store.
        """
        if self.failure is None:
            self.failure = text
            if heard:
                self._store.add(self._key("heard"), 1)
        self._known.set()

    def _until_all_have_heard(self) -> None:
        end = time.monotonic() + _LINGER
        while self._store.add(self._key("heard"), 0) < self._world and time.monotonic() < end:
            time.sleep(0.05)

    def _key(self, *parts: Any) -> str:
        return self._prefix + "/".join(map(str, parts))

    # -- the thread that acts

    def _guard(self) -> None:
        looks, missed = 0, 0.0
        while not self._known.wait(_EVERY):
            if self._closing.is_set():
                return
            missed = missed + _EVERY if self._looks == looks else 0.0
            looks = self._looks
            if missed > self._seconds and self._threads[0].is_alive():
                self._learn(
                    f"the store of torch.distributed has not answered for {missed:g} s: rank 0 or the launcher, "
                    "whichever holds it, was stopped or hangs"
                )
        if self._closing.wait(_ALIKE):
            return
        for group in self._groups:
            close_connections(group)
        place, since = None, 0.0
        while not self._told and not self._closing.wait(_EVERY / 2):
            frame = sys._current_frames().get(self._trainer)
            if frame is None:
                return
            here = id(frame), frame.f_lasti
            since = since + _EVERY / 2 if here == place else 0.0
            place = here
            if since >= self._patience - _ALIKE:
                self._end(traceback.extract_stack(frame))
        for release in self._releases:
            with suppress(Exception):
                release()

    def _end(self, stack: traceback.StackSummary) -> None:
        """The training's thread waits where it cannot be reached."""
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        flushing.join(_EVERY)  # the training's thread may be in the midst of printing
        where = "".join(f"\n  {f.filename}:{f.lineno} in {f.name}" for f in stack[-3:])
        print(
            f"distca: {self.failure}. Rank {self._rank}, {self._where()}, waits for it and ends now, at{where}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def backward_of_layer(watch: Watch | None, *, last: bool = True) -> Any:
    """See :meth:`Watch.backward_of_layer`."""
    return nullcontext() if watch is None else watch.backward_of_layer(last=last)


def explained(watch: Watch | None, error: Exception) -> AgreementError:
    """What to raise in the place of an error by which waiting for others ended."""
    if watch is not None:
        return watch.explain(error)
    return RankFailedError(f"the connection to another rank was lost; look for an earlier error there ({error})")
