# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other about a micro-batch before it is planned: plain integers over a CPU process group.

One small collective per micro-batch, off the device. It also carries bad news: a rank whose input cannot be used says
so here, and every rank raises the same error instead of waiting for one that has stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca.layout import Layout

# Lengths that fit into the first message; more documents on some rank cost a second one.
_INLINE = 504
_HEADER = 8
_ERROR_BYTES = 1024


class AgreementError(RuntimeError):
    """The ranks cannot go on together; the message says which rank differs and how."""


@dataclass(frozen=True)
class MicroBatch:
    """One rank's part of a micro-batch.

    Attributes:
        layout: of this rank alone (whole documents), or of all servers of its group, the same on all of them.
        targets: target tokens on this rank in this micro-batch.
        step_targets: the same over the whole accumulation step, where known.
        in_two: whether this rank could run it as two nano-batches.
    """

    layout: Layout
    targets: int
    step_targets: int | None = None
    in_two: bool = False


@dataclass(frozen=True)
class GlobalMicroBatch:
    """What all ranks know after the gathering.

    Attributes:
        layout: of the servers of this rank's group.
        targets: target tokens of the micro-batch over all ranks.
        step_targets: the same over the accumulation step, where every rank knew it.
        in_two: whether every rank could run it as two nano-batches.
    """

    layout: Layout
    targets: int
    step_targets: int | None
    in_two: bool


