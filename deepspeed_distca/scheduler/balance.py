# SPDX-License-Identifier: Apache-2.0
"""From a layout to balanced CA-tasks: which query rows of overloaded ranks are computed by which other server.

Servers above (1 + tolerance) times their share of the total load give query ranges away until they are not; whoever is
below takes them. As long as one server is above that bound another is below its share, so a taker with room for at
least `tolerance` times its share always exists, and nothing smaller than that is filled: few, large ranges.

Bytes decide what goes where. A query range [a, b) costs its own rows' q, out and so on, and the key/value rows below b
that the taker lacks; so a document's rows cost least per work near its end, a taker that has a document's keys gets more
of it for its queries alone, and every new taker of a long document costs almost the whole document's keys. Therefore
the largest surplus meets the largest room, a taker that is not full takes on with other ranks' rows of the same
document, and a last remainder goes to the smallest room that holds it, which leaves the large rooms to others.

Everything is decided in Python integers and by geometry (documents are ordered by where they lie, not by their ids).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import MAX_COST, UNITS_PER_SECOND, CostModel, Phase, key_start
from deepspeed_distca.scheduler.cuts import Cuts
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.tasks import (
    PIECE_DOCUMENT,
    PIECE_END,
    PIECE_RANK,
    PIECE_START,
    Tasks,
    home_pieces,
    home_tasks,
    task_rows,
)

__all__ = ["Tasks", "balance", "home_tasks"]

_TOLERANCE_UNIT = 10**9

#: How many of a rank's largest pieces are looked at for each move. Smaller ones carry less work per byte.
_LOOK_AT = 6

#: Whole pieces are moved without a look at alternatives while surplus and room hold at least so many of the largest.
_MANY = 32

#: Rounds of levelling for each rank, after which the remaining imbalance stays: a guard, far above what is needed.
_LEVELLING = 8


def balance(
    layout: Layout,
    cost: CostModel,
    *,
    phase: Phase = "forward",
    tolerance: float = 0.02,
    min_shard_tokens: int | None = None,
    granularity: int = 128,
    window: int | None = None,
    heads: Heads | None = None,
    server_weights: Sequence[int] | None = None,
    max_received_rows: int | None = None,
) -> Tasks:
    """Spreads a layout's core attention so that no server's load exceeds (1 + tolerance) times its share.

    A pure function of its arguments. Where loads are within the tolerance already, every row is computed at its home.
    Otherwise the bound holds wherever cuts of the granularity allow it: a server is left above it only where giving
    one more shard of `min_shard_tokens` rows (a whole piece, if it is shorter than two) would put the least loaded
    server above that server's own load.

    Args:
        layout: where the tokens live.
        cost: what tasks cost; decides everything.
        phase: "forward" or "backward": whose cost is balanced and whose bytes are weighed.
        tolerance: 0.02 by default: the cost model itself is off by 1-4 %, and each further halving costs more
            transfers than it wins time.
        min_shard_tokens: query rows below which no piece is cut; None is one granule.
        granularity: cuts lie at document positions that are multiples of it.
        window: keys a query sees, its own included; None for full causal attention.
        heads: bytes of the rows; None takes the cost model's.
        server_weights: relative speeds of the servers, integers >= 0, one per rank; None is all equal. A server of
            weight 0 computes nothing.
        max_received_rows: the most query plus key/value rows that a server may receive by what is moved to it. It
            costs balance where it binds. Key/value rows that a server needs for its own queries count, but are
            received even where they alone pass the cap.

    Returns:
        The tasks, with predicted loads.

    Raises:
        LayoutError: a layout that no plan can be made for.
        ValueError: an option out of range.
        OverflowError: documents so long that costs leave int64.
    """
    _check_options(tolerance, min_shard_tokens, granularity, window, max_received_rows)
    weights = _check_weights(server_weights, layout.num_ranks)
    terms = cost.phase(phase)
    layout.validate()
    pieces = home_pieces(layout)
    costs = cost.cost(
        pieces[:, PIECE_START],
        pieces[:, PIECE_END],
        key_start(pieces[:, PIECE_START], window),
        window,
        phase,
    )
    if float(costs.sum(dtype=np.float64)) > MAX_COST:
        raise OverflowError(f"the layout's total cost exceeds {MAX_COST} fs: its documents are too long")
    before = _sum_by(pieces[:, PIECE_RANK], costs, layout.num_ranks)
    share = _Shares(weights, tolerance)
    total = int(before.sum())
    limits = share.limits(total)
    if all(load <= limit for load, limit in zip(before.tolist(), limits, strict=True)):
        return Tasks(task_rows(pieces, window), before, before)

    heads = heads or cost.heads
    if phase == "forward":
        row_bytes = heads.q_bytes + heads.return_bytes, heads.kv_bytes
    else:
        row_bytes = 2 * heads.q_bytes + heads.out_bytes + 2 * heads.lse_bytes, 2 * heads.kv_bytes
    moves = _Moves(
        pieces=pieces,
        costs=costs,
        loads=before.tolist(),
        share=share,
        cuts=Cuts(terms, window, granularity),
        shard=max(granularity, min_shard_tokens or 1),
        granularity=granularity,
        window=window,
        row_cost=tuple(n * UNITS_PER_SECOND // cost.bytes_per_second for n in row_bytes),
        max_received_rows=max_received_rows,
    )
    ranges = moves.run()
    rows = task_rows(ranges, window)
    loads = _sum_by(rows[:, 4], cost.cost(rows[:, 1], rows[:, 2], rows[:, 3], window, phase), layout.num_ranks)
    return Tasks(rows, loads, before)


def _check_options(tolerance, min_shard_tokens, granularity, window, max_received_rows) -> None:
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < float("inf"):
        raise ValueError(f"tolerance must be a finite number >= 0, got {tolerance!r}")
    for name, value in (
        ("granularity", granularity),
        ("min_shard_tokens", min_shard_tokens),
        ("window", window),
        ("max_received_rows", max_received_rows),
    ):
        if value is None and name != "granularity":
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def _check_weights(weights: Sequence[int] | None, num_ranks: int) -> list[int]:
    if weights is None:
        return [1] * num_ranks
    values = list(weights)
    if len(values) != num_ranks:
        raise ValueError(f"server_weights must have one entry for each of {num_ranks} ranks, got {len(values)}")
    if any(isinstance(w, bool) or not isinstance(w, int | np.integer) or not 0 <= w <= 10**6 for w in values):
        raise ValueError(f"server_weights must be integers in 0..1000000, got {values}")
    if not any(values):
        raise ValueError("server_weights are all 0: some server must compute")
    return [int(w) for w in values]


def _sum_by(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, dtype=np.int64)
    np.add.at(out, index, values)
    return out


class _Shares:
    """Each server's share of a total load, and its limit: the share times (1 + tolerance)."""

    def __init__(self, weights: list[int], tolerance: float) -> None:
        self.weights, self._sum = weights, sum(weights)
        self._slack = round(tolerance * _TOLERANCE_UNIT)
        self.equal = len(set(weights)) == 1

    def limits(self, total: int) -> list[int]:
        if self.equal:
            return [self.limit(0, total)] * len(self.weights)
        return [self.limit(server, total) for server in range(len(self.weights))]

    def limit(self, server: int, total: int) -> int:
        numerator = total * self.weights[server] * (_TOLERANCE_UNIT + self._slack)
        return numerator // (self._sum * _TOLERANCE_UNIT)

    def least_room(self, server: int, total: int) -> int:
        """What a server below its share has at least left below its limit; never 0."""
        return max(1, total * self.weights[server] * self._slack // (self._sum * _TOLERANCE_UNIT))

    def relative(self, server: int, load: int) -> int:
        """Load by weight, comparable between servers."""
        weight = self.weights[server]
        return (load << 20) // weight if weight else load << 60


class _Moves:
    """The state of one balancing run: what every server still computes of its own, and what was moved where.

    Documents go by their place in an order that only their geometry decides, so that neither ids nor the order of
    segments within a rank matter. A piece is (cost, document, start, end); a move is (score, server, start, end,
    piece, relief of the giver, cost to the server, key/value rows to send).
    """

    def __init__(
        self,
        *,
        pieces: np.ndarray,
        costs: np.ndarray,
        loads: list[int],
        share: _Shares,
        cuts: Cuts,
        shard: int,
        granularity: int,
        window: int | None,
        row_cost: tuple[int, int],
        max_received_rows: int | None,
    ) -> None:
        self._pieces, self._costs, self._share, self._cuts = pieces, costs, share, cuts
        self._shard, self._granularity, self._window = shard, granularity, window
        self._q_cost, self._kv_cost = row_cost
        self._loads, self._total = loads, sum(loads)
        self._moved: list[tuple[int, int, int, int]] = []  # (document, start, end, server)
        self._document, self._name = _by_geometry(pieces)
        self._cap = max_received_rows
        self._received = _rows_needed_at_home(pieces, len(loads), window) if max_received_rows else [0] * len(loads)

        # Of documents with a piece on a giver: which rows each rank stores, which key ranges a server stores or will
        # receive, which query ranges it computes.
        self._stored: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._keys: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._computed: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._servers_of: dict[int, dict[int, None]] = {}  # in order of arrival
        self._homes_of: dict[int, dict[int, None]] = {}

        self._own: dict[int, list[tuple[int, int, int, int]]] = {}  # a giver's pieces, ascending
        self._is_given = np.zeros(len(pieces), dtype=bool)
        limits = share.limits(self._total)
        self._add_givers([r for r, load in enumerate(loads) if load > limits[r]])

    def _add_givers(self, ranks: list[int]) -> None:
        """Lets ranks give their own pieces away from now on."""
        pieces, document = self._pieces, self._document
        gives = np.zeros(len(self._loads), dtype=bool)
        gives[ranks] = True
        rows = np.flatnonzero(gives[pieces[:, PIECE_RANK]])
        self._is_given[rows] = True
        for rank in ranks:
            self._own[rank] = []
        for cost, d, (_, start, end, rank) in zip(
            self._costs[rows].tolist(), document[rows].tolist(), pieces[rows].tolist(), strict=True
        ):
            self._own[rank].append((cost, d, start, end))
        for rank in ranks:
            self._own[rank].sort()
        concerned = np.zeros(len(self._name), dtype=bool)
        concerned[document[rows]] = True
        concerned[list(self._homes_of)] = False
        rows = np.flatnonzero(concerned[document])
        for d, (_, start, end, rank) in zip(document[rows].tolist(), pieces[rows].tolist(), strict=True):
            self._stored.setdefault((d, rank), []).append((start, end))
            self._hold(d, rank, start, end)
            self._homes_of.setdefault(d, {})[rank] = None

    def run(self) -> np.ndarray:
        """Moves until every server is within its limit or nothing helps.

        Returns:
            int64 [n, 4] (document, start, end, server), all query ranges.
        """
        self._fill(list(self._own), self._share.least_room)
        self._level()
        name = self._name
        own = [(name[d], start, end, rank) for rank, own in self._own.items() for _, d, start, end in own]
        moved = [(name[d], start, end, server) for d, start, end, server in self._moved]
        return np.concatenate([self._pieces[~self._is_given], np.array(own + moved, dtype=np.int64).reshape(-1, 4)])

    def _over(self, server: int) -> int:
        """How much a server's load exceeds its limit; negative: its room."""
        return self._loads[server] - self._share.limit(server, self._total)

    # -- filling rooms ------------------------------------------------------------------------------------------

    def _fill(self, givers: list[int], least_room: Callable[[int, int], int]) -> None:
        """Moves from givers to servers whose room is at least `least_room`(server, total) until either runs out."""
        self._least_room = least_room
        queue = [(*self._urgency(r), r) for r in givers]
        heapify(queue)
        self._rooms: list[tuple[int, int]] = []  # (room, -server), ascending: the last is the largest
        self._room: dict[int, int] = {}  # of every server that may take
        for server in range(len(self._loads)):
            if server not in self._own:
                self._room[server] = -self._over(server)
                if self._is_open(server):
                    self._rooms.append((self._room[server], -server))
        self._rooms.sort()
        while queue and self._rooms:
            giver = heappop(queue)[-1]
            wanted = self._over(giver)
            if wanted <= 0:
                continue
            now = (*self._urgency(giver), giver)
            if queue and now > queue[0]:  # others have become more urgent
                heappush(queue, now)
                continue
            if not self._move_small(giver, wanted):
                move = self._choose(giver, wanted)
                if move is None:
                    continue  # not even the largest room holds a shard, or the cap forbids it
                server, document = self._take(giver, move)
                while self._is_open(server):
                    follow = self._follow(server, document)
                    if follow is None:
                        break
                    self._take(*follow)
                self._reopen(server)
            if self._over(giver) > 0:
                heappush(queue, (*self._urgency(giver), giver))

    def _urgency(self, giver: int) -> tuple[int, int]:
        """Order among givers: first who shares the document with the largest surplus over all its homes."""
        own, over = self._own[giver], self._over(giver)
        return -max(over, self._surplus_around(own[-1][1])) if own else -over, -over

    def _surplus_around(self, document: int) -> int:
        """What the homes of a document have to give, all together."""
        return sum(max(0, self._over(r)) for r in self._homes_of[document] if r in self._own)

    def _is_open(self, server: int) -> bool:
        return self._room[server] >= self._least_room(server, self._total)

    def _reopen(self, server: int) -> None:
        """Puts a server in its place among the rooms after it has taken."""
        if self._is_open(server):
            insort(self._rooms, (self._room[server], -server))

    def _move_small(self, giver: int, wanted: int) -> bool:
        """Many whole pieces to the largest room at once, where even the largest is small beside it and the surplus."""
        own, server = self._own[giver], -self._rooms[-1][1]
        if not own or own[-1][0] * _MANY > min(wanted, self._room[server]):
            return False
        moved = False
        while own and own[-1][0] <= self._room[server] and self._over(giver) > 0:
            piece = own[-1]
            cost, document, start, end = piece
            missing = self._missing(document, server, start, end)
            if not self._may_receive(server, end - start + missing):
                break
            self._take(giver, (0, server, start, end, piece, cost, cost, missing))
            moved = True
        if moved:
            self._reopen(server)
        return moved

    def _choose(self, giver: int, wanted: int):
        """The move with the least cost for the work it takes off the giver."""
        rooms, own = self._rooms, self._own[giver]
        if not own:
            return None
        size, document, start, end = own[-1]
        room, server = rooms[-1][0], -rooms[-1][1]
        # The smallest room that holds what this document's homes have to give, rounded up to a granule.
        enough = max(wanted, self._surplus_around(document))
        enough += size if end - start <= self._granularity else self._cuts.cost(end - self._granularity, end)
        if room > enough:
            room, server = rooms[bisect_left(rooms, (enough,))]
            server = -server
        looked = own[-_LOOK_AT:]
        best = None
        for piece in looked:
            best = self._better(best, giver, server, piece, wanted)
        # Who has the document's keys. A room that is too small for anything else may do for the last remainder.
        least = min(wanted, self._least_room(server, self._total))
        for piece in looked:
            for holder in self._servers_of[piece[1]]:
                if holder != server and self._room.get(holder, 0) >= least:
                    best = self._better(best, giver, holder, piece, wanted)
        if best is None and (self._cap is not None or room < rooms[-1][0]):
            for _, server in reversed(rooms):
                for piece in looked:
                    best = self._better(best, giver, -server, piece, wanted)
                if best is not None:
                    break
        return best

    def _follow(self, server: int, document: int):
        """The best move to a server with room left: rows of the same document from any of its homes."""
        best, giver_of_best = None, -1
        for giver in self._homes_of[document]:
            if giver not in self._own:
                continue
            wanted = self._over(giver)
            if wanted <= 0:
                continue
            for piece in self._own[giver][-_LOOK_AT:]:
                if piece[1] == document:
                    found = self._better(best, giver, server, piece, wanted)
                    if found is not best:
                        best, giver_of_best = found, giver
        return None if best is None else (giver_of_best, best)

    def _better(self, best, giver: int, server: int, piece, wanted: int):
        """The cheaper of `best` and the moves of a part of `piece` to `server` that take `wanted` off the giver, or
        as much of it as there is room for."""
        size, document, start, end = piece
        room, cuts = self._room[server], self._cuts
        below, above = self._joins(document, server, start, end)
        ranges = []
        if end - start >= 2 * self._shard and size - below - above > min(room, wanted):
            kept = size - wanted  # what may stay with the giver
            lowest, highest = self._cut_limits(start, end)
            if lowest <= highest:
                x = min(cuts.head_within(start, end, room + below), cuts.tail_within(start, end, kept))
                ranges.append((start, min(max(x, lowest), highest), below))
                x = max(cuts.tail_within(start, end, room + above), cuts.head_within(start, end, kept))
                ranges.append((min(max(x, lowest), highest), end, above))
        if size - below - above <= room:
            ranges.append((start, end, below + above))
        for a, b, joined in ranges:
            if a == start and b == end:
                relief, cost = size, size - joined
            else:
                relief, cost = size - (cuts.cost(b, end) if a == start else cuts.cost(start, a)), cuts.cost(a, b) - joined
            if cost > room or relief <= 0:
                continue
            missing = self._missing(document, server, a, b)
            if not self._may_receive(server, b - a + missing):
                continue
            price = (b - a) * self._q_cost + missing * self._kv_cost + cost - relief
            score = (price << 20) // min(relief, wanted)
            if best is None or (score, server, -b, -a) < (best[0], best[1], -best[3], -best[2]):
                best = (score, server, a, b, piece, relief, cost, missing)
        return best

    def _cut_limits(self, start: int, end: int) -> tuple[int, int]:
        """The first and the last place where [start, end) may be cut; first > last: nowhere."""
        granularity = self._granularity
        return -(-(start + self._shard) // granularity) * granularity, (end - self._shard) // granularity * granularity

    def _joins(self, document: int, server: int, start: int, end: int) -> tuple[int, int]:
        """What queries that begin at `start`, and those that stop at `end`, cost less at a server that computes the
        document's queries up to there, or from there on: they become one task."""
        below = above = 0
        for x, y in self._computed.get((document, server), ()):
            if y == start:
                below = self._cuts.joined(start)
            if x == end:
                above = self._cuts.joined(end)
        return below, above

    def _take(self, giver: int, move) -> tuple[int, int]:
        """Carries out a move; returns its server and document. The server leaves the list of rooms."""
        _, server, a, b, piece, relief, cost, missing = move
        _, document, start, end = piece
        own = self._own[giver]
        del own[bisect_left(own, piece)]
        if a > start:
            insort(own, (self._cuts.cost(start, a), document, start, a))
        if b < end:
            insort(own, (self._cuts.cost(b, end), document, b, end))
        self._moved.append((document, a, b, server))
        self._hold(document, server, a, b)
        self._received[server] += b - a + missing
        self._loads[giver] -= relief
        self._loads[server] += cost
        self._total += cost - relief
        entry = (self._room[server], -server)
        place = bisect_left(self._rooms, entry)
        if place < len(self._rooms) and self._rooms[place] == entry:
            del self._rooms[place]
        self._room[server] = -self._over(server)
        return server, document

    # -- where shards are coarser than the room that is left --------------------------------------------------------

    def _level(self) -> None:
        """Single shards from servers above their limit to the least loaded, as long as that lowers the larger of the
        two relative loads. Who is above its limit thereby gives away of its own, which may be cut finer."""
        share, loads = self._share, self._loads
        stuck: set[int] = set()
        for _ in range(_LEVELLING * len(loads)):
            over = [(share.relative(r, loads[r]), -r) for r in self._own if r not in stuck and self._over(r) > 0]
            if not over:
                return
            relative, giver = max(over)
            giver = -giver
            move = self._smallest(giver, relative)
            if move is None:
                stuck.add(giver)
                continue
            server, _ = self._take(giver, move)
            if self._over(server) > 0:
                if server not in self._own:
                    self._add_givers([server])
                self._fill([server], lambda server, total: 1)

    def _smallest(self, giver: int, relative: int):
        """The cheapest move of one shard after which its server is relatively less loaded than the giver was."""
        share, cuts = self._share, self._cuts
        order = sorted(
            (share.relative(s, self._loads[s]), s)
            for s in range(len(self._loads))
            if s != giver and share.weights[s]
        )
        for _, server in order if self._cap is not None else order[:1]:
            best = None
            for piece in self._own[giver][-_LOOK_AT:]:
                size, document, start, end = piece
                lowest, highest = self._cut_limits(start, end)
                below, above = self._joins(document, server, start, end)
                if lowest <= highest and end - start >= 2 * self._shard:
                    ranges = [(start, lowest, below), (highest, end, above)]
                else:
                    ranges = [(start, end, below + above)]
                for a, b, joined in ranges:
                    cost = cuts.cost(a, b) - joined
                    kept = (cuts.cost(b, end) if b < end else 0) + (cuts.cost(start, a) if a > start else 0)
                    missing = self._missing(document, server, a, b)
                    if kept >= size or share.relative(server, self._loads[server] + cost) >= relative:
                        continue
                    if not self._may_receive(server, b - a + missing):
                        continue
                    price = (b - a) * self._q_cost + missing * self._kv_cost + cost
                    if best is None or (price, -b, -a) < (best[0], -best[3], -best[2]):
                        best = (price, server, a, b, piece, size - kept, cost, missing)
            if best is not None:
                return best
        return None

    # -- key/value rows -----------------------------------------------------------------------------------------

    def _missing(self, document: int, server: int, a: int, b: int) -> int:
        """Key/value rows that queries [a, b) need and the server neither stores nor receives already."""
        low = key_start(a, self._window)
        held = self._keys.get((document, server))
        if held is None:
            return b - low
        if self._window is None:
            # One range from 0: what lies above it is missing, unless stored.
            low = held[0][1]
            if b <= low:
                return 0
            rows = b - low
            for x, y in self._stored.get((document, server), ()):
                rows -= max(0, min(y, b) - max(x, low))
            return rows
        stored = self._stored.get((document, server), ())
        return _uncovered(low, b, sorted([*held, *stored]))

    def _may_receive(self, server: int, rows: int) -> bool:
        return self._cap is None or self._received[server] + rows <= self._cap

    def _hold(self, document: int, server: int, start: int, end: int) -> None:
        """Notes that the server computes queries [start, end) of a document and so stores or receives their keys."""
        self._computed.setdefault((document, server), []).append((start, end))
        low, high = key_start(start, self._window), end
        held = self._keys.get((document, server))
        if held is None:
            self._keys[document, server] = [(low, high)]
            self._servers_of.setdefault(document, {})[server] = None
        elif self._window is None:
            held[0] = (0, max(high, held[0][1]))
        else:
            held.append((low, high))


def _by_geometry(pieces: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Numbers documents by where they lie: by the rank of their first piece, length, and all pieces.

    Returns:
        The number of each piece's document [num_pieces], and the id of the document of each number.
    """
    document = pieces[:, PIECE_DOCUMENT]
    new = np.append(True, document[1:] != document[:-1])
    first = np.flatnonzero(new)
    count = np.diff(np.append(first, len(document)))
    length = pieces[first + count - 1, PIECE_END]
    tie = np.zeros(len(first), dtype=np.int64)
    several = np.flatnonzero(count > 1)
    shapes = [pieces[first[i] : first[i] + count[i], PIECE_START:].tolist() for i in several.tolist()]
    for place, i in enumerate(sorted(range(len(several)), key=shapes.__getitem__)):
        tie[several[i]] = place + 1
    order = np.lexsort((tie, length, pieces[first, PIECE_RANK]))
    number = np.empty(len(first), dtype=np.int64)
    number[order] = np.arange(len(first))
    return np.repeat(number, count), document[first[order]].tolist()


def _uncovered(low: int, high: int, ranges: list[tuple[int, int]]) -> int:
    """Rows of [low, high) in none of the ranges, which are sorted."""
    rows, reach = 0, low
    for x, y in ranges:
        if x >= high:
            break
        if x > reach:
            rows += x - reach
        reach = max(reach, y)
    return rows + max(0, high - reach)


def _rows_needed_at_home(pieces: np.ndarray, num_ranks: int, window: int | None) -> list[int]:
    """Key/value rows that each rank must receive for its own queries."""
    from deepspeed_distca.scheduler.traffic import rows_between  # noqa: PLC0415 - only where a cap is given

    _, kv = rows_between(pieces, task_rows(pieces, window), num_ranks)
    np.fill_diagonal(kv, 0)
    return kv.sum(axis=0).tolist()
