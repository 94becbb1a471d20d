# SPDX-License-Identifier: Apache-2.0
"""Random layouts and random, valid partitions of their work into CA-tasks: any of them must give the exact result."""

from __future__ import annotations

import itertools

import numpy as np

from deepspeed_distca.layout import Layout, Segment


def random_layout(rng: np.random.Generator, ranks: int, documents: int, longest: int) -> Layout:
    """Documents of any length cut into pieces that lie on any ranks in any order; some ranks may be empty."""
    pieces: list[list[Segment]] = [[] for _ in range(ranks)]
    for document in range(documents):
        length = int(rng.choice([1, 2, int(rng.integers(1, longest + 1)), longest]))
        cuts = [0, length]
        if rng.random() < 0.4:
            cuts = sorted({0, length, *rng.integers(0, length + 1, size=2).tolist()})
        for a, b in itertools.pairwise(cuts):
            pieces[int(rng.integers(ranks))].append(Segment(document, a, b - a))
    for row in pieces:
        rng.shuffle(row)
    return Layout.from_ranks(pieces).validate()


def random_tasks(rng: np.random.Generator, layout: Layout, window: int | None, stay: float = 0.5) -> np.ndarray:
    """A partition of all query rows into tasks on any servers; each piece stays at its home with probability stay."""
    rows = []
    for rank in range(layout.num_ranks):
        for document, start, length in layout.rank(rank):
            end = start + length
            cuts = sorted({start, end, *rng.integers(start, end + 1, size=int(rng.integers(0, 3))).tolist()})
            for a, b in itertools.pairwise(cuts):
                server = rank if rng.random() < stay else int(rng.integers(layout.num_ranks))
                rows.append((document, a, b, 0 if window is None else max(0, a - window + 1), server))
    return np.array(rows, dtype=np.int64).reshape(-1, 5)