class Agreement:
    """Gathers integers over ranks.

    Args:
        group: a process group for CPU tensors (gloo), or None for a single process.
        servers: consecutive ranks of the group that share their work.
        fingerprint: of everything else a plan depends on (options, cost model, heads); must be the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, servers: int, fingerprint: int) -> None:
        self._group = group
        self._world = group.size() if group is not None else 1
        self._rank = group.rank() if group is not None else 0
        self._servers = servers
        self._fingerprint = fingerprint

    def gather(self, micro_batch: MicroBatch | Exception) -> Callable[[], GlobalMicroBatch]:
        """Collective. Sends this rank's part of a micro-batch without waiting for the others.

        Args:
            micro_batch: this rank's part, or the error that its input gave.

        Returns:
            Collective too, to be called once, and before anything else is gathered: waits for the micro-batch as all
            ranks together see it. It raises AgreementError on every rank if a rank has an error or the ranks' inputs
            do not fit together.
        """
        failed = isinstance(micro_batch, Exception)
        message = np.zeros(_HEADER + _INLINE, dtype=np.int64)
        lengths = np.zeros(0, dtype=np.int64)
        if failed:
            message[0] = 1
        else:
            layout = micro_batch.layout
            shared = layout.num_ranks > 1 or self._servers == 1
            lengths = np.zeros(0, dtype=np.int64) if shared else layout.segments[:, 3]
            step = -1 if micro_batch.step_targets is None else micro_batch.step_targets
            message[1:7] = layout.num_ranks, len(lengths), micro_batch.targets, step, self._fingerprint, 0
            message[7] = micro_batch.in_two
            if shared and self._servers > 1:
                message[6] = fingerprint(layout.segments)
            message[_HEADER : _HEADER + len(lengths)] = lengths[:_INLINE]
        arrived = self._start(message)
        return lambda: self._together(arrived(), micro_batch, lengths)

    def _together(
        self, gathered: np.ndarray, micro_batch: MicroBatch | Exception, lengths: np.ndarray
    ) -> GlobalMicroBatch:
        """See :meth:`gather`.

        Args:
            gathered: the first message of every rank, int64 [ranks, _HEADER + _INLINE].
            lengths: of this rank's documents, unless all servers have the same layout.
        """
        errors = np.flatnonzero(gathered[:, 0])
        if len(errors):
            self._raise_everywhere(micro_batch if isinstance(micro_batch, Exception) else None, errors)
        self._check(gathered)
        group = slice(self._rank // self._servers * self._servers, None)
        group = slice(group.start, group.start + self._servers)
        if self._servers == 1 or gathered[self._rank, 1] > 1:
            layout = micro_batch.layout
        else:
            layout = Layout.from_lengths(self._lengths(gathered, lengths)[group])
        steps = gathered[:, 4]
        step_targets = None if (steps < 0).any() else int(steps.sum())
        return GlobalMicroBatch(layout, int(gathered[:, 3].sum()), step_targets, bool(gathered[:, 7].all()))

    def gather_values(self, values: np.ndarray | Exception) -> list[np.ndarray]:
        """Collective. The integers of every rank, any number of them from each.

        Args:
            values: int64 [n], or the error that this rank met instead.

        Raises:
            AgreementError: on every rank, if a rank has an error or runs with other options.
        """
        failed = isinstance(values, Exception)
        mine = np.zeros(0, dtype=np.int64) if failed else values
        message = np.zeros(_HEADER + _INLINE, dtype=np.int64)
        message[0], message[2], message[5] = failed, len(mine), self._fingerprint
        message[_HEADER : _HEADER + len(mine)] = mine[:_INLINE]
        gathered = self._all_gather(message)
        errors = np.flatnonzero(gathered[:, 0])
        if len(errors):
            self._raise_everywhere(values if failed else None, errors)
        self._check_fingerprint(gathered)
        counts, rows = gathered[:, 2], gathered[:, _HEADER:]
        if counts.max() > _INLINE:
            padded = np.zeros(int(counts.max()), dtype=np.int64)
            padded[: len(mine)] = mine
            rows = self._all_gather(padded)
        return [rows[r, :n] for r, n in enumerate(counts.tolist())]

    def same(self, digest: int, what: str) -> None:
        """Collective. Raises AgreementError on every rank unless all servers of each group have the same digest."""
        digests = self._all_gather(np.array([digest], dtype=np.int64))[:, 0]
        of_group = digests.reshape(-1, self._servers)
        if (of_group != of_group[:, :1]).any():
            table = ", ".join(f"rank {r}: {d:016x}" for r, d in enumerate(digests))
            raise AgreementError(
                f"the ranks disagree on {what} ({table}); do all of them run the same versions of Python, NumPy and "
                "deepspeed_distca with the same `distca` block?"
            )

    def _check_fingerprint(self, gathered: np.ndarray) -> None:
        if (gathered[:, 5] != gathered[0, 5]).any():
            odd = np.flatnonzero(gathered[:, 5] != gathered[0, 5]).tolist()
            raise AgreementError(
                f"ranks {odd} run with another `distca` block, cost model or model than rank 0; all must be the same"
            )

    def _check(self, gathered: np.ndarray) -> None:
        self._check_fingerprint(gathered)
        if self._servers == 1:
            return
        kinds = gathered[:, 1]
        if (kinds != kinds[0]).any():
            raise AgreementError(
                f"layouts of {kinds.tolist()} ranks were given on ranks 0..{self._world - 1}; give either each rank's "
                "own documents or the layout of all servers, on all ranks alike"
            )
        if kinds[0] > 1:
            if kinds[0] != self._servers:
                raise AgreementError(f"the layout has {kinds[0]} ranks, but there are {self._servers} servers")
            of_group = gathered[:, 6].reshape(-1, self._servers)
            if (of_group != of_group[:, :1]).any():
                raise AgreementError("the servers were given different layouts for one micro-batch")

    def _lengths(self, gathered: np.ndarray, mine: np.ndarray) -> list[list[int]]:
        counts = gathered[:, 2]
        most = int(counts.max())
        rows = gathered[:, _HEADER:]
        if most > _INLINE:
            padded = np.zeros(most, dtype=np.int64)
            padded[: len(mine)] = mine
            rows = self._all_gather(padded)
        return [rows[r, :n].tolist() for r, n in enumerate(counts.tolist())]

    def _raise_everywhere(self, error: Exception | None, ranks: np.ndarray) -> None:
        text = np.zeros(_ERROR_BYTES, dtype=np.int64)
        if error is not None:
            raw = np.frombuffer(str(error).encode()[:_ERROR_BYTES], dtype=np.uint8)
            text[: len(raw)] = raw
        gathered = self._all_gather(text)
        if error is not None:
            raise error
        first = int(ranks[0])
        words = bytes(gathered[first].astype(np.uint8)).rstrip(b"\0").decode(errors="replace")
        raise AgreementError(f"rank {first} cannot use its micro-batch: {words}")

    def _all_gather(self, values: np.ndarray) -> np.ndarray:
        return self._start(values)()

    def _start(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        """Sends values; what is returned waits for those of every rank, [ranks, *values.shape]."""
        if self._group is None:
            return lambda: values[None]
        mine = torch.from_numpy(values)
        out = [torch.empty_like(mine) for _ in range(self._world)]
        with _in_time():
            work = dist.all_gather(out, mine, group=self._group, async_op=True)

        def wait() -> np.ndarray:
            with _in_time():
                work.wait()
            return torch.stack(out).numpy()

        return wait


@contextmanager
def _in_time() -> Iterator[None]:
    """What a collective raises, in words that help."""
    try:
        yield
    except RuntimeError as error:
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
