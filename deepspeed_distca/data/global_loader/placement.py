# SPDX-License-Identifier: Apache-2.0
"""Where the documents of one global batch are stored: which rank holds which tokens, so that little has to move.

The gradient is a sum over documents, so that any placement trains the same. Each rank has a token budget, which is
met exactly, and an attention server with a share of the work. First it is tried to cut no document at all
(``whole_documents``). Else a document that costs more than one server's share must be computed by several, whatever
its placement, and every one of them needs the keys in front of its queries. Placement decides whether the queries
travel as well, and how many servers there are:

- The longest document is cut from its end: the emptiest server stores as many of the last tokens as its share of the
  work allows, and short documents fill up its token budget. What is left is a shorter document. So few servers need
  the keys of a long document, and those at its beginning need few of them.
- A document that fits is stored whole, where most work is missing.
- What has to be cut for tokens alone is short; the rank with the most room gets its end.

How much work short documents will bring, and which are short, is uncertain while the long ones are placed. So several
assumptions are tried, beside the plain order, and the scheduler itself tells which moves the fewest bytes. Every rank
computes the same placement without talking to the others.

Where ranks lie on several nodes, documents are dealt out to nodes first, as if each were one rank, and then to the
ranks of each. So nodes have equal work, and little is left to cross between them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import product
from typing import Any, Literal, get_args

import numpy as np

from deepspeed_distca.data.checks import one_of
from deepspeed_distca.data.global_loader.whole_documents import divide
from deepspeed_distca.defaults import GRANULARITY, MIN_GAIN, TOLERANCE
from deepspeed_distca.given import integers
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.balance import balance
from deepspeed_distca.scheduler.cost_model import PHASES, CostModel, PhaseCost, key_start
from deepspeed_distca.scheduler.levels import by_levels
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.shares import Shares
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.scheduler.traffic import rows_between

Placement = Literal["whole", "free", "contiguous", "head_tail"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

#: Cost units are femtoseconds; sums over a batch in picoseconds stay far from the end of int64.
_UNIT = 1000
#: Cuts of long pieces are rounded to the tile of the flash-attention kernels.
_TILE = 128
#: Shares of a server's work below which a document counts as short, in thousandths.
_SHORT = (30, 100, 300)
#: A server that lacks less than this share of its work gets no further piece of a long document, in thousandths: each
#: one costs nearly all of the document's keys.
_LEAST_ROOM = 100
#: How far a whole document may exceed a server's share, in thousandths.
_EXCESS = 20
#: Ranks above which whole documents are not looked for: the search takes 1 to 2 s for so many, and they lie on
#: several nodes, between which bytes count.
_MOST_RANKS = 64
_NOTHING = np.iinfo(np.int64).min

Work = Callable[[int, int], int]  # of queries [low, high) of a document
Piece = tuple[int, int, int]  # (document, start, length)
Pieces = list[list[Piece]]  # of each rank


def place(
    lengths: Sequence[int] | np.ndarray,
    budgets: Sequence[int] | np.ndarray,
    *,
    placement: Placement = "whole",
    cost: CostModel | None = None,
    tolerance: float = TOLERANCE,
    server_weights: Sequence[int] | None = None,
    window: int | None = None,
    min_gain: float = MIN_GAIN,
    nodes: Topology | None = None,
) -> Layout:
    """The layout of documents 0..n-1 over ranks.

    Args:
        lengths: tokens of each document, at least 1.
        budgets: tokens of each rank; 0 makes it a server without tokens of its own. They are met exactly where the
            documents have as many tokens. Where they have fewer, every rank gets the same part of its budget.
        placement: "whole": no document is cut, and work is as even as that allows; where no whole documents fill the
            ranks, or these are more than 64, as "free".
            "free": no document is cut where work is even enough so that rows stay; else the fewest bytes move, which
            is found as this module says.
            "contiguous": documents one after another, those that pass a rank's end going on on the next.
            "head_tail": in that order too, but what a rank holds of a document that goes on is half from its head
            and half from its tail, so that the work of a document over many ranks is even.
        cost: of attention tasks, for "whole" and "free"; None is the H200 fit.
        tolerance, server_weights, window: what the batch will be balanced with, for those two; see ``balance``.
        min_gain: the block's, for "free". Rows stay where balance would save less, so that attention may be uneven by
            twice that share: 8 % of attention were 0.7 to 4 % of measured steps on H200s, where moving rows costs 1 to
            2.5 %. 0: bytes alone decide.
        nodes: of the ranks, for "whole" and "free": nodes get equal work first, and whole documents are taken only
            where nodes are then within the tolerance, as bytes count between them. None: one node.

    Raises:
        ValueError: lengths, budgets or weights that are no integers or out of range, more tokens than budgets hold, an
            unknown placement, or nodes of another number of ranks.
    """
    one_of("placement", placement, Placement)
    lengths, budgets = integers("lengths of documents", lengths, 1), integers("budgets", budgets, 0)
    if not any(budgets):
        raise ValueError(f"budgets must not all be 0, got {budgets}")
    if sum(lengths) > sum(budgets):
        raise ValueError(f"the documents have {sum(lengths)} tokens, the budgets hold {sum(budgets)}")
    if nodes is not None and len(nodes.nodes) != len(budgets):
        raise ValueError(f"nodes must be one for each of the {len(budgets)} ranks, got {len(nodes.nodes)}")
    if nodes is not None and nodes.size == 1:
        nodes = None
    budgets = share_tokens(sum(lengths), budgets)
    in_order = _layout(_in_order(lengths, budgets, head_tail=placement == "head_tail"))
    if placement in ("contiguous", "head_tail") or not lengths:
        return in_order
    cost = cost or CostModel.fitted()
    weights = Shares(server_weights, len(budgets), tolerance).weights

    def moved(layout: Layout) -> tuple[int, int]:
        """Bytes over forward and backward, of all ranks and of the one that sends or receives the most. Those between
        nodes count as many times as NICs are slower, and a key row once a node."""
        options: dict[str, Any] = dict(tolerance=tolerance, server_weights=server_weights, window=window)
        if nodes is None:
            q, kv = rows_between(layout, balance(layout, cost, **options).rows)
        else:
            # Most of the work is backward's. Levels seldom fail at twice the tolerance, and then take half the time.
            options.update(phase="backward", tolerance=2 * tolerance)
            tasks = by_levels(layout, cost, nodes, granularity=GRANULARITY, **options)
            rows = (tasks or balance(layout, cost, **options)).rows
            q, kv = rows_between(layout, rows)[0], RouteCompiler(layout, rows, nodes).key_rows()
        forward, backward = map(cost.heads.moved, PHASES)
        size = q * (forward.query + backward.query) + kv * (forward.key + backward.key)
        if nodes is not None:
            size[nodes.across] *= max(1, cost.bytes_per_second // cost.nic_bytes_per_second)
        return int(size.sum()), int(max(size.sum(0).max(), size.sum(1).max()))

    best: Layout = in_order
    # In order, nodes would have whatever work comes.
    fewest: tuple[float, float] = moved(in_order) if nodes is None else (math.inf, math.inf)
    if fewest[0] == 0:
        return best
    work = work_of(cost, window)
    works = {n: work(0, n) for n in set(lengths)}
    total = sum(works[n] for n in lengths)
    # The share of a server without tokens has to be moved to it; the work for it is left to those who store tokens.
    storing = [w if n else 0 for w, n in zip(weights, budgets, strict=True)]
    anyhow, uneven = placement == "whole", max(2 * min_gain, tolerance)
    candidates = []
    # Whole documents cannot be even where one is too much for a server, or servers without tokens count.
    share = total * (1 + uneven) / sum(weights)
    may_be_even = max(works.values()) <= share * max(weights) and sum(weights) <= (1 + uneven) * sum(storing)
    if len(budgets) <= _MOST_RANKS and (anyhow or may_be_even):
        ranks = divide(lengths, budgets, works.__getitem__, weights)
        if ranks is None and anyhow and len(in_order.segments) == len(lengths):
            ranks = [[segment.document for segment in in_order.rank(rank)] for rank in range(len(budgets))]
        if ranks is not None:
            loads = [sum(works[lengths[document]] for document in rank) for rank in ranks]
            even = anyhow or all(load <= share * w for load, w in zip(loads, weights, strict=True))
            if nodes is not None and not _nodes_are_even(nodes, loads, weights, tolerance):
                order = _dealt(nodes, loads, list(zip(budgets, weights, strict=True)))
                ranks, loads = [ranks[i] for i in order], [loads[i] for i in order]
                even = even and _nodes_are_even(nodes, loads, weights, tolerance)
            whole = _layout([[(document, 0, lengths[document]) for document in rank] for rank in ranks])
            if even:
                return whole
            candidates.append(whole)
    everything = [(document, 0, n) for document, n in enumerate(lengths)]
    for short, slack in product(_SHORT, sorted({0, int(tolerance * 750)})):  # thousandths: up to 3/4 of the tolerance
        candidates.append(
            _layout(_by_levels(everything, budgets, storing if any(storing) else weights, work, slack, short, nodes))
        )
    for layout in candidates:
        bytes_moved = moved(layout)
        if bytes_moved < fewest:
            best, fewest = layout, bytes_moved
    return best


def work_of(cost: CostModel | None, window: int | None) -> Work:
    """The attention work of queries [low, high) of a document, forward and backward, in picoseconds; with the H200 fit
    where there is no cost model."""
    cost = cost or CostModel.fitted()
    names = ("pair", "query_row", "key_row", "task")
    terms = PhaseCost(*(getattr(cost.forward, name) + getattr(cost.backward, name) for name in names))
    return lambda low, high: int(terms(low, high, key_start(low, window), window)) // _UNIT


def share_tokens(tokens: int, budgets: Sequence[int]) -> list[int]:
    """Parts of budgets that add up to `tokens`, in proportion to the budgets and never above them."""
    total = sum(budgets)
    ends = np.cumsum(np.array([0, *budgets], dtype=object)) * tokens // total
    return [int(n) for n in np.diff(ends)]


def _in_order(lengths: Sequence[int], budgets: Sequence[int], head_tail: bool) -> Pieces:
    ranks: Pieces = [[] for _ in budgets]
    rank, room = -1, 0
    for document, length in enumerate(lengths):
        low, high = 0, length  # what is not stored yet
        while low < high:
            while not room:
                rank += 1
                room = budgets[rank]
            part = min(high - low, room)
            room -= part
            # The last rank of a document gets what is left in the middle, in one piece.
            head = part - part // 2 if head_tail and part < high - low else part
            tail = part - head
            ranks[rank].append((document, low, head))
            if tail:
                ranks[rank].append((document, high - tail, tail))
            low, high = low + head, high - tail
    return ranks


def _layout(ranks: Pieces) -> Layout:
    rows = [(rank, *piece) for rank, pieces in enumerate(ranks) for piece in sorted(pieces)]
    return Layout(np.array(rows, dtype=np.int64), len(ranks))


def _nodes_are_even(nodes: Topology, loads: list[int], weights: Sequence[int], tolerance: float) -> bool:
    share = sum(loads) * (1 + tolerance) / sum(weights)
    return all(sum(loads[r] for r in its) <= share * sum(weights[r] for r in its) for its in nodes.servers)


def _dealt(nodes: Topology, loads: list[int], kinds: list[tuple[int, int]]) -> list[int]:
    """Whose documents each rank gets, so that nodes come to have work by weight; ranks change with those of the same
    budget and weight only.

    Args:
        kinds: budget and weight of each rank.
    """
    power = [sum(kinds[rank][1] for rank in its) for its in nodes.servers]
    found, has = [-1] * len(loads), [0] * nodes.size
    for source in sorted(range(len(loads)), key=lambda rank: (-loads[rank], rank)):
        free = (rank for rank, kind in enumerate(kinds) if found[rank] < 0 and kind == kinds[source])
        rank = min(free, key=lambda rank: (has[nodes.nodes[rank]] / (power[nodes.nodes[rank]] or 1), rank))
        found[rank] = source
        has[nodes.nodes[rank]] += loads[source]
    return found


def _by_levels(
    pieces: list[Piece],
    budgets: Sequence[int],
    weights: Sequence[int],
    work: Work,
    slack: int,
    short: int,
    nodes: Topology | None,
) -> Pieces:
    """``_by_work`` among nodes and then among the ranks of each, or among all ranks of the only one."""
    if nodes is None:
        return _by_work(pieces, budgets, weights, work, slack, short)
    ranks: Pieces = [[] for _ in budgets]
    room, power = ([sum(of[rank] for rank in its) for its in nodes.servers] for of in (budgets, weights))
    for its, part in zip(nodes.servers, _by_work(pieces, room, power, work, slack, short), strict=True):
        own = [weights[rank] for rank in its]
        if not any(own):  # others will compute it all
            own = [1] * len(its)
        found = _by_work(part, [budgets[rank] for rank in its], own, work, slack, short)
        for rank, of_rank in zip(its, found, strict=True):
            ranks[rank] = of_rank
    return ranks


def _by_work(
    pieces: list[Piece], budgets: Sequence[int], weights: Sequence[int], work: Work, slack: int, short: int
) -> Pieces:
    """One free placement under an assumption of what counts as short.

    Args:
        pieces: of documents, which fill the budgets.
        weights: share of the work that each rank's server shall get.
        slack: thousandths by which long pieces may exceed it.
        short: thousandths of a mean share that a short document costs at most.
    """
    alone = [work(start, start + n) for _, start, n in pieces]
    mean = max(1, sum(alone) // sum(w > 0 for w in weights))
    light = [(n, w) for (_, _, n), w in zip(pieces, alone, strict=True) if w * 1000 <= mean * short]
    by_token = sum(w for _, w in light) // max(1, sum(n for n, _ in light))  # what short documents will bring
    tokens = np.array(budgets, dtype=np.int64)
    shares = [sum(alone) * w * (1000 + slack) // (sum(weights) * 1000) for w in weights]
    # Work that is missing once the rest of the tokens are those of short documents.
    room = np.array(shares, dtype=np.int64) - by_token * tokens
    ranks: Pieces = [[] for _ in budgets]

    def emptiest(least: int) -> int:
        """The rank that lacks the most work among those with room for so many tokens."""
        return int(np.where(tokens >= least, room, _NOTHING).argmax())

    def added(low: int, high: int) -> int:
        """What tokens [low, high) of a document bring more than short documents would."""
        return work(low, high) - by_token * (high - low)

    waiting = [(-n, document, start) for document, start, n in pieces]  # the first `n` tokens from there on
    heapify(waiting)
    while waiting:
        length, document, start = heappop(waiting)
        low, high = start, start - length
        fits, long = tokens.max() >= high - start, work(start, high) * 1000 > mean * short
        rank = emptiest(high - start if fits else 1)
        if not fits or (long and room[rank] < added(start, high) - mean * _EXCESS // 1000):
            other = emptiest(1)
            if long and room[other] * 1000 > mean * _LEAST_ROOM:
                # As many of the last tokens as its work and tokens allow, at least one.
                rank, low = other, max(start, high - int(tokens[other]))
                fitting = range(low, high - 1)
                low += bisect_left(fitting, True, key=lambda cut: added(cut, high) <= room[rank])
                if high - low > 4 * _TILE:
                    low = -(-low // _TILE) * _TILE
            elif not fits:  # it is cut for tokens alone
                rank = int(tokens.argmax())
                low = high - int(tokens[rank])
        ranks[rank].append((document, low, high - low))
        tokens[rank] -= high - low
        room[rank] -= added(low, high)
        if low > start:
            heappush(waiting, (start - low, document, start))
    return ranks
