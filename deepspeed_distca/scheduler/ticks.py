# SPDX-License-Identifier: Apache-2.0
"""The ticks of the same-phase pipeline schedule: in every one all stages do forward, or all do backward.

Cycle c = 0 .. m + 2 (S - 1) - 1 holds a forward tick while c < m + S - 1, in which stage s has micro-batch c - s, and
a backward tick once c >= S - 1, in which it has micro-batch c - (2 (S - 1) - s): m + S - 1 ticks of either phase, as
many as 1F1B takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_distca.scheduler.cost_model import Phase


@dataclass(frozen=True)
class Tick:
    """One tick of the whole pipeline.

    Attributes:
        phase: what all stages do.
        micro_batches: by stage, the micro-batch it has; None where it has none and serves.
    """

    phase: Phase
    micro_batches: tuple[int | None, ...]


def training_ticks(micro_batches: int, stages: int) -> list[Tick]:
    """The ticks of a training batch, in order."""
    ticks = []
    for cycle in range(micro_batches + 2 * (stages - 1)):
        if cycle < micro_batches + stages - 1:
            ticks.append(_tick("forward", [cycle - s for s in range(stages)], micro_batches))
        if cycle >= stages - 1:
            ticks.append(_tick("backward", [cycle - (2 * (stages - 1) - s) for s in range(stages)], micro_batches))
    return ticks


def _tick(phase: Phase, ids: list[int], micro_batches: int) -> Tick:
    return Tick(phase, tuple(i if 0 <= i < micro_batches else None for i in ids))
