# SPDX-License-Identifier: Apache-2.0
"""Where the documents of one global batch are stored: which rank holds which tokens, so that little has to move.

The gradient is a sum over documents, so that any placement trains the same. Each rank has a token budget, which is
met exactly, and an attention server with a share of the work. A document that costs more than one server's share must
be computed by several, whatever its placement, and every one of them needs the keys in front of its queries. What
placement decides is whether the queries travel as well, and how many servers there are:

- The longest document is cut from its end: the emptiest server stores as many of the last tokens as its share of the
  work allows, and short documents fill up its token budget. What is left is a shorter document. So few servers need
  the keys of a long document, and those at its beginning need few of them.
- A document that fits is stored whole, where most work is missing.
- What has to be cut for tokens alone is short, and is cut where few keys lie in front.

Before that it is tried to cut no document at all (``whole_documents``). Over NVLink steps were the fastest so, however
uneven the work (docs/data.md); over slower links bytes count, and it must be even enough to stay where it is.

How much work short documents will bring, and which documents are short, is uncertain while the long ones are placed.
So several assumptions are tried, beside the plain orders, and the scheduler itself tells which moves the fewest bytes.

Every rank computes the same placement without talking to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Literal

import numpy as np

from deepspeed_distca.data.global_loader.whole_documents import divide
from deepspeed_distca.defaults import MIN_GAIN, TOLERANCE
from deepspeed_distca.given import integers
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.balance import balance
from deepspeed_distca.scheduler.cost_model import CostModel, PhaseCost, key_start
from deepspeed_distca.scheduler.shares import Shares
from deepspeed_distca.scheduler.traffic import traffic

Placement = Literal["whole", "free", "contiguous", "head_tail"]
PLACEMENTS: tuple[Placement, ...] = ("whole", "free", "contiguous", "head_tail")

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

Pieces = list[list[tuple[int, int, int]]]  # (document, start, length) of each rank


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

    Raises:
        ValueError: lengths, budgets or weights that are no integers or out of range, more tokens than budgets hold, or
            an unknown placement.
    """
    lengths, budgets = _checked(lengths, budgets, placement)
    budgets = share_tokens(sum(lengths), budgets)
    contiguous = _layout(_in_order(lengths, budgets, head_tail=False))
    if placement == "contiguous" or not lengths:
        return contiguous
    head_tail = _layout(_in_order(lengths, budgets, head_tail=True))
    if placement == "head_tail":
        return head_tail
    cost = cost or CostModel.fitted()
    weights = Shares(server_weights, len(budgets), tolerance).weights
    work = work_of(cost, window)

    def moved(layout: Layout) -> tuple[int, int]:
        """Bytes over forward and backward, of all ranks and of the one that sends or receives the most."""
        tasks = balance(layout, cost, tolerance=tolerance, server_weights=server_weights, window=window)
        rows = traffic(layout, tasks)
        size = rows.q_rows * cost.heads.step_q_bytes + rows.kv_rows * cost.heads.step_kv_bytes
        return int(size.sum()), int(max(size.sum(0).max(), size.sum(1).max()))

    best, fewest = contiguous, moved(contiguous)
    if fewest[0] == 0:
        return best
    works = {n: work(0, n) for n in set(lengths)}
    anyhow, uneven = placement == "whole", max(2 * min_gain, tolerance)
    whole = None
    if len(budgets) <= _MOST_RANKS and (anyhow or _may_be_even(lengths, budgets, weights, works, uneven)):
        ranks = divide(lengths, budgets, works.__getitem__, weights)
        if ranks is not None:
            whole = _layout([[(document, 0, lengths[document]) for document in rank] for rank in ranks])
            loads = [sum(works[lengths[document]] for document in rank) for rank in ranks]
            mean = sum(loads) / sum(weights)
            if anyhow or all(load <= (1 + uneven) * mean * w for load, w in zip(loads, weights, strict=True)):
                return whole
        elif anyhow and len(contiguous.segments) == len(lengths):
            return contiguous
    plain = [head_tail] if whole is None else [head_tail, whole]
    for layout in chain(plain, _candidates(lengths, budgets, weights, work, tolerance)):
        bytes_moved = moved(layout)
        if bytes_moved < fewest:
            best, fewest = layout, bytes_moved
    return best


def work_of(cost: CostModel, window: int | None) -> Callable[[int, int], int]:
    """The attention work of queries [low, high) of a document, forward and backward, in picoseconds."""
    terms = _both_phases(cost)
    return lambda low, high: int(terms(low, high, key_start(low, window), window)) // _UNIT


def share_tokens(tokens: int, budgets: Sequence[int]) -> list[int]:
    """Parts of budgets that add up to `tokens`, in proportion to the budgets and never above them."""
    total = sum(budgets)
    ends = np.cumsum(np.array([0, *budgets], dtype=object)) * tokens // total
    return [int(n) for n in np.diff(ends)]


def _checked(
    lengths: Sequence[int] | np.ndarray, budgets: Sequence[int] | np.ndarray, placement: str
) -> tuple[list[int], list[int]]:
    if placement not in PLACEMENTS:
        raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}")
    lengths, budgets = integers("lengths of documents", lengths, 1), integers("budgets", budgets, 0)
    if not any(budgets):
        raise ValueError(f"budgets must not all be 0, got {budgets}")
    if sum(lengths) > sum(budgets):
        raise ValueError(f"the documents have {sum(lengths)} tokens, the budgets hold {sum(budgets)}")
    return lengths, budgets


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


