# SPDX-License-Identifier: Apache-2.0
"""The reports of `plan`, `advise` and `simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from deepspeed_distca.layout import Layout
from deepspeed_distca.report.figures import DOING, ROWS, Plan, batches, lines, loads, plan_map, stacked, timeline
from deepspeed_distca.report.page import Page
from deepspeed_distca.scheduler.cost_model import PHASES, Phase
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import SERVER
from deepspeed_distca.simulator.documents import in_words
from deepspeed_distca.simulator.policies import IDEAL, OURS, PARTS, PLAIN
from deepspeed_distca.simulator.step import Load, Loads, Training, plain, planner, plugin

if TYPE_CHECKING:
    from deepspeed_distca.simulator.advise import Advice
    from deepspeed_distca.simulator.simulate import Simulated

BEFORE_AFTER = (("plain", "before"), ("plugin", "after"))
MAP = (
    "One phase of one layer: a row is a server, a block the attention of a document, in the colour of the rank where "
    "its queries are. Faint blocks stay at home, full ones came from another rank."
)
_LAYER = "One layer forward and backward; ranks wait where nothing is drawn."
_PART_COLOURS = dict(
    zip(PARTS, ("plain", "plugin", "other", "moving", "fifth", "sixth", "#7f7f7f", "#c4a7e7"), strict=True)
)


def plan_page(plan: Plan, phase: str, table: Sequence[Sequence[str]], sent_mib: float) -> Page:
    """Of ``ds_distca plan``.

    Args:
        table: of the servers; the first row is the head.
        sent_mib: MiB of the mean rank, there and back.
    """
    before, after = plan.loads()
    page = Page("A plan of core attention", [f"{len(plan.tasks)} tasks on {len(after)} servers, {phase} of one layer"])
    page.tiles(
        [
            (f"{plan.tasks.balance_before:.2f} → {plan.tasks.balance:.2f}", "largest over mean attention"),
            (f"{float(before.max() * 1e3):.1f} → {float(after.max() * 1e3):.1f} ms", "attention of the busiest rank"),
            (f"{sent_mib:,.1f} MiB", "sent by the mean rank, there and back"),
        ]
    )
    page.figure("loads", "Loads", "Attention of every rank, by the cost model.", loads(before, after), BEFORE_AFTER)
    page.figure("map", "The plan", of_servers(len(after), MAP), plan_map(plan))
    home = np.zeros(len(after))
    np.add.at(home, plan.tasks.rows[~plan.moved, SERVER], plan.seconds[~plan.moved])
    doing = (("plain", "queries of its own"), ("plugin", "queries of other ranks"))
    panels = [("before", [(before, np.zeros_like(before))]), ("after", [(home, np.maximum(after - home, 0.0))])]
    words = of_servers(len(after), "What every server computes, first what is at home.")
    page.figure("timeline", "In time", words, timeline(panels, doing), doing)
    page.table("Servers", table)
    return page


def advise_page(advice: Advice, training: Training, layout: Layout) -> Page:
    """Of ``ds_distca advise``.

    Args:
        layout: of the micro-batch that is drawn.
    """
    page = Page("Does it pay?", [in_words(advice.documents), training.model.name, advice.why, advice.note])
    page.tiles(
        [
            (f"{advice.speed_up[0]:.2f}x", "median speed-up of a step"),
            (f"{advice.balance[0]:.2f}", "largest over mean attention, as documents lie"),
            (f"{advice.plain_ms[0]:,.0f} → {advice.plugin_ms[0]:,.0f} ms", "a step without and with the plugin"),
            (f"{advice.moved:.0%}", f"of {advice.micro_batches} micro-batches move rows"),
        ]
    )
    key = (("plain", "without"), ("plugin", "with the plugin"), ("moving", "perfect balance"))
    rows = [tuple(ms / 1e3 for ms in step) for step in advice.steps_ms]
    page.figure("steps", "Steps", "Every micro-batch that was drawn.", batches(rows), key)
    _layer(page, training, layout, plain(training, layout), plugin(training, layout))
    head = ["", "median", "10 %", "90 %"]
    page.table("Numbers", [head, *([name, *cells] for name, cells in advice.rows())])
    return page


def simulate_page(simulated: Simulated, scale: Mapping[int, Mapping[str, float]]) -> Page:
    """Of ``ds_distca simulate``.

    Args:
        scale: by ranks and policy, how much faster than packed data.
    """
    training, ours, own = simulated.training, simulated[OURS], simulated[PLAIN]
    about = f"{simulated.ranks} ranks of {simulated.tokens:,} tokens, {training.model.name}"
    page = Page("A training step, predicted", [in_words(simulated.documents), about, simulated.limits()])
    page.tiles(
        [
            (f"{own.seconds / ours.seconds:.2f}x", "as fast as packed data"),
            (f"{simulated[IDEAL].seconds / ours.seconds:.0%}", "of perfect balance"),
            (f"{simulated.rate(ours):,.0f}", "tokens a second and GPU"),
            (f"{ours.memory / 2**30:.0f} GiB", "of memory a rank, an estimate"),
        ]
    )
    key = [(colour, name) for name, colour in _PART_COLOURS.items()]
    shown = [(simulated.name(one.name), one.parts) for one in simulated.outcomes]
    page.figure("parts", "A step by policy", "What its seconds go for.", stacked(shown, _PART_COLOURS), key)
    if len(scale) > 1:
        names = [one.name for one in simulated.outcomes if one.name != PLAIN]
        colours = dict(zip(names, ("other", "fifth", "sixth"), strict=False)) | {OURS: "plugin", IDEAL: "moving"}
        series = [
            (n, colours[n], [at[n] for at in scale.values()]) for n in names if all(n in at for at in scale.values())
        ]
        words = f"Over packed data, with {simulated.tokens:,} tokens on each of so many ranks; a micro-batch of each."
        page.figure(
            "scale", "Speed-up over scale", words, lines(list(scale), series, "x"), [(c, n) for n, c, _ in series]
        )
    _layer(page, training, simulated.first, own.loads, ours.loads)
    page.table("Policies", simulated.table(), simulated.name(OURS))
    return page


def _layer(page: Page, training: Training, layout: Layout, before: Loads, after: Loads) -> None:
    """Loads, plan and layer of a micro-batch, by layers of the first kind, over the ranks of a stage."""
    window = next(iter(training.model.windows))
    phase: Phase = "backward"
    training = replace(training, options=replace(training.options, topology=training.replica_nodes))
    worth = planner(training, layout, window, phase)
    tasks, _ = worth.spread(RouteCompiler(layout, worth.home.rows, training.options.nodes))
    plan = Plan.of(layout, tasks, training.cost, phase, window)
    words = "Attention of one layer's backward on every rank, the first micro-batch."
    page.figure("loads", "Loads", words, loads(*plan.loads()), BEFORE_AFTER)
    page.figure("map", "The plan", of_servers(layout.num_ranks, MAP), plan_map(plan))
    panels = [
        (words, [_doing(found[window, phase]) for phase in PHASES if (window, phase) in found])
        for words, found in (("without the plugin", before), ("with it", after))
    ]
    page.figure("timeline", "A layer in time", of_servers(layout.num_ranks, _LAYER), timeline(panels, DOING), DOING)


def _doing(load: Load) -> tuple[np.ndarray, ...]:
    return load.linear, load.attention, np.broadcast_to(load.exposed, load.linear.shape)


def of_servers(ranks: int, words: str) -> str:
    return words if ranks <= ROWS else f"{words} The first {ROWS} of {ranks} ranks."
