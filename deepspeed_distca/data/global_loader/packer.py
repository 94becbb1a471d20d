# SPDX-License-Identifier: Apache-2.0
"""Which documents are trained together: global batches that hold exactly as many tokens as all ranks' budgets.

A pack is the set of documents of one micro-batch of one group of ranks, a step the packs of an optimizer step. Only
lengths are needed, and a bounded number of them ahead, so that streams are packed like datasets. A pure function of
lengths and options: every rank packs the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from deepspeed_distca.data.packing import OVERFLOW, Overflow, Piece
from deepspeed_distca.given import integer

Fill = Literal["exact", "whole"]
FILLS: tuple[Fill, ...] = ("exact", "whole")

#: Documents that are tried as the third of three that fill a pack.
_THIRDS = 64

#: Packs [micro-batch][group] of a step.
Step = list[list[list[Piece]]]


class Pack(NamedTuple):
    """Documents of one group's micro-batch.

    Attributes:
        pieces: whole documents, or what a cut left of them; each is a document of its own in this pack.
        complete: False if the documents ran out before it was full.
    """

    pieces: list[Piece]
    complete: bool


@dataclass
class PackingCounts:
    """What packing has done so far.

    Attributes:
        documents, tokens: that were packed; a document that was cut counts once.
        packs: that hold them; unfilled_tokens is the room that was left in them.
        cut_documents: cut at a pack's end because no whole documents filled it exactly.
        split_documents: longer than a pack, and cut for that.
        dropped_documents, dropped_tokens: longer than a pack, and left out; or of an incomplete last step that was.
        empty_documents: without tokens, and left out.
    """

    documents: int = 0
    tokens: int = 0
    packs: int = 0
    unfilled_tokens: int = 0
    cut_documents: int = 0
    split_documents: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    empty_documents: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class GlobalPacker:
    """Packs documents in the order they come, looking a little ahead.

    Args:
        capacities: tokens of each group's pack: the sum of its ranks' budgets.
        fill: "exact": a pack holds its capacity to the token. Documents are taken in order, those that do not
            fit being passed over; then up to three of the next `lookahead` documents, or two of them in exchange for
            one that was taken, must fill the rest exactly. Where none do, the next document is cut, and what is left
            of it goes into the next pack as a document of its own.
            "whole": no document is cut; where no combination is exact, a pack stays a little below its capacity.
        overflow: what becomes of a document longer than the smallest capacity: cut into pieces of at most that many
            tokens ("split"), left out and counted ("drop"), refused ("error").
        lookahead: documents that may be passed over, or taken before their turn.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self,
        capacities: Sequence[int],
        *,
        fill: Fill = "exact",
        overflow: Overflow = "split",
        lookahead: int = 256,
    ) -> None:
        if not capacities or min(capacities) < 1:
            raise ValueError(f"every group of ranks needs a token budget of at least 1 in total, got {capacities}")
        for name, value, allowed in (("fill", fill, FILLS), ("overflow", overflow, OVERFLOW)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        integer("lookahead", lookahead, 1)
        self.capacities = [int(n) for n in capacities]
        self.longest = min(self.capacities)
        self.fill, self.overflow, self.lookahead = fill, overflow, lookahead
        self.counts = PackingCounts()

    def steps(
        self, documents: Iterable[tuple[int, int]], accumulation: int = 1, *, drop_last: bool = False
    ) -> Iterator[Step]:
        """Packs grouped into optimizer steps of `accumulation` micro-batches.

        The last step may be incomplete: then its last packs are smaller or empty, or, with `drop_last`, it is left
        out.

        Args:
            documents: (document, length) in training order.
        """
        groups, size = len(self.capacities), accumulation * len(self.capacities)
        packs = self.packs(documents)
        while found := list(islice(packs, size)):
            complete = len(found) == size and all(pack.complete for pack in found)
            if drop_last and not complete:
                self._drop(found)
                return
            pieces = [pack.pieces for pack in found] + [[] for _ in range(size - len(found))]
            yield [pieces[i : i + groups] for i in range(0, size, groups)]

    def packs(self, documents: Iterable[tuple[int, int]]) -> Iterator[Pack]:
        """Packs of the groups in turn, none of them empty.

        Raises:
            ValueError: a negative length, or a document that is too long with overflow "error".
        """
        source = self._pieces(documents)
        waiting: deque[Piece] = deque()
        number = 0
        while waiting or (waiting := deque(islice(source, 1))):
            capacity = self.capacities[number % len(self.capacities)]
            pieces, room = self._in_order(waiting, source, capacity)
            if room:
                waiting.extend(islice(source, max(0, self.lookahead - len(waiting))))
            complete = room == 0 or bool(waiting)
            if room and waiting:
                room = self._complete(pieces, waiting, room)
            self.counts.packs += 1
            self.counts.unfilled_tokens += room
            self.counts.tokens += capacity - room
            number += 1
            yield Pack(pieces, complete)

    def _pieces(self, documents: Iterable[tuple[int, int]]) -> Iterator[Piece]:
        """Documents after the overflow policy."""
        counts = self.counts
        for document, length in documents:
            if length < 1:
                if length < 0:
                    raise ValueError(f"document {document}: its length must not be negative, got {length}")
                counts.empty_documents += 1
                continue
            if length <= self.longest:
                counts.documents += 1
                yield Piece(document, 0, length)
                continue
            if self.overflow == "error":
                raise ValueError(
                    f"document {document} has {length} tokens, the ranks that share it hold {self.longest} together; "
                    'raise tokens_per_rank, use more ranks, or choose overflow="split" or "drop"'
                )
            if self.overflow == "drop":
                counts.dropped_documents += 1
                counts.dropped_tokens += length
                continue
            counts.documents += 1
            counts.split_documents += 1
            for start in range(0, length, self.longest):
                yield Piece(document, start, min(self.longest, length - start))

    @staticmethod
    def _in_order(waiting: deque[Piece], source: Iterator[Piece], room: int) -> tuple[list[Piece], int]:
        """Takes documents until one does not fit, which then waits first."""
        taken: list[Piece] = []
        while room:
            piece = waiting.popleft() if waiting else next(source, None)
            if piece is None:
                break
            if piece.length > room:
                waiting.appendleft(piece)
                break
            taken.append(piece)
            room -= piece.length
        return taken, room

    def _complete(self, pieces: list[Piece], waiting: deque[Piece], room: int) -> int:
        """Fills the room that is left from what waits; returns what is still left."""
        while room:
            lengths = [piece.length for piece in self._window(waiting)]
            fitting = [index for index, length in enumerate(lengths) if length <= room]
            if not fitting and self.fill == "whole":
                return room
            change = None
            # No three can do it while there is room for more.
            if sum(sorted(lengths[index] for index in fitting)[-3:]) >= room or not fitting:
                change = self._exactly(pieces, lengths, room)
            if change is not None:
                removed, added = change
                back = [pieces.pop(removed)] if removed is not None else []
                pieces.extend(waiting[index] for index in sorted(added))
                for index in sorted(added, reverse=True):
                    del waiting[index]
                waiting.extendleft(back)
                return 0
            if fitting:
                pieces.append(waiting[fitting[0]])
                del waiting[fitting[0]]
                room -= pieces[-1].length
                continue
            # Nothing fits any more, so this is little: a document loses only so much of its beginning.
            document, start, length = waiting.popleft()
            pieces.append(Piece(document, start, room))
            waiting.appendleft(Piece(document, start + room, length - room))
            self.counts.cut_documents += 1
            return 0
        return 0

    def _window(self, waiting: deque[Piece]) -> list[Piece]:
        return list(islice(waiting, self.lookahead))

    @staticmethod
    def _exactly(pieces: list[Piece], lengths: list[int], room: int) -> tuple[int | None, tuple[int, ...]] | None:
        """How to fill the room to the token: (index of a piece to give back, or None; indices of what to take)."""
        choice = _Choice(lengths)
        found = choice.one(room) or choice.two(room) or choice.three(room)
        if found:
            return None, found
        for pick in (choice.one, choice.two):
            for index in reversed(range(len(pieces))):
                found = pick(room + pieces[index].length)
                if found:
                    return index, found
        return None

    def _drop(self, packs: list[Pack]) -> None:
        pieces = [piece for pack in packs for piece in pack.pieces]
        tokens = sum(piece.length for piece in pieces)
        begun = sum(piece.start == 0 for piece in pieces)  # of the others, an earlier step has the beginning
        room = sum(self.capacities[i % len(self.capacities)] for i in range(len(packs)))
        counts = self.counts
        counts.dropped_documents += begun
        counts.dropped_tokens += tokens
        counts.documents -= begun
        counts.tokens -= tokens
        counts.packs -= len(packs)
        counts.unfilled_tokens -= room - tokens


class _Choice:
    """Finds lengths, the first ones in order, that add up to a sum."""

    def __init__(self, lengths: list[int]) -> None:
        self._first = {length: index for index, length in reversed(list(enumerate(lengths)))}
        self._lengths = np.array(lengths, dtype=np.int64)
        self._order = np.argsort(self._lengths, kind="stable")
        self._sorted = self._lengths[self._order]

    def one(self, total: int) -> tuple[int, ...]:
        """The index of a length, or nothing."""
        index = self._first.get(total)
        return () if index is None else (index,)

    def two(self, total: int) -> tuple[int, ...]:
        """The indices of two lengths, or nothing."""
        if not len(self._lengths):
            return ()
        wanted = total - self._lengths
        at = np.minimum(np.searchsorted(self._sorted, wanted), len(wanted) - 1)
        other = self._order[at]
        hits = np.flatnonzero((self._sorted[at] == wanted) & (other != np.arange(len(wanted))))
        return (int(hits[0]), int(other[hits[0]])) if len(hits) else ()

    def three(self, total: int) -> tuple[int, ...]:
        """The indices of three lengths, or nothing; not every combination is tried."""
        for index in np.flatnonzero(self._lengths < total)[:_THIRDS].tolist():
            found = self.two(total - int(self._lengths[index]))
            if found and index not in found:
                return (index, *found)
        return ()