def _candidates(
    lengths: list[int], budgets: list[int], weights: list[int], work: Callable[[int, int], int], tolerance: float
) -> Iterator[Layout]:
    # The share of a server without tokens has to be moved to it; it is tried to leave the work for it where it falls,
    # and to spread it over those who store tokens.
    shares = {tuple(weights), tuple(w if n else 0 for w, n in zip(weights, budgets, strict=True))}
    for share in sorted(shares):
        if not any(share):
            continue
        for short in _SHORT:
            for slack in sorted({0, int(tolerance * 750)}):  # thousandths: up to 3/4 of the tolerance
                filling = _Filling(lengths, budgets, work, list(share), slack, short)
                filling.run()
                yield _layout(filling.ranks)


def _may_be_even(
    lengths: list[int], budgets: list[int], weights: list[int], works: dict[int, int], slack: float
) -> bool:
    """Whether whole documents can have even work: none is too much for a server, and servers without tokens, which
    have no document of their own, hardly count."""
    share = sum(works[n] for n in lengths) * (1 + slack) / sum(weights)
    with_tokens = sum(w for w, n in zip(weights, budgets, strict=True) if n)
    return max(works.values()) <= share * max(weights) and sum(weights) <= (1 + slack) * with_tokens


def _both_phases(cost: CostModel) -> PhaseCost:
    names = ("pair", "query_row", "key_row", "task")
    return PhaseCost(*(getattr(cost.forward, name) + getattr(cost.backward, name) for name in names))


class _Filling:
    """One free placement under an assumption of what counts as short."""

    def __init__(
        self,
        lengths: list[int],
        budgets: list[int],
        work: Callable[[int, int], int],
        weights: list[int],
        slack: int,
        short: int,
    ) -> None:
        """Args:
        work: of queries [low, high) of a document.
        weights: share of the work that each rank's server shall get.
        slack: thousandths by which long pieces may exceed it.
        short: thousandths of a mean share that a short document costs at most.
        """
        alone = [work(0, n) for n in lengths]
        total = sum(alone)
        self._work = work
        self._mean = max(1, total // sum(w > 0 for w in weights))
        self._short = self._mean * short // 1000
        light = [(n, w) for n, w in zip(lengths, alone, strict=True) if w <= self._short]
        #: What a token of short documents will bring on average.
        self._light = sum(w for _, w in light) // max(1, sum(n for n, _ in light))
        self._tokens = np.array(budgets, dtype=np.int64)
        self._missing = np.array(
            [total * w * (1000 + slack) // (sum(weights) * 1000) for w in weights], dtype=np.int64
        )
        #: Work that is missing once the rest of the tokens are those of short documents.
        self._room = self._missing - self._light * self._tokens
        self._homes: list[set[int]] = [set() for _ in lengths]
        self._waiting = [(-n, document) for document, n in enumerate(lengths)]  # the first `n` tokens of a document
        self.ranks: Pieces = [[] for _ in budgets]

    def run(self) -> None:
        """Stores every document."""
        heapify(self._waiting)
        while self._waiting:
            high, document = heappop(self._waiting)
            high = -high
            work = self._work(0, high)
            rank = self._emptiest(high)
            long = work > self._short
            if rank is not None:
                needed = work - self._light * high - self._mean * _EXCESS // 1000
                if not long or int(self._room[rank]) >= needed:
                    self._store(rank, document, 0, high)
                    continue
            emptiest = self._emptiest(1)
            if long and emptiest is not None and int(self._room[emptiest]) > self._mean * _LEAST_ROOM // 1000:
                self._store_tail(emptiest, document, high)
            elif rank is not None:
                self._store(rank, document, 0, high)
            else:
                self._store_by_tokens(document, high)

    def _emptiest(self, tokens: int) -> int | None:
        """The rank that lacks the most work among those with room for so many tokens."""
        fits = self._tokens >= tokens
        if not fits.any():
            return None
        return int(np.where(fits, self._room, _NOTHING).argmax())

    def _store(self, rank: int, document: int, low: int, high: int) -> None:
        self.ranks[rank].append((document, low, high - low))
        self._homes[document].add(rank)
        self._tokens[rank] -= high - low
        self._missing[rank] -= self._work(low, high)
        self._room[rank] = self._missing[rank] - self._light * self._tokens[rank]

    def _store_tail(self, rank: int, document: int, high: int) -> None:
        """As many of the last tokens before `high` as the rank's work and tokens allow, at least one."""
        room = int(self._room[rank])
        low, end = max(0, high - int(self._tokens[rank])), high - 1
        while low < end:
            middle = (low + end) // 2
            if self._work(middle, high) - self._light * (high - middle) <= room:
                end = middle
            else:
                low = middle + 1
        if high - low > 4 * _TILE:
            low = -(-low // _TILE) * _TILE
        self._keep_rest(rank, document, low, high)

    def _store_by_tokens(self, document: int, high: int) -> None:
        """Cuts what fits nowhere, for tokens alone."""
        at_home = [rank for rank in self._homes[document] if self._tokens[rank]]
        if at_home:  # these servers need the keys anyway
            rank = max(at_home, key=lambda r: (int(self._room[r]), -r))
            self._keep_rest(rank, document, max(0, high - int(self._tokens[rank])), high)
            return
        rooms = sorted((int(n), rank) for rank, n in enumerate(self._tokens) if n)
        for tokens, rank in rooms:
            # This rank is filled by the head; whoever gets the rest receives only so many keys.
            others = [other for room, other in rooms if other != rank and room >= high - tokens]
            if others:
                self._store(rank, document, 0, tokens)
                self._store(max(others, key=lambda r: (int(self._room[r]), -r)), document, tokens, high)
                return
        tokens, rank = rooms[-1]
        self._keep_rest(rank, document, high - tokens, high)

    def _keep_rest(self, rank: int, document: int, low: int, high: int) -> None:
        self._store(rank, document, low, high)
        if low:
            heappush(self._waiting, (-low, document))
