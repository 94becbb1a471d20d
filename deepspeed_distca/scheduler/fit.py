# SPDX-License-Identifier: Apache-2.0
"""Cost models from measured times: non-negative least squares on the relative error, and how well a fit predicts.

Every measured call, a batch of tasks, is one row of features: what the cost model's terms are multiplied by, summed
over the tasks. A term cannot be negative, so that no task or transfer is ever predicted to gain time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_distca.scheduler.cost_model import MAX_TERM, UNITS_PER_SECOND, MovingCost, PhaseCost, key_start, pairs

# Reweighted passes after which the fit stands, the relative error below which a row counts as met, and the ratio of
# predicted to measured time below which all are alike.
_PASSES = 60
_MET = 1e-4
_LOWEST = 0.01


def nnls(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises |a x - b|, by Lawson and Hanson's active set.

    Args:
        a: float64 [rows, terms].
        b: float64 [rows].

    Returns:
        float64 [terms].
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale  # the terms differ by orders of magnitude
    terms = a.shape[1]
    x, free = np.zeros(terms), np.zeros(terms, dtype=bool)
    tolerance = 1e-12 * max(float(np.abs(a.T @ b).max(initial=0.0)), 1e-300)
    for _ in range(3 * terms):
        gradient = np.where(free, -np.inf, a.T @ (b - a @ x))
        if free.all() or gradient.max() <= tolerance:
            break
        free[np.argmax(gradient)] = True
        while free.any():
            solution = np.zeros(terms)
            solution[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if (solution[free] > 0).all():
                x = solution
                break
            # Back to where the first term on the way to the solution meets zero; it leaves.
            falling = free & (solution <= 0)
            step = np.min(x[falling] / np.maximum(x[falling] - solution[falling], 1e-300))
            x = x + step * (solution - x)
            free &= x > 1e-15 * max(float(x.max()), 1e-300)
            x[~free] = 0.0
    return x / scale


def fit_terms(features: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Non-negative terms with the least sum of absolute relative errors, by reweighted least squares.

    Least squares alone would bend the terms to a few shapes that no linear model meets; the median of the errors is
    what balance depends on. Errors are relative to the geometric mean of predicted and measured time, so that twice
    as long counts like half as long; relative to the measured time, fits to scattered times come out low.

    Args:
        features: float64 [calls, terms].
        measured: float64 [calls], positive.

    Returns:
        float64 [terms], in the unit of `measured`.

    Raises:
        ValueError: fewer calls than terms, or times that are not positive and finite.
    """
    features, measured = np.asarray(features, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    if len(features) < features.shape[1]:
        raise ValueError(f"{features.shape[1]} terms cannot be fitted to {len(features)} measured calls")
    if not (np.isfinite(measured).all() and (measured > 0).all()):
        raise ValueError(f"measured times must be positive, got {measured.tolist()}")
    relative = features / measured[:, None]
    weights = np.ones(len(measured))
    best, least = np.zeros(features.shape[1]), np.inf
    for _ in range(_PASSES):
        x = nnls(relative * weights[:, None], weights)
        ratio = np.maximum(relative @ x, _LOWEST)
        error = np.abs(ratio - 1)
        total = (error / np.sqrt(ratio)).sum()
        if total < least - 1e-9:
            best, least = x, total
        weights = 1 / np.sqrt(np.maximum(error, _MET) * np.sqrt(ratio))
    return best


def features(q_len: np.ndarray, k_len: np.ndarray, window: int | None = None) -> np.ndarray:
    """Pairs, query rows, key rows and tasks of one call.

    Args:
        q_len, k_len: int64 [num_tasks]; task i is the last q_len[i] queries of a document of as many positions as its
            last query sees. With a window, k_len counts the keys that the task needs.

    Returns:
        float64 [4], the terms of :class:`PhaseCost` in order.
    """
    end = k_len.astype(np.int64)
    start = end - q_len
    total = pairs(start, end, window).sum()
    keys = (end - key_start(start, window)).sum()
    return np.array([total, q_len.sum(), keys, len(q_len)], dtype=np.float64)


def fit_phase(rows: np.ndarray, seconds: np.ndarray) -> PhaseCost:
    """The cost of a phase.

    Args:
        rows: float64 [calls, 4], of :func:`features`.
        seconds: float64 [calls].

    Raises:
        ValueError: too few calls, or times from which no time for a pair can be told.
    """
    pair, query_row, key_row, task = fit_terms(rows, np.asarray(seconds) * UNITS_PER_SECOND)
    if pair < 1:
        raise ValueError("the measured times do not grow with the query-key pairs: measure longer documents")
    return PhaseCost(round(pair), round(query_row), round(key_row), round(task))


def predict(cost: PhaseCost, rows: np.ndarray, launch: int = 0) -> np.ndarray:
    """Seconds of calls with these features, float64 [calls], none below `launch` femtoseconds."""
    terms = np.array([cost.pair, cost.query_row, cost.key_row, cost.task], dtype=np.float64)
    return np.maximum(rows @ terms, launch) / UNITS_PER_SECOND


def fit_transfer(sizes: np.ndarray, seconds: np.ndarray) -> tuple[int, int]:
    """Bytes per second and latency in femtoseconds of transfers.

    Args:
        sizes: bytes [transfers]. seconds: float64 [transfers].

    Raises:
        ValueError: fewer than two transfers, or times that do not grow with the size.
    """
    sizes = np.asarray(sizes, dtype=np.float64)
    per_byte, latency = fit_terms(np.stack([sizes, np.ones(len(sizes))], axis=1), seconds)
    if per_byte <= 0:
        raise ValueError("the measured transfers do not take longer with their size: measure larger ones")
    return max(1, round(min(1 / per_byte, MAX_TERM))), round(min(latency * UNITS_PER_SECOND, MAX_TERM))


def fit_moving(messages: Sequence[int], seconds: Sequence[float]) -> MovingCost:
    """What moving rows costs in a phase, by least squares: measured differences scatter, below 0 too.

    Args:
        messages: of each layer.
        seconds: by which it took longer than one whose rows stay, and than its transfers.
    """
    counts = np.asarray(messages, dtype=np.float64)
    terms = nnls(np.stack([np.ones(len(counts)), counts], axis=1), np.asarray(seconds, dtype=np.float64))
    return MovingCost(*(round(min(term * UNITS_PER_SECOND, MAX_TERM)) for term in terms.tolist()))


@dataclass(frozen=True)
class PredictionError:
    """Relative errors |predicted / measured - 1| of a number of calls."""

    median: float
    worst: float
    calls: int

    @classmethod
    def of(cls, predicted: np.ndarray, measured: np.ndarray) -> PredictionError:
        errors = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
        return cls(float(np.median(errors)), float(errors.max()), len(errors))

    def __str__(self) -> str:
        return f"median {self.median:.1%}, worst {self.worst:.1%} over {self.calls}"
