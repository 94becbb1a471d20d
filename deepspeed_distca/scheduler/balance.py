# SPDX-License-Identifier: Apache-2.0
"""From a layout to balanced CA-tasks: which query rows of overloaded ranks are computed by which other server.

Servers above (1 + tolerance) times their share of the total load give query ranges away until they are not; whoever is
below takes them. As long as one server is above that limit another is below its share, so a taker whose room is at
least `tolerance` times its share always exists, and smaller rooms are left alone: few, large ranges.

Bytes decide what goes where. A query range [a, b) costs its own rows' q, out and so on, and the key/value rows below b
that the taker lacks. So a document's rows cost least for their work near its end; a taker that has a document's keys
gets more of it for its queries alone; and every new taker of a long document costs nearly all of its keys. Therefore
the document with the largest surplus meets the largest rooms, a taker that is not full goes on with the rows that
other homes of the document have to give, and a last remainder goes to the smallest room that holds it, which leaves
the large ones to others.

Whoever gave more than it had to takes again. Where shards are coarser than the room that is left, single shards are
moved, and their takers first give away of their own where that can be cut finer. Where that leaves a load above what
is promised, ranges are dealt out in order.

Everything is decided in Python integers and by geometry: documents are ordered by where they lie, not by their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from deepspeed_distca.defaults import GRANULARITY, TOLERANCE
from deepspeed_distca.given import integer, number
from deepspeed_distca.layout import MAX_TOKENS, PIECE_DOCUMENT, PIECE_RANK, PIECE_START, Layout
from deepspeed_distca.scheduler.cost_model import MAX_COST, UNITS_PER_SECOND, CostModel, Phase
from deepspeed_distca.scheduler.cuts import UnitCuts, costliest_shard
from deepspeed_distca.scheduler.dealing import Dealing
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.holdings import number_documents
from deepspeed_distca.scheduler.moves import Moves
from deepspeed_distca.scheduler.shares import MAX_TOLERANCE, Shares
from deepspeed_distca.scheduler.tasks import SERVER, TASK_DOCUMENT, Tasks, home_tasks, task_costs, task_rows
from deepspeed_distca.scheduler.traffic import rows_between
from deepspeed_distca.scheduler.units import Units
from deepspeed_distca.trees import CONTEXT_DOCUMENT

__all__ = ["Tasks", "balance", "home_tasks"]

#: Further tries where cuts add so much that a limit was not kept, and the part of the total that is not worth one.
_ATTEMPTS = 3
_ATTEMPT_STEP = 500


def balance(
    layout: Layout,
    cost: CostModel,
    *,
    phase: Phase = "forward",
    tolerance: float = TOLERANCE,
    granularity: int = GRANULARITY,
    window: int | None = None,
    heads: Heads | None = None,
    server_weights: Sequence[int] | None = None,
    max_received_rows: int | None = None,
) -> Tasks:
    """Spreads a layout's core attention so that no server's load exceeds (1 + tolerance) times its share.

    A pure function of its arguments. Where loads are within the tolerance already, every row is computed at its home.
    Otherwise the bound holds wherever cuts allow it: no load exceeds (1 + tolerance) times the server's share of the
    plan's own total, or its share plus the costliest shard, if that is more (``Shares.promised``). A shard is a range
    that no cut divides: cuts lie at multiples of `granularity` and leave as many rows on either side, so that it has
    up to three times as many. With a cap on received rows nothing is promised of loads.

    Args:
        layout: where the tokens live.
        cost: what tasks cost; decides everything.
        phase: "forward" or "backward": whose cost is balanced and whose bytes are weighed.
        tolerance: share by which a load may exceed its own.
        granularity: cuts lie at document positions that are multiples of it, and leave at least so many query rows on
            either side.
        window: keys a query sees, its own included; None for full causal attention.
        heads: bytes of the rows; None takes the cost model's.
        server_weights: relative speeds of the servers, integers in 0..1000000, one for each rank; None is all equal.
            Load by weight is balanced. A server of weight 0 computes nothing, whatever that costs.
        max_received_rows: the most query plus key/value rows that a server may receive. It costs balance where it
            binds. Key/value rows that a server needs for its own queries count, but are received even where they
            alone pass the cap. Where others cannot take all that servers of weight 0 store within the cap, it is
            doubled for that work until they can.

    Returns:
        The tasks, with predicted loads.

    Raises:
        LayoutError: a layout that no plan can be made for; trees with a path longer than the window.
        ValueError: an option out of range.
        OverflowError: documents so long that costs would leave int64, or cuts that would make them.
    """
    _check_options(tolerance, granularity, window, max_received_rows)
    granularity = int(granularity)
    window = None if window is None else int(window)
    terms = cost.phase(phase)
    layout.validate()
    num_ranks = layout.num_ranks
    shares = Shares(server_weights, num_ranks, tolerance)
    units = Units(layout, window)
    pieces = units.pieces
    costs = units.costs(pieces, cost, phase)
    _check_total(costs)
    before = _sum_by(pieces[:, PIECE_RANK], costs, num_ranks)
    loads = before.tolist()
    if shares.are_kept(loads):
        return Tasks(task_rows(pieces, units), before, before)

    documents = number_documents(pieces, units.full)
    cuts = UnitCuts(terms, window, granularity, documents.full)
    prices = row_costs(heads or cost.heads, phase, cost.bytes_per_second)
    received = _received_at_home(layout, window) if max_received_rows else [0] * num_ranks

    def tasks_of(ranges: np.ndarray) -> Tasks:
        rows = task_rows(ranges, units)
        costs = task_costs(rows, cost, phase, window)
        _check_total(costs)
        return Tasks(rows, _sum_by(rows[:, SERVER], costs, num_ranks), before)

    def attempt(assumed_total: int) -> Tasks:
        moves = Moves(
            pieces=pieces,
            costs=costs,
            documents=documents,
            loads=loads.copy(),
            shares=shares,
            cuts=cuts,
            window=window,
            row_costs=prices,
            max_received_rows=max_received_rows,
            received_rows=received.copy(),
            assumed_total=assumed_total,
        )
        return tasks_of(moves.run())

    best = attempt(0)
    reached = best.loads.tolist()
    if max_received_rows or shares.are_kept(reached):
        return best
    # A total below which there is none: every document in one task.
    last = np.append(pieces[1:, PIECE_DOCUMENT] != pieces[:-1, PIECE_DOCUMENT], True)
    whole = pieces[last]
    whole[:, PIECE_START] = 0
    least = int(units.costs(whole, cost, phase).sum())
    if terms.key_row or terms.task:
        best = _with_other_totals(best, attempt, shares, least)
        reached = best.loads.tolist()
    most = shares.promised(
        sum(reached), costliest_shard(pieces, lambda ends: units.costs(ends, cost, phase), granularity)
    )
    if all(load <= bound for load, bound in zip(reached, most, strict=True)):
        return best
    dealing = Dealing(pieces, costs, documents, num_ranks, cuts)
    dealt = [tasks_of(dealing.lowest(shares, least, whole=whole)) for whole in (False, True)]
    return min(best, *dealt, key=lambda tasks: shares.total_at(tasks.loads.tolist()))


def _with_other_totals(best: Tasks, attempt: Callable[[int], Tasks], shares: Shares, low: int) -> Tasks:
    """Cuts add to the total, and ranges that join take from it. Where that decides, limits that follow the total are
    not met by a little: looks for a fixed one that is.

    Args:
        best: the plan whose limits follow the total.
        attempt: makes the plan of a fixed total.
        low: a total that is surely not too high.
    """
    high = 0
    for _ in range(_ATTEMPTS):
        reached = shares.total_at(best.loads.tolist())
        if shares.are_kept(best.loads.tolist()):
            break
        high = high or reached
        if high - low <= low // _ATTEMPT_STEP:
            break
        assumed = (low + high) // 2
        tried = attempt(assumed)
        tried_reached = shares.total_at(tried.loads.tolist())
        if tried_reached <= assumed:
            high = assumed
        else:
            low = assumed
        if tried_reached < reached:
            best = tried
    return best


def _check_options(tolerance: float, granularity: int, window: int | None, max_received_rows: int | None) -> None:
    number("tolerance", tolerance, 0, MAX_TOLERANCE)
    integer("granularity", granularity, 1, MAX_TOKENS)
    optional = {"window": window, "max_received_rows": max_received_rows}
    for name, value in optional.items():
        if value is not None:
            integer(name, value, 1, MAX_TOKENS)


def _check_total(costs: np.ndarray) -> None:
    if float(costs.sum(dtype=np.float64)) > MAX_COST:
        raise OverflowError(f"the layout's total cost exceeds {MAX_COST} fs: its documents are too long")


def row_costs(heads: Heads, phase: Phase, bytes_per_second: int) -> tuple[int, int]:
    """Transfer time of a moved query row and a key/value row, out and back, in the unit of loads."""
    row = heads.moved(phase)
    return row.query * UNITS_PER_SECOND // bytes_per_second, row.key * UNITS_PER_SECOND // bytes_per_second


def _received_at_home(layout: Layout, window: int | None) -> list[int]:
    """Key/value rows that each rank must receive for its own queries."""
    rows = home_tasks(layout, window)
    rows = rows[~np.isin(rows[:, TASK_DOCUMENT], layout.contexts[:, CONTEXT_DOCUMENT])]  # whose keys are there
    return rows_between(layout, rows)[1].sum(axis=0).tolist()


def _sum_by(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, dtype=np.int64)
    np.add.at(out, index, values)
    return out
