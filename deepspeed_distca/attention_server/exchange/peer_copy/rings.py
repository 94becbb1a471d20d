# SPDX-License-Identifier: Apache-2.0
"""How every rank's staging memory is divided among those that it sends to: plain integers, no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

#: Bytes to whose multiples slots, and the messages' places in them, are rounded.
ALIGNMENT = 256


@dataclass(frozen=True)
class Rings:
    """Where the rings of slots lie, one for every ordered pair of ranks, in the memory of the sender.

    Attributes:
        slots: of each ring.
        starts: its first byte, by sender and receiver.
        slot_bytes: size of its slots, a multiple of ``ALIGNMENT``; 0 from a rank to itself.
    """

    slots: int
    starts: tuple[tuple[int, ...], ...]
    slot_bytes: tuple[tuple[int, ...], ...]

    @cached_property
    def received_bytes(self) -> tuple[tuple[int, ...], ...]:
        """``slot_bytes`` by receiver and sender."""
        return tuple(zip(*self.slot_bytes, strict=True))

    def slot(self, sender: int, receiver: int, number: int) -> int:
        """First byte of the slot of a chunk."""
        return self.starts[sender][receiver] + number % self.slots * self.slot_bytes[sender][receiver]


def divide(area: int, slots: int, sizes: Sequence[Sequence[int]]) -> Rings:
    """Divides memory in proportion to what is sent.

    Args:
        area: bytes of every rank.
        slots: of each ring.
        sizes: bytes from each rank, the first index, to each; all 0: equal parts. A pair that sends nothing keeps
            slots of ``ALIGNMENT`` bytes.

    Raises:
        ValueError: memory in which a pair of ranks would have no slot.
    """
    world = len(sizes)
    least = max(1, world - 1) * slots * ALIGNMENT
    if area < least:
        raise ValueError(f"{area} bytes of staging memory are too small for {world} ranks, which need {least}")
    starts, slot_bytes = [], []
    for sender, row in enumerate(sizes):
        weights = [0 if receiver == sender else int(size) for receiver, size in enumerate(row)]
        if not any(weights):
            weights = [int(receiver != sender) for receiver in range(world)]
        unit = max(1, sum(weights)) * slots * ALIGNMENT
        mine = [
            0 if receiver == sender else ALIGNMENT * (1 + (area - least) * weight // unit)
            for receiver, weight in enumerate(weights)
        ]
        slot_bytes.append(tuple(mine))
        starts.append(tuple(slots * sum(mine[:receiver]) for receiver in range(world)))
    return Rings(slots, tuple(starts), tuple(slot_bytes))
