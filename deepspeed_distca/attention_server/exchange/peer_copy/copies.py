# SPDX-License-Identifier: Apache-2.0
"""Rows between GPUs of one node by copy engines: no communication kernel takes multiprocessors from attention.

Every rank has staging memory that its peers can read, divided among them in proportion to what a micro-batch's plan
sends them. A sender packs rows into slots there, on the caller's own stream as far as they fit: that is a copy within
the device's memory, at a time when no kernel competes with it. Then a stream of its own tells the receiver. The
receiver waits for that on another stream, pulls the rows over the link to where they are wanted, and tells the sender
that the slots are free. Both wait with the driver's stream memory operations, so neither waiting nor pulling needs a
multiprocessor.

Unlike a receive over NCCL, pulling is not ordered behind the receiver's own computation: only behind what the caller
had queued when it named the destinations. With :meth:`PeerCopyExchange.expect` that is before a rank's tasks at home,
so that results arrive while they run.

A wait has no time limit of its own on the device. A thread ends the process with a message when an exchange is not
over after the time limit, as NCCL's watchdog does.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from deepspeed_distca.attention_server.exchange.base import Done, Expected, Messages, Pending, Round
from deepspeed_distca.attention_server.exchange.peer_copy.rings import divide
from deepspeed_distca.attention_server.exchange.peer_copy.slots import Operation, PeerSlots
from deepspeed_distca.attention_server.exchange.peer_copy.streams import Streams

#: Slots of each ordered pair of ranks.
SLOTS = 8
_FLAG_BYTES = 64  # a flag's own cache line
#: Exchanges under way from which on those that are over are looked for when another begins.
_MANY = 64


def header_bytes(world: int) -> int:
    """Bytes before the slots: for each peer a count of chunks that it has packed, and one of those it has pulled."""
    return -(-2 * world * _FLAG_BYTES // 4096) * 4096


class PeerCopyExchange:
    """An ``Exchange`` over staging memory that all ranks of the group can read and whose flags they can write.

    Args:
        streams: of this rank's device.
        rank: this one's, in the group.
        memory: address of every rank's staging memory, as this rank sees it; zeros in its first ``header_bytes``.
        size: bytes of each.
        timeout: seconds after which an exchange that is not over ends the process; None: never.
        keep: whatever must live as long as the addresses.

    Raises:
        ValueError: staging memory in which a pair of ranks would have no slot.
    """

    name = "peer_copy"
    early = True

    def __init__(
        self,
        streams: Streams,
        rank: int,
        memory: Sequence[int],
        size: int,
        *,
        timeout: float | None,
        keep: object = None,
    ) -> None:
        world = len(memory)
        self._streams, self._rank, self._memory = streams, rank, list(memory)
        self._header = header_bytes(world)
        self._area = size - self._header
        self._rings = divide(self._area, SLOTS, [[0] * world] * world)
        self._slots = PeerSlots(rank, self._rings)
        self._keep = keep
        self._watch = _Watch(timeout, f"rank {rank} of {world}")

    def for_sizes(self, sizes: np.ndarray) -> PeerCopyExchange:
        """See :class:`Exchange`: every rank's memory is divided in proportion to what it sends to each."""
        other = copy.copy(self)  # the same streams, memory and counts
        other._rings = divide(self._area, SLOTS, sizes.tolist())
        return other

    def start(self, sends: Messages, receives: Messages, then: Round | None = None) -> Pending:
        """See :class:`Exchange`."""
        return self._post(sends, receives, then, self._streams.current(), None)

    def expect(self, receives: Messages, *, sends: bool) -> Expected:
        """See :class:`Exchange`. A rank that sends nothing in the exchange queues its pulls at once. One that sends
        packs first, so that no stream of its own can ever stand between its packing and a peer that waits for it."""
        current = self._streams.current()
        free = self._streams.record(current) if receives else None
        if sends:
            return _Later(lambda messages: self._post(messages, receives, None, self._streams.current(), free))
        pending = self._post((), receives, None, current, free)

        def nothing(messages: Messages) -> Pending:
            if any(tensor.numel() for _, tensor in messages):
                raise ValueError("an exchange was announced as one without sends; pass sends=True to expect()")
            return pending

        return _Later(nothing)

    def release(self) -> None:
        """Lets all waits of this rank pass, whatever their peers do: the exchange is of no use afterwards."""
        for peer in range(len(self._memory)):
            for which in (0, 1):
                self._streams.write(self._streams.rescue(), self._flag(self._rank, which, peer), 2**30)

    def _post(self, sends: Messages, receives: Messages, then: Round | None, current: Any, free: Any) -> Pending:
        """Queues an exchange, with no more events than it needs: small steps feel each of them.

        Args:
            current: the caller's stream.
            free: event after which the destinations may be written; None: now.
        """
        streams = self._streams
        now = pulled = packed = None
        held = False
        for i, (out, into) in enumerate(((sends, receives), then) if then else ((sends, receives),)):
            sizes, expected = _sizes(out), _sizes(into)
            changed = any(size for _, size in sizes) and self._change_rings()
            operations = self._slots.operations(self._rings, sizes, expected)
            early = [op for op in operations if op.packs and op.round == 0 and i == 0]
            late = operations[len(early) :]
            packs, pulls = any(op.packs for op in late), any(not op.packs for op in late)
            if now is None and (then or packs or (pulls and free is None)):
                now = streams.record(current)  # in front of what is packed there
            if early:
                self._pack_now(early, out, current, changed)
            if packs:
                streams.hold(streams.outbox, now)
                if i and pulled is not None:
                    streams.hold(streams.outbox, pulled)
            for op in late:
                if op.packs:
                    self._pack(streams.outbox, op, out)
                    continue
                if not held:
                    streams.hold(streams.inbox, now if free is None else free)
                    held = True
                self._pull(op, into)
            if packs:
                packed = streams.record(streams.outbox)
            if pulls:
                pulled = streams.record(streams.inbox)
        events = [event for event in (packed, pulled) if event is not None]
        if not events:
            return Done()
        pending = _Queued(streams, events, (sends, receives, then))
        self._watch.add(pending)
        return pending

    def _change_rings(self) -> bool:
        """Packs into this exchange's rings from now on: the outbox waits until the former ones are empty. Whether
        there was something to wait for."""
        full = self._slots.change(self._rings)
        for peer, count in full:
            self._streams.wait_until(self._streams.outbox, self._flag(self._rank, 1, peer), count)
        return bool(full)

    def _pack_now(self, operations: list[Operation], messages: Messages, current: Any, changed: bool) -> None:
        """Packs on the caller's stream; the slots are free once the outbox has seen it."""
        streams = self._streams
        if changed or any(op.number >= SLOTS for op in operations):
            for op in operations:
                self._wait_for_slot(op)
            streams.hold(current, streams.record(streams.outbox))
        for op in operations:
            self._copy_in(current, op, messages)
        streams.hold(streams.outbox, streams.record(current))
        for op in operations:
            streams.write(streams.outbox, self._flag(op.peer, 0, self._rank), op.number + 1)

    def _pack(self, stream: Any, op: Operation, messages: Messages) -> None:
        self._wait_for_slot(op)
        self._copy_in(stream, op, messages)
        self._streams.write(stream, self._flag(op.peer, 0, self._rank), op.number + 1)

    def _wait_for_slot(self, op: Operation) -> None:
        if op.number >= SLOTS:
            address = self._flag(self._rank, 1, op.peer)
            self._streams.wait_until(self._streams.outbox, address, op.number + 1 - SLOTS)

    def _copy_in(self, stream: Any, op: Operation, messages: Messages) -> None:
        slot = self._slot(self._rank, op.peer, op.number)
        for at, source, size in _ranges(op, messages):
            self._streams.copy(stream, slot + at, source, size)

    def _pull(self, op: Operation, messages: Messages) -> None:
        streams, stream = self._streams, self._streams.inbox
        streams.wait_until(stream, self._flag(self._rank, 0, op.peer), op.number + 1)
        slot = self._slot(op.peer, self._rank, op.number)
        for at, to, size in _ranges(op, messages):
            streams.copy(stream, to, slot + at, size)
        streams.write(stream, self._flag(op.peer, 1, self._rank), op.number + 1)

    def _flag(self, owner: int, which: int, peer: int) -> int:
        """Address of a count in a rank's memory, of chunks that a peer packed for it (0), or pulled from it (1)."""
        return self._memory[owner] + (2 * peer + which) * _FLAG_BYTES

    def _slot(self, sender: int, receiver: int, number: int) -> int:
        return self._memory[sender] + self._header + self._rings.slot(sender, receiver, number)


