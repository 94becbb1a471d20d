# SPDX-License-Identifier: Apache-2.0
"""Documents over ranks without cutting any: token budgets met exactly, work spread as evenly as whole documents allow.

A batch of documents none of which is more work than a server's share needs no transfers if it is divided well. That is
a subset sum with a second sum, the work, which shall come near a target. Ranks are halved again and again, and of each
two halves one takes the documents that a table of reachable sums finds for it. Then the rank with the most work
divides its documents anew with others that have little, as long as that helps.

Every rank computes the same: floating-point numbers are only used in single operations, which all CPUs round alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

#: Documents that are chosen among at once; of more, the others are dealt out before. The second number is for where
#: the first gives nothing that is near the target, the third for documents of which few fill the largest table.
_POOLS = (24, 48, 12)
#: Work is told apart in so many steps up to the target; the bits of a word hold a third more.
_STEPS = 48
#: Numbers of steps around the target of which a subset is looked at: steps are rounded.
_NEAREST = 6
#: Tables with differently rounded work, and the part of a step by which a document's rounding differs from the next's.
_TRIES = 4
_GOLDEN = 0.6180339887498949
#: How often two ranks divide their documents anew.
_EXCHANGES = 8
#: Ranks that the one with the most work tries it with, those with the least first.
_PARTNERS = 4
#: Tokens of the largest table: 200 MB for 48 documents.
_MOST_TOKENS = 2**19
#: Share of the target that is near enough, in thousandths.
_NEAR = 10


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
        work: of a whole document of so many tokens.
        weights: share of the work that each rank shall get; one without tokens gets none.
    """
    if max(lengths, default=0) > max(budgets):
        return None
    batch = _Batch(lengths, budgets, work, weights)
    ranks = batch.halve(list(range(len(lengths))), list(range(len(budgets))))
    if ranks is not None and len(budgets) > 2:
        batch.even_out(ranks)
    return ranks


def subset(lengths: Sequence[int], works: Sequence[int], tokens: int, target: int) -> list[int] | None:
    """Indices of documents with exactly so many tokens, whose work comes near the target; None if there are none, or
    the tokens are too many to look for them."""
    total = sum(lengths)
    if 2 * tokens > total:  # the others are easier to find
        others = subset(lengths, works, total - tokens, sum(works) - target)
        return None if others is None else sorted(set(range(len(lengths))) - set(others))
    if tokens == 0:
        return []
    if tokens > _MOST_TOKENS:
        return None
    # What every token costs at least is the same for all subsets.
    base = min(w / n for n, w in zip(lengths, works, strict=True))
    above = np.array([w - base * n for n, w in zip(lengths, works, strict=True)])
    wanted = min(max(target - base * tokens, 0.0), float(above.sum()))
    width = max(wanted / _STEPS, 1.0)
    best: tuple[int, list[int]] | None = None
    for attempt in range(_TRIES):
        rounding = (0.5 + attempt * _GOLDEN * np.arange(len(lengths))) % 1.0
        subsets = _reached(lengths, above / width + rounding, tokens, wanted / width)
        while not subsets and above.max() > width / 2:  # none has so little work
            width *= 4
            subsets = _reached(lengths, above / width + rounding, tokens, wanted / width)
        for found in subsets:
            error = abs(sum(works[i] for i in found) - target)
            if best is None or error < best[0]:
                best = error, found
        if best is None or best[0] * 1000 <= target * _NEAR:
            break
    return best and best[1]


def _reached(lengths: Sequence[int], work: np.ndarray, tokens: int, wanted: float) -> list[list[int]]:
    """Subsets with so many tokens whose work, in whole steps, is the nearest to what is wanted; one of each number of
    steps. None has 64 or more."""
    steps = np.clip(work, 0, 64).astype(np.int64).tolist()
    # tables[i][n]: a bit for each number of steps that a subset of the first i documents with n tokens has.
    tables = [np.ones(1, dtype=np.uint64)]
    for n, step in zip(lengths, steps, strict=True):
        last = tables[-1]
        if n > tokens or step > 63:
            tables.append(last)
            continue
        table = np.zeros(min(tokens + 1, len(last) + n), dtype=np.uint64)
        table[n:] = last[: len(table) - n] << np.uint64(step)
        table[: len(last)] |= last
        tables.append(table)
    if len(tables[-1]) <= tokens:
        return []
    ends = int(tables[-1][tokens])
    bits = sorted((bit for bit in range(64) if ends >> bit & 1), key=lambda bit: abs(bit - wanted))
    return [_trace(tables, lengths, steps, tokens, bit) for bit in bits[:_NEAREST]]


