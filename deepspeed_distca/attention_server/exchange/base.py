# SPDX-License-Identifier: Apache-2.0
"""Moving rows between ranks: a small interface and its implementation over torch.distributed.

A transfer is a list of (peer, tensor) to send and one to receive. The tensors are contiguous row ranges of larger
buffers, so that rows leave from where they are and arrive where they are needed; a rank with nothing to say is not
involved at all. The two sides list what passes between them in the same order (the plan sees to that), and sizes are
known from the plan, never negotiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.watch import Watch, explained

Messages = Sequence[tuple[int, torch.Tensor]]
Round = tuple[Messages, Messages]


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Orders what follows on the caller's stream (on CPU: the host) behind the exchange; again: nothing."""


class Exchange(Protocol):
    """Moves rows between the servers of a group; peers are ranks of that group.

    Attributes:
        early: results had better leave as soon as they are there. They had not where sending holds multiprocessors
            until the receiver is ready, which it is when it has done its own tasks.
    """

    early: bool

    def start(self, sends: Messages, receives: Messages, then: Round | None = None) -> Pending:
        """Starts sending and receiving; neither side's tensors may be touched until ``wait()``.

        Args:
            sends, receives: of the first round.
            then: sends and receives of a second one, which may send on what the first receives.
        """

    def expect(self, receives: Messages, *, sends: bool) -> Expected:
        """Names what an exchange will receive before there is something to send: the next one between these ranks.

        The tensors may not be touched from now on; an exchange that can do so fills them as soon as their senders are
        ready.

        Args:
            sends: whether this rank will send anything in that exchange.
        """

    def for_sizes(self, sizes: np.ndarray) -> Exchange:
        """The same exchange with its memory divided for a plan that moves so much. Those of one plan may be used in
        turn with those of another, in the same order on every rank.

        Args:
            sizes: bytes from each rank to each at a time, int64 [sender, receiver]; more is moved too, but slower.
        """


class Expected(Protocol):
    """An exchange whose receives are known."""

    def start(self, sends: Messages) -> Pending:
        """See :meth:`Exchange.start`."""


class Done:
    """An exchange that is over, or in which there was nothing to do."""

    def wait(self) -> None:
        pass


class _Works:
    def __init__(self, works: list[dist.Work], keep: Messages, watch: Watch | None) -> None:
        self._works, self._keep, self._watch = works, keep, watch  # the tensors must outlive the transfer

    def wait(self) -> None:
        # gloo would wait for another message if a finished send or receive were waited for again.
        works, self._works = self._works, []
        _wait(works, self._watch)
        self._keep = ()


class PeerToPeerExchange:
    """Grouped sends and receives over a process group: one NCCL launch on GPUs, sockets through gloo on CPU.

    Args:
        group: of the servers.
        watch: tells, when an exchange fails, which rank is to blame.

    A wait, or a start, raises AgreementError where a rank of the group does not do its part.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch | None = None) -> None:
        self.group, self.name, self._watch = group, dist.get_backend(group), watch
        self._on_host = self.name != "nccl"
        self.early = self._on_host
        self._global_rank = dist.get_process_group_ranks(group)

    def start(self, sends: Messages, receives: Messages, then: Round | None = None) -> Pending:
        works = self._start(sends, receives)
        keep = [*sends, *receives]
        if then is not None:
            if self._on_host and then[0]:
                # What NCCL sends on follows what it receives, on its own stream; here it must have arrived.
                _wait(works, self._watch)
                works = []
            works += self._start(*then)
            keep += [*then[0], *then[1]]
        return _Works(works, keep, self._watch) if works else Done()

    def for_sizes(self, sizes: np.ndarray) -> PeerToPeerExchange:
        """See :class:`Exchange`. It has no memory of its own."""
        return self

    def expect(self, receives: Messages, *, sends: bool) -> Expected:
        """See :class:`Exchange`. One launch holds all sends and receives, so nothing starts before the sends."""
        return ReceivesLater(self, receives)

    def _start(self, sends: Messages, receives: Messages) -> list[dist.Work]:
        operations = [
            dist.P2POp(operation, tensor, self._global_rank[peer], self.group)
            for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in messages
            if tensor.numel()
        ]
        try:
            return dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise explained(self._watch, error) from error


def _wait(works: list[dist.Work], watch: Watch | None) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise explained(watch, error) from error


class ReceivesLater:
    """Receives that start together with the sends."""

    def __init__(self, exchange: Exchange, receives: Messages) -> None:
        self._exchange, self._receives = exchange, receives

    def start(self, sends: Messages) -> Pending:
        """See :class:`Expected`."""
        return self._exchange.start(sends, self._receives)


def exchange_group(ranks: list[list[int]], device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """The process group in which this rank serves, apart from the training's own collectives.

    On GPUs its communication kernels get a high-priority stream: launched beside an attention kernel they would
    otherwise wait for its SMs to drain (measured: DESIGN, "local_first over NCCL").

    Args:
        ranks: the global ranks of every group, the same on all ranks; collective over the default group.
    """
    options, backend = None, "gloo"
    if device.type == "cuda":
        backend = "nccl"
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    mine = None
    for members in ranks:
        group = dist.new_group(members, backend=backend, timeout=timeout, pg_options=options)
        if dist.get_rank() in members:
            mine = group
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is in none of the groups {ranks}")
    return mine