def _sizes(messages: Messages) -> tuple[tuple[int, int], ...]:
    """Peer and bytes of each."""
    for _, tensor in messages:
        if not tensor.is_contiguous():
            raise ValueError(f"rows to send or receive must be contiguous, got strides {tensor.stride()}")
    return tuple([(peer, tensor.nbytes) for peer, tensor in messages])


def _ranges(op: Operation, messages: Messages) -> list[tuple[int, int, int]]:
    """Ranges of bytes to copy: place in the slot, address, size. Pieces are joined that touch on both sides and are of
    one buffer, such as runs of neighbouring rows: every copy takes of the host's time. (No copy may pass from one
    allocation of the device to another one, however they lie.)"""
    ranges: list[tuple[int, int, int]] = []
    end = end_at = -1
    last: torch.Tensor | None = None
    for piece in op.pieces:
        tensor = messages[piece.message][1]
        address, at, size = tensor.data_ptr() + piece.start, piece.at, piece.size
        if address == end and at == end_at and last is not None and _one_buffer(tensor, last):
            at, address, before = ranges.pop()
            size += before
        ranges.append((at, address, size))
        end, end_at, last = address + size, at + size, tensor
    return ranges


def _one_buffer(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class _Later:
    def __init__(self, start: Callable[[Messages], Pending]) -> None:
        self.start = start


class _Queued:
    """An exchange whose operations are queued. Keeps its tensors until the caller's stream has been told to wait."""

    def __init__(self, streams: Streams, events: list[Any], keep: object) -> None:
        self._streams, self._events, self._keep = streams, events, keep
        self._waited = False

    def wait(self) -> None:
        if self._waited:
            return
        self._waited = True
        current = self._streams.current()
        for event in self._events:
            self._streams.hold(current, event)
        self._keep = None

    def over(self) -> bool:
        return all(self._streams.done(event) for event in self._events)


class _Watch:
    """Ends the process when an exchange takes too long: a device that waits for a rank that is gone waits forever."""

    def __init__(self, timeout: float | None, who: str) -> None:
        self._timeout, self._who = timeout, who
        self._under_way: deque[tuple[float, _Queued]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, pending: _Queued) -> None:
        """Watches an exchange; it is kept, with its tensors, at least until it is over."""
        with self._lock:
            if len(self._under_way) >= _MANY:  # not at every exchange: asking the device takes of the host's time
                while self._under_way and self._under_way[0][1].over():
                    self._under_way.popleft()
            self._under_way.append((time.monotonic(), pending))
        if self._timeout is not None and self._thread is None:
            self._thread = threading.Thread(
                target=self._look, args=(self._timeout,), name="distca-peer-copy-watch", daemon=True
            )
            self._thread.start()

    def late(self, timeout: float) -> bool:
        """Whether an exchange is not over that began so many seconds ago."""
        with self._lock:
            while self._under_way and time.monotonic() - self._under_way[0][0] > timeout:
                if not self._under_way[0][1].over():
                    return True
                self._under_way.popleft()
        return False

    def _look(self, timeout: float) -> None:
        while True:
            time.sleep(min(5.0, timeout / 4))
            if self.late(timeout):
                print(
                    f"distca: an exchange by peer copies was not over after {timeout:g} s on {self._who}: "
                    "another rank stopped, or is that slow (then raise `timeout_seconds`). This process ends.",
                    file=sys.stderr,
                    flush=True,
                )
                os.abort()
