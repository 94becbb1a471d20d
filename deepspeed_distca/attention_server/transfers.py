# SPDX-License-Identifier: Apache-2.0
"""Rows on their way: the messages of a plan's runs, and what is added up at home."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed_distca.attention_server import borrowed
from deepspeed_distca.attention_server.exchange.base import Exchange, Messages, Pending, Round
from deepspeed_distca.attention_server.rank_plan import RankPlan, Run, Sum


def home_rows(home: torch.Tensor, runs: list[Run]) -> Messages:
    """The runs' rows of a home buffer, with their peers: to send, or to receive into."""
    return [(run.peer, home[run.at_home]) for run in runs]


def work_rows(work: torch.Tensor, runs: list[Run]) -> Messages:
    """The same of a workspace."""
    return [(run.peer, work[run.at_work]) for run in runs]


def relay(p: RankPlan, k_work: torch.Tensor, v_work: torch.Tensor) -> Round | None:
    """The second round of a dispatch: keys and values from workspace to workspace."""
    if not p.relay_in and not p.relay_out:
        return None
    works = (k_work, v_work)
    return (
        [message for work in works for message in home_rows(work, p.relay_out)],
        [message for work in works for message in work_rows(work, p.relay_in)],
    )


def consecutive(buffer: torch.Tensor, runs: list[Run]) -> Messages:
    """The runs one after another in a buffer of their own."""
    row, messages = 0, []
    for run in runs:
        messages.append((run.peer, buffer[row : row + run.rows]))
        row += run.rows
    return messages


def keep(work: torch.Tensor, home: torch.Tensor, runs: list[Run]) -> None:
    for run in runs:
        work[run.at_work].copy_(home[run.at_home])


def dispatch(
    exchange: Exchange,
    p: RankPlan,
    queries: list[tuple[torch.Tensor, torch.Tensor]],
    keys: list[tuple[torch.Tensor, torch.Tensor]],
    stats: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Pending:
    """Rows leave for their servers, and this rank's own go to its workspace.

    Args:
        queries, keys: home and workspace of what goes with query rows, and of keys and values.
        stats: of the query rows of ``p.returned``, one after another, and their workspace.
    """
    sends = [message for home, _ in queries for message in home_rows(home, p.q_out)]
    receives = [message for _, work in queries for message in work_rows(work, p.q_in)]
    if stats is not None:
        rows = consecutive(stats[0], p.returned)
        sends += rows[: len(p.q_out)]
        receives += work_rows(stats[1], p.q_in)
    sends += [message for home, _ in keys for message in home_rows(home, p.kv_out)]
    receives += [message for _, work in keys for message in work_rows(work, p.kv_in_direct)]
    pending = exchange.start(sends, receives, relay(p, *(work for _, work in keys)))
    for home, work in queries:
        keep(work, home, p.q_keep)
    for home, work in keys:
        keep(work, home, p.kv_keep)
    if stats is not None:
        for run, (_, row) in zip(p.q_keep, rows[len(p.q_out) :], strict=True):
            stats[1][run.at_work].copy_(row)
    return pending


def add_rows(home: torch.Tensor, span: slice, rows: torch.Tensor) -> None:
    """Adds rows to a range of home, in fp32 at least, rounding once."""
    if home.dtype.itemsize < 4:
        home[span] = home[span].float() + rows
    else:
        home[span] += rows


def accumulate(sums: list[Sum], rows: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    """Adds what servers contribute to rows of dk or dv, in fp32 at least, rounding once.

    Args:
        sums: where to: ``RankPlan.touched`` or ``RankPlan.relayed_sums``.
        rows: to which is added, at home or in the workspace.
        sources: buffers of which the contributions are.
    """
    for span, contributions in sums:
        total = rows[span]
        if len(contributions) == 1:
            # One addition is computed in fp32 and rounded once anyway: no copy in fp32 is needed.
            source, row, run = contributions[0]
            total += sources[source][row : row + run.rows]
            continue
        if total.dtype.itemsize < 4:
            total = borrowed.empty_like(total, dtype=torch.float32).copy_(total)
        for source, row, run in contributions:
            at = run.home - span.start
            total[at : at + run.rows] += sources[source][row : row + run.rows]
        if total.dtype != rows.dtype:
            rows[span] = total
