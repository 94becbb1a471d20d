# SPDX-License-Identifier: Apache-2.0
"""Documents over ranks without cutting any: token budgets met exactly, work spread as evenly as whole documents allow.

A batch of documents none of which is more work than a server's share needs no transfers if it is divided well. That is
a subset sum with a second sum, the work, which shall come near a target. Ranks are halved again and again, and of each
two halves one takes the documents that a table of reachable sums finds for it. Then the rank with the most work
divides its documents anew with others that have little, as long as that helps.

Every rank computes the same: integers, and single divisions of floating-point numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

#: Documents that are chosen among at once; of more, the others are dealt out by work before.
_POOL = 48
#: Work is told apart in so many steps up to the target; the bits of a word hold a third more.
_STEPS = 48
#: Numbers of steps around the target of which a subset is looked at: steps are rounded.
_NEAREST = 6
#: Tables with differently rounded work.
_TRIES = 4
#: How often two ranks divide their documents anew.
_EXCHANGES = 8
#: Ranks that the one with the most work tries it with, those with the least first.
_PARTNERS = 4
#: Tokens of the largest table: 200 MB for 48 documents.
_MOST_TOKENS = 2**19
#: Share of the target that is near enough, in thousandths.
_NEAR = 5


def divide(
    lengths: Sequence[int],
    budgets: Sequence[int],
    work: Callable[[int], int],
    weights: Sequence[int],
) -> list[list[int]] | None:
    """Documents of each rank, none cut and every budget met exactly; None where none were found.

    Args:
        lengths: tokens of the documents, which add up to the budgets.
        budgets: tokens of each rank.
        work: of a whole document of so many tokens; at least in proportion to them.
        weights: share of the work that each rank shall get.
    """
    works = [work(n) for n in lengths]
    ranks = _halve(list(range(len(lengths))), list(range(len(budgets))), lengths, budgets, works, weights)
    if ranks is not None and len(budgets) > 2:
        _even_out(ranks, lengths, budgets, works, weights)
    return ranks


def subset(lengths: Sequence[int], works: Sequence[int], tokens: int, target: int) -> list[int] | None:
    """Indices of documents with exactly so many tokens, whose work comes near the target; None if there are none, or
    the tokens are too many to look for them."""
    if tokens == 0:
        return []
    if tokens == sum(lengths):
        return list(range(len(lengths)))
    if tokens > _MOST_TOKENS:
        return None
    # What every token costs at least is the same for all subsets.
    base = min(w / n for n, w in zip(lengths, works, strict=True))
    above = np.array([w - base * n for n, w in zip(lengths, works, strict=True)])
    total = sum(works) - base * sum(lengths)
    width = max((target - base * tokens) / _STEPS, 1.0)
    rng = np.random.default_rng(0)
    best: tuple[int, list[int]] | None = None
    for attempt in range(_TRIES):
        rounding = rng.random(len(lengths)) if attempt else 0.5
        subsets = _reached(lengths, above / width + rounding, tokens)
        while not subsets and total > _STEPS / 2 * width:  # none has so little work
            width *= 4
            subsets = _reached(lengths, above / width + rounding, tokens)
        for found in subsets:
            error = abs(sum(works[i] for i in found) - target)
            if best is None or error < best[0]:
                best = error, found
        if best is None or best[0] * 1000 <= target * _NEAR:
            break
    return best and best[1]


def _reached(lengths: Sequence[int], work: np.ndarray, tokens: int) -> list[list[int]]:
    """Subsets with so many tokens whose work, in whole steps, is the nearest to _STEPS; one of each number of steps.
    None has 64 or more."""
    steps = np.clip(work, 0, 64).astype(np.int64).tolist()
    # tables[i][n]: a bit for each number of steps that a subset of the first i documents with n tokens has.
    tables = [np.zeros(tokens + 1, dtype=np.uint64)]
    tables[0][0] = 1
    for n, step in zip(lengths, steps, strict=True):
        table = tables[-1]
        if n <= tokens and step < 64:
            table = table.copy()
            table[n:] |= tables[-1][: tokens + 1 - n] << np.uint64(step)
        tables.append(table)
    ends = int(tables[-1][tokens])
    bits = sorted((bit for bit in range(64) if ends >> bit & 1), key=lambda bit: abs(bit - _STEPS))
    return [_trace(tables, lengths, steps, tokens, bit) for bit in bits[:_NEAREST]]


def _trace(tables: list[np.ndarray], lengths: Sequence[int], steps: list[int], tokens: int, bit: int) -> list[int]:
    found = []
    for i in reversed(range(len(lengths))):
        if not int(tables[i][tokens]) >> bit & 1:
            found.append(i)
            tokens, bit = tokens - lengths[i], bit - steps[i]
    return found


def _halve(
    documents: list[int],
    ranks: list[int],
    lengths: Sequence[int],
    budgets: Sequence[int],
    works: Sequence[int],
    weights: Sequence[int],
) -> list[list[int]] | None:
    """Documents of each of these consecutive ranks, which have exactly as many tokens."""
    if len(ranks) == 1:
        return [documents]
    halves = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
    shares = [sum(weights[r] for r in half) for half in halves]
    total, room = sum(works[d] for d in documents), [sum(budgets[r] for r in half) for half in halves]
    missing = [total * share // max(1, sum(shares)) for share in shares]
    pool, taken = _deal(documents, room, missing, lengths, works)
    if pool is None:
        return None
    parts = _split(pool, lengths, works, room[0], missing[0])
    if parts is None:
        return None
    found: list[list[int]] = []
    for half, mine, more in zip(halves, taken, parts, strict=True):
        divided = _halve(mine + more, half, lengths, budgets, works, weights)
        if divided is None:
            return None
        found += divided
    return found


def _deal(
    documents: list[int], room: list[int], missing: list[int], lengths: Sequence[int], works: Sequence[int]
) -> tuple[list[int] | None, tuple[list[int], list[int]]]:
    """All but a pool of documents, longest first, so that both sides come to lack as much work by token: then the pool
    can be divided as it must be. `room` and `missing` become what is left. The pool is None if a document fits
    nowhere."""
    order = sorted(documents, key=lambda d: (-lengths[d], d))
    count = len(order)
    first = min(count // 4, max(0, count - _POOL))  # the longest are no choice of the last moment
    size = min(_POOL, count - first)
    pool = {order[first + i * (count - first) // size] for i in range(size)}
    taken: tuple[list[int], list[int]] = ([], [])
    for document in order:
        if document in pool:
            continue
        fits = []
        for side in (0, 1):
            rest, lacking = list(room), list(missing)
            rest[side] -= lengths[document]
            lacking[side] -= works[document]
            if rest[side] >= 0:
                fits.append((abs(lacking[0] * rest[1] - lacking[1] * rest[0]), side))
        if not fits:
            return None, taken
        side = min(fits)[1]
        taken[side].append(document)
        room[side] -= lengths[document]
        missing[side] -= works[document]
    return [d for d in order if d in pool], taken


def _split(
    documents: list[int], lengths: Sequence[int], works: Sequence[int], tokens: int, target: int
) -> tuple[list[int], list[int]] | None:
    chosen = subset([lengths[d] for d in documents], [works[d] for d in documents], tokens, max(0, target))
    if chosen is None:
        return None
    inside = {documents[i] for i in chosen}
    return [d for d in documents if d in inside], [d for d in documents if d not in inside]


def _even_out(
    ranks: list[list[int]],
    lengths: Sequence[int],
    budgets: Sequence[int],
    works: Sequence[int],
    weights: Sequence[int],
) -> None:
    """The rank with the most work divides its documents anew with one that has little, as long as that helps and it is
    1 % above its share."""
    share = sum(works) / max(1, sum(weights))

    def over(rank: int, documents: list[int]) -> float:
        return sum(works[d] for d in documents) - share * weights[rank]

    for _ in range(_EXCHANGES):
        order = sorted(range(len(ranks)), key=lambda r: over(r, ranks[r]))
        high = order[-1]
        if over(high, ranks[high]) * 100 <= share * weights[high]:
            return
        for low in order[: min(_PARTNERS, len(order) - 1)]:
            parts = _halve(ranks[high] + ranks[low], [high, low], lengths, budgets, works, weights)
            if parts is not None and max(map(over, (high, low), parts)) < over(high, ranks[high]):
                ranks[high], ranks[low] = parts
                break
        else:
            return
