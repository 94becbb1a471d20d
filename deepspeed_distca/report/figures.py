# SPDX-License-Identifier: Apache-2.0
"""The figures of reports: loads, plans, steps in time, and speed-ups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from deepspeed_distca.layout import Layout
from deepspeed_distca.report.page import RANKS, Figure
from deepspeed_distca.scheduler.cost_model import UNITS_PER_SECOND, CostModel, Phase
from deepspeed_distca.scheduler.tasks import Q_END, Q_START, SERVER, TASK_DOCUMENT, Tasks, task_costs
from deepspeed_distca.scheduler.traffic import homes_of

#: Rows of servers that are drawn; tasks narrower than this share of the widest row are drawn together.
ROWS, _NARROW = 32, 0.004
#: Of what a rank does, in its order.
DOING = (("plain", "linear layers"), ("plugin", "attention"), ("moving", "exchange"))


@dataclass(frozen=True)
class Plan:
    """What is drawn of a plan for one phase of a layer.

    Attributes:
        tasks: who computes what.
        homes: of each task, the ranks that its queries come from.
        seconds: of each task, float64 [num_tasks].
    """

    tasks: Tasks
    homes: list[list[int]]
    seconds: np.ndarray

    @classmethod
    def of(cls, layout: Layout, tasks: Tasks, cost: CostModel, phase: Phase, window: int | None = None) -> Plan:
        seconds = task_costs(tasks.rows, cost, phase, window) / UNITS_PER_SECOND
        return cls(tasks, homes_of(layout, tasks.rows), seconds)

    def loads(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of each server before and after, float64 [num_ranks] each."""
        return self.tasks.loads_before / UNITS_PER_SECOND, self.tasks.loads / UNITS_PER_SECOND

    @cached_property
    def moved(self) -> np.ndarray:
        """Whether a task's queries come from another rank, bool [num_tasks]."""
        servers = self.tasks.rows[:, SERVER].tolist()
        return np.array([home != [server] for home, server in zip(self.homes, servers, strict=True)], dtype=bool)


def loads(before: np.ndarray, after: np.ndarray) -> Figure:
    """Attention of every rank before and after, one above the other, by one scale."""
    top, count, floor = max(before.max(initial=0.0), after.max(initial=0.0)) or 1.0, len(before), -24.0
    panels = [("plain", "before", before), ("plugin", "after", after)]
    heights = [max(120 * float(values.max(initial=0.0)) / top, 30) for _, _, values in panels]
    figure = Figure(sum(heights) + 2 * 30 + 12, "Attention of every rank before and after balancing")
    for height, (colour, words, values) in zip(heights, panels, strict=True):
        floor += height + 36
        wide = (0.8 if count <= 128 else 1.0) / count
        for rank, value in enumerate(values.tolist()):
            high = 120 * value / top
            figure.rect(
                (rank + 0.1 * (count <= 128)) / count,
                floor - high,
                wide,
                high,
                colour,
                tip=f"rank {rank}: {_ms(value)}",
            )
        mean, largest = float(values.mean()), float(values.max(initial=0.0))
        at = floor - 120 * mean / top
        figure.line(0, at, 1, at, dashed=True)
        figure.line(0, floor, 1, floor)
        figure.text(0, floor + 17, f"{words}: largest over mean {largest / mean if mean else 1.0:.2f}", ink=True)
        figure.text(0, floor, "0", "end", shift=-8)
        if floor - at > 14 and at - (floor - 120 * largest / top) > 14:
            figure.text(0, at + 4, "mean", "end", shift=-8)
        figure.text(0, floor - 120 * largest / top + 5, _ms(largest), "end", shift=-8)
    return figure


def plan_map(plan: Plan) -> Figure:
    """Every server's tasks one after another in time, in the colour of the rank that their queries come from."""
    count = min(len(plan.tasks.loads), ROWS)
    line = 18 if count <= 16 else 13
    figure = Figure(count * line + 24, "Which documents each server computes", left=64)
    _, after = plan.loads()
    top = float(after.max(initial=0.0)) or 1.0
    rows = plan.tasks.rows
    for server in range(count):
        at, y = 0.0, server * line
        mine = np.flatnonzero(rows[:, SERVER] == server)
        for parts in _drawn_together(mine[np.lexsort((-plan.seconds[mine], plan.moved[mine]))], plan, top):
            wide = float(plan.seconds[parts].sum()) / top
            home = plan.homes[parts[0]]
            document, low, high = (int(rows[parts[0], c]) for c in (TASK_DOCUMENT, Q_START, Q_END))
            told = f"document {document}, queries {low} to {high}" if len(parts) == 1 else f"{len(parts)} documents"
            tip = f"{told} of rank {', '.join(map(str, home[:4]))}: {_ms(wide * top)}"
            colour, faint = RANKS[home[0] % len(RANKS)], not plan.moved[parts[0]]
            figure.rect(at, y, max(wide - 0.0008, 0.0004), line - 3, colour, tip=tip, faint=faint)
            at += wide
        figure.text(0, y + line - 6, f"rank {server}", "end", shift=-8)
    _axis(figure, count * line, top)
    return figure


def _drawn_together(order: np.ndarray, plan: Plan, top: float) -> Iterable[list[int]]:
    """A server's tasks one by one; those too narrow to be seen with others of the same home."""
    wide = plan.seconds[order] / top >= _NARROW
    for away in (False, True):
        of_kind = plan.moved[order] == away
        yield from ([task] for task in order[of_kind & wide].tolist())
        narrow: dict[int, list[int]] = {}
        for task in order[of_kind & ~wide].tolist():
            narrow.setdefault(plan.homes[task][0], []).append(task)
        yield from (parts for _, parts in sorted(narrow.items()))


