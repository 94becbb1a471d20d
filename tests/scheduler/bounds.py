# SPDX-License-Identifier: Apache-2.0
"""Yardsticks for plans: what no plan can beat, what ``balance`` promises, the exact optimum of small cases, and the
bytes of a naive plan. For tests and reports; nothing here takes part in planning.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepspeed_distca.layout import PIECE_DOCUMENT, PIECE_END, PIECE_RANK, PIECE_START, Layout
from deepspeed_distca.scheduler.cost_model import CostModel, Phase, key_start
from deepspeed_distca.scheduler.cuts import costliest_shard
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.shares import Shares
from deepspeed_distca.scheduler.tasks import SERVER, TASK_DOCUMENT, Tasks
from deepspeed_distca.scheduler.units import Units


def lower_bound(
    layout: Layout,
    cost: CostModel,
    *,
    phase: Phase = "forward",
    granularity: int = 128,
    window: int | None = None,
) -> int:
    """A load that some server has in every plan whose cuts lie at multiples of the granularity or at home borders.

    The larger of the mean, with every document in one task (cutting only adds), and the costliest granule.
    """
    pieces = layout.pieces
    if not len(pieces):
        return 0
    length = np.zeros(len(pieces), dtype=np.int64)
    _, number = np.unique(pieces[:, PIECE_DOCUMENT], return_inverse=True)
    np.maximum.at(length, number, pieces[:, PIECE_END])
    length = length[: int(number.max()) + 1]
    zero = np.zeros_like(length)
    total = int(cost.cost(zero, length, zero, window, phase).sum())
    start, end = granules(layout, granularity)[:, 1:3].T
    costliest = int(cost.cost(start, end, key_start(start, window), window, phase).max())
    return max(-(-total // layout.num_ranks), costliest)


def promised(
    layout: Layout,
    cost: CostModel,
    tasks: Tasks,
    tolerance: float,
    *,
    phase: Phase = "forward",
    granularity: int = 128,
    window: int | None = None,
    server_weights: Sequence[int] | None = None,
) -> list[int]:
    """The load of each server that ``balance`` does not exceed, without a cap on received rows.

    That is (1 + tolerance) times its share; or its share plus the costliest shard, if that is more (with unequal
    weights a fast server may keep a little more, see ``Shares.promised``). The costliest shard is what the last cut of
    some rank's own piece leaves: up to three granules, of which two parts of a granule at least cannot always be
    made. The share is of the plan's own total, to which every cut adds.
    """
    shares = Shares(server_weights, layout.num_ranks, tolerance)
    costliest = costliest_shard(
        layout.pieces, lambda ends: Units(layout, window).costs(ends, cost, phase), granularity
    )
    return shares.promised(int(tasks.loads.sum()), costliest)


def granules(layout: Layout, granularity: int = 128) -> np.ndarray:
    """The finest query ranges that cuts can make.

    Returns:
        int64 [num_granules, 4], columns (document, start, end, home), sorted by (document, start).
    """
    pieces = layout.pieces
    start, end = pieces[:, PIECE_START], pieces[:, PIECE_END]
    first, last = start // granularity, (end - 1) // granularity
    count = last - first + 1
    which = np.repeat(np.arange(len(pieces)), count)
    index = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + first[which]
    return np.stack(
        [
            pieces[which, PIECE_DOCUMENT],
            np.maximum(index * granularity, start[which]),
            np.minimum((index + 1) * granularity, end[which]),
            pieces[which, PIECE_RANK],
        ],
        axis=1,
    )


def least_max_load(
    layout: Layout,
    cost: CostModel,
    *,
    phase: Phase = "forward",
    granularity: int = 128,
    window: int | None = None,
    max_granules: int = 18,
) -> int:
    """The smallest possible max load, by branch and bound over all ways to give granules to servers of equal speed.

    Raises:
        ValueError: more than `max_granules` granules; the time grows exponentially with their number.
    """
    parts = granules(layout, granularity)
    if len(parts) > max_granules:
        raise ValueError(f"{len(parts)} granules are too many for an exact solution, allowed: {max_granules}")
    if not len(parts):
        return 0
    terms = cost.phase(phase)
    alone, joined = [], []  # what a granule adds to a server without, and with, its left neighbour
    before = None
    for document, start, end, _ in parts.tolist():
        low = key_start(start, window)
        alone.append(terms(start, end, low, window))
        saved = alone[-1]
        if before == (document, start):
            saved -= terms.key_row * (start - low) + terms.task
        joined.append(saved)
        before = document, end
    rest = np.append(np.cumsum(joined[::-1])[::-1], 0).tolist()
    servers = layout.num_ranks
    floor = lower_bound(layout, cost, phase=phase, granularity=granularity, window=window)
    best = sum(joined) + sum(alone)  # above any plan
    loads = [0] * servers

    def place(i: int, left_at: int, used: int) -> None:
        nonlocal best
        if best <= floor or max(loads) >= best or sum(loads) + rest[i] >= best * servers:
            return
        if i == len(alone):
            best = max(loads)
            return
        # Servers that have nothing yet are alike: only the first of them is tried.
        for server in range(min(used + 1, servers)):
            added = joined[i] if server == left_at else alone[i]
            loads[server] += added
            place(i + 1, server, max(used, server + 1))
            loads[server] -= added

    place(0, -1, 0)
    return best


def naive_bytes(layout: Layout, tasks: Tasks | np.ndarray, heads: Heads) -> np.ndarray:
    """Forward dispatch bytes of a plan that sends q, k and v of whole documents to every server of any of their rows.

    Returns:
        int64 [sender, receiver]; what stays at home is not counted.
    """
    rows = tasks.rows if isinstance(tasks, Tasks) else tasks
    out = np.zeros((layout.num_ranks, layout.num_ranks), dtype=np.int64)
    pieces = layout.pieces
    pairs = np.unique(rows[:, [TASK_DOCUMENT, SERVER]], axis=0)
    for document, server in pairs.tolist():
        mine = pieces[pieces[:, PIECE_DOCUMENT] == document]
        np.add.at(out[:, server], mine[:, PIECE_RANK], mine[:, PIECE_END] - mine[:, PIECE_START])
    np.fill_diagonal(out, 0)
    return out * (heads.q_bytes + heads.kv_bytes)
