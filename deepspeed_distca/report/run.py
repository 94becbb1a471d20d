# SPDX-License-Identifier: Apache-2.0
"""The report of a run, from what an engine still knows of its last steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_distca.report.figures import Plan, lines, loads, plan_map
from deepspeed_distca.report.page import Page
from deepspeed_distca.report.pages import BEFORE_AFTER, MAP, of_servers

if TYPE_CHECKING:
    from deepspeed_distca.attention_server.statistics import StepStatistics

#: Points of a line; where there are more steps, means of some in a row are drawn.
_POINTS = 60
#: Steps of the table, the last ones.
_LISTED = 12
_HEAD = ["step", "seconds", "before", "after", "moved", "MiB sent", "planning ms", "micro-batches", "tokens"]


def write_run(engine: Any, file: str | Path) -> None:
    """Writes a page about the last steps of training, one file that needs no network. Any rank may write its own.

    Args:
        engine: what ``deepspeed.initialize`` gave, with a `distca` block; for Trainer ``trainer.model_wrapped``.
        file: an HTML file.

    Raises:
        ValueError: an engine without the plugin, or one that has not trained yet.
        OSError: the file cannot be written.
    """
    runtime = getattr(engine, "distca", None)
    if runtime is None:
        raise ValueError(f"{type(engine).__name__} has no `distca` block: there is nothing to report")
    server = runtime.server
    if server.last_plan is None:
        raise ValueError("no step was trained yet; write the report after some")
    layout, last = server.last_plan
    run_page(server.history, Plan.of(layout, last.tasks, server.cost, "forward", last.window)).save(Path(file))


def run_page(steps: Sequence[StepStatistics], last: Plan) -> Page:
    """Of a run.

    Args:
        steps: the last ones, in order.
        last: forward of the last micro-batch that was planned.
    """
    timed = [(step, step.seconds) for step in steps if step.seconds]
    servers = len(last.tasks.loads)
    page = Page(
        "A run with balanced core attention",
        [f"{len(steps):,} optimizer steps, {steps[0].step:,} to {steps[-1].step:,}, on {servers} servers"],
    )
    before, after = (statistics.median(getattr(step, f"balance_{when}") for step in steps) for _, when in BEFORE_AFTER)
    tiles = [
        (f"{before:.2f} → {after:.2f}", "largest over mean attention, median"),
        (f"{statistics.mean(step.moved_share for step in steps):.0%}", "of attention moved"),
    ]
    if timed:
        # Medians: some steps compile kernels, and behind some there is an evaluation or a checkpoint.
        saved = statistics.median(_saved(step) / seconds for step, seconds in timed)
        tiles += [
            (f"{statistics.median(seconds for _, seconds in timed):.2f} s", "a step, median"),
            (f"{saved:+.1%}", "longer without the plugin, by the cost model, median"),
        ]
        if rate := statistics.median(step.tokens / seconds for step, seconds in timed):
            tiles.append((f"{rate / servers:,.0f}", "tokens a second and GPU, median"))
    page.tiles(tiles)
    xs = _thinned([step.step for step in steps], first=True)
    series = [
        (when, colour, _thinned([getattr(step, f"balance_{when}") for step in steps])) for colour, when in BEFORE_AFTER
    ]
    drawn = lines([int(x) for x in xs], series, "", title="Balance over steps", along="steps")
    page.figure("balance", "Balance", "Largest over mean attention of the servers.", drawn, BEFORE_AFTER)
    if timed:
        numbers = [int(x) for x in _thinned([step.step for step, _ in timed], first=True)]
        taken = _thinned([seconds for _, seconds in timed])
        drawn = lines(numbers, [("a step", "plugin", taken)], " s", title="Seconds over steps", along="steps")
        page.figure("seconds", "Seconds", "From a step's first plan to the next one's, on this rank's host.", drawn)
    words = "Attention of every server in one layer's forward, by the cost model; the last micro-batch."
    page.figure("loads", "Loads", words, loads(*last.loads()), BEFORE_AFTER)
    page.figure("map", "The plan", of_servers(servers, MAP), plan_map(last))
    page.table("The last steps", [_HEAD, *(_row(step) for step in steps[-_LISTED:])])
    return page


def _saved(step: StepStatistics) -> float:
    """Seconds of attention that balance has saved, by the cost model."""
    mean = sum(step.predicted_server_seconds) / max(1, len(step.predicted_server_seconds))
    return (step.balance_before - step.balance_after) * mean


def _thinned(values: Sequence[float], *, first: bool = False) -> list[float]:
    """At most so many points: means of some in a row, or the first of them."""
    some = -(-len(values) // _POINTS)
    rows = [values[i : i + some] for i in range(0, len(values), some)]
    return [row[0] if first else statistics.mean(row) for row in rows]


def _row(step: StepStatistics) -> list[str]:
    return [
        f"{step.step:,}",
        f"{step.seconds:.3f}" if step.seconds else "",
        f"{step.balance_before:.3f}",
        f"{step.balance_after:.3f}",
        f"{step.moved_share:.1%}",
        f"{step.bytes_sent_mean / 2**20:,.1f}",
        f"{step.planning_ms:.1f}",
        str(step.micro_batches),
        f"{step.tokens:,}",
    ]
