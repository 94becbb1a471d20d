# SPDX-License-Identifier: Apache-2.0
"""What a rank does for an exchange by peer copies, and in what order: plain integers, no device.

Every ordered pair of ranks (sender, receiver) has a ring of slots of equal size in the sender's staging memory. What
the sender has for the receiver in one exchange is laid end to end and cut into chunks of at most a slot. Chunks are
numbered over the life of the pair, on both sides alike, since both list the same messages; chunk n lies in slot
n modulo the number of slots. The sender packs a chunk into its slot and says so; the receiver pulls it to where it is
wanted and says so. Packing chunk n waits until chunk n - slots has been pulled. An exchange may have other rings than
the one before; then a rank's first packing waits until everything that it packed before has been pulled.

No order of waits can close a circle. An exchange goes in rounds of as many chunks per pair as there are slots, and
within a round every rank packs before it pulls. So packing waits for pulls of an earlier round, or an earlier
exchange, and pulling waits for packing of the same round: each operation waits for operations that are earlier in an
order that all ranks share. That holds even if a rank does everything on a single stream; more streams only wait for
less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from deepspeed_distca.attention_server.exchange.peer_copy.rings import ALIGNMENT, Rings

Sizes = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Piece:
    """Bytes [start, start + size) of a message, at [at, at + size) of a slot."""

    message: int
    start: int
    at: int
    size: int


class Operation(NamedTuple):  # made for every layer: a dataclass would take longer
    """Packing of a chunk for a peer, or pulling of one from it.

    Attributes:
        packs: pack, not pull.
        peer: to or from whom.
        number: of the chunk, over the life of the pair.
        round: in the exchange, from 0.
        pieces: of the messages given, by their place in that list.
    """

    packs: bool
    peer: int
    number: int
    round: int
    pieces: tuple[Piece, ...]


class PeerSlots:
    """Counts the chunks between a rank and its peers.

    Args:
        rank: this one.
        rings: in which it packs at first.
    """

    def __init__(self, rank: int, rings: Rings) -> None:
        self._rank, self._rings = rank, rings
        self._packed: defaultdict[int, int] = defaultdict(int)
        self._pulled: defaultdict[int, int] = defaultdict(int)

    def change(self, rings: Rings) -> list[tuple[int, int]]:
        """From now on this rank packs into these rings.

        Returns:
            Peers, and how many chunks each must have pulled before: none if the rings are the same.
        """
        before, self._rings = self._rings, rings
        return [] if rings == before else list(self._packed.items())

    def operations(self, rings: Rings, sends: Sizes, receives: Sizes) -> list[Operation]:
        """The operations of an exchange, in the order in which they are to be queued.

        Args:
            rings: the same on all ranks.
            sends, receives: peer and bytes of each message; between two ranks both list them in the same order.
        """
        out, into = rings.slot_bytes[self._rank], rings.received_bytes[self._rank]
        numbered = []
        found = _operations(rings.slots, out, into, tuple(sends), tuple(receives))
        for op in found:
            before = (self._packed if op.packs else self._pulled)[op.peer]
            numbered.append(Operation(op.packs, op.peer, before + op.number, op.round, op.pieces))
        for op in found:
            (self._packed if op.packs else self._pulled)[op.peer] += 1
        return numbered


@lru_cache(maxsize=64)  # the layers of a micro-batch exchange the same
def _operations(
    slots: int, out: tuple[int, ...], into: tuple[int, ...], sends: Sizes, receives: Sizes
) -> tuple[Operation, ...]:
    """See :meth:`PeerSlots.operations`, with chunks numbered from 0.

    Args:
        slots: of a pair.
        out, into: bytes of a slot to and from each peer.
    """
    both = [*_chunks(True, sends, out, slots), *_chunks(False, receives, into, slots)]
    # Within a round the first chunks of all peers, then the second ones: peers are served side by side.
    return tuple(sorted(both, key=lambda op: (op.round, not op.packs, op.number - op.round * slots)))


def _chunks(packs: bool, messages: Sizes, slot_bytes: Sequence[int], slots: int) -> Iterator[Operation]:
    by_peer: dict[int, list[tuple[int, int]]] = {}
    for message, (peer, size) in enumerate(messages):
        if size:
            by_peer.setdefault(peer, []).append((message, size))
    for peer, mine in by_peer.items():
        for number, pieces in enumerate(cut(mine, slot_bytes[peer])):
            yield Operation(packs, peer, number, number // slots, pieces)


def cut(messages: Sequence[tuple[int, int]], slot_bytes: int) -> list[tuple[Piece, ...]]:
    """Messages, as (which, bytes), laid end to end and cut into chunks of at most a slot."""
    chunks: list[list[Piece]] = []
    at = slot_bytes
    for message, size in messages:
        start = 0
        while start < size:
            if at >= slot_bytes:
                chunks.append([])
                at = 0
            taken = min(size - start, slot_bytes - at)
            chunks[-1].append(Piece(message, start, at, taken))
            start += taken
            at += -(-taken // ALIGNMENT) * ALIGNMENT
    return [tuple(chunk) for chunk in chunks]
