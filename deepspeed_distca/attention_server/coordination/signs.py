# SPDX-License-Identifier: Apache-2.0
"""What a rank tells the others of itself while it trains, and what is said of one that no longer does."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch.distributed as dist

from deepspeed_distca.attention_server.coordination.agreement import AgreementError

_DETACHED = 1 << 62
OUTSIDE = "outside of forward, backward and step"
#: By these words torch's errors of connections and collectives are known, which have no type of their own for gloo.
_CONNECTION = re.compile(
    r"\bgloo\b|\bNCCL\b|connection (closed|reset|refused)|broken pipe|pair closure|timed out waiting|wait timeout",
    re.I,
)


def is_connection_error(error: BaseException) -> bool:
    """Whether an error says no more than that another rank did not do its part."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, AgreementError)
        and _CONNECTION.search(str(error)) is not None
    )


@dataclass(frozen=True)
class Sign:
    """A rank's sign of life: how many it has given, at which micro-batch it is and where, whether it has left, and
    whether its training's thread is in a collective."""

    count: int = 0
    number: int = 0
    left: bool = False
    unfinished: bool = False
    waits: bool = False
    place: str = OUTSIDE

    @staticmethod
    def of_detached(count: int) -> Sign:
        """Of a rank that has no part in it any more, and for which nobody waits on that account: it may have given a
        micro-batch up, as others will."""
        return Sign(count, _DETACHED, left=True, place="where the plugin was detached")

    def to_text(self) -> str:
        return f"{self.count} {self.number} {self.left:d} {self.unfinished:d} {self.waits:d} {self.place}"

    @staticmethod
    def from_text(text: str) -> Sign:
        count, number, left, unfinished, waits, place = text.split(" ", 5)
        return Sign(int(count), int(number), left == "1", unfinished == "1", waits == "1", place)

    @property
    def phase(self) -> str:
        """The place without its layer."""
        return self.place.split(",")[0]


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


def error_in_words(error: BaseException) -> str:
    """Its type and the beginning of its text, on one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:600]}" if words else type(error).__name__
