# SPDX-License-Identifier: Apache-2.0
"""What a rank tells the others of itself while it trains, and what follows from the signs of all."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_distca.attention_server.coordination.position import FORWARD, OUTSIDE, Position

#: Seconds between two signs of life, and two looks at those of others.
EVERY = 0.5
_HINT = (
    ". Every rank must run the same number of training micro-batches (an empty one where it has no documents); look "
    "for an earlier error on another rank, or raise `distca.timeout_seconds` if a rank is only slow"
)


@dataclass(frozen=True)
class Sign:
    """A rank's sign of life.

    Attributes:
        count: how many it has given.
        number, unfinished, place: see :class:`Position`.
        left: whether it was the last one.
        waits: whether its training's thread is in a collective.
        layer: see :class:`Position`.
    """

    count: int = 0
    number: int = 0
    left: bool = False
    unfinished: bool = False
    waits: bool = False
    place: str = OUTSIDE
    layer: int = 0

    def following(self, position: Position, *, left: bool) -> Sign:
        """The same rank's next one."""
        waits, place = position.in_collective(), position.where()
        return Sign(self.count + 1, position.number, left, position.unfinished, waits, place, position.layer)

    def to_text(self) -> str:
        return f"{self.count} {self.number} {self.left:d} {self.unfinished:d} {self.waits:d} {self.layer} {self.place}"

    @staticmethod
    def from_text(text: str) -> Sign:
        count, number, left, unfinished, waits, layer, place = text.split(" ", 6)
        return Sign(int(count), int(number), left == "1", unfinished == "1", waits == "1", place, int(layer))

    @property
    def phase(self) -> str:
        """The place without its layer."""
        return self.place.split(",")[0]

    def is_beyond(self, number: int, layers: int) -> bool:
        """Whether this rank is past so many attention layers of a micro-batch's forward, or past that forward."""
        forward = self.phase == f"in {FORWARD} of micro-batch {number}"
        return self.number > number or (self.number == number and (self.layer > layers or not forward))

    def waits_for(self, gone: Sign) -> bool:
        """Whether this rank is at a micro-batch that one that has left did not finish."""
        return self.number > gone.number or (self.number == gone.number and self.unfinished and gone.unfinished)


def reason_of_waiting(mine: Sign, before: dict[int, Sign], now: dict[int, Sign]) -> str:
    """Why this rank has waited in vain, in words.

    Args:
        before, now: signs of the other ranks, by rank; between them each has given some if it is alive.
    """
    silent = [rank for rank, sign in now.items() if not sign.left and sign.count == before[rank].count]
    if silent:
        return silent_in_words(silent, now)
    gone = [gone_in_words(rank, sign) for rank, sign in now.items() if sign.left and mine.waits_for(sign)]
    return ("; ".join(gone) or elsewhere(mine, now) or "all ranks are alive and at the same place") + _HINT


def elsewhere(mine: Sign, others: dict[int, Sign]) -> str:
    """Which ranks are not at this one's place, in words; or do not wait there as it does. Empty: none."""
    found = [
        f"rank {rank} is {sign.place}"
        for rank, sign in others.items()
        if (sign.number, sign.phase) != (mine.number, mine.phase) or (mine.waits and not sign.waits)
    ]
    return "; ".join(found[:8])


def silent_in_words(ranks: list[int], signs: dict[int, Sign], seconds: float | None = None) -> str:
    """Ranks that have given no sign since the last ones (for so many seconds)."""
    places = "; ".join(f"rank {rank} was {signs[rank].place}" for rank in ranks[:8])
    names = f"ranks {ranks} give" if len(ranks) > 1 else f"rank {ranks[0]} gives"
    since = "" if seconds is None else f" since {seconds:g} s (`distca.timeout_seconds`)"
    return f"{names} no sign of life{since}: killed, stopped or hung. When last seen, {places}"


def gone_in_words(rank: int, sign: Sign) -> str:
    """A rank whose last sign says that it has left."""
    if sign.unfinished:
        return f"rank {rank} has left (its script ended) {sign.place}"
    return f"rank {rank} has left (its script ended) after {sign.number} micro-batches"
