# SPDX-License-Identifier: Apache-2.0
"""The plan of one phase of a micro-batch's layers, made ready for this rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import PHASES, CostModel, Phase
from deepspeed_distca.scheduler.digest import digest
from deepspeed_distca.scheduler.routes import RouteCompiler, home_routes
from deepspeed_distca.scheduler.tasks import Tasks, home_tasks
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.scheduler.worth import PlanOptions, Worth, two_pay


@dataclass(frozen=True)
class PlannedPhase:
    """One phase's plan for the layers of one kind.

    Attributes:
        phase: which one.
        window: of the layers.
        layers: how many there are.
        tasks: of all servers.
        part: this rank's.
        sent: bytes that each rank sends in all the layers, int64 [num_ranks].
        largest: bytes from each rank to each in one layer, out or back, whichever is more, int64 [sender, receiver].
        digest: of the tasks.
        weights: by which attention was to be spread over the servers; None is equal parts.
    """

    phase: Phase
    window: int | None
    layers: int
    tasks: Tasks
    part: RankPlan
    sent: np.ndarray
    largest: np.ndarray
    digest: int
    weights: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PlannedAhead:
    """Phases of a micro-batch that were planned before it was asked for, by a process that knew its layout.

    Attributes:
        by: all that the plan depends on beside the layout.
        layout: of all servers.
        phases: in the order of :meth:`MicroBatchPlanner.phases`; they follow from the rest. DeepSpeed's tensor
            parallelism compares what ranks give a model, and arrays are no truth values.
    """

    by: tuple[object, ...]
    layout: Layout
    phases: list[PlannedPhase] = field(compare=False)


class _Home:
    """A layout with every query where it is stored. What is worked out is kept: both phases ask for it."""

    def __init__(self, layout: Layout, window: int | None, rank: int, nodes: Topology | None) -> None:
        self.layout, self.window, self._rank, self._nodes = layout, window, rank, nodes
        self.rows = home_tasks(layout, window)
        self.whole = layout.is_whole and not layout.has_trees

    @cached_property
    def compiler(self) -> RouteCompiler:
        return RouteCompiler(self.layout, self.rows, self._nodes)

    @cached_property
    def part(self) -> RankPlan:
        """This rank's."""
        return RankPlan(home_routes(self.layout, self._rank) if self.whole else self.compiler.rank(self._rank))

    @cached_property
    def digest(self) -> int:
        """Of either phase."""
        return digest(self.layout, self.rows, window=self.window)


