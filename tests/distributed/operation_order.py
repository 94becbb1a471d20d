# SPDX-License-Identifier: Apache-2.0
"""Can the communication of several ranks block for good? Their operations, run as if each of them held its rank until
all of its partners have come to theirs.

That is stricter than any backend. With NCCL an operation holds a stream, and the host only when something waits for
the device (an ``.item()``, the load of a kernel); with gloo a send may return before it is received. Ranks whose
operations complete here in the order in which the host issues them complete whatever waits for what, over any number
of communicators: by induction, the first operation that is stuck would have to wait for one that was issued before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

SEND, RECEIVE = "send", "receive"


@dataclass(frozen=True)
class Message:
    """One send or receive.

    Attributes:
        direction: "send" or "receive".
        peer: the global rank of the other side.
        content: of which both sides must think the same: elements and dtype.
    """

    direction: str
    peer: int
    content: str


@dataclass(frozen=True)
class Operation:
    """What one rank issues at a time.

    Attributes:
        group: the communicator's name, the same on all of its ranks.
        collective: what it is, with its size; None for messages.
        members: global ranks that take part in a collective.
        messages: sends and receives that progress together; between two ranks of a communicator they meet in order.
    """

    group: str
    collective: str | None = None
    members: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()


class Blocked(AssertionError):
    """The ranks wait for each other, or two that meet do not mean the same."""


def run(programs: list[list[Operation]]) -> int:
    """Runs every rank's operations, each holding its rank until it is complete; their number.

    Raises:
        Blocked: they never complete.
    """
    at = [0] * len(programs)
    # Messages of the operation that a rank is held by.
    left: list[list[Message]] = [list(p[0].messages) if p else [] for p in programs]

    def now(rank: int) -> Operation | None:
        return programs[rank][at[rank]] if at[rank] < len(programs[rank]) else None

    def advance(rank: int) -> None:
        at[rank] += 1
        operation = now(rank)
        left[rank] = list(operation.messages) if operation else []

    progress = True
    while progress:
        progress = False
        for rank in range(len(programs)):
            operation = now(rank)
            if operation is None:
                continue
            if operation.collective is not None:
                others = [now(m) for m in operation.members]
                if all(o is not None and o.group == operation.group and o.collective for o in others):
                    if {(o.collective, o.members) for o in others} != {(operation.collective, operation.members)}:
                        raise Blocked(f"ranks {operation.members} meet in different collectives: {others}")
                    for member in operation.members:
                        advance(member)
                    progress = True
                continue
            for message in list(left[rank]):
                progress |= _meet(rank, message, operation, now(message.peer), left)
            if not left[rank]:
                advance(rank)
                progress = True
    stuck = {rank: now(rank) for rank in range(len(programs)) if now(rank) is not None}
    if stuck:
        lines = [f"rank {r} at its operation {at[r]} of {len(programs[r])}: {o}" for r, o in stuck.items()]
        raise Blocked("the ranks wait for each other:\n" + "\n".join(lines))
    return sum(map(len, programs))


def _meet(rank: int, message: Message, mine: Operation, theirs: Operation | None, left: list[list[Message]]) -> bool:
    """Completes a message with its other half, if the peer is held by it now."""
    if theirs is None or theirs.group != mine.group or theirs.collective is not None:
        return False
    first = next(m for m in left[rank] if (m.direction, m.peer) == (message.direction, message.peer))
    opposite = RECEIVE if message.direction == SEND else SEND
    other = next((m for m in left[message.peer] if (m.direction, m.peer) == (opposite, rank)), None)
    if other is None:
        return False
    if other.content != first.content:
        raise Blocked(f"rank {rank} would {first}, rank {message.peer} would {other}")
    left[rank].remove(first)
    left[message.peer].remove(other)
    return True


@dataclass
class Recorder:
    """What this rank issued, in order."""

    operations: list[Operation] = field(default_factory=list)
    _batch: list[tuple[str, Message]] | None = None

    def message(self, group: Any, direction: str, tensors: Any, group_peer: int) -> None:
        (tensor,) = tensors
        peer = dist.get_process_group_ranks(group)[group_peer]
        message = Message(direction, peer, f"{tensor.numel()} {tensor.dtype}")
        if self._batch is not None:
            self._batch.append((group.group_name, message))
        else:
            self.operations.append(Operation(group.group_name, messages=(message,)))

    def collective(self, group: Any, name: str) -> None:
        members = tuple(dist.get_process_group_ranks(group))
        if len(members) > 1:
            self.operations.append(Operation(group.group_name, name, members))


_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "scatter",
)


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Writes down every operation that this process issues over any process group."""
    recorder, group_class, batched = Recorder(), dist.ProcessGroup, dist.batch_isend_irecv
    names = (*_COLLECTIVES, "send", "recv")
    own = {name: getattr(group_class, name) for name in names}
    bound = {name: vars(group_class)[name] for name in names}  # of pybind11, whose functions do not bind themselves

    def point_to_point(name: str, direction: str):
        def issue(group, tensors, peer, *rest, **named):
            recorder.message(group, direction, tensors, peer)
            return own[name](group, tensors, peer, *rest, **named)

        return issue

    def collective(name: str):
        def issue(group, *given, **named):
            recorder.collective(group, name)
            return own[name](group, *given, **named)

        return issue

    def batch(operations):
        recorder._batch = []
        try:
            works = batched(operations)
            (name,) = {group for group, _ in recorder._batch}
            recorder.operations.append(Operation(name, messages=tuple(m for _, m in recorder._batch)))
        finally:
            recorder._batch = None
        return works

    try:
        for name in _COLLECTIVES:
            setattr(group_class, name, collective(name))
        group_class.send, group_class.recv = point_to_point("send", SEND), point_to_point("recv", RECEIVE)
        dist.batch_isend_irecv = batch
        yield recorder
    finally:
        for name, function in bound.items():
            setattr(group_class, name, function)
        dist.batch_isend_irecv = batched
