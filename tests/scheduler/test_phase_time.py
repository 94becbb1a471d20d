# SPDX-License-Identifier: Apache-2.0
"""Predicted time of a phase with its transfers: by hand, and within what must hold for any loads and bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_distca.scheduler.cost_model import CostModel
from deepspeed_distca.scheduler.phase_time import phase_seconds

COST = replace(CostModel(), bytes_per_second=10**6, latency=0)
MB = 10**6


def two(out: float, back: float) -> tuple[np.ndarray, np.ndarray]:
    """Rank 0 sends to rank 1 and gets results back, in MB."""
    there, again = np.zeros((2, 2), dtype=np.int64), np.zeros((2, 2), dtype=np.int64)
    there[0, 1], again[1, 0] = out * MB, back * MB
    return there, again


@pytest.mark.parametrize(
    ("at_home", "away", "sizes", "early", "late"),
    [
        ([5, 1], [0, 3], (0, 0), 5, 5),
        ([5, 1], [0, 3], (2, 1), 6, 6),  # rows at 2, results at 5, back at 6
        ([5, 1], [0, 1], (2, 1), 5, 6),  # results at 3: on their way while rank 0 is busy, or after it
        ([5, 9], [0, 1], (2, 1), 10, 11),
        ([5, 4], [0, 1], (2, 3), 6, 8),
        ([0, 0], [0, 0], (0, 0), 0, 0),
    ],
)
def test_by_hand(at_home, away, sizes, early, late) -> None:
    loads = np.array(at_home, dtype=float), np.array(away, dtype=float)
    assert phase_seconds(COST, *loads, *two(*sizes), early=True) == pytest.approx(early)
    assert phase_seconds(COST, *loads, *two(*sizes), early=False) == pytest.approx(late)


@pytest.mark.parametrize(
    ("start", "at_home", "away", "sizes", "early", "late"),
    [
        ([4, 0], [5, 1], [0, 3], (0, 0), 9, 9),
        ([0, 4], [5, 1], [0, 3], (2, 1), 8, 9),  # rows are there at 2, but their server only begins at 4
        ([0, 4], [5, 0], [0, 3], (2, 1), 8, 8),  # results at 7
        ([0, 4], [5, 1], [0, 3], (6, 1), 10, 10),  # rows at 6
        ([4, 0], [0, 1], [0, 3], (2, 1), 10, 10),  # rows leave at 4 and are there at 6
        ([4, 0], [5, 1], [0, 3], (2, 1), 10, 10),
        ([4, 9], [0, 1], [0, 0], (0, 0), 10, 10),
        ([7, 2], [0, 0], [0, 0], (0, 0), 7, 7),  # linear work alone
    ],
)
def test_servers_that_begin_later_by_hand(start, at_home, away, sizes, early, late) -> None:
    start, *loads = (np.array(x, dtype=float) for x in (start, at_home, away))
    phase = phase_seconds(COST, *loads, *two(*sizes), early=True, start=start)
    assert phase == pytest.approx(early)
    assert phase_seconds(COST, *loads, *two(*sizes), early=False, start=start) == pytest.approx(late)


def test_a_busy_end_holds_up_all_that_it_sends() -> None:
    out, back = np.zeros((3, 3), dtype=np.int64), np.zeros((3, 3), dtype=np.int64)
    out[0, 1], out[0, 2] = 3 * MB, MB
    loads = np.zeros(3), np.array([0.0, 1.0, 2.0])
    assert phase_seconds(COST, *loads, out, back, early=True) == pytest.approx(4 + 2)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_between_the_busiest_server_and_everything_in_turn(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    at_home, away = rng.uniform(0, 5, ranks), rng.uniform(0, 5, ranks) * rng.integers(0, 2, ranks)
    out = rng.integers(0, 3 * MB, (ranks, ranks)) * (away > 0)[None, :]
    np.fill_diagonal(out, 0)
    back = (out * rng.uniform(0, 2)).astype(np.int64).T
    early, late = (phase_seconds(COST, at_home, away, out, back, early=e) for e in (True, False))
    busiest = (at_home + away).max()
    slowest = [np.maximum(size.sum(0), size.sum(1)).max() / MB for size in (out, back)]
    assert busiest <= early <= late <= busiest + sum(slowest) + 1e-9
    fast = replace(COST, bytes_per_second=10**12)
    for e, seconds in ((True, early), (False, late)):
        faster = phase_seconds(fast, at_home, away, out, back, early=e)
        assert busiest <= faster <= seconds
    # Who begins at once is as before to the bit; whoever begins later, no more than that is added.
    start = rng.uniform(0, 3, ranks)
    for e, seconds in ((True, early), (False, late)):
        at_once = phase_seconds(COST, at_home, away, out, back, early=e, start=np.zeros(ranks))
        assert at_once == seconds
        later = phase_seconds(COST, at_home, away, out, back, early=e, start=start)
        own = (start + at_home + away).max()
        assert max(seconds, own) <= later <= seconds + start.max() + 1e-9
        together = phase_seconds(COST, at_home, away, out, back, early=e, start=np.full(ranks, 2.0))
        assert together == pytest.approx(seconds + 2)
