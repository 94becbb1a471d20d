# SPDX-License-Identifier: Apache-2.0
"""Weights of servers whose linear work and attention are to end together: by hand, and against a search in floats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepspeed_distca.scheduler.shares import MAX_WEIGHT, Shares
from deepspeed_distca.scheduler.speeds import finishing_weights


@pytest.mark.parametrize(
    ("speeds", "linear", "home", "parts"),
    [
        ([1, 1], [100, 100], [60, 0], [1, 1]),
        ([1, 1], [100, 80], [30, 30], [20, 40]),  # both end at 120
        ([1, 1], [100, 80], [60, 0], [30, 30]),  # the second has nothing to do from 80 to 100
        ([1, 1], [100, 80], [50, 10], [25, 35]),  # something: until 90
        ([3, 2], [30, 30], [20, 20], [30, 10]),  # 60 / 3 = 40 / 2
        ([3, 2], [30, 30], [37, 3], [30, 10]),
        ([3, 2], [30, 30], [3, 37], [25.2, 14.8]),  # 3 before 15, and 37 from then on, 3 to 2
        ([1, 1, 1], [100, 100, 0], [60, 30, 0], [1, 1, 1]),  # a pool begins when rows are there
        ([1, 1, 3], [100, 100, 0], [60, 30, 0], [1, 1, 3]),
        ([1, 1], [100, 10], [2, 50], [0, 1]),  # the second is through with its own at 60, before any row comes
        ([0, 1, 1], [500, 10, 10], [20, 20, 20], [0, 1, 1]),
        ([0, 1, 3], [20, 10, 30], [40, 0, 0], [0, 1, 3]),  # rows are there at 10: the others' average speed is 2
        ([0, 1, 3], [40, 10, 30], [40, 40, 0], [0, 10 + 70 / 4, 210 / 4]),
        ([2, 0, 1], [0, 0, 0], [60, 1, 2], [2, 0, 1]),  # attention alone: in proportion
        ([5, 7, 0], [1, 2, 3], [0, 0, 0], None),
        ([0, 0], [1, 2], [2, 3], None),
    ],
)
def test_by_hand(speeds, linear, home, parts) -> None:
    weights = finishing_weights(speeds, linear, home)
    assert all(type(weight) is int for weight in weights)
    if parts is None:
        assert list(weights) == speeds
    elif parts == [0, 1]:
        # What is left for later is spread by speed: 2 of the first.
        assert weights == (round(MAX_WEIGHT * 1 / 51), MAX_WEIGHT)
    else:
        assert max(weights) == MAX_WEIGHT
        assert weights == pytest.approx([MAX_WEIGHT * part / max(parts) for part in parts], abs=0.51)


SERVERS = st.integers(1, 8)
WORK = st.sampled_from([0, 0, 10**15]) | st.integers(0, 2**60)


@settings(max_examples=300, deadline=None)
@given(st.data(), SERVERS)
def test_ends_together_as_a_search_in_floats_does(data, servers: int) -> None:
    several = dict(min_size=servers, max_size=servers)
    speeds = data.draw(st.lists(st.integers(0, 10**6), **several))
    linear, home = (data.draw(st.lists(WORK, **several)) for _ in range(2))
    assume(any(speeds) and any(home))
    weights = finishing_weights(speeds, linear, home)
    Shares(weights, servers, 0.0)  # in the range that balance takes

    s, done, own = (np.array(x, dtype=float) for x in (speeds, linear, home))
    there = (done / np.where(s > 0, s, s[s > 0].mean())).max()  # all rows
    assume(own.sum() > 1e-6 * there * s.sum())  # else the search has too few digits
    # Busy with linear work, or without anything to do, until its own attention fills the time until then.
    free = np.where(s > 0, np.maximum(done / np.maximum(s, 1), there - own / np.maximum(s, 1)), 0.0)
    low, high = there, there + own.sum() / s[s > 0].min()
    for _ in range(200):
        end = (low + high) / 2
        low, high = (end, high) if (s * (end - free)).sum() < own.sum() else (low, end)
    parts = s * (high - free)
    # Weights are rounded, and the search ends with the floats of the larger work.
    exact = 1e-6 + 1e-12 * s.sum() * high / parts.max()
    assert np.abs(np.array(weights) / MAX_WEIGHT - parts / parts.max()).max() < exact
    assert all(weight == 0 for weight, speed in zip(weights, speeds, strict=True) if speed == 0)


@settings(max_examples=200, deadline=None)
@given(st.data(), SERVERS)
def test_linear_work_and_attention_by_speed_are_the_same_where_nobody_waits(data, servers: int) -> None:
    several = dict(min_size=servers, max_size=servers)
    speeds = np.array(data.draw(st.lists(st.integers(900, 1000), **several)))
    linear = np.array(data.draw(st.lists(st.integers(10**12, 12 * 10**11), **several)))
    home = np.array(data.draw(st.lists(st.integers(10**12, 10**13), **several)))  # more than linear work differs
    weights = np.array(finishing_weights(speeds.tolist(), linear.tolist(), home.tolist()))
    ends = (linear + home.sum() * (weights / weights.sum())) / speeds
    assert ends == pytest.approx((linear.sum() + home.sum()) / speeds.sum(), rel=1e-4)
