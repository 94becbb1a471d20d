# SPDX-License-Identifier: Apache-2.0
"""Packing: which documents share a row, so that rows have (nearly) the same number of tokens.

A pure function of lengths, budget and seed, so that every rank computes the same rows without talking to the others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, NamedTuple

import numpy as np

from deepspeed_distca.data.states import whole_numbers

Overflow = Literal["error", "split", "drop"]
OVERFLOW: tuple[Overflow, ...] = ("error", "split", "drop")


class Piece(NamedTuple):
    """Tokens [start, start + length) of a document; a whole document where it fits into a row."""

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class Packing:
    """Rows of pieces, and what became of the documents that are longer than a row.

    Attributes:
        rows: the pieces of each row, at most ``max_tokens`` tokens together; no row is empty.
        max_tokens: the budget they were packed for.
        split_documents: documents that were cut; every piece is a document of its own.
        dropped_documents: documents that were left out, and ``dropped_tokens`` their tokens.
    """

    rows: tuple[tuple[Piece, ...], ...]
    max_tokens: int
    split_documents: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return sum(piece.length for row in self.rows for piece in row)

    @property
    def fill(self) -> float:
        """Share of the budget that holds tokens, 1.0 when every row is full."""
        return self.tokens / (len(self.rows) * self.max_tokens) if self.rows else 1.0


def check_overflow(max_tokens: int | None, overflow: str) -> None:
    """Raises ValueError for a budget below one token or a policy that does not exist."""
    whole = isinstance(max_tokens, int | np.integer) and not isinstance(max_tokens, bool)
    if max_tokens is not None and not (whole and max_tokens >= 1):
        raise ValueError(f"max_tokens must be a whole number of at least 1, got {max_tokens!r}")
    if overflow not in OVERFLOW:
        raise ValueError(f"overflow must be one of {', '.join(OVERFLOW)}, got {overflow!r}")


def cut(length: int, max_tokens: int) -> list[tuple[int, int]]:
    """(start, length) of the pieces that a document of ``length`` tokens is cut into, the last one the shortest."""
    return [(start, min(max_tokens, length - start)) for start in range(0, length, max_tokens)]


def pack_documents(
    lengths: Sequence[int] | np.ndarray, max_tokens: int, *, overflow: Overflow = "split", seed: int | None = None
) -> Packing:
    """Packs documents of the given lengths into rows of at most ``max_tokens`` tokens.

    Best fit: each piece goes into the fullest row that still has room for it, in the order of the documents, or in
    an order shuffled by ``seed``. Empty documents are left out. Documents longer than a row are, by ``overflow``,
    cut into pieces ("split"), left out and counted ("drop"), or refused ("error").

    Raises:
        TypeError: lengths that are no integers.
        ValueError: a budget below 1, negative lengths, an unknown policy, or a document that is too long ("error").
    """
    check_overflow(max_tokens, overflow)
    lengths = whole_numbers(lengths, "lengths")
    if min(lengths, default=0) < 0:
        raise ValueError(f"lengths must not be negative, got {min(lengths)}")
    order = np.arange(len(lengths)) if seed is None else np.random.default_rng(seed).permutation(len(lengths))
    rows: list[list[Piece]] = []
    room = _Room()
    split = dropped = dropped_tokens = 0
    for document in order.tolist():
        length = lengths[document]
        if length > max_tokens:
            if overflow == "error":
                raise ValueError(
                    f"document {document} has {length} tokens, a row at most {max_tokens}; raise max_tokens or choose "
                    'overflow="split" or "drop"'
                )
            if overflow == "drop":
                dropped, dropped_tokens = dropped + 1, dropped_tokens + length
                continue
            split += 1
        for start, tokens in cut(length, max_tokens):
            free, row = room.take(tokens) or (max_tokens, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(Piece(document, start, tokens))
            room.add(free - tokens, row)
    return Packing(tuple(map(tuple, rows)), max_tokens, split, dropped, dropped_tokens)


class _Room:
    """Rows that are not full: perhaps as many as documents, but of no more kinds than a row has tokens."""

    def __init__(self) -> None:
        self._free: list[int] = []  # sorted
        self._rows: dict[int, list[int]] = {}  # by free tokens, a heap

    def add(self, free: int, row: int) -> None:
        """A row with so many free tokens, if any."""
        if not free:
            return
        if free not in self._rows:
            insort(self._free, free)
            self._rows[free] = []
        heappush(self._rows[free], row)

    def take(self, tokens: int) -> tuple[int, int] | None:
        """Free tokens and number of the row with the fewest that suffice, the first of several; None if none do."""
        found = bisect_left(self._free, tokens)
        if found == len(self._free):
            return None
        free = self._free[found]
        row = heappop(self._rows[free])
        if not self._rows[free]:
            del self._rows[free], self._free[found]
        return free, row
