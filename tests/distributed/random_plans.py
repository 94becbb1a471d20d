# SPDX-License-Identifier: Apache-2.0
"""Random layouts and random, valid partitions of their work into CA-tasks: any of them must give the exact result."""

from __future__ import annotations

import itertools

import numpy as np

from deepspeed_distca.layout import Layout, Segment
from deepspeed_distca.scheduler.units import Units


def random_layout(rng: np.random.Generator, ranks: int, documents: int, longest: int, trees: float = 0.0) -> Layout:
    """Documents of any length cut into pieces that lie on any ranks in any order; some ranks may be empty.

    Args:
        trees: with which probability a document is a tree.
    """
    pieces: list[list[Segment]] = [[] for _ in range(ranks)]
    branches: list[list[int]] = []
    for document in range(documents):
        length = int(rng.choice([1, 2, int(rng.integers(1, longest + 1)), longest]))
        cuts = [0, length]
        if trees and rng.random() < trees:
            branches += [[document, *branch] for branch in random_tree(rng, length)]
        elif rng.random() < 0.4:
            cuts = sorted({0, length, *rng.integers(0, length + 1, size=2).tolist()})
        for a, b in itertools.pairwise(cuts):
            pieces[int(rng.integers(ranks))].append(Segment(document, a, b - a))
    for row in pieces:
        rng.shuffle(row)
    return Layout(Layout.from_ranks(pieces).segments, ranks, np.array(branches, dtype=np.int64)).validate()


def random_tree(rng: np.random.Generator, length: int) -> list[tuple[int, int, int]]:
    """Branches (start, length, parent) of any depth over so many rows."""
    cuts = sorted({0, length, *rng.integers(0, length + 1, size=int(rng.integers(0, 8))).tolist()})
    open_, found = [-1], []
    for start, end in itertools.pairwise(cuts):
        while len(open_) > 2 and rng.random() < 0.4:
            open_.pop()  # goes on from further up
        found.append((start, end - start, open_[-1]))
        open_.append(start)
    return found


def visible(layout: Layout, document: int, length: int) -> np.ndarray:
    """Which rows of a document each row attends to, bool [length, length]."""
    if not (layout.branches[:, 0] == document).any():
        return np.tri(length, dtype=bool)
    seen = np.zeros((length, length), dtype=bool)
    for _, start, rows, parent in layout.branches[layout.branches[:, 0] == document].tolist():
        end = start + rows
        seen[start:end, start:end] = np.tri(rows, dtype=bool)
        if parent >= 0:
            last = max(i for i in range(start) if seen[i, parent] and branch_of(layout, document, i) == parent)
            seen[start:end] |= seen[last]
    return seen


def texts_of(seen: np.ndarray) -> list[np.ndarray]:
    """The rows of every text of a document, from its first one to where nothing goes on, by :func:`visible`."""
    return [np.flatnonzero(seen[i]) for i in range(len(seen)) if not seen[i + 1 :, i].any()]


def branch_of(layout: Layout, document: int, row: int) -> int:
    """The branch that a row of a tree is in, by its start."""
    starts = layout.branches[layout.branches[:, 0] == document, 1]
    return int(starts[starts <= row].max())


def random_tasks(rng: np.random.Generator, layout: Layout, window: int | None, stay: float = 0.5) -> np.ndarray:
    """A partition of all query rows of all units into tasks on any servers; each piece stays at its home with
    probability stay. Pieces of one unit at one server are not joined."""
    units, ranges = Units(layout, window), []
    for unit, start, end, rank in units.pieces.tolist():
        cuts = sorted({start, end, *rng.integers(start, end + 1, size=int(rng.integers(0, 3))).tolist()})
        for a, b in itertools.pairwise(cuts):
            server = rank if rng.random() < stay else int(rng.integers(layout.num_ranks))
            ranges.append((unit, a, b, server))
    unit, start, end, server = np.array(ranges, dtype=np.int64).reshape(-1, 4).T
    return np.stack([*units.places(unit, start, end), server], axis=1)
