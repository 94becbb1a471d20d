# SPDX-License-Identifier: Apache-2.0
"""Which documents of an optimizer step share a micro-batch: such that ranks have even work in each of them.

The gradient of a step is a sum over its documents, so that their micro-batches are as free as their ranks. A document
that is more work than a rank's share keeps the other ranks waiting, or is spread over them; unless each of them has
one like it at the same time. So such documents share micro-batches, as many as there are ranks, the longest first.
The other documents are dealt out to fill every micro-batch to the token, with as much work by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepspeed_distca.data.global_loader.whole_documents import divide

#: How many sets of micro-batches of long documents are tried. Where short documents are missing each try takes a tenth
#: of a second and more.
_TRIES = 3

#: By how much less work must be above the shares before documents change places, in thousandths.
_LEAST_GAIN = 10


def regroup(
    packs: Sequence[Sequence[int]], ranks: int, tokens: int, work: Callable[[int], int]
) -> list[list[int]] | None:
    """Documents for each micro-batch of a step, with as many tokens as before; None where nothing better was found.

    Args:
        packs: lengths of the documents of each micro-batch.
        ranks: that store tokens.
        tokens: of a rank for a micro-batch, at most.
        work: of a document of so many tokens.

    Returns:
        indices of documents, counted through all packs.
    """
    lengths = [length for pack in packs for length in pack]
    if len(packs) < 2:
        return None
    works = {length: work(length) for length in set(lengths)}
    before = sum(_excess(pack, ranks, tokens, works) for pack in packs)
    alike = _alike(lengths, [sum(pack) for pack in packs], ranks, tokens, works) if before else []
    # Short documents may not fill what the last of these leave; then fewer of them are tried.
    for count in range(len(alike), max(0, len(alike) - _TRIES), -1):
        groups = _filled(alike[:count], lengths, packs, works)
        if groups is not None:
            after = sum(_excess([lengths[i] for i in group], ranks, tokens, works) for group in groups)
            return groups if after * 1000 <= before * (1000 - _LEAST_GAIN) else None
    return None


def _excess(pack: Sequence[int], ranks: int, tokens: int, works: dict[int, int]) -> int:
    """Work of a micro-batch's documents above the shares of the ranks that they take."""
    share = sum(works[length] for length in pack) // ranks
    return sum(max(0, works[length] - share * _ranks_of(length, tokens)) for length in pack)


def _ranks_of(length: int, tokens: int) -> int:
    """How many ranks a document of that length takes."""
    return -(-length // tokens)


def _alike(
    lengths: Sequence[int], sizes: Sequence[int], ranks: int, tokens: int, works: dict[int, int]
) -> list[tuple[int, list[int]]]:
    """Documents that are more than a share of what is left, the longest first, by micro-batch; the largest micro-batch
    first. The last one is filled up with the longest of the other documents, one for each rank that has none."""
    found: list[tuple[int, list[int]]] = []
    waiting = sorted(range(len(sizes)), key=lambda m: (sizes[m], -m))
    left, places = sum(works[length] for length in lengths), ranks * len(sizes)
    free = room = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[i]
        needed = _ranks_of(length, tokens)
        alone = works[length] * places > left * needed
        if needed > free or length > room:
            if not alone or not waiting:
                break
            found.append((waiting.pop(), []))
            free, room = ranks, sizes[found[-1][0]]
            if needed > free or length > room:
                break
        found[-1][1].append(i)
        free, room = free - needed, room - length
        left, places = left - works[length], places - needed
    return [(micro_batch, group) for micro_batch, group in found if group]


def _filled(
    alike: list[tuple[int, list[int]]], lengths: Sequence[int], packs: Sequence[Sequence[int]], works: dict[int, int]
) -> list[list[int]] | None:
    """The micro-batches with all other documents, each with as many tokens as its pack; None if they do not fit so."""
    groups: list[list[int]] = [[] for _ in packs]
    for micro_batch, group in alike:
        groups[micro_batch] = list(group)
    taken = {i for group in groups for i in group}
    rest = [i for i in range(len(lengths)) if i not in taken]
    if not rest:
        return groups
    room = [sum(pack) - sum(lengths[i] for i in group) for pack, group in zip(packs, groups, strict=True)]
    parts = divide([lengths[i] for i in rest], room, works.__getitem__, room)
    if parts is None:
        return None
    return [group + sorted(rest[i] for i in part) for group, part in zip(groups, parts, strict=True)]
