# SPDX-License-Identifier: Apache-2.0
"""Dealing query ranges out in order, which keeps what ``balance`` promises of loads where its own choices do not.

Every server keeps of its own what its limit allows, small pieces first. What is left is dealt to the servers with
room, one document after another, each server being filled until its room holds no shard more. So either all is dealt,
or every server is within one shard of its limit: the lowest limits at which all is dealt are at most a shard above the
shares. Bytes are looked at only in so far as a document's rows stay together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepspeed_distca.scheduler.cuts import UnitCuts
from deepspeed_distca.scheduler.holdings import Documents
from deepspeed_distca.scheduler.shares import Shares

#: A query range (cost, document, start, end), with what it costs as one task.
_Range = tuple[int, int, int, int]
#: Query ranges (document, start, end, server).
_Placed = list[tuple[int, int, int, int]]

#: The search for limits ends when they are known to one part in so many.
_PARTS = 2**16


class Dealing:
    """The pieces of a layout, to be dealt out under limits."""

    def __init__(
        self, pieces: np.ndarray, costs: np.ndarray, documents: Documents, num_ranks: int, cuts: UnitCuts
    ) -> None:
        """Args:
        pieces, costs: ``Layout.pieces`` and what each costs as one task.
        documents: how they are numbered.
        num_ranks: how many servers there are.
        cuts: the cost of a query range, and where to cut.
        """
        self._cuts = cuts
        self._ids, numbers = documents.ids.tolist(), documents.of_piece.tolist()
        self._own: list[list[_Range]] = [[] for _ in range(num_ranks)]
        self._whole: list[list[_Range]] = [[] for _ in range(num_ranks)]
        self._parts: list[_Range] = []
        columns = costs.tolist(), numbers, pieces.tolist()
        for cost, document, (_, start, end, rank) in sorted(zip(*columns, strict=True)):
            part = cost, document, start, end
            self._own[rank].append(part)
            (self._parts if document in documents.several else self._whole[rank]).append(part)

    def lowest(self, shares: Shares, low: int, *, whole: bool) -> np.ndarray:
        """All query ranges under the lowest limits that were found to hold them.

        Args:
            shares: whose limits they are.
            low: a total load below which there is none, >= 1.
            whole: only whole documents stay at home. Pieces that others have the rest of are dealt, so that they
                join again.

        Returns:
            int64 [n, 4], columns (document, start, end, server).
        """
        high, best = low, self._within(shares.limits(low), whole)
        while best is None:
            high *= 2
            best = self._within(shares.limits(high), whole)
        while high - low > low // _PARTS + 1:
            middle = (low + high) // 2
            placed = self._within(shares.limits(middle), whole)
            if placed is None:
                low = middle
            else:
                high, best = middle, placed
        return np.array([(self._ids[document], *part) for document, *part in best], dtype=np.int64)

    def _within(self, limits: Sequence[int], whole: bool) -> _Placed | None:
        """All query ranges, or None where the limits do not hold them."""
        placed: _Placed = []
        rooms, rest = [], list(self._parts) if whole else []
        for server, own in enumerate(self._whole if whole else self._own):
            room = self._keep(server, own, limits[server], placed, rest)
            if room > 0:
                rooms.append((-room, server))
        rest.sort(key=lambda part: part[1:], reverse=True)  # the next one is the last
        for minus_room, server in sorted(rooms):
            self._deal(server, -minus_room, placed, rest)
            if not rest:
                return placed
        return None if rest else placed

    def _keep(self, server: int, own: list[_Range], room: int, placed: _Placed, rest: list[_Range]) -> int:
        """What a server keeps of its own goes to `placed`, what it does not to `rest`; returns its room."""
        for i, (cost, document, start, end) in enumerate(own):
            if cost > room:
                x, cuts = self._cut(document, start, end, room), self._cuts.of(document)
                if x > start:
                    placed.append((document, start, x, server))
                    room -= cuts.cost(start, x)
                if x < end:
                    rest.append((cuts.cost(x, end), document, x, end))
                rest += own[i + 1 :]
                break
            placed.append((document, start, end, server))
            room -= cost
        return room

    def _deal(self, server: int, room: int, placed: _Placed, rest: list[_Range]) -> None:
        """Gives a server what comes next until its room holds no shard of it."""
        before = None  # the document and position at which the server's last range ends
        while rest:
            cost, document, start, end = rest[-1]
            cuts = self._cuts.of(document)
            saved = cuts.joined(start) if before == (document, start) else 0
            if cost - saved > room:
                x = self._cut(document, start, end, room + saved)
                if x > start:
                    placed.append((document, start, x, server))
                    rest[-1] = (cuts.cost(x, end), document, x, end)
                return
            rest.pop()
            placed.append((document, start, end, server))
            room -= cost - saved
            before = document, end

    def _cut(self, document: int, start: int, end: int, room: int) -> int:
        """Where to cut [start, end) so that its head fits the room; `start` where there is no such place."""
        cuts = self._cuts.of(document)
        lowest, highest = cuts.limits(start, end)
        x = min(cuts.head_within(start, end, room), highest)
        return x if lowest <= x else start