def timeline(
    panels: Sequence[tuple[str, Sequence[tuple[np.ndarray, ...]]]], doing: Sequence[tuple[str, str]]
) -> Figure:
    """What ranks do after one another, panels by one scale.

    Args:
        panels: words, and for each phase the seconds of every rank for each of `doing`, float64 [num_ranks]; a phase
            begins when the last rank is through with the one before.
        doing: colours, and what is done.
    """
    count = min(len(panels[0][1][0][0]), ROWS)
    line = 14 if count <= 16 else 9
    figure = Figure(len(panels) * (count * line + 34) + 14, "What every rank does, without and with the plugin")
    top = max(sum(map(_longest, phases)) for _, phases in panels) or 1.0
    for number, (words, phases) in enumerate(panels):
        y = number * (count * line + 34)
        figure.text(0, y + 12, words, ink=True)
        start = 0.0
        for phase in phases:
            for rank in range(count):
                at = start
                for (colour, what), seconds in zip(doing, phase, strict=True):
                    wide = float(seconds[rank]) / top
                    if wide:
                        tip = f"rank {rank}, {what}: {_ms(float(seconds[rank]))}"
                        figure.rect(at, y + 20 + rank * line, wide, line - 2, colour, tip=tip)
                    at += wide
            start += _longest(phase) / top
            figure.line(start, y + 18, start, y + 20 + count * line, dashed=True)
        for rank in range(0, count, 1 if count <= 16 else 8):
            figure.text(0, y + 20 + rank * line + line - 3, f"rank {rank}", "end", shift=-8)
    _axis(figure, len(panels) * (count * line + 34) - 14, top)
    return figure


def _longest(phase: tuple[np.ndarray, ...]) -> float:
    """Seconds of the slowest rank."""
    return float(np.sum(phase, axis=0).max())


def stacked(rows: Sequence[tuple[str, Mapping[str, float]]], colours: Mapping[str, str]) -> Figure:
    """A bar for each row, of parts in seconds."""
    figure = Figure(len(rows) * 44 + 24, "What a step's seconds go for", left=4)
    top = max(sum(parts.values()) for _, parts in rows) or 1.0
    for number, (words, parts) in enumerate(rows):
        at, y = 0.0, number * 44
        figure.text(0, y + 12, f"{words}, {_ms(sum(parts.values()))}", ink=True)
        for name, colour in colours.items():
            wide = parts.get(name, 0.0) / top
            if wide > 0:
                figure.rect(at, y + 18, wide, 18, colour, tip=f"{name}: {_ms(wide * top)}")
            at += wide
    _axis(figure, len(rows) * 44, top)
    return figure


def lines(
    xs: Sequence[int],
    series: Sequence[tuple[str, str, Sequence[float]]],
    unit: str,
    *,
    title: str = "Speed-up over the number of ranks",
    along: str = "ranks",
) -> Figure:
    """Series over whole numbers, which are drawn at equal distances.

    Args:
        series: words, colour and values.
        unit: behind a value.
        along: what the numbers are of.
    """
    height = 240
    figure = Figure(height + 40, title, left=52, right=24)
    values = [value for _, _, found in series for value in found]
    step = _round_step((max(values) - min(values)) / 6)
    low, high = math.floor(min(values) / step + 1e-9) * step, math.ceil(max(values) / step - 1e-9) * step
    high = max(high, low + step)

    def y(value: float) -> float:
        return 6 + height * (high - value) / (high - low)

    digits = max(1, -math.floor(math.log10(step)))
    for tick in range(round((high - low) / step) + 1):
        at = low + tick * step
        figure.line(0, y(at), 1, y(at))
        figure.text(0, y(at) + 4, f"{at:.{digits}f}{unit}", "end", shift=-8)
    places = [number / max(len(xs) - 1, 1) for number in range(len(xs))]
    for number in range(0, len(xs), -(-len(xs) // 8)):
        figure.text(places[number], height + 24, f"{xs[number]:,}", "middle")
    figure.text(0.5, height + 40, along, "middle")
    for words, colour, found in series:
        points = [(place, y(value)) for place, value in zip(places, found, strict=True)]
        for a, b in pairwise(points):
            figure.line(*a, *b, colour)
        for (place, at), x, value in zip(points, xs, found, strict=True):
            figure.dot(place, at, colour, f"{words}, {x:,} {along}: {value:.{digits + 1}f}{unit}")
    return figure


def _round_step(least: float) -> float:
    """The smallest of 0.1, 0.2, 0.5, 1, 2, 5 times a power of ten that is no less; at least 0.01."""
    power = 10.0 ** math.floor(math.log10(max(least, 0.01)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= max(least, 0.01) * (1 - 1e-9))


def batches(rows: Sequence[tuple[float, ...]]) -> Figure:
    """Seconds of steps without the plugin, with it, and with perfect balance, for each micro-batch."""
    height = 150
    figure = Figure(height + 24, "Steps of every micro-batch")
    top = max(max(row) for row in rows) or 1.0
    for number, row in enumerate(rows):
        for place, (value, colour) in enumerate(zip(row, ("plain", "plugin", "moving"), strict=True)):
            high, wide = height * value / top, 0.26 / len(rows)
            figure.rect((number + 0.08) / len(rows) + place * wide, height - high, wide, high, colour, tip=_ms(value))
    figure.line(0, height, 1, height)
    figure.text(0, 10, _ms(top), "end", shift=-8)
    figure.text(0, height, "0", "end", shift=-8)
    figure.text(0.5, height + 18, "micro-batches", "middle")
    return figure


def _axis(figure: Figure, y: float, top: float) -> None:
    figure.line(0, y + 2, 1, y + 2)
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        figure.text(share, y + 17, _ms(top * share) if share else "0", anchor)


def _ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"
