# SPDX-License-Identifier: Apache-2.0
"""A step's sequences into micro-batches with equal tokens on every rank, below a cap.

Where attention is balanced by the plugin, a rank's time follows its tokens. So tokens come first here, and attention,
which follows the squares of lengths, decides only between places with room. A pure function of integers: every rank
finds the same without talking to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np

from deepspeed_distca.data.packing import pack_documents
from deepspeed_distca.given import integer, integers

#: Ranks whose tokens differ by this share at most may change places, so that those of a micro-batch have like
#: attention.
_LEEWAY = 0.01
#: No sequence is longer: sums of squares stay far below the end of int64.
_LONGEST = 2**24

#: By micro-batch and rank the indices of sequences.
Step = list[list[list[int]]]


def pack_step(lengths: Sequence[int] | np.ndarray, tokens_per_rank: int, ranks: int) -> Step:
    """The sequences of one optimizer step as micro-batches with equal tokens on every rank, none above a cap.

    No sequence is cut, lost or there twice. There are as few micro-batches as best fit, the longest first, gets by
    with, those with the most tokens first. Ranks of a micro-batch have as many tokens as each other, as far as whole
    sequences allow. Micro-batches may differ: where long sequences are too few for all of them, those with long ones
    get more on every rank, the others less.

    Args:
        lengths: tokens of each sequence, prompt and answer together, at least 1; the same on every rank.
        tokens_per_rank: the most tokens that a rank may have in a micro-batch, at most 2**24.
        ranks: that run micro-batches together: all data-parallel ones.

    Returns:
        by micro-batch and rank the indices of its sequences, in rising order. A list is empty only where there are
        fewer sequences than lists: that rank then has no tokens of its own, and computes attention of the others.

    Raises:
        ValueError: no sequences, one longer than the cap or without a token, or numbers that are none.
    """
    cap, ranks = integer("tokens_per_rank", tokens_per_rank, 1, _LONGEST), integer("ranks", ranks, 1)
    given = _checked(np.array(integers("lengths", lengths), dtype=np.int64), cap)
    order = np.argsort(-given, kind="stable")
    longest_first = given[order]
    fitted = [[piece.document for piece in row] for row in pack_documents(longest_first, cap).rows]
    count = -(-len(fitted) // ranks)
    bins = _even(longest_first, _levels(longest_first, ranks, count), cap)
    if bins is None:  # too tight: what did fit, however uneven
        bins = _without_empty([*fitted, *([] for _ in range(count * ranks - len(fitted)))], longest_first)
    indices = order.tolist()
    bins = _grouped([sorted(indices[i] for i in bin) for bin in bins], given)
    return [bins[i : i + ranks] for i in range(0, len(bins), ranks)]


def _checked(lengths: np.ndarray, cap: int) -> np.ndarray:
    if not len(lengths):
        raise ValueError("lengths is empty: a step needs at least one sequence; leave a step without any out")
    for wrong, allowed, advice in (
        (lengths < 1, "a sequence has at least 1", "leave it out"),
        (lengths > cap, f"a rank at most tokens_per_rank={cap}", "raise the cap, or cut the sequence short"),
    ):
        if wrong.any():
            first = int(wrong.argmax())
            raise ValueError(
                f"lengths[{first}] has {lengths[first]} tokens, but {allowed}; {advice} ({int(wrong.sum())} of "
                f"{len(lengths)} sequences are like it)"
            )
    return lengths


def _levels(lengths: np.ndarray, ranks: int, count: int) -> np.ndarray:
    """Tokens that each bin is to have, a micro-batch's ranks one after another, falling: as many as the longest
    sequence that has to be in the micro-batch, and otherwise the same everywhere; together enough for all."""
    levels = np.zeros(count * ranks, dtype=np.int64)
    longest = lengths[::ranks][:count]  # of each micro-batch, where the longest go together
    levels[: len(longest) * ranks] = np.repeat(longest, ranks)
    left = int(lengths.sum())
    for first in range(0, len(levels), ranks):
        each, more = divmod(left, len(levels) - first)
        if each + (more > 0) >= levels[first]:
            levels[first:] = each
            levels[first : first + more] += 1
            break
        left -= int(levels[first]) * ranks
    return levels


def _even(lengths: np.ndarray, levels: np.ndarray, cap: int) -> list[list[int]] | None:
    """Sequences by bin, a bin for each level: each sequence, the longest first, goes where the least attention is
    among the bins that are not full by it, or else where most is missing, below the cap. The last ones go to bins that
    have none. None where a sequence fits nowhere."""
    bins: list[list[int]] = [[] for _ in levels]
    missing, room, squares = levels.copy(), np.full(len(levels), cap), np.zeros(len(levels), dtype=np.int64)
    nowhere, empty = np.iinfo(np.int64).max, len(bins)
    for i, length in enumerate(lengths.tolist()):
        left = len(lengths) - i
        if left <= empty:
            for j, bin in enumerate([bin for bin in bins if not bin][:left], i):
                bin.append(j)
            break
        at = int(np.where(missing >= length, squares, nowhere).argmin())
        if missing[at] < length:
            at = int(np.where(room >= length, missing, -nowhere).argmax())
            if room[at] < length:
                return None
        empty -= not bins[at]
        bins[at].append(i)
        missing[at] -= length
        room[at] -= length
        squares[at] += length * length
    return bins


def _without_empty(bins: list[list[int]], lengths: np.ndarray) -> list[list[int]]:
    """Each bin without a sequence gets the longest of the fullest bin with several, as long as there is one."""
    heap = [(-int(lengths[bin].sum()), i) for i, bin in enumerate(bins) if len(bin) > 1]
    heapify(heap)
    for bin in bins:
        if not bin and heap:
            tokens, fullest = heap[0]
            bin.append(bins[fullest].pop(0))
            if len(bins[fullest]) > 1:
                heapreplace(heap, (tokens + int(lengths[bin[0]]), fullest))
            else:
                heappop(heap)
    return bins


def _grouped(bins: list[list[int]], lengths: np.ndarray) -> list[list[int]]:
    """Bins in the order of micro-batches: by tokens, and where these are about equal by attention, so that as little
    as can be of it has to move."""
    tokens = np.array([int(lengths[bin].sum()) for bin in bins])
    squares = [int((lengths[bin] ** 2).sum()) for bin in bins]
    order = np.argsort(-tokens, kind="stable").tolist()
    found: list[list[int]] = []
    while len(found) < len(order):
        rest = order[len(found) :]
        least = (1 - _LEEWAY) * tokens[rest[0]]
        alike = [bin for bin in rest if tokens[bin] >= least]
        found += [bins[bin] for bin in sorted(alike, key=lambda bin: (-squares[bin], bin))]
    return found
