# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other about a micro-batch before it is planned: plain integers over a CPU process group.

One small collective per micro-batch, off the device. It also carries bad news: a rank whose input cannot be used says
so here, and every rank raises the same error instead of waiting for one that has stopped.

All messages have one size and begin with their kind. A rank whose script caught an error and went on to its next
micro-batch is met by others that still ask about the last one, and all of them notice: collectives of different sizes
would end a process instead.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca.layout import Layout

if TYPE_CHECKING:
    from deepspeed_distca.attention_server.coordination.watch import Watch

logger = logging.getLogger(__name__)

# Integers of a message: its kind, what it says of itself, and then what has room.
_SIZE = 512
_HEADER = 10
# Lengths that fit into the first message; more documents on some rank cost more messages.
_INLINE = _SIZE - _HEADER
_ERROR_BYTES = 8 * (_SIZE - 1)
#: Below it are counts of targets, so that those of many ranks can be sent as they are.
_COUNTS_END = 2**62
#: How often this rank looks whether others have left the micro-batch for which it waits.
_LOOK = timedelta(milliseconds=200)
#: Seconds in which the reason for what others do must have come.
_NEWS = 1.0


class _Kind(IntEnum):
    """What a message is about: the first of a micro-batch or of some values, what did not fit there, and so on."""

    MICRO_BATCH = 1
    VALUES = 2
    MORE = 3
    DIGEST = 4
    ERROR = 5


class AgreementError(RuntimeError):
    """The ranks cannot go on together; the message says which rank differs and how."""


class _OutOfStep(AgreementError):
    """Ranks are at different places."""


class MicroBatchLeftError(AgreementError):
    """Another rank has left the micro-batch before its plan was made, and this one with it."""


@dataclass(frozen=True)
class MicroBatch:
    """One rank's part of a micro-batch.

    Attributes:
        layout: of this rank alone (whole documents), or of all servers of its group, the same on all of them.
        targets: target tokens on this rank in this micro-batch.
        step_targets: the same over the whole accumulation step, where known.
        tokens_digest: 63 bits of its tokens, by which ranks find that all of them have the same; 0: not known.
    """

    layout: Layout
    targets: int
    step_targets: int | None = None
    tokens_digest: int = 0

    def problem(self) -> str:
        """Why it cannot be told to the others; or nothing."""
        for name, value in (("targets", self.targets), ("step_targets", self.step_targets)):
            is_count = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if value is not None and not (is_count and 0 <= value < _COUNTS_END):
                return f"`{name}` was given {value!r}; allowed: a whole number from 0 to {_COUNTS_END - 1}"
        return ""


@dataclass(frozen=True)
class GlobalMicroBatch:
    """What all ranks know after the gathering.

    Attributes:
        layout: of the servers of this rank's group.
        targets: target tokens of the micro-batch over all ranks.
        step_targets: the same over the accumulation step, where every rank knew it.
    """

    layout: Layout
    targets: int
    step_targets: int | None


