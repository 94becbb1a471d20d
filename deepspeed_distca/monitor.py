# SPDX-License-Identifier: Apache-2.0
"""Statistics of every optimizer step through DeepSpeed's monitor: TensorBoard, W&B, Comet, CSV, as its config says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed_distca.attention_server.statistics import StepStatistics

PREFIX = "Train/DistCA/"


def events(statistics: StepStatistics, samples: int, seconds: float | None = None) -> list[tuple[str, float, int]]:
    """(name, value, samples seen) of what is known without waiting for the device.

    Times that were measured are those of the step before, which the device has finished: "previous" in their names.
    They are left out in the first step, and wherever the device is further behind.

    Args:
        seconds: of the host, from the end of the step before; None: not known.
    """
    values = {
        "balance_before": statistics.balance_before,
        "balance_after": statistics.balance_after,
        "moved_share": statistics.moved_share,
        "bytes_moved": statistics.bytes_moved,
        "bytes_sent_max": statistics.bytes_sent_max,
        "planning_ms": statistics.planning_ms,
    }
    measured = {
        "previous_server_ms": statistics.previous_server_seconds,
        "previous_exposed_ms": statistics.previous_exposed_seconds,
    }
    values |= {name: value * 1e3 for name, value in measured.items() if value is not None}
    if seconds:
        values["tokens_per_second"] = statistics.tokens / seconds
    return [(PREFIX + name, float(value), samples) for name, value in values.items()]


class StepMonitor:
    """Writes the events of a step when the engine has taken it, where DeepSpeed's monitor is enabled.

    Args:
        engine: a DeepSpeedEngine.
        statistics: of the last step; must not wait for the device.
        rank: DeepSpeed's monitors write on rank 0 only.
    """

    def __init__(self, engine: Any, statistics: Callable[[], StepStatistics], rank: int) -> None:
        self._engine, self._statistics = engine, statistics
        self._ended: float | None = None
        self._writes = rank == 0 and bool(getattr(getattr(engine, "monitor", None), "enabled", False))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the engine's ``step``, after which DeepSpeed has no hook."""
        engine = self._engine
        before = engine.global_steps
        yield
        if self._writes and engine.global_steps != before:
            now = time.perf_counter()
            seconds = None if self._ended is None else now - self._ended
            self._ended = now
            engine.monitor.write_events(events(self._statistics(), engine.global_samples, seconds))
