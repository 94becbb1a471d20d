# SPDX-License-Identifier: Apache-2.0
"""How long a plan's phase takes, transfers included: whether moving rows is worth it over the links there are."""

from __future__ import annotations

import numpy as np

from deepspeed_distca.scheduler.cost_model import CostModel


def phase_seconds(
    cost: CostModel,
    at_home: np.ndarray,
    away: np.ndarray,
    out: np.ndarray,
    back: np.ndarray,
    *,
    early: bool,
    start: np.ndarray | None = None,
) -> float:
    """Predicted seconds from the start of one layer's dispatch until the last rank has its results.

    Servers have something to do as long as they have tasks: those at home until rows are there, then those in the
    workspace first. What a transfer takes is what its busiest end takes for all it sends or receives.

    Args:
        cost: rate and latency of transfers.
        at_home, away: seconds of each server's tasks in place and in its workspace, float64 [num_ranks].
        out, back: bytes [sender, receiver] of the dispatch and of the return.
        early: results leave as soon as they are there; otherwise once either end has done all its tasks.
        start: seconds after which each server has done the linear work in front of its dispatch, float64
            [num_ranks]: its tasks begin then, and its rows leave then. The phase begins with that work. None: all
            servers begin at once.
    """
    begin = np.zeros(len(at_home)) if start is None else start
    sending, returning = (_pairwise(_ends(cost, size), size) for size in (out, back))
    arrivals = np.where(out > 0, begin[:, None] + sending, 0.0)
    there = np.maximum(arrivals.max(axis=0, initial=0.0), begin)  # when a server can begin with its workspace
    ready = there + away
    done = np.maximum(begin + at_home + away, np.where(away > 0, ready, 0.0))
    leave = ready[:, None] if early else np.maximum(done[:, None], done[None, :])
    arrive = np.where(back > 0, leave + returning, 0.0)
    return float(max(done.max(initial=0.0), arrive.max(initial=0.0)))


def _ends(cost: CostModel, size: np.ndarray) -> np.ndarray:
    return cost.transfer_seconds(size.sum(axis=1), size.sum(axis=0))


def _pairwise(seconds: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Seconds of the busier end, where bytes travel."""
    return np.where(size > 0, np.maximum(seconds[:, None], seconds[None, :]), 0.0)
