# SPDX-License-Identifier: Apache-2.0
"""The plan of one phase of a micro-batch's layers: what is computed where, and whether transfers are worth it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deepspeed_distca.attention_server.server_plan import ServerPlan
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.balance import balance
from deepspeed_distca.scheduler.cost_model import UNITS_PER_SECOND, CostModel
from deepspeed_distca.scheduler.digest import digest
from deepspeed_distca.scheduler.phase_time import phase_seconds
from deepspeed_distca.scheduler.plan import PlanCompiler
from deepspeed_distca.scheduler.speeds import finishing_weights
from deepspeed_distca.scheduler.tasks import K_START, Q_END, Q_START, SERVER, Tasks, home_tasks

#: A layer's linear work in a phase, in forwards of it: backward has gradients of inputs and of weights.
LINEAR_WORK = {"forward": 1, "backward": 2}


@dataclass(frozen=True)
class PlanOptions:
    """What planning depends on beside the layout; the same on every rank. See ``DistCAConfig`` for the meanings."""

    tolerance: float
    granularity: int
    min_shard_tokens: int | None
    max_received_rows: int | None
    server_weights: tuple[int, ...] | None = None  # speeds of this rank's servers
    min_gain: float = 0.0
    linear_flops: int = 0  # of a layer's forward, for a token


@dataclass(frozen=True)
class PlannedPhase:
    """One phase's plan for the layers of one kind.

    Attributes:
        phase: "forward" or "backward".
        window: of the layers.
        layers: how many there are.
        tasks: of all servers.
        part: this rank's.
        sent: bytes that each rank sends in all the layers, int64 [num_ranks].
        largest: bytes from each rank to each in one layer, out or back, whichever is more, int64 [sender, receiver].
        digest: of the tasks.
        weights: by which attention was to be spread over the servers; None is equal parts.
    """

    phase: str
    window: int | None
    layers: int
    tasks: Tasks
    part: ServerPlan
    sent: np.ndarray
    largest: np.ndarray
    digest: int
    weights: tuple[int, ...] | None = None


class _AtHome:
    """Every query row computed where it is stored: the same tasks in either phase, compiled once, and only if asked.

    Args:
        server: whose part is wanted.
    """

    def __init__(self, layout: Layout, window: int | None, server: int) -> None:
        self.layout, self.window, self._server = layout, window, server
        self.rows = home_tasks(layout, window)

    @cached_property
    def compiler(self) -> PlanCompiler:
        return PlanCompiler(self.layout, self.rows)

    @cached_property
    def part(self) -> ServerPlan:
        return ServerPlan(self.compiler.rank(self._server))


class PhasePlanner:
    """Plans phases. Everything follows from layout, cost model, options and the kind of exchange, the same on every
    rank: predicted times are compared in float64, but with sums and maxima of single numbers only, which every CPU
    rounds alike.

    Args:
        server: this rank's place among its servers.
        cost: predicts the seconds of tasks and transfers.
        options: how to plan.
        early: whether results leave as soon as they are there; see :class:`~.exchange.Exchange`.
    """

    def __init__(self, server: int, cost: CostModel, options: PlanOptions, *, early: bool) -> None:
        self._server, self._cost, self._options, self._early = server, cost, options, early
        self._last: _AtHome | None = None

    def plan(self, layout: Layout, window: int | None, phase: str, layers: int) -> PlannedPhase:
        """The plan of a phase, "forward" or "backward", of so many layers with one window."""
        at_home = self._at_home(layout, window)
        home = self._home(at_home, phase)
        weights = self._weights(layout, phase, home.loads)
        tasks, compiler = self._tasks(at_home, phase, home, weights)
        part = at_home.part if tasks is home else ServerPlan(compiler.rank(self._server))
        out, back = compiler.bytes_between(self._cost.heads, phase)
        sent = layers * (out + back).sum(axis=1)
        value = digest(layout, tasks, phase=phase, window=window).value
        largest = np.maximum(out, back)
        return PlannedPhase(phase, window, layers, tasks, part, sent, largest, value, weights)

    def _at_home(self, layout: Layout, window: int | None) -> _AtHome:
        """Kept from one phase to the next."""
        last = self._last
        if last is None or last.layout is not layout or last.window != window:
            self._last = last = _AtHome(layout, window, self._server)
        return last

    def _tasks(
        self, at_home: _AtHome, phase: str, home: Tasks, weights: tuple[int, ...] | None
    ) -> tuple[Tasks, PlanCompiler]:
        """The tasks, compiled. Those of `home` are that very object."""
        layout, window = at_home.layout, at_home.window
        # A server of weight 0 computes nothing, whatever that costs.
        frugal = self._options.min_gain > 0 and 0 not in (self._options.server_weights or ())
        hopeless = frugal and self._gains_too_little(layout, phase, home.loads, self._least(layout, phase, home.loads))
        # Where documents continue on other ranks, rows are exchanged anyway.
        if hopeless and not at_home.compiler.moves_rows:
            return home, at_home.compiler  # without a search
        tasks = balance(
            layout,
            self._cost,
            phase=phase,
            window=window,
            tolerance=self._options.tolerance,
            granularity=self._options.granularity,
            min_shard_tokens=self._options.min_shard_tokens,
            max_received_rows=self._options.max_received_rows,
            server_weights=weights,
        )
        compiler = PlanCompiler(layout, tasks.rows)
        if not frugal or not compiler.moves_rows or at_home.compiler.moves_rows:
            return tasks, compiler
        seconds = self._predicted(layout, compiler, window, phase)
        if self._gains_too_little(layout, phase, home.loads, seconds):
            return home, at_home.compiler
        return tasks, compiler

    def speeds(self, servers: int) -> np.ndarray:
        """Relative speeds of the servers, 1 on average, and 1 where nothing is known: no weights, or a weight of 0."""
        if self._options.server_weights is None:
            return np.ones(servers)
        weights = np.array(self._options.server_weights, dtype=np.float64)
        known = weights > 0
        return np.where(known, weights / weights[known].mean(), 1.0)

    def last_load(self, planned: PlannedPhase, loads: np.ndarray) -> float:
        """The load, in the unit of loads, that is to be compared with the mean: the largest. With weights it is the
        mean and by how much the server that is last exceeds what it was to have, at its speed; so it is the mean
        where a plan is followed exactly, however unequal the parts.

        Args:
            loads: of a phase of this planner, as planned or with everything at home, int64 [num_ranks].
        """
        if planned.weights is None:
            return float(loads.max())
        weights = np.array(planned.weights, dtype=np.float64)
        intended = int(loads.sum()) * (weights / weights.sum())
        return float(loads.mean() + ((loads - intended) / self.speeds(len(loads))).max())

    def _home(self, at_home: _AtHome, phase: str) -> Tasks:
        """The tasks at home with their loads."""
        rows, loads = at_home.rows, np.zeros(at_home.layout.num_ranks, dtype=np.int64)
        cost = self._cost.cost(rows[:, Q_START], rows[:, Q_END], rows[:, K_START], at_home.window, phase)
        np.add.at(loads, rows[:, SERVER], cost)
        return Tasks(rows, loads, loads)

    def _weights(self, layout: Layout, phase: str, home: np.ndarray) -> tuple[int, ...] | None:
        """By what attention is balanced: with speeds, so that it and linear work of known size end together."""
        speeds = self._options.server_weights
        if speeds is None or not self._options.linear_flops:
            return speeds
        linear = [self._cost.linear_cost(flops) for flops in self._linear_flops(layout, phase)]
        return finishing_weights(speeds, linear, home.tolist())

    def _linear_flops(self, layout: Layout, phase: str) -> list[int]:
        """Of a layer's linear work in a phase, for each server."""
        return [self._options.linear_flops * tokens * LINEAR_WORK[phase] for tokens in layout.tokens.tolist()]

    def _start(self, layout: Layout, phase: str) -> np.ndarray | None:
        """Seconds that each server's linear work takes before its attention, float64 [num_ranks]. None without
        speeds: then servers are taken to begin attention together."""
        if self._options.server_weights is None:
            return None
        seconds = [self._cost.linear_seconds(flops) for flops in self._linear_flops(layout, phase)]
        return np.array(seconds) / self.speeds(layout.num_ranks)

    def _predicted(self, layout: Layout, compiler: PlanCompiler, window: int | None, phase: str) -> float:
        """Seconds of one layer's phase with its transfers. With speeds the phase begins with the linear work."""
        speeds, start = self.speeds(layout.num_ranks), self._start(layout, phase)
        loads = compiler.loads(lambda q_start, q_end, k_start: self._cost.cost(q_start, q_end, k_start, window, phase))
        at_home, away = (load / UNITS_PER_SECOND / speeds for load in loads)
        sizes = compiler.bytes_between(self._cost.heads, phase)
        return phase_seconds(self._cost, at_home, away, *sizes, early=self._early, start=start)

    def _least(self, layout: Layout, phase: str, home: np.ndarray) -> float:
        """Seconds of one layer's phase that no plan can be below, of the kind that `_predicted` gives."""
        speeds, start = self.speeds(layout.num_ranks).tolist(), self._start(layout, phase)
        linear = [0.0] if start is None else [s * speed for s, speed in zip(start.tolist(), speeds, strict=True)]
        return (int(home.sum()) / UNITS_PER_SECOND + math.fsum(linear)) / math.fsum(speeds)

    def _gains_too_little(self, layout: Layout, phase: str, home: np.ndarray, seconds: float) -> bool:
        """Whether balance saves less than ``min_gain`` of the phase, after transfers.

        Args:
            home: loads with every task at home.
            seconds: of the phase once it is balanced.
        """
        attention = home / UNITS_PER_SECOND / self.speeds(layout.num_ranks)
        start = self._start(layout, phase)
        if start is None:
            before = float(attention.max())
            whole = self._cost.linear_seconds(max(self._linear_flops(layout, phase))) + before
        else:
            before = whole = float((start + attention).max())
        return before - seconds < self._options.min_gain * whole
