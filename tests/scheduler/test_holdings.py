# SPDX-License-Identifier: Apache-2.0
"""What servers have while work is moved, against sets of positions; and the numbering of documents."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.holdings import Holdings, documents_in_order, number_documents


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("seed", range(20))
def test_missing_rows_and_neighbours_against_sets(seed, window):
    rng = random.Random(seed)
    ranks, length = 4, rng.randint(50, 400)
    borders = sorted({0, length, *rng.sample(range(1, length), rng.randint(0, 5))})
    homes = [rng.randrange(ranks) for _ in borders[1:]]
    layout = Layout.from_ranks(
        [
            [(0, a, b - a) for a, b, home in zip(borders, borders[1:], homes, strict=False) if home == r]
            for r in range(ranks)
        ]
    )
    pieces = layout.pieces
    holdings = Holdings(pieces, number_documents(pieces), window)

    def keys(start: int, end: int) -> set[int]:
        return set(range(0 if window is None else max(0, start - window + 1), end))

    assert holdings.is_whole(0) == (len(pieces) == 1)
    stored = {r: {p for _, a, b, home in pieces.tolist() if home == r for p in range(a, b)} for r in range(ranks)}
    own = [(a, b, home) for _, a, b, home in pieces.tolist()]
    has = {r: set(stored[r]) for r in range(ranks)}
    computes = np.empty(length, dtype=int)
    for a, b, home in own:
        has[home] |= keys(a, b)
        computes[a:b] = home
    for _ in range(12):
        index = rng.randrange(len(own))
        start, end, giver = own[index]
        a, b = rng.choice([(start, end), (start, rng.randint(start + 1, end)), (rng.randint(start, end - 1), end)])
        for server in range(ranks):
            assert holdings.missing(0, server, a, b) == len(keys(a, b) - has[server])
            below, above = holdings.touches(0, server, a, b)
            if server != giver:
                assert below == (a > 0 and computes[a - 1] == server)
                assert above == (b < length and computes[b] == server)
        server = rng.choice([r for r in range(ranks) if r != giver])
        holdings.move(0, giver, start, end, a, b, server)
        has[server] |= keys(a, b)
        computes[a:b] = server
        own[index : index + 1] = [(x, y, giver) for x, y in ((start, a), (b, end)) if x < y]
        if not own:
            break
    assert set(holdings.homes(0)) == set(pieces[:, 3].tolist())
    assert set(holdings.servers(0)) >= set(computes.tolist())


def test_documents_are_numbered_by_where_they_lie():
    ranks = [[(5, 0, 9), (1, 0, 4), (8, 0, 9)], [(5, 9, 2), (3, 0, 1)], [(8, 9, 2)]]
    documents = number_documents(Layout.from_ranks(ranks).pieces)
    # By first rank, then length; 5 and 8 differ in where their second piece lies.
    assert documents.ids.tolist() == [1, 5, 8, 3]
    # Pieces by id: 1, 3, 5, 5, 8, 8.
    assert documents.of_piece.tolist() == [0, 3, 1, 1, 2, 2]
    assert documents.first.tolist() == [0, 2, 4, 1]
    assert documents.several == {1: 2, 2: 2}
    renamed = [[({5: 8, 8: 5}.get(d, d), s, n) for d, s, n in rank] for rank in ranks]
    assert number_documents(Layout.from_ranks(renamed).pieces).ids.tolist() == [1, 8, 5, 3]


def test_documents_that_are_numbered_keep_their_order():
    layout = Layout.from_ranks([[(7, 0, 50), (3, 0, 20)], [(7, 50, 30), (5, 0, 20)]])
    documents = documents_in_order(layout.pieces)
    assert documents.ids.tolist() == [3, 5, 7] and documents.several == {2: 2}
    assert documents.of_piece.tolist() == [0, 1, 2, 2] and documents.first.tolist() == [0, 1, 2]
    assert not len(documents_in_order(layout.pieces[:0]).ids)
