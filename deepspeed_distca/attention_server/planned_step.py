# SPDX-License-Identifier: Apache-2.0
"""What was planned for an optimizer step, and its statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deepspeed_distca.attention_server.phase_planner import PhasePlanner, PlannedPhase
from deepspeed_distca.attention_server.statistics import StepStatistics
from deepspeed_distca.scheduler.cost_model import CostModel

#: Steps of which what was planned is kept.
KEPT = 1000


class _Loads(NamedTuple):
    """Of a planned phase what statistics need: see :class:`PlannedPhase`; and the servers' loads."""

    layers: int
    weights: tuple[int, ...] | None
    before: np.ndarray
    after: np.ndarray
    sent: np.ndarray


@dataclass
class PlannedStep:
    """The plans of a step's micro-batches, added up when that is asked for: a device may be waiting for the plan.

    Attributes:
        number: of the step.
        began: when its first plan was begun, in seconds of the host's clock.
        others: see :class:`StepStatistics`.
    """

    number: int
    began: float
    planning_ms: float = 0.0
    micro_batches: int = 0
    tokens: int = 0
    kept_layers: int = 0
    _phases: list[_Loads] = field(default_factory=list)

    def add(self, planned: Iterable[PlannedPhase]) -> None:
        """Takes phases in, without what layers need of them."""
        self._phases += [_Loads(p.layers, p.weights, p.tasks.loads_before, p.tasks.loads, p.sent) for p in planned]

    def statistics(self, server: int, cost: CostModel, planner: PhasePlanner) -> StepStatistics:
        """All that is known without a device.

        Args:
            server: this rank's place among its servers.
            cost, planner: by which the step was planned.
        """
        found = StepStatistics(
            planning_ms=self.planning_ms,
            micro_batches=self.micro_batches,
            kept_layers=self.kept_layers,
            tokens=self.tokens,
            step=self.number,
        )
        if not self._phases:
            return found
        sent = np.sum([phase.sent for phase in self._phases], axis=0)
        seconds, speeds = np.zeros(len(sent)), planner.speeds(len(sent))
        largest, mean, moved = {"before": 0.0, "after": 0.0}, 0.0, 0.0
        for phase in self._phases:
            for when, loads in (("before", phase.before), ("after", phase.after)):
                largest[when] += phase.layers * planner.last_load(phase.weights, loads)
            mean += phase.layers * float(phase.before.mean())
            moved += phase.layers * float(np.maximum(phase.before - phase.after, 0).sum())
            seconds += phase.layers * cost.seconds(phase.after) / speeds
        after = sum(phase.layers * float(phase.after.mean()) for phase in self._phases)
        if mean and after:
            found.balance_before, found.balance_after = largest["before"] / mean, largest["after"] / after
            found.moved_share = moved / (mean * len(sent))
        found.bytes_sent, found.bytes_sent_max = int(sent[server]), int(sent.max())
        found.bytes_sent_mean = float(sent.mean())
        found.predicted_server_seconds = seconds.tolist()
        return found
