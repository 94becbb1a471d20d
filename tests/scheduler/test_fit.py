# SPDX-License-Identifier: Apache-2.0
"""Fits of the cost model: against known terms, against trying every set of terms, and against the measured table."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from deepspeed_distca.scheduler import CostModel
from deepspeed_distca.scheduler.cost_model import MovingCost, PhaseCost, key_start
from deepspeed_distca.scheduler.fit import (
    PredictionError,
    features,
    fit_moving,
    fit_phase,
    fit_transfer,
    nnls,
    predict,
)
from tests.scheduler.test_cost_model import MEASURED

# Femtoseconds of the order of the H200's: a full set of terms, and one without key rows and tasks.
TERMS = [PhaseCost(66_000, 10_000_000, 21_000_000, 2_000_000_000), PhaseCost(27_000, 7_000_000, 0, 0)]


def random_calls(rng: np.random.Generator, count: int) -> np.ndarray:
    """Features of calls of one kind of task each: short and long documents, whole or their tails."""
    rows = []
    for _ in range(count):
        tasks, longest, share = rng.integers(1, 200), 10 ** rng.uniform(1.5, 4.5), rng.choice([1.0, 0.3, 0.02])
        k_len = (longest * rng.uniform(0.5, 1, tasks)).astype(np.int64)
        rows.append(features(np.maximum(1, (k_len * share).astype(np.int64)), k_len))
    return np.stack(rows)


def assert_close(fitted: PhaseCost, true: PhaseCost, rows: np.ndarray, within: float) -> None:
    """Every term within a share of its true value; a term that is truly nothing within that share of what a typical
    call costs."""
    typical = np.median(predict(true, rows)) * 1e15
    for i, name in enumerate(("pair", "query_row", "key_row", "task")):
        got, expected = getattr(fitted, name), getattr(true, name)
        if expected:
            assert abs(got / expected - 1) < within, name
        else:
            assert got * np.median(rows[:, i]) < within * typical, name


@pytest.mark.parametrize("true", TERMS)
def test_known_terms_are_recovered(true):
    rows = random_calls(np.random.default_rng(0), 40)
    assert_close(fit_phase(rows, predict(true, rows)), true, rows, 1e-4)


@pytest.mark.parametrize("true", TERMS)
def test_known_terms_are_recovered_from_noisy_times(true):
    rng = np.random.default_rng(1)
    rows = random_calls(rng, 80)
    seconds = predict(true, rows) * rng.normal(1, 0.001, len(rows))
    seconds[rng.choice(len(rows), 8, replace=False)] *= 1.5  # calls that something disturbed
    assert_close(fit_phase(rows, seconds), true, rows, 0.01)


def test_no_term_is_negative():
    # Times that fall with the key rows: least squares would say so, and predict that longer documents take less.
    rng = np.random.default_rng(2)
    rows = random_calls(rng, 30)
    seconds = (rows @ [30_000, 5_000_000, 0, 0] / (1 + 1e-5 * rows[:, 2])) / 1e15
    free = np.linalg.lstsq(rows / seconds[:, None], np.ones(30), rcond=None)[0]
    assert free.min() < 0
    fitted = fit_phase(rows, seconds)
    assert min(fitted.query_row, fitted.key_row, fitted.task) >= 0 < fitted.pair


def test_nnls_is_the_best_of_every_set_of_terms():
    rng = np.random.default_rng(3)
    for _ in range(200):
        rows, terms = rng.integers(1, 8), rng.integers(1, 5)
        a = rng.normal(size=(rows, terms)) * 10.0 ** rng.integers(-6, 6, terms)
        b = rng.normal(size=rows)
        least = np.linalg.norm(b)
        for size in range(1, terms + 1):
            for chosen in combinations(range(terms), size):
                x = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
                if (x >= 0).all():
                    least = min(least, np.linalg.norm(a[:, chosen] @ x - b))
        x = nnls(a, b)
        assert (x >= 0).all()
        assert np.linalg.norm(a @ x - b) <= least * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("window", [None, 100])
def test_features_are_what_the_cost_model_counts(window):
    rng = np.random.default_rng(4)
    end = rng.integers(1, 1000, 20)
    start = end - np.ceil(end * rng.random(20)).astype(np.int64)
    low = key_start(start, window)
    cost = CostModel.fitted()
    # A buffer holds the keys that a task needs, so its rows are counted from the first of them.
    row = features(end - start, end - low, window)
    for phase in ("forward", "backward"):
        expected = cost.cost(start, end, low, window, phase).sum() / 1e15
        assert predict(cost.phase(phase), row[None])[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("phase", "column", "flops"), [("forward", 3, 4), ("backward", 4, 10)])
def test_the_default_terms_are_the_fit_of_the_measured_table(phase, column, flops):
    table = np.array([line.split() for line in MEASURED.split("\n") if line], dtype=np.int64)
    rows = np.stack([features(np.full(n, q), np.full(n, k)) for q, k, n in table[:, :3]])
    seconds = flops * 32 * 128 * rows[:, 0] / (table[:, column] * 1e12)
    assert_close(fit_phase(rows, seconds), CostModel.fitted().phase(phase), rows, 0.01)


def test_transfers():
    sizes = np.array([2**16, 2**20, 2**24, 2**28])
    rate, latency = fit_transfer(sizes, 50e-6 + sizes / 300e9)
    assert rate == pytest.approx(300e9, rel=1e-4) and latency == pytest.approx(50e9, rel=1e-4)
    with pytest.raises(ValueError, match="larger"):
        fit_transfer(sizes, np.array([4e-3, 3e-3, 2e-3, 1e-3]))


def test_predictions_have_a_floor_and_an_error():
    rows = np.array([[10.0, 0, 0, 0], [1e6, 0, 0, 0]])
    predicted = predict(PhaseCost(1_000_000), rows, launch=20_000_000_000)
    assert predicted.tolist() == [20e-6, 1e-3]
    error = PredictionError.of(predicted, np.array([20e-6, 0.8e-3]))
    assert (error.median, error.worst, error.calls) == (pytest.approx(0.125), pytest.approx(0.25), 2)


def test_what_cannot_be_fitted():
    rows = random_calls(np.random.default_rng(5), 6)
    with pytest.raises(ValueError, match="cannot be fitted to 3"):
        fit_phase(rows[:3], np.ones(3))
    with pytest.raises(ValueError, match="positive"):
        fit_phase(rows, np.zeros(6))
    with pytest.raises(ValueError, match="longer documents"):
        fit_phase(rows, 1e-5 * rows[:, 3])


def test_what_moving_rows_costs_never_comes_out_negative():
    terms = fit_moving([10, 40, 120], [1e-3 + 20e-6 * m for m in (10, 40, 120)])
    assert (terms.layer, terms.message) == (pytest.approx(10**12, rel=1e-6), pytest.approx(2 * 10**10, rel=1e-6))
    assert fit_moving([10, 40, 120], [3e-3, 2e-3, 1e-3]).message == 0
    assert fit_moving([10, 40, 120], [-1e-4, 1e-3, 4e-3]).layer == 0
    assert fit_moving([10, 40], [-1e-4, -1e-4]) == MovingCost()
