# SPDX-License-Identifier: Apache-2.0
"""Where rows are cut, and what a rank's part of a plan is after that."""

from __future__ import annotations

import numpy as np
import pytest

from deepspeed_distca.attention_server.parts import crossings, row_cuts, two_parts
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.routes import RouteCompiler, TaskRanges
from tests.distributed.random_plans import random_layout, random_tasks


def cut_of(lengths: list[int], granularity: int = 128) -> int:
    return int(row_cuts(Layout.from_lengths([lengths]), granularity)[0])


def test_rows_are_cut_at_a_border_near_the_middle_or_inside_a_document() -> None:
    assert cut_of([4096] * 16) == 32768
    assert cut_of([100, 104, 200]) == 204  # within a sixteenth of 404
    assert cut_of([65536]) == 32768
    assert cut_of([1000, 64536]) == 1000 + 31744  # a multiple of 128 in the document's positions, near 32768
    assert cut_of([7]) == 3 and cut_of([2]) == 1
    assert cut_of([1]) == 1 and cut_of([]) == 0
    # A piece that begins in the middle of a document: positions count, not rows.
    piece = Layout.from_ranks([[(0, 0, 50)], [(0, 50, 1000)]])
    cut = int(row_cuts(piece, 128)[1])
    assert (cut + 50) % 128 == 0 and abs(cut - 500) <= 64


@pytest.mark.parametrize("seed", range(40))
def test_cuts_leave_no_half_empty_and_are_near_the_middle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, ranks=3, documents=6, longest=200)
    for granularity in (1, 16, 128):
        for cut, tokens in zip(row_cuts(layout, granularity), layout.tokens, strict=True):
            assert tokens < 2 or 0 < cut < tokens
            assert abs(cut - tokens / 2) <= max(tokens / 16, granularity / 2 + 1)


@pytest.mark.parametrize("seed", range(40))
def test_crossing_is_what_it_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, ranks=3, documents=4, longest=30)
    cuts = np.array([rng.integers(0, n + 1) for n in layout.tokens])
    nano: dict[tuple[int, int], int] = {}
    for rank in range(3):
        row = 0
        for document, start, length in layout.rank(rank):
            for position in range(start, start + length):
                nano[document, position] = int(row >= cuts[rank])
                row += 1
    expected = tuple(
        any(nano[d, p] == half and any(nano[d, earlier] != half for earlier in range(p)) for d, p in nano)
        for half in (0, 1)
    )
    assert crossings(layout, cuts) == expected


def pairs(tasks: TaskRanges, window: int | None, q_first: int = 0, k_first: int = 0) -> list[tuple[int, int]]:
    """Every (query row, key row) of the tasks."""
    found = []
    for q, n, k, m in zip(tasks.q_start, tasks.q_len, tasks.k_start, tasks.k_len, strict=True):
        for i in range(n):
            last = k + m - n + i
            low = k if window is None else max(k, last - window + 1)
            found += [(int(q + i + q_first), int(key + k_first)) for key in range(low, last + 1)]
    return found


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("seed", range(20))
def test_no_pair_of_rows_is_lost_or_counted_twice(seed: int, window: int | None) -> None:
    rng = np.random.default_rng((seed, window or 0))
    layout = random_layout(rng, ranks=3, documents=5, longest=25)
    compiler = RouteCompiler(layout, random_tasks(rng, layout, window))
    cuts = np.array([rng.integers(0, n + 1) for n in layout.tokens])
    for rank in range(3):
        whole = compiler.rank(rank)
        for backward in (False, True):
            phase = two_parts(whole, cuts, window, backward=backward, crossed=(False, False))
            local = [
                pair
                for part in phase.parts
                for tasks in (*part.local, part.shared)
                for pair in pairs(tasks, window, part.first, part.k_first)
            ]
            assert sorted(local) == sorted(pairs(whole.local, window))
            remote = [pair for part in phase.parts for pair in pairs(part.plan.routes.remote, window)]
            assert sorted(remote) == sorted(pairs(whole.remote, window))
            for part in phase.parts:
                served = np.concatenate([np.zeros(0, int), *part.plan.routes.waves])
                assert sorted(served) == list(range(len(part.plan.routes.remote)))
            for name in ("q_in", "kv_in", "q_out", "kv_out", "relay_in", "relay_out"):
                rows = sum(int(getattr(part.plan.routes, name)[:, 3].sum()) for part in phase.parts)
                assert rows == int(getattr(whole, name)[:, 3].sum())
