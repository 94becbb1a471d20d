# SPDX-License-Identifier: Apache-2.0
"""The thread that talks to the store: it says that this rank is alive, and hears what has become of the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from deepspeed_distca.attention_server.coordination.alarm import STUCK, Alarm
from deepspeed_distca.attention_server.coordination.board import Board
from deepspeed_distca.attention_server.coordination.errors import error_in_words
from deepspeed_distca.attention_server.coordination.position import Position, Unchanged
from deepspeed_distca.attention_server.coordination.signs import (
    EVERY,
    Sign,
    elsewhere,
    gone_in_words,
    reason_of_waiting,
    silent_in_words,
)

#: Seconds that a process which ends after an alarm gives the others to hear of it.
_LINGER = 1.0
#: Seconds over which ranks are looked at to find one that gives no sign of life.
_SILENT = 1.5


class Lookout:
    """Twice a second it gives a sign of life, looks for an alarm and for a note of a rank that has left a micro-batch,
    and looks at one neighbour's sign. Between that it runs errands for training.

    Fields that change: ``_errands`` is filled by the training's threads, ``_hurry`` is set by them and cleared here;
    all others, ``sign`` among them, are written by this thread alone.

    Args:
        board: what all ranks read and write; this thread alone in this process.
        seconds: without a sign of life, or at one place in a collective, after which a rank counts as gone.
        position: read.
        alarm: raised and read.
        closing: set when this rank leaves.
    """

    def __init__(
        self, board: Board, seconds: float, position: Position, alarm: Alarm, closing: threading.Event
    ) -> None:
        self._board, self._seconds, self._position, self._alarm = board, seconds, position, alarm
        self._closing, self._hurry = closing, threading.Event()
        self._errands: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        #: The last one given; its count says that this thread is not held up.
        self.sign = Sign()
        self._note = -1, ""  # of a rank that has left a micro-batch: its number, and why
        self._peer, self._silent = board.after(position.rank), Unchanged(EVERY)
        self._stayed = Unchanged(EVERY)  # this rank, where it is
        self._thread = threading.Thread(target=self._run, name="distca-lookout", daemon=True)

    # -- called by the training's threads, and by the guard

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def leave(self) -> None:
        """Waits until the others have been told that this rank has left, or for a little while."""
        self._hurry.set()
        if self._thread is not threading.current_thread():  # which may collect an engine that was dropped
            self._thread.join(_LINGER + 1.0)

    def raise_alarm(self, text: str) -> None:
        """Tells all ranks that one has failed."""
        self._ask(lambda: self._raise_alarm(text)).wait(2.0)

    def leave_note(self, text: str) -> None:
        """Tells all ranks that this one has left its micro-batch before it was planned."""
        number = self._position.number
        self._ask(lambda: self._board.leave_note(number, text)).wait(2.0)

    def find_out(self, who: str, why: str) -> None:
        """Looks which rank a wait that ended is due to, and raises the alarm."""
        self._ask(lambda: self._find_out(who, why))
        if self.is_alive():
            self._alarm.wait(_SILENT + 4.0)

    def left_by_others(self, seconds: float) -> str | None:
        """See :meth:`~.watch.Watch.left_by_others`."""
        end = time.monotonic() + seconds
        while (note := self._note)[0] != self._position.number:
            if time.monotonic() >= end:
                return None
            self._hurry.set()
            time.sleep(0.02)
        return note[1]

    def other_layers(self, ranks: Sequence[int]) -> str | None:
        """See :meth:`~.watch.Watch.other_layers`."""
        number, layers = self._position.number, self._position.layer
        self._ask(lambda: self._board.say_layers(number, layers))
        unknown, end = list(ranks), time.monotonic() + self._seconds
        while unknown and self._alarm.text is None:
            found: list[str | None] = []

            def look(rank: int = unknown[0], found: list[str | None] = found) -> None:
                sign = self._board.sign_of(rank)  # first: what it has to say, it says before it goes on
                theirs = self._board.layers_of(rank, number)
                if theirs is not None:
                    found.append(f"rank {rank} through {theirs}" if theirs != layers else None)
                elif sign.is_beyond(number, layers):
                    found.append(f"rank {rank} is {sign.place}")
                elif time.monotonic() > end:
                    found.append(f"rank {rank} has not come to the end of its forward, but is {sign.place}")

            self._ask(look).wait(2.0)
            if not found:
                time.sleep(0.02)
            elif found[0] is None:
                unknown.pop(0)
            else:
                return found[0]
        return None

    def _ask(self, errand: Callable[[], None]) -> threading.Event:
        """Has this thread do something at once. Returns what is set when that is done, or will never be."""
        done = threading.Event()
        self._errands.put((errand, done))
        self._hurry.set()
        if not self.is_alive():
            done.set()
        return done

    # -- the thread

    def _run(self) -> None:
        try:
            self._talk()
        except Exception as error:  # the store has ended with the process that holds it
            if self._position.unfinished and not self._closing.is_set():
                # Where this rank waits for nobody, the end of rank 0's script may have been an orderly one.
                patience = STUCK if self._position.in_collective() else max(STUCK, self._seconds)
                self._alarm.sound(
                    "the store of torch.distributed is gone, and with it rank 0 or the launcher, whichever held it: "
                    f"it was killed or has ended; this rank is {self._position.where()} ({error_in_words(error)})",
                    patience,
                )

    def _talk(self) -> None:
        hurried = False
        while True:
            closing = self._closing.is_set()
            self._say(left=closing)
            self._listen()
            if closing or self._alarm.text is not None:
                break
            if not hurried:  # what is counted by looks is time
                self._look_at_peer()
                self._look_at_self()
            hurried = self._hurry.wait(EVERY)
            self._hurry.clear()
        while not self._closing.wait(EVERY):  # the others may still ask for signs of life
            self._say()
        self._say(left=True)
        if self._alarm.text is not None:
            # The store may end with this process, and the others must have heard of it by then.
            end = time.monotonic() + _LINGER
            while not self._board.all_have_heard() and time.monotonic() < end:
                time.sleep(0.05)

    def _say(self, *, left: bool = False) -> None:
        while not self._errands.empty():
            errand, done = self._errands.get()
            try:
                errand()
            finally:
                done.set()
        self.sign = self.sign.following(self._position, left=left)
        self._board.give_sign(self.sign)

    def _listen(self) -> None:
        alarm = self._board.alarm()
        if alarm is not None:
            self._hear(alarm)
        self._note = self._board.note() or self._note
        left = self.left_by_others(0.0)
        if left is not None and self._position.layers and not self._alarm.told:
            self._raise_alarm(left)  # this rank is past what can be given up

    def _look_at_peer(self) -> None:
        sign = self._board.sign_of(self._peer)
        if not sign.left:
            if self._silent.seconds((self._peer, sign.count)) > self._seconds:
                self._raise_alarm(silent_in_words([self._peer], {self._peer: sign}, self._seconds))
        elif not self.sign.waits_for(sign):
            self._peer = self._board.after(self._peer)
        elif self._position.in_collective(ours=True):
            # Elsewhere a micro-batch may have been given up, and this rank be at something else that takes its time.
            self._raise_alarm(gone_in_words(self._peer, sign))

    def _look_at_self(self) -> None:
        """Whether this rank waits for the others for too long, in a collective that is not ours. A rank that hangs by
        itself is in none: the others find out."""
        stayed = self._stayed.seconds(self._position.spot())
        if stayed > self._seconds and self.sign.waits and self._position.unfinished:
            others = elsewhere(self.sign, self._board.others())
            if others:
                self._raise_alarm(
                    f"rank {self._position.rank} has waited for {stayed:g} s (`distca.timeout_seconds`) "
                    f"{self._position.where()}: {others}"
                )

    def _find_out(self, who: str, why: str) -> None:
        before = self._board.others()
        for _ in range(round(_SILENT / 0.25)):
            if self._alarm.text is not None:  # it may follow the error that it causes
                return
            self._closing.wait(0.25)
            self._say()
            self._listen()
        if self._alarm.text is None:
            self._raise_alarm(f"{who}: {reason_of_waiting(self.sign, before, self._board.others())} ({why})")

    def _raise_alarm(self, text: str) -> None:
        self._hear(self._board.raise_alarm(text))

    def _hear(self, text: str) -> None:
        """There is an alarm on the board."""
        if self._alarm.sound(text):
            self._board.hear()