class PhasePlanner:
    """Plans phases.

    Args:
        server: this rank's place among its servers.
        cost: predicts the seconds of tasks and transfers.
        options: how to plan.
        early: whether results leave as soon as they are there; see :class:`~.exchange.Exchange`.
        in_two: whether micro-batches run as two nano-batches.
    """

    def __init__(
        self, server: int, cost: CostModel, options: PlanOptions, *, early: bool, in_two: bool = False
    ) -> None:
        self._server, self._cost, self._options = server, cost, options
        self._early, self._in_two = early, in_two
        self._homes: dict[int | None, _Home] = {}  # of the last layout, by window

    @property
    def nodes(self) -> Topology | None:
        """See :attr:`PlanOptions.nodes`."""
        return self._options.nodes

    @property
    def depends_on(self) -> tuple[object, ...]:
        """All that a plan depends on beside the layout and the layers."""
        return self._server, self._cost, self._options, self._early, self._in_two

    def plan(self, layout: Layout, window: int | None, phase: Phase, layers: int) -> PlannedPhase:
        """The plan of a phase of so many layers with one window."""
        layout = layout.for_window(window)
        home = self._homes.get(window)
        if home is None or home.layout is not layout:
            home = self._homes[window] = _Home(layout, window, self._server, self._options.nodes)
        worth = self._worth(layout, window, phase, layers, home.rows)
        sizes = np.zeros((2, layout.num_ranks, layout.num_ranks), dtype=np.int64)
        if home.whole and worth.stays():
            tasks, part = worth.home, home.part
        else:
            tasks, compiler = worth.spread(home.compiler)
            part = home.part if compiler is home.compiler else RankPlan(compiler.rank(self._server))
            sizes[:] = compiler.bytes_between(self._cost.heads, phase)
        if np.array_equal(tasks.rows, home.rows):
            made = home.digest
        else:
            made = digest(layout, tasks, phase=phase, window=window)
        return PlannedPhase(
            phase,
            window,
            layers,
            tasks,
            part,
            layers * sizes.sum(axis=(0, 2)),
            sizes.max(axis=0),
            made,
            worth.weights,
        )

    def two_pay(self, phases: Iterable[tuple[Phase, Layout, int | None, int]]) -> bool:
        """See :func:`~deepspeed_distca.scheduler.worth.two_pay`.

        Args:
            phases: of each its layout, the window of its layers and their number.
        """
        found = ((self._worth(layout, window, phase, layers), layers) for phase, layout, window, layers in phases)
        return two_pay(found, self._options.min_gain)

    def _worth(
        self, layout: Layout, window: int | None, phase: Phase, layers: int, rows: np.ndarray | None = None
    ) -> Worth:
        return Worth(
            layout,
            window,
            phase,
            self._cost,
            self._options,
            early=self._early,
            in_two=self._in_two,
            layers=layers,
            rows=rows,
        )

    def speeds(self, servers: int) -> np.ndarray:
        """See :meth:`PlanOptions.speeds`."""
        return self._options.speeds(servers)

    def last_load(self, weights: tuple[int, ...] | None, loads: np.ndarray) -> float:
        """The load, in the unit of loads, that is to be compared with the mean: the largest. With weights it is the
        mean and by how much the server that is last exceeds what it was to have, at its speed; so it is the mean
        where a plan is followed exactly, however unequal the parts.

        Args:
            weights: of a phase of this planner.
            loads: of it, as planned or with everything at home, int64 [num_ranks].
        """
        if weights is None:
            return float(loads.max())
        parts = np.array(weights, dtype=np.float64)
        intended = int(loads.sum()) * (parts / parts.sum())
        return float(loads.mean() + ((loads - intended) / self.speeds(len(loads))).max())


class MicroBatchPlanner:
    """Plans both phases of all layers of a micro-batch. Another process may have a copy, to plan ahead.

    Args:
        planner: of a phase of layers with one window.
        layers: by window, how many there are.
    """

    def __init__(self, planner: PhasePlanner, layers: Mapping[int | None, int]) -> None:
        self._planner, self._layers = planner, dict(layers)

    @property
    def nodes(self) -> Topology | None:
        """Those of the servers, where these are on several."""
        return self._planner.nodes

    def __call__(self, layout: Layout) -> PlannedAhead:
        """The plan of a layout of all servers, for :meth:`phases`."""
        return PlannedAhead(self._by, layout, self.phases(layout))

    def phases(self, layout: Layout, ahead: PlannedAhead | None = None) -> list[PlannedPhase]:
        """Forward of each window, then backward: see :meth:`phase`."""
        return [planned for phase in PHASES for planned in self.phase(layout, phase, ahead)]

    def phase(self, layout: Layout, phase: Phase, ahead: PlannedAhead | None = None) -> list[PlannedPhase]:
        """One phase, by window.

        Args:
            ahead: taken if it is the plan of this very layout, made as this planner would.
        """
        if isinstance(ahead, PlannedAhead) and ahead.by == self._by and ahead.layout == layout:
            return [planned for planned in ahead.phases if planned.phase == phase]
        return [self._planner.plan(layout, window, phase, layers) for window, layers in self._layers.items()]

    @property
    def _by(self) -> tuple[object, ...]:
        return (*self._planner.depends_on, tuple(self._layers.items()))
