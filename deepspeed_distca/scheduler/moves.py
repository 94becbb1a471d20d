# SPDX-License-Identifier: Apache-2.0
"""Moving query ranges from overloaded servers to others: the state and the choices of one balancing run.

See ``balance`` for what is reached and why moves are chosen as they are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from functools import partial
from heapq import nsmallest
from typing import NamedTuple

import numpy as np

from deepspeed_distca.layout import PIECE_RANK
from deepspeed_distca.scheduler.cuts import UnitCuts
from deepspeed_distca.scheduler.holdings import Documents, Holdings
from deepspeed_distca.scheduler.shares import Shares

#: How many of a rank's largest pieces are looked at for each move. Smaller ones carry less work per byte.
_LOOK_AT = 6

#: Whole pieces are moved without a look at alternatives while surplus and room hold at least so many of the largest.
_MANY = 32

#: How many of the servers that have a document's keys, the least loaded ones, may take one more shard of it.
_HOLDERS = 4

#: Rounds of levelling for each rank, after which the remaining imbalance stays: a guard, above what is needed.
_LEVELLING = 2

#: The part of all limits that loads leave, one in so many, where levelling is quick and does meet them.
_SLACK = 500


#: Queries [start, end) of a document that their home still computes: (cost, document, start, end). Plain tuples, of
#: which there are many; they sort by cost.
Piece = tuple[int, int, int, int]


class Move(NamedTuple):
    """Queries [start, end) of a piece to a server.

    Attributes:
        order: of two moves the one with the lesser is better: what it costs, then its place.
        relief, cost: by how much the giver's load falls and the server's rises.
        rows: query and key/value rows that the server will receive.
    """

    order: tuple[int, ...]
    server: int
    start: int
    end: int
    piece: Piece
    relief: int
    cost: int
    rows: int


class Moves:
    """What every server still computes of its own, and what was moved where.

    Neither document ids nor the order of segments within a rank matter: documents go by their numbers in Holdings.
    """

    def __init__(
        self,
        *,
        pieces: np.ndarray,
        costs: np.ndarray,
        documents: Documents,
        loads: list[int],
        shares: Shares,
        cuts: UnitCuts,
        window: int | None,
        row_costs: tuple[int, int],
        max_received_rows: int | None,
        received_rows: list[int],
        assumed_total: int = 0,
    ) -> None:
        """Args:
        pieces, costs: ``Layout.pieces`` and what each costs as one task.
        documents: how they are numbered.
        loads: of each server, with everything at home.
        shares: who may have how much.
        cuts: the cost of a query range, and where to cut.
        window: keys a query sees, or None.
        row_costs: of transferring a query row, out and back, and a key/value row; in the unit of loads.
        max_received_rows, received_rows: a cap, and what servers receive already.
        assumed_total: limits are shares of this; 0: of the total load, which grows as cuts add to it.
        """
        self._pieces, self._costs, self._documents = pieces, costs, documents
        self._loads, self._total = loads, sum(loads)
        self._shares, self._cuts = shares, cuts
        self._holdings = Holdings(pieces, documents, window)
        self._q_cost, self._kv_cost = row_costs
        self._cap, self._received = max_received_rows, received_rows
        self._assumed_total = assumed_total
        self._limits = shares.limits(assumed_total or self._total)
        self._wanted_room: dict[int, int] = {}  # what a server shall have left beside what it still computes
        self._moved: list[tuple[int, int, int, int]] = []  # (document, start, end, server)
        self._own: dict[int, list[Piece]] = {}  # the pieces of those who may give, ascending
        self._is_own = np.zeros(len(pieces), dtype=bool)
        self._add_givers([r for r, load in enumerate(loads) if load > self._limits[r]])

    def run(self, *, patient: bool = True) -> np.ndarray:
        """Moves until every server is within its limit or nothing helps.

        Args:
            patient: loads are levelled that together are as much as all limits, too, though it takes long.

        Returns:
            int64 [n, 4] (document, start, end, server): all query ranges, with the documents' ids.
        """
        givers = list(self._own)
        self._fill(givers, self._shares.least_room)
        # Who gave a costly piece as a whole may have room again, and often the keys of what others still have to give.
        self._fill(givers, self._shares.least_room, givers)
        self._empty()
        if patient or self._total <= sum(self._limits) * (_SLACK - 1) // _SLACK:
            self._level()
        # Of documents of which nothing moved all pieces are where they were.
        ids, documents = self._documents.ids, self._documents.of_piece
        moved = {document for document, _, _, _ in self._moved}
        changed = np.zeros(len(ids), dtype=bool)
        changed[list(moved)] = True
        kept = ~(self._is_own & changed[documents])
        stayed = [(d, start, end, rank) for rank, own in self._own.items() for _, d, start, end in own if d in moved]
        ranges = np.array(stayed + self._moved, dtype=np.int64).reshape(-1, 4)
        ranges[:, 0] = ids[ranges[:, 0]]
        return np.concatenate([self._pieces[kept], ranges])

    def _add_givers(self, ranks: list[int]) -> None:
        """Lets ranks give their own pieces away from now on."""
        gives = np.zeros(len(self._loads), dtype=bool)
        gives[ranks] = True
        rows = np.flatnonzero(gives[self._pieces[:, PIECE_RANK]])
        self._is_own[rows] = True
        _, start, end, rank = self._pieces[rows].T
        cost, document = self._costs[rows], self._documents.of_piece[rows]
        order = np.lexsort((start, document, cost, rank))
        pieces = list(zip(*(column[order].tolist() for column in (cost, document, start, end)), strict=True))
        borders = np.searchsorted(rank[order], [(r, r + 1) for r in ranks]).tolist()
        for giver, (first, last) in zip(ranks, borders, strict=True):
            self._own[giver] = pieces[first:last]

    def _over(self, server: int) -> int:
        """By how much a server's load exceeds its limit; negative: its room."""
        over = self._loads[server] - self._limits[server]
        return over + self._wanted_room.get(server, 0) if self._wanted_room else over

    def _relative(self, server: int, more: int = 0) -> int:
        """See :meth:`Shares.relative`, with so much more than its load."""
        return self._shares.relative(server, self._loads[server] + more)

    # -- filling rooms ------------------------------------------------------------------------------------------

    def _fill(
        self, givers: list[int], least_room: Callable[[int, int], int], takers: Sequence[int] | None = None
    ) -> None:
        """Moves from givers to servers whose room is at least `least_room`(server, total) until either runs out.

        Args:
            takers: those servers; None are all whose own pieces are not given away.
        """
        self._least_room = least_room
        if takers is None:
            takers = [s for s in range(len(self._loads)) if s not in self._own]
        self._room = {s: -self._over(s) for s in takers}
        #: (room, -server) of those who take, ascending: the last is the largest.
        self._rooms = sorted((room, -s) for s, room in self._room.items() if self._is_open(s))
        # Whoever shares the document with the largest surplus over all its homes comes first and is served to the end,
        # so that this document's keys go to the fewest servers.
        order = []
        for giver in givers:
            own, over = self._own[giver], self._over(giver)
            if own and over > 0:
                order.append((-max(over, self._surplus_around(own[-1][1])), -over, giver))
        for _, _, giver in sorted(order):
            while self._rooms:
                wanted = self._over(giver)
                if wanted <= 0:
                    break
                if self._move_small(giver, wanted):
                    continue
                move = self._choose(giver, wanted)
                if move is None:
                    break  # not even the largest room holds a shard, or the cap forbids it
                self._take(giver, move)
                while self._is_open(move.server):
                    follower, follow = self._follow(move.server, move.piece[1])
                    if follow is None:
                        break
                    self._take(follower, follow)
                self._reopen(move.server)

    def _surplus_around(self, document: int) -> int:
        """What the homes of a document have to give, all together."""
        return sum(max(0, self._over(r)) for r in self._holdings.homes(document) if r in self._own)

    def _is_open(self, server: int) -> bool:
        return self._room[server] >= self._least_room(server, self._total)

    def _reopen(self, server: int) -> None:
        """Puts a server in its place among the rooms after it has taken."""
        if self._is_open(server):
            insort(self._rooms, (self._room[server], -server))

    def _move_small(self, giver: int, wanted: int) -> bool:
        """Many whole pieces to the largest room at once, where even the largest is small beside it and the surplus."""
        own, (room, minus_server) = self._own[giver], self._rooms[-1]
        if not own or own[-1][0] * _MANY > min(wanted, room):
            return False
        server, moved = -minus_server, len(self._moved)
        while own and own[-1][0] <= self._room[server] and self._over(giver) > 0:
            piece = own[-1]
            cost, document, start, end = piece
            if not self._holdings.is_whole(document):
                terms = self._terms(server, piece, start, end, (0, 0))
                if terms is None:
                    break
                self._take(giver, Move((), server, start, end, piece, *terms))
                continue
            # A document that nobody has seen any part of needs no book-keeping.
            rows = end + self._documents.full.get(document, end)
            if not self._may_receive(server, rows):
                break
            own.pop()
            self._moved.append((document, start, end, server))
            self._received[server] += rows
            self._loads[giver] -= cost
            self._loads[server] += cost
            self._room[server] -= cost
        if len(self._moved) == moved:
            return False
        if self._rooms and self._rooms[-1] == (room, minus_server):
            self._rooms.pop()
        self._reopen(server)
        return True

    def _choose(self, giver: int, wanted: int) -> Move | None:
        """The move with the least cost for the work that it takes off the giver."""
        rooms, own = self._rooms, self._own[giver]
        if not own:
            return None
        largest = own[-1]
        room, server = rooms[-1][0], -rooms[-1][1]
        # The smallest room that holds what this document's homes have to give, rounded up to a granule.
        enough = max(wanted, self._surplus_around(largest[1])) + self._cuts.of(largest[1]).last_granule(*largest[2:])
        if room > enough:
            room, server = rooms[bisect_left(rooms, (enough,))]
            server = -server
        looked = own[-_LOOK_AT:]
        best = None
        for piece in looked:
            best = self._better(best, server, piece, wanted)
        # Who has the document's keys. A room that is too small for anything else may do for the last remainder.
        least = min(wanted, self._least_room(server, self._total))
        for piece in looked:
            holders = self._holdings.servers(piece[1])
            # Not worth working out for a few. A document on hundreds of servers would take that many looks every time.
            needed = max(least, self._least_fitting(piece)) if len(holders) > _LOOK_AT else least
            for holder in holders:
                if holder != server and self._room.get(holder, 0) >= needed:
                    best = self._better(best, holder, piece, wanted)
        if best is None and (self._cap is not None or room < rooms[-1][0]):
            fitting = [self._least_fitting(piece) for piece in looked]
            for room, minus_server in reversed(rooms):
                for piece, fits in zip(looked, fitting, strict=True):
                    if room >= fits:
                        best = self._better(best, -minus_server, piece, wanted)
                if best is not None:
                    break
        return best

    def _least_fitting(self, piece: Piece) -> int:
        """A room below which no part of the piece fits, whatever it extends."""
        cost, document, start, end = piece
        cuts = self._cuts.of(document)
        below, above = cuts.joined(start), cuts.joined(end)
        lowest, highest = cuts.limits(start, end)
        least = cost - below - above
        if lowest <= highest:
            least = min(least, cuts.cost(start, lowest) - below, cuts.cost(highest, end) - above)
        return least

    def _follow(self, server: int, document: int) -> tuple[int, Move | None]:
        """The best move to a server with room left: rows of the same document from any of its homes."""
        best, follower = None, -1
        for giver in self._holdings.homes(document):
            wanted = self._over(giver) if giver in self._own else 0
            if wanted <= 0:
                continue
            for piece in self._own[giver][-_LOOK_AT:]:
                if piece[1] == document:
                    found = self._better(best, server, piece, wanted)
                    if found is not best:
                        best, follower = found, giver
        return follower, best

    def _better(self, best: Move | None, server: int, piece: Piece, wanted: int) -> Move | None:
        """The better of `best` and the moves of a part of `piece` to `server` that take `wanted` off the giver, or as
        much of it as there is room for: its head, its tail, or all of it."""
        whole, document, start, end = piece
        room, cuts = self._room[server], self._cuts.of(document)
        savings = below, above = self._savings(server, piece)
        joined, ranges = whole - below - above, []
        if joined > min(room, wanted):
            lowest, highest = cuts.limits(start, end)
            if lowest <= highest:
                kept = whole - wanted  # what may stay with the giver
                x = min(cuts.head_within(start, end, room + below), cuts.tail_within(start, end, kept))
                ranges.append((start, min(max(x, lowest), highest)))
                x = max(cuts.tail_within(start, end, room + above), cuts.head_within(start, end, kept))
                ranges.append((min(max(x, lowest), highest), end))
        if joined <= room:
            ranges.append((start, end))
        for a, b in ranges:
            terms = self._terms(server, piece, a, b, savings, room)
            if terms is not None:
                relief, cost, rows = terms
                transfers = (b - a) * self._q_cost + (rows - (b - a)) * self._kv_cost
                order = ((transfers + cost - relief) << 20) // min(relief, wanted), server, -b, -a
                if best is None or order < best.order:
                    best = Move(order, server, a, b, piece, relief, cost, rows)
        return best

    def _terms(
        self, server: int, piece: Piece, a: int, b: int, savings: tuple[int, int], room: int | None = None
    ) -> tuple[int, int, int] | None:
        """The relief, cost and rows of the move of [a, b) of a piece: its head, its tail, or all of it; None where it
        is none, or there is no room, or the cap forbids it.

        Args:
            savings: of :meth:`_savings`.
        """
        whole, document, start, end = piece
        relief = cost = whole
        if a > start or b < end:
            cuts = self._cuts.of(document)
            relief -= cuts.cost(b, end) if a == start else cuts.cost(start, a)
            cost = cuts.cost(a, b)
        cost -= (savings[0] if a == start else 0) + (savings[1] if b == end else 0)
        if relief <= 0 or (room is not None and cost > room):
            return None
        rows = b - a + self._holdings.missing(document, server, a, b)
        return (relief, cost, rows) if self._may_receive(server, rows) else None

    def _may_receive(self, server: int, rows: int) -> bool:
        return self._cap is None or self._received[server] + rows <= self._cap

    def _savings(self, server: int, piece: Piece) -> tuple[int, int]:
        """What the piece's head, and its tail, cost less at a server whose tasks they extend."""
        _, document, start, end = piece
        below, above = self._holdings.touches(document, server, start, end)
        cuts = self._cuts.of(document)
        return cuts.joined(start) if below else 0, cuts.joined(end) if above else 0

    def _take(self, giver: int, move: Move) -> None:
        """Carries out a move. The server leaves the list of rooms."""
        server, piece, a, b = move.server, move.piece, move.start, move.end
        cost, document, start, end = piece
        cuts, own = self._cuts.of(document), self._own[giver]
        del own[bisect_left(own, piece)]
        for x, y in ((start, a), (b, end)):
            if x < y:
                part = cuts.cost(x, y)
                insort(own, (part, document, x, y))
                cost -= part
        # Where the giver computes a neighbour that it got from elsewhere, the two were one task.
        below, above = self._holdings.touches(document, giver, start, end)
        if below and a == start:
            cost -= cuts.joined(start)
        if above and b == end:
            cost -= cuts.joined(end)
        self._loads[giver] -= cost
        self._loads[server] += move.cost
        if move.cost != cost:
            self._total += move.cost - cost
            if not self._assumed_total:
                self._limits = self._shares.limits(self._total)
        self._holdings.move(document, giver, start, end, a, b, server)
        self._moved.append((document, a, b, server))
        self._received[server] += move.rows
        entry = self._room.get(server, 0), -server
        place = bisect_left(self._rooms, entry)
        if place < len(self._rooms) and self._rooms[place] == entry:
            del self._rooms[place]
        self._room[server] = -self._over(server)

    # -- servers that are to compute nothing ----------------------------------------------------------------------

    def _empty(self) -> None:
        """Lets others compute what servers of weight 0 still have, whatever that costs.

        Limits are raised, by twice as much every time, until all of it is taken; once one server may have everything,
        the cap on received rows is doubled. Afterwards both are as before, for levelling among the others.
        """
        givers = [r for r, own in self._own.items() if own and not self._shares.weights[r]]
        if not givers:
            return
        before = self._limits, self._assumed_total, self._cap
        base, step = self._assumed_total or self._total, sum(self._loads[r] for r in givers)
        enough = self._shares.total_for_one(self._total)
        while givers:
            if self._cap is None or self._assumed_total < enough:
                self._assumed_total = base + step
                self._limits = self._shares.limits(self._assumed_total)
                step *= 2
            else:
                self._cap *= 2
            self._fill(givers, lambda server, total: 1, range(len(self._loads)))
            enough = max(enough, self._shares.total_for_one(self._total))
            givers = [r for r in givers if self._own[r]]
        self._limits, self._assumed_total, self._cap = before
        if not self._assumed_total:
            self._limits = self._shares.limits(self._total)

    # -- where shards are coarser than the room that is left --------------------------------------------------------

    def _level(self) -> None:
        """Shards from servers above their limit to others, which give away of their own for it where that can be cut
        finer, as long as that lowers the larger of the two relative loads. A shard's taker takes all that it has room
        for: another one would need the document's keys as well."""
        stuck: set[int] = set()
        servers = range(len(self._loads))
        for _ in range(_LEVELLING * len(servers)):
            over = [(self._relative(s), -s) for s in servers if s not in stuck and self._over(s) > 0]
            if not over:
                return
            level, giver = max(over)
            giver = -giver
            if giver not in self._own:
                self._add_givers([giver])
            move = self._shard_of(giver)
            if move is not None:
                self._make_room(move.server, move.cost)
                if move.piece not in self._own[giver]:
                    continue  # the giver gave of it as well
                if self._relative(move.server, move.cost) < level:
                    self._room[move.server] = -self._over(move.server)
                    more = self._better(None, move.server, move.piece, self._over(giver))
                    self._take(giver, more if more is not None and more.relief > move.relief else move)
                    continue
            stuck.add(giver)

    def _make_room(self, server: int, room: int) -> None:
        """Lets a server give of its own away until it has `room`, as far as others have room for that."""
        if self._over(server) + room <= 0:
            return
        if server not in self._own:
            self._add_givers([server])
        self._wanted_room = {server: room}
        self._fill([server], lambda server, total: 1)
        self._wanted_room = {}

    def _shard_of(self, giver: int) -> Move | None:
        """The best move of one shard: the cheapest that fits, or else the one that loads its server least."""
        loads, weights = self._loads, self._shares.weights
        takers = [s for s in range(len(loads)) if s != giver and weights[s]]
        if self._cap is None and takers and self._shares.are_equal:
            takers = [min(takers, key=lambda s: loads[s])]
        everyone, best = takers, None
        for piece in self._own[giver][-_LOOK_AT:]:
            _, document, start, end = piece
            cuts = self._cuts.of(document)
            lowest, highest = cuts.limits(start, end)
            holders = [s for s in self._holdings.servers(document) if s != giver and weights[s]]
            holders = nsmallest(_HOLDERS, holders, key=self._relative)
            shards = [(start, lowest), (highest, end)] if lowest <= highest else [(start, end)]
            if self._cap is None and not self._shares.are_equal:
                # A fast server may end up less loaded than an emptier slow one: the load with the shard counts.
                sizes = [cuts.cost(a, b) for a, b in shards]
                takers = [min(everyone, key=partial(self._relative, more=size)) for size in sizes if everyone]
            for server in dict.fromkeys([*takers, *holders]):
                savings = self._savings(server, piece)
                for a, b in shards:
                    terms = self._terms(server, piece, a, b, savings)
                    if terms is None:
                        continue
                    relief, cost, rows = terms
                    after = 0 if self._over(server) + cost <= 0 else self._relative(server, cost)
                    price = (b - a) * self._q_cost + (rows - (b - a)) * self._kv_cost + cost
                    order = after, price, server, -b, -a
                    if best is None or order < best.order:
                        best = Move(order, server, a, b, piece, relief, cost, rows)
        return best