def _trace(tables: list[np.ndarray], lengths: Sequence[int], steps: list[int], tokens: int, bit: int) -> list[int]:
    found = []
    for i in reversed(range(len(lengths))):
        if tokens >= len(tables[i]) or not int(tables[i][tokens]) >> bit & 1:
            found.append(i)
            tokens, bit = tokens - lengths[i], bit - steps[i]
    return found


class _Batch:
    """Documents and ranks, by number."""

    def __init__(
        self, lengths: Sequence[int], budgets: Sequence[int], work: Callable[[int], int], weights: Sequence[int]
    ) -> None:
        self._lengths, self._budgets = lengths, budgets
        self._works = [work(n) for n in lengths]
        self._weights = [w if n else 0 for w, n in zip(weights, budgets, strict=True)]

    def halve(self, documents: list[int], ranks: list[int]) -> list[list[int]] | None:
        """Documents of each of these ranks, which have exactly as many tokens together."""
        if len(ranks) == 1:
            return [documents]
        halves = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
        parts = self._split(documents, halves)
        if parts is None:
            return None
        found: list[list[int]] = []
        for half, part in zip(halves, parts, strict=True):
            divided = self.halve(part, half)
            if divided is None:
                return None
            found += divided
        return found

    def even_out(self, ranks: list[list[int]]) -> None:
        """The rank with the most work divides its documents anew with one that has little, as long as that helps and
        it is 1 % above its share."""
        share = sum(self._works) / max(1, sum(self._weights))

        def over(rank: int, documents: list[int]) -> float:
            return self._work(documents) - share * self._weights[rank]

        with_tokens = [rank for rank, budget in enumerate(self._budgets) if budget]
        for _ in range(_EXCHANGES):
            order = sorted(with_tokens, key=lambda rank: over(rank, ranks[rank]))
            high = order[-1]
            if over(high, ranks[high]) * 100 <= share * self._weights[high]:
                return
            for low in order[: min(_PARTNERS, len(order) - 1)]:
                parts = self.halve(ranks[high] + ranks[low], [high, low])
                if parts is not None and max(map(over, (high, low), parts)) < over(high, ranks[high]):
                    ranks[high], ranks[low] = parts
                    break
            else:
                return

    def _work(self, documents: list[int]) -> int:
        return sum(self._works[d] for d in documents)

    def _split(self, documents: list[int], halves: tuple[list[int], list[int]]) -> tuple[list[int], list[int]] | None:
        """The documents of two halves of the ranks."""
        shares = [sum(self._weights[rank] for rank in half) for half in halves]
        target = self._work(documents) * shares[0] // max(1, sum(shares))
        order = sorted(documents, key=lambda d: (-self._lengths[d], d))
        best: tuple[int, tuple[list[int], list[int]]] | None = None
        for size in dict.fromkeys(min(size, len(order)) for size in _POOLS):
            if best is not None and best[0] * 100 <= target:
                break
            pool = _spaced(order, size)
            lengths, works = ([of[d] for d in pool] for of in (self._lengths, self._works))
            room = [sum(self._budgets[rank] for rank in half) for half in halves]
            missing = [target, self._work(documents) - target]
            parts = self._deal([d for d in order if d not in pool], sum(lengths), room, missing)
            chosen = subset(lengths, works, room[0], max(0, missing[0])) if parts else None
            if parts is None or chosen is None:
                continue
            for i, document in enumerate(pool):
                parts[i not in chosen].append(document)
            error = abs(self._work(parts[0]) - target)
            if best is None or error < best[0]:
                best = error, parts
        return best and best[1]

    def _deal(
        self, documents: list[int], reserve: int, room: list[int], missing: list[int]
    ) -> tuple[list[int], list[int]] | None:
        """Documents, longest first, to two sides, so that both come to lack as much work by token and each half of its
        part of the tokens that are kept in reserve: then the pool can be divided as it must be. `room` and `missing`
        become what is left. None if a document fits nowhere."""
        keep = [reserve * n // max(1, 2 * sum(room)) for n in room]
        taken: tuple[list[int], list[int]] = ([], [])
        for document in documents:
            length, work = self._lengths[document], self._works[document]
            fits = []
            for side in (0, 1):
                rest, lacking = list(room), list(missing)
                rest[side] -= length
                lacking[side] -= work
                if rest[side] >= 0:
                    uneven = abs(lacking[0] * rest[1] - lacking[1] * rest[0])
                    fits.append((rest[side] < keep[side], uneven, side))
            if not fits:
                return None
            side = min(fits)[-1]
            taken[side].append(document)
            room[side] -= length
            missing[side] -= work
        return taken


def _spaced(order: list[int], size: int) -> list[int]:
    """So many documents of all lengths, but the longest: those are no choice of the last moment."""
    first = min(len(order) // 4, len(order) - size)
    return [order[first + i * (len(order) - first) // size] for i in range(size)]
