# SPDX-License-Identifier: Apache-2.0
"""Which documents are trained together: global batches that hold exactly as many tokens as all ranks' budgets.

A pack is the set of documents of one micro-batch of one group of ranks, a step the packs of an optimizer step. Only
lengths are needed, and a bounded number of them ahead, so that streams are packed like datasets. A pure function of
lengths and options: every rank packs the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Literal, NamedTuple

import numpy as np

from deepspeed_distca.data.checks import one_of
from deepspeed_distca.data.packing import Overflow, PackingCounts, Piece, pieces_of
from deepspeed_distca.given import integer

Fill = Literal["exact", "whole"]

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
        one_of("fill", fill, Fill)
        one_of("overflow", overflow, Overflow)
        self.capacities = [int(n) for n in capacities]
        self.longest = min(self.capacities)
        self.fill, self.overflow, self.lookahead = fill, overflow, integer("lookahead", lookahead, 1)
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
        groups, size, counts = len(self.capacities), accumulation * len(self.capacities), self.counts
        packs = self.packs(documents)
        while found := list(islice(packs, size)):
            pieces = [piece for pack in found for piece in pack.pieces]
            tokens = sum(piece.length for piece in pieces)
            if drop_last and not (len(found) == size and found[-1].complete):
                begun = sum(piece.start == 0 for piece in pieces)  # of the others, an earlier step has the beginning
                counts.documents -= begun
                counts.dropped_documents += begun
                counts.dropped_tokens += tokens
                return
            counts.tokens += tokens
            counts.packs += len(found)
            counts.unfilled_tokens += sum(islice(cycle(self.capacities), len(found))) - tokens
            step = [pack.pieces for pack in found] + [[] for _ in range(size - len(found))]
            yield [step[i : i + groups] for i in range(0, size, groups)]

    def packs(self, documents: Iterable[tuple[int, int]]) -> Iterator[Pack]:
        """Packs of the groups in turn, none of them empty.

        Raises:
            ValueError: a document that is too long with overflow "error".
        """
        limit = f"the ranks that share it hold {self.longest} together; raise tokens_per_rank, use more ranks"
        source = pieces_of(documents, self.longest, self.overflow, self.counts, limit)
        waiting: list[Piece] = []
        for room in cycle(self.capacities):
            pieces: list[Piece] = []
            while room and (waiting or (waiting := list(islice(source, 1)))) and waiting[0].length <= room:
                pieces.append(waiting.pop(0))
                room -= pieces[-1].length
            if not pieces and not waiting:
                return
            if room:
                waiting += islice(source, self.lookahead - len(waiting))
            complete = room == 0 or bool(waiting)
            if room and waiting:
                self._fill(pieces, waiting, room)
            yield Pack(pieces, complete)

    def _fill(self, pieces: list[Piece], waiting: list[Piece], room: int) -> None:
        """Fills the room that is left from what waits."""
        while room:
            lengths = [piece.length for piece in waiting]
            fitting = [index for index, length in enumerate(lengths) if length <= room]
            if not fitting and self.fill == "whole":
                return
            # No three can do it while there is room for more.
            if not fitting or sum(sorted(lengths[index] for index in fitting)[-3:]) >= room:
                back, added = self._exactly(pieces, lengths, room)
                if added:
                    given_back = [pieces.pop(index) for index in back]
                    pieces += [waiting[index] for index in sorted(added)]
                    waiting[:] = given_back + [piece for index, piece in enumerate(waiting) if index not in added]
                    return
            if fitting:
                pieces.append(waiting.pop(fitting[0]))
                room -= pieces[-1].length
                continue
            # Nothing fits any more, so this is little: a document loses only so much of its beginning.
            document, start, length = waiting[0]
            pieces.append(Piece(document, start, room))
            waiting[0] = Piece(document, start + room, length - room)
            self.counts.cut_documents += 1
            return

    @staticmethod
    def _exactly(pieces: list[Piece], lengths: list[int], room: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How to fill the room to the token: the index of a piece to give back, if any, and of those to take."""
        choice = _Choice(lengths)
        found = choice.one(room) or choice.two(room) or choice.three(room)
        if found:
            return (), found
        for pick in (choice.one, choice.two):
            for index in reversed(range(len(pieces))):
                found = pick(room + pieces[index].length)
                if found:
                    return (index,), found
        return (), ()


class _Choice:
    """Finds lengths, of which there are some, the first ones in order, that add up to a sum."""

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