class Agreement:
    """Gathers integers over ranks.

    Args:
        group: a process group for CPU tensors (gloo), or None for a single process.
        servers: consecutive ranks of the group that share their work.
        fingerprint: of everything else a plan depends on (options, cost model, heads); must be the same on all ranks.
        watch: tells when another rank will not come.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, servers: int, fingerprint: int, watch: Watch | None = None
    ) -> None:
        self._group, self._watch = group, watch
        self._compared = False  # whether ranks have been told that all of them have the same tokens
        self._world = group.size() if group is not None else 1
        self._rank = group.rank() if group is not None else 0
        #: global ranks, by which errors name them
        self._ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        self._servers = servers
        self._fingerprint = fingerprint
        self._asked = True  # for what the last gathering gave

    def gather(self, micro_batch: MicroBatch | Exception) -> Callable[[], GlobalMicroBatch]:
        """Collective. Sends this rank's part of a micro-batch without waiting for the others.

        Args:
            micro_batch: this rank's part, or the error that its input gave.

        Returns:
            Collective too, to be called once, and before anything else is gathered: waits for the micro-batch as all
            ranks together see it. It raises AgreementError on every rank if a rank has an error or the ranks' inputs
            do not fit together. Where the micro-batch failed before it could be called, on all ranks alike, the next
            one may be gathered. If only some ranks left it, that is an error on the others: while they still agree on
            it, or else, with the next one, on all ranks.
        """
        if isinstance(micro_batch, MicroBatch) and (problem := micro_batch.problem()):
            micro_batch = ValueError(problem)
        message = np.zeros(_SIZE, dtype=np.int64)
        message[:2] = _Kind.MICRO_BATCH, isinstance(micro_batch, Exception)
        message[9], self._asked = not self._asked, False
        lengths = np.zeros(0, dtype=np.int64)
        if not isinstance(micro_batch, Exception):
            layout = micro_batch.layout
            shared = layout.num_ranks > 1 or self._servers == 1
            lengths = lengths if shared else layout.segments[:, 3]
            step = -1 if micro_batch.step_targets is None else micro_batch.step_targets
            message[2:7] = layout.num_ranks, len(lengths), micro_batch.targets, step, self._fingerprint
            if shared and self._servers > 1:
                message[7] = fingerprint(layout.segments)
            message[8] = micro_batch.tokens_digest
            message[_HEADER : _HEADER + len(lengths)] = lengths[:_INLINE]
        arrived = self._start(message)

        def in_step() -> np.ndarray:
            try:
                return arrived()
            except _OutOfStep:
                if not message[9]:
                    raise
            # The others were still at the micro-batch that this rank left; now they have raised and come to this one.
            message[9] = 0
            return self._start(message)()

        return lambda: self._together(in_step, micro_batch, lengths)

    def _together(
        self, arrived: Callable[[], np.ndarray], micro_batch: MicroBatch | Exception, lengths: np.ndarray
    ) -> GlobalMicroBatch:
        """See :meth:`gather`.

        Args:
            arrived: waits for the first message of every rank, int64 [ranks, _SIZE].
            lengths: of this rank's documents, unless all servers have the same layout.
        """
        self._asked = True
        try:
            gathered = arrived()
        except MicroBatchLeftError:
            self._asked = False  # this rank has left it as well
            raise
        self._raise_errors(gathered, micro_batch)
        left = gathered[:, 9]
        if left.any() and not left.all():
            raise AgreementError(
                f"ranks {self._named(left != 0)} left the last micro-batch before its first attention layer, "
                "the others did not; look for an earlier error on them. To go on, all ranks must be at the same "
                "micro-batch of their optimizer step again: load a checkpoint, or begin the step anew"
            )
        self._check(gathered)
        group = slice(self._rank // self._servers * self._servers, None)
        group = slice(group.start, group.start + self._servers)
        if self._servers == 1 or gathered[self._rank, 2] > 1:
            layout = micro_batch.layout
        else:
            layout = Layout.from_lengths(self._rows(gathered, lengths)[group])
        self._compare_tokens(gathered[:, 8])
        targets, steps = (gathered[:, column].tolist() for column in (4, 5))
        step_targets = None if min(steps) < 0 else sum(steps)
        return GlobalMicroBatch(layout, sum(targets), step_targets)

    def _compare_tokens(self, digests: np.ndarray) -> None:
        if self._compared or self._world == 1 or not digests[0] or (digests != digests[0]).any():
            return
        self._compared = True
        if self._rank == 0:
            logger.warning(
                "distca: all %d ranks were given the very same tokens. A DataLoader needs a DistributedSampler (or "
                "another division of the data among ranks); as it is, every rank does the same work, and there is "
                "nothing to balance",
                self._world,
            )

    def all_well(self, error: Exception | None, what: str) -> None:
        """Collective. Raises on every rank if a rank has an error: its own, or else an AgreementError.

        Args:
            error: that this rank met.
            what: it was doing, as in "cannot ...".
        """
        self.gather_values(np.zeros(0, dtype=np.int64) if error is None else error, what)

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Around what every rank does by itself, without the others. See :meth:`all_well`."""
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        self.all_well(failure, what)

    def gather_values(self, values: np.ndarray | Exception, what: str = "use its micro-batch") -> list[np.ndarray]:
        """Collective. The integers of every rank, any number of them from each.

        Args:
            values: int64 [n], or the error that this rank met instead.
            what: it could not do then, as in "cannot ...".

        Raises:
            AgreementError: on every rank, if a rank has an error or runs with other options.
        """
        failed = isinstance(values, Exception)
        mine = np.zeros(0, dtype=np.int64) if failed else values
        message = np.zeros(_SIZE, dtype=np.int64)
        message[:2], message[3], message[6] = (_Kind.VALUES, failed), len(mine), self._fingerprint
        message[_HEADER : _HEADER + len(mine)] = mine[:_INLINE]
        gathered = self._start(message)()
        self._raise_errors(gathered, values, what)
        self._check_fingerprint(gathered)
        return self._rows(gathered, mine)

    def same(self, digest: int, what: str) -> None:
        """Collective. Raises AgreementError on every rank unless all servers of each group have the same digest."""
        digests = self._send(_Kind.DIGEST, np.array([digest], dtype=np.int64))()[:, 0]
        of_group = digests.reshape(-1, self._servers)
        if (of_group != of_group[:, :1]).any():
            table = ", ".join(f"rank {r}: {d:016x}" for r, d in zip(self._ranks, digests, strict=True))
            raise AgreementError(
                f"the ranks disagree on {what} ({table}); do all of them run the same versions of Python, NumPy and "
                "deepspeed_distca with the same `distca` block?"
            )

    def _named(self, which: np.ndarray) -> list[int]:
        """The global ranks of some of the group, given by a mask."""
        return [self._ranks[r] for r in np.flatnonzero(which).tolist()]

    def _check_fingerprint(self, gathered: np.ndarray) -> None:
        if (gathered[:, 6] != gathered[0, 6]).any():
            odd = self._named(gathered[:, 6] != gathered[0, 6])
            raise AgreementError(
                f"ranks {odd} run with another `distca` block, cost model or model than rank {self._ranks[0]}; all "
                "must be the same"
            )

    def _check(self, gathered: np.ndarray) -> None:
        self._check_fingerprint(gathered)
        kinds = gathered[:, 2]
        if (kinds != kinds[0]).any():
            raise AgreementError(
                f"layouts of {kinds.tolist()} ranks were given on ranks {self._ranks}; give either each rank's "
                "own documents or the layout of all servers, on all ranks alike"
            )
        if kinds[0] > 1:
            if kinds[0] != self._servers:
                raise AgreementError(f"the layout has {kinds[0]} ranks, but {self._servers} servers share attention")
            of_group = gathered[:, 7].reshape(-1, self._servers)
            if (of_group != of_group[:, :1]).any():
                raise AgreementError("the servers were given different layouts for one micro-batch")

    def _rows(self, gathered: np.ndarray, mine: np.ndarray) -> list[np.ndarray]:
        """The values of every rank, whose numbers are in the first messages: collective if some do not fit there."""
        counts, pieces = gathered[:, 3], [gathered[:, _HEADER:]]
        rest = range(_INLINE, int(counts.max()), _SIZE - 1)
        for first in rest:  # one after the other: a rank that has left meets one of them only
            pieces.append(self._send(_Kind.MORE, mine[first : first + _SIZE - 1])())
        return [row[:n] for row, n in zip(np.concatenate(pieces, axis=1), counts.tolist(), strict=True)]

    def _raise_errors(self, gathered: np.ndarray, mine: object, what: str = "use its micro-batch") -> None:
        """Where the first messages say that ranks have errors: raises this rank's own, or the first other one."""
        ranks = np.flatnonzero(gathered[:, 1])
        if not len(ranks):
            return
        error = mine if isinstance(mine, Exception) else None
        raw = b"" if error is None else str(error).encode()[:_ERROR_BYTES]
        text = np.frombuffer(raw.ljust(_ERROR_BYTES, b"\0"), dtype=np.int64)
        try:
            texts = self._send(_Kind.ERROR, text)()
        except AgreementError as unheard:
            if error is not None:
                raise error from unheard
            raise
        if error is not None:
            raise error
        first = int(ranks[0])
        words = texts[first].tobytes().rstrip(b"\0").decode(errors="replace")
        raise AgreementError(f"rank {self._ranks[first]} cannot {what}: {words}")

    def _send(self, kind: _Kind, values: np.ndarray) -> Callable[[], np.ndarray]:
        """Sends up to _SIZE - 1 values; what is returned waits for those of every rank, [ranks, _SIZE - 1]."""
        message = np.zeros(_SIZE, dtype=np.int64)
        message[0], message[1 : 1 + len(values)] = kind, values
        arrived = self._start(message)
        return lambda: arrived()[:, 1:]

    def _start(self, message: np.ndarray) -> Callable[[], np.ndarray]:
        """Sends a message; what is returned waits for those of every rank, [ranks, _SIZE]."""
        if self._group is None:
            return lambda: message[None]
        mine = torch.from_numpy(message)
        out = [torch.empty_like(mine) for _ in range(self._world)]
        with self._in_time():
            work = dist.all_gather(out, mine, group=self._group, async_op=True)

        def wait() -> np.ndarray:
            with self._in_time():
                self._wait(work)
            gathered = torch.stack(out).numpy()
            kinds = gathered[:, 0]
            if (kinds != kinds[0]).any():
                if (
                    self._watch is not None and message[0] != _Kind.MICRO_BATCH
                ):  # the others have gone on, not this one
                    self._raise_if_left(_NEWS)
                asked = zip(self._ranks, kinds.tolist(), strict=True)
                asked = ", ".join(f"rank {r}: {_Kind(k).name.lower()}" for r, k in asked)
                raise _OutOfStep(
                    "the ranks are not at the same place: some began their next micro-batch while others were still "
                    f"agreeing on the last one ({asked}); look for an earlier error on one of them"
                )
            return gathered

        return wait

    def _raise_if_left(self, seconds: float = 0.0) -> None:
        left = self._watch.left_by_others(seconds)
        if left:
            raise MicroBatchLeftError(
                f"{left}. That rank left the micro-batch before it was planned, and so has this one; both may go on "
                "to the next"
            )

    def _wait(self, work: dist.Work) -> None:
        if self._watch is None:
            work.wait()
            return
        while not work.is_completed():
            self._raise_if_left()
            try:
                work.wait(_LOOK)
            except RuntimeError:
                if work.is_completed():
                    raise  # not for want of time
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


def fingerprint(*values: object) -> int:
    """63 bits of a hash of arrays, strings and numbers, the same in every process."""
    state = hashlib.blake2b(digest_size=8)
    for value in values:
        state.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        state.update(b"\0")
    return int.from_bytes(state.digest(), "little") >> 1


def agreement_group(ranks: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """The CPU group over which this rank's group agrees; None for a single process. Collective over all ranks."""
    if not dist.is_initialized():
        return None
    mine = None
    for members in ranks:
        group = dist.new_group(members, backend="gloo", timeout=timeout)
        if dist.get_rank() in members:
            mine = group
    return mine
