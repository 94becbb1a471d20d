# SPDX-License-Identifier: Apache-2.0
"""Layouts and cost models for hypothesis."""

from __future__ import annotations

import itertools
import random

from hypothesis import strategies as st

from deepspeed_distca.layout import Layout, Segment
from deepspeed_distca.scheduler import CostModel, Heads

HEADS = Heads(query=4, key_value=1, head_dim=128)

#: (cost model, phase): query-key pairs alone, and the fit in both phases, whose tasks and keys cost something too.
COSTS = {
    "area": (CostModel.area(HEADS), "forward"),
    "forward": (CostModel.fitted(HEADS), "forward"),
    "backward": (CostModel.fitted(HEADS), "backward"),
}

RANKS = st.integers(1, 9)
DOCUMENTS = st.integers(1, 24)
LENGTHS = st.one_of(
    st.sampled_from([1, 2, 7, 127, 128, 129, 331, 1000, 4096, 5003, 20000]),
    st.integers(1, 40000),
)


@st.composite
def layouts(draw, ranks=RANKS, documents=DOCUMENTS, lengths=LENGTHS) -> Layout:
    """Documents of any length, whole or in pieces, on any ranks in any order; ranks may be empty. Ids have gaps."""
    num_ranks = draw(ranks)
    rng = random.Random(draw(st.integers(0, 2**32)))
    rows: list[list[Segment]] = [[] for _ in range(num_ranks)]
    for document, length in enumerate([draw(lengths) for _ in range(draw(documents))]):
        pieces = min(length, rng.choice([1, 1, 1, 2, 3, 6]))
        borders = [0, *sorted(rng.sample(range(1, length), pieces - 1)), length] if length > 1 else [0, 1]
        for start, end in itertools.pairwise(borders):
            rows[rng.randrange(num_ranks)].append(Segment(document * 7 + 3, start, end - start))
    for row in rows:
        rng.shuffle(row)
    return Layout.from_ranks(rows)


def windows() -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.sampled_from([1, 2, 50, 127, 128, 129, 3000]))
