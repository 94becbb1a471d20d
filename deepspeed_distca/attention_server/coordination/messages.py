# SPDX-License-Identifier: Apache-2.0
"""Messages of integers that all ranks of a group send each other, over a CPU process group.

All messages have one size and begin with their kind. A rank whose script caught an error and went on to its next
micro-batch is met by others that still ask about the last one, and all of them notice: collectives of different sizes
would end a process instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.coordination.errors import (
    AgreementError,
    MicroBatchLeftError,
    OutOfStepError,
)
from deepspeed_distca.attention_server.coordination.watch import Watch

#: Integers of a message.
_SIZE = 512
#: What a rank says of itself at the beginning of the first message of a micro-batch or of some values.
_ABOUT = (
    "kind",
    "failed",  # it has an error, whose text follows
    "layout_ranks",  # ranks of the layout that it was given
    "count",  # of its values
    "targets",
    "step_targets",  # -1: not known
    "fingerprint",  # of what all ranks must have alike
    "layout_digest",  # of a layout of several ranks
    "tokens_digest",
    "kept_layers",  # of how many layers it can keep core attention
    "in_two",  # it can run the micro-batch as two nano-batches
    "left",  # it left the last micro-batch before that was planned
)
_FIRST = np.dtype([*((name, np.int64) for name in _ABOUT), ("values", np.int64, (_SIZE - len(_ABOUT),))])
#: Any other message.
_FURTHER = np.dtype([("kind", np.int64), ("values", np.int64, (_SIZE - 1,))])
#: Values that have room in a first message; more of them on some rank cost more messages, of so many each.
_INLINE, _MORE = _SIZE - len(_ABOUT), _SIZE - 1
_ERROR_BYTES = 8 * _MORE
#: How often this rank looks whether others have left the micro-batch for which it waits.
_LOOK = timedelta(milliseconds=200)
#: Seconds in which the reason for what others do must have come.
_NEWS = 1.0

T = TypeVar("T")


class Kind(IntEnum):
    """What a message is about: the first of a micro-batch or of some values, what did not fit there, and so on."""

    MICRO_BATCH = 1
    VALUES = 2
    MORE = 3
    DIGEST = 4
    ERROR = 5


def first_message(kind: Kind, values: np.ndarray, **about: int) -> np.ndarray:
    """A record [1] of a first message.

    Args:
        values: int64 [n], of which those go along that have room; see :meth:`Messenger.all_values`.
        about: the other fields; 0 where not given.
    """
    message = np.zeros(1, dtype=_FIRST)
    message["kind"], message["count"] = kind, len(values)
    for name, value in about.items():
        message[name] = value
    message["values"][0, : len(values)] = values[:_INLINE]
    return message


class Messenger:
    """Of one rank in one group. What it does is collective over the group.

    Args:
        group: a process group for CPU tensors (gloo), or None for a single process.
        watch: tells when another rank will not come.

    Attributes:
        ranks: global ranks of the group, by which errors name them.
        rank: this one's, in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, watch: Watch | None) -> None:
        self._group, self._watch = group, watch
        self.ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        self.rank = group.rank() if group is not None else 0

    def send(self, message: np.ndarray) -> Callable[[], np.ndarray]:
        """Sends a message, a record [1]; what is returned waits for those of every rank, a record [ranks].

        Raises:
            AgreementError: a rank does not come in time; :class:`OutOfStepError` where it is at another place,
                MicroBatchLeftError where it has left the micro-batch. From what is returned.
        """
        if len(self.ranks) == 1:
            return lambda: message
        mine = torch.from_numpy(message.view(np.int64))
        everyone = torch.empty(len(self.ranks), _SIZE, dtype=torch.int64)
        with self._in_time():
            work = dist.all_gather(list(everyone), mine, group=self._group, async_op=True)

        def wait() -> np.ndarray:
            with self._in_time():
                self._wait(work)
            gathered = everyone.numpy().view(message.dtype)[:, 0]
            self._check_kinds(gathered["kind"], Kind(message["kind"][0]))
            return gathered

        return wait

    def send_values(self, kind: Kind, values: np.ndarray) -> Callable[[], np.ndarray]:
        """Sends a message that is no first one, of up to 511 values; what is returned waits for those of every rank,
        int64 [ranks, 511]."""
        message = np.zeros(1, dtype=_FURTHER)
        message["kind"], message["values"][0, : len(values)] = kind, values
        arrived = self.send(message)
        return lambda: arrived()["values"]

    def all_values(self, firsts: np.ndarray, mine: np.ndarray) -> list[np.ndarray]:
        """The values of every rank: collective if some do not fit into the first messages.

        Args:
            firsts: the first messages of every rank.
            mine: all values of this one, int64 [n].
        """
        counts, pieces = firsts["count"], [firsts["values"]]
        for begin in range(_INLINE, int(counts.max()), _MORE):
            # One after the other: a rank that has left meets one of them only.
            pieces.append(self.send_values(Kind.MORE, mine[begin : begin + _MORE])())
        return [row[:n] for row, n in zip(np.concatenate(pieces, axis=1), counts.tolist(), strict=True)]

    def without_errors(self, firsts: np.ndarray, mine: T | Exception, what: str) -> T:
        """What this rank gave, unless first messages say that ranks have errors: then it raises this rank's own, or
        else an AgreementError with the text of the first other one.

        Args:
            firsts: of every rank.
            mine: what this rank gave, or its error.
            what: a rank with an error cannot do.
        """
        ranks = np.flatnonzero(firsts["failed"])
        if not len(ranks) and not isinstance(mine, Exception):
            return mine
        raw = str(mine).encode()[:_ERROR_BYTES] if isinstance(mine, Exception) else b""
        try:
            texts = self.send_values(Kind.ERROR, np.frombuffer(raw.ljust(_ERROR_BYTES, b"\0"), dtype=np.int64))()
        except AgreementError as unheard:
            if isinstance(mine, Exception):
                raise mine from unheard
            raise
        if isinstance(mine, Exception):
            raise mine
        first = int(ranks[0])
        words = texts[first].tobytes().rstrip(b"\0").decode(errors="replace")
        raise AgreementError(f"rank {self.ranks[first]} cannot {what}: {words}")

    def named(self, which: np.ndarray) -> list[int]:
        """The global ranks of some of the group, given by a mask."""
        return [self.ranks[r] for r in np.flatnonzero(which).tolist()]

    def _check_kinds(self, kinds: np.ndarray, mine: Kind) -> None:
        if (kinds == mine).all():
            return
        if mine != Kind.MICRO_BATCH:  # the others have gone on, not this one
            self._raise_if_left(_NEWS)
        both = zip(self.ranks, kinds.tolist(), strict=True)
        asked = ", ".join(f"rank {rank}: {Kind(kind).name.lower()}" for rank, kind in both)
        raise OutOfStepError(
            "the ranks are not at the same place: some began their next micro-batch while others were still "
            f"agreeing on the last one ({asked}); look for an earlier error on one of them"
        )

    def _raise_if_left(self, seconds: float = 0.0) -> None:
        left = None if self._watch is None else self._watch.left_by_others(seconds)
        if left:
            raise MicroBatchLeftError(
                f"{left}. That rank left the micro-batch before it was planned, and so has this one; both may go on "
                "to the next"
            )

    def _wait(self, work: dist.Work) -> None:
        while self._watch is not None and not work.is_completed():
            self._raise_if_left()
            # It may be over between the end of the look and any question about it: a failure is raised again below.
            with suppress(RuntimeError):
                work.wait(_LOOK)
        work.wait()

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """What a collective raises, in words that help."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, AgreementError):
                raise
            if self._watch is not None:
                raise self._watch.explain(error) from error
            raise AgreementError(
                "a rank did not come to this micro-batch in time. Every rank must run the same number of training "
                "micro-batches (an empty one where it has no documents); look for an earlier error on another rank, "
                f"or raise `distca.timeout_seconds` if a rank is only slow ({error})"
            ) from error
