# SPDX-License-Identifier: Apache-2.0
"""What must hold of any tasks, written plainly and without the scheduler's own code."""

from __future__ import annotations

import itertools

import numpy as np

from deepspeed_distca.layout import Layout


def documents_of(layout: Layout) -> dict[int, np.ndarray]:
    """The rank that stores each position of each document."""
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for rank, document, start, length in layout.segments.tolist():
        parts.setdefault(document, []).append((start, rank, length))
    return {
        document: np.concatenate([np.full(length, rank) for _, rank, length in sorted(parts[document])])
        for document in sorted(parts)
    }


def check_tasks(layout: Layout, rows: np.ndarray, window: int | None) -> None:
    """Every query once, in order, against exactly the keys it sees; never more queries than keys."""
    assert rows.dtype == np.int64 and rows.shape[1] == 6
    homes = documents_of(layout)
    counts = {document: np.zeros(len(home), dtype=int) for document, home in homes.items()}
    for document, q_start, q_end, k_start, k_end, server in rows.tolist():
        assert k_end == q_end
        assert 0 <= q_start < q_end <= len(homes[document])
        assert k_start == (0 if window is None else max(0, q_start - window + 1))
        assert q_end - q_start <= q_end - k_start
        assert 0 <= server < layout.num_ranks
        counts[document][q_start:q_end] += 1
    assert all((count == 1).all() for count in counts.values())
    order = [tuple(row) for row in rows[:, [5, 0, 1]].tolist()]
    assert order == sorted(order)
    same = (rows[1:, 5] == rows[:-1, 5]) & (rows[1:, 0] == rows[:-1, 0])
    assert (rows[1:, 1] > rows[:-1, 2])[same].all(), "ranges that follow on each other must be one task"


def visible_pairs(q_start: int, q_end: int, window: int | None) -> int:
    """Query-key pairs, counted one query after another."""
    return sum(min(p + 1, window or p + 1) for p in range(q_start, q_end))


def rows_sent(layout: Layout, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Query and key/value rows [home, server], counted position by position."""
    q = np.zeros((layout.num_ranks, layout.num_ranks), dtype=np.int64)
    kv = np.zeros_like(q)
    homes = documents_of(layout)
    needed: dict[tuple[int, int], set[int]] = {}
    for document, q_start, q_end, k_start, _, server in rows.tolist():
        for position in range(q_start, q_end):
            q[homes[document][position], server] += 1
        needed.setdefault((document, server), set()).update(range(k_start, q_end))
    for (document, server), positions in needed.items():
        for position in positions:
            kv[homes[document][position], server] += 1
    np.fill_diagonal(q, 0)
    np.fill_diagonal(kv, 0)
    return q, kv


def check_shards(layout: Layout, rows: np.ndarray, shard: int) -> None:
    """What a task has of a contiguous range that one rank stores is all of it, or at least `shard` rows."""
    homes = documents_of(layout)
    for document, q_start, q_end, *_ in rows.tolist():
        home = homes[document]
        borders = [0, *(np.flatnonzero(np.diff(home)) + 1).tolist(), len(home)]
        for start, end in itertools.pairwise(borders):
            part = min(end, q_end) - max(start, q_start)
            assert part <= 0 or part == end - start or part >= shard


def tile(start: np.ndarray, length: np.ndarray, rows: int) -> bool:
    """Whether ranges cover all rows of a buffer in order, each once."""
    return int(length.sum()) == rows and np.array_equal(start, np.cumsum(length) - length)
