# SPDX-License-Identifier: Apache-2.0
"""What the plugin does, in the logs of transformers' Trainer."""

from __future__ import annotations

import time
from typing import Any

from transformers import Trainer, TrainerCallback


class DistCACallback(TrainerCallback):
    """Puts what the plugin does into a Trainer's logs, and so into whatever its ``report_to`` names.

    ``trainer.add_callback(DistCACallback(trainer))``. Each log of training gets means over the steps since the last
    one: ``distca_balance_before`` and ``distca_balance_after`` (largest over mean load of attention),
    ``distca_moved_share`` (of attention), ``distca_estimated_gain`` (how much longer steps would take without the
    plugin: predicted seconds of attention that balance saved over measured ones of the steps) and
    ``distca_tokens_per_second`` (of the ranks that share attention). Without a ``distca`` block nothing is added. The
    first step, and those after evaluation or saving, are left out of what is measured by time.

    Args:
        trainer: whose logs they are; TRL's trainers are Trainers.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._ended: float | None = None
        self._clear()

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Goes before the callbacks that report, which Trainer puts first."""
        callbacks = self._trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)
        self._ended = None
        self._clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Adds a step up."""
        runtime = getattr(self._trainer.model_wrapped, "distca", None)
        if runtime is None:
            return
        now, statistics = time.perf_counter(), runtime.server.planned
        self._steps.append((statistics.balance_before, statistics.balance_after, statistics.moved_share))
        if self._ended is not None:
            servers = statistics.predicted_server_seconds
            mean = sum(servers) / max(1, len(servers))
            self._seconds += now - self._ended
            self._saved += (statistics.balance_before - statistics.balance_after) * mean
            self._tokens += statistics.tokens
        self._ended = now

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The time since the last step is not that of training."""
        self._ended = None

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        """Adds the values to a log of training, and to what Trainer keeps of it."""
        if not self._steps or logs is None or "loss" not in logs:
            return
        names = ("distca_balance_before", "distca_balance_after", "distca_moved_share")
        values = {n: sum(v) / len(v) for n, v in zip(names, zip(*self._steps, strict=True), strict=True)}
        if self._seconds:
            values["distca_estimated_gain"] = self._saved / self._seconds
            values["distca_tokens_per_second"] = self._tokens / self._seconds
        logs.update(values)
        state.log_history[-1].update(values)
        self._clear()

    def _clear(self) -> None:
        self._steps: list[tuple[float, float, float]] = []
        self._seconds = self._saved = 0.0
        self._tokens = 0
