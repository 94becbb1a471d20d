# SPDX-License-Identifier: Apache-2.0
"""Statistics of every optimizer step through DeepSpeed's monitor: TensorBoard, W&B, Comet, CSV, as its config says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed_distca.attention_server.statistics import StepStatistics

PREFIX = "Train/DistCA/"


def events(statistics: StepStatistics, samples: int) -> list[tuple[str, float, int]]:
    """(name, value, samples seen) of what is known without waiting for the device.

    Times that were measured are those of the step before, which the device has finished: "previous" in their names.
    They are left out in the first step, and wherever the device is further behind.
    """
    values = {
        "balance_before": statistics.balance_before,
        "balance_after": statistics.balance_after,
        "bytes_moved": statistics.bytes_moved,
        "bytes_sent_max": statistics.bytes_sent_max,
        "planning_ms": statistics.planning_ms,
    }
    measured = {
        "previous_server_ms": statistics.previous_server_seconds,
        "previous_exposed_ms": statistics.previous_exposed_seconds,
    }
    values |= {name: seconds * 1e3 for name, seconds in measured.items() if seconds is not None}
    return [(PREFIX + name, float(value), samples) for name, value in values.items()]


class StepMonitor:
    """Writes the events of a step when the engine has taken it.

    DeepSpeed has no hook after a step, so this engine's ``step`` is wrapped, on the instance, until :meth:`remove`.
    Without an enabled monitor nothing is wrapped.

    Args:
        engine: a DeepSpeedEngine.
        statistics: of the last step; must not wait for the device.
        rank: DeepSpeed's monitors write on rank 0 only.
    """

    def __init__(self, engine: Any, statistics: Callable[[], StepStatistics], rank: int) -> None:
        self._engine = engine
        self._wrapped = rank == 0 and bool(getattr(getattr(engine, "monitor", None), "enabled", False))
        if not self._wrapped:
            return
        step = engine.step

        def step_and_write(*args: Any, **kwargs: Any) -> Any:
            before = engine.global_steps
            result = step(*args, **kwargs)
            if engine.global_steps != before:
                engine.monitor.write_events(events(statistics(), engine.global_samples))
            return result

        engine.step = step_and_write

    def remove(self) -> None:
        """Gives the engine its own ``step`` back."""
        if self._wrapped:
            self._wrapped = False
            del self._engine.step
