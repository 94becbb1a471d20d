# SPDX-License-Identifier: Apache-2.0
"""A plan in the making: agreed on and computed on a thread while the device and the host are at the first layer.

Planning takes a few milliseconds of the host: a small collective among CPUs and some NumPy. The plan is not needed
before the first layer's attention, and the loss's divisor not before the loss, so neither is waited for earlier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from deepspeed_distca.attention_server.runtime import MicroBatchPlan
from deepspeed_distca.attention_server.tasks import AttentionSpec


class PendingPlan:
    """Stands for a :class:`MicroBatchPlan` that a thread is making.

    Args:
        make: gives the plan and the divisor of the summed loss; runs on the thread and must not touch the device.
        device: where the divisor is wanted.

    Attributes:
        divisor: fp32 scalar on the device; it gets its value when the plan is first used, which is before any later
            work on the stream reads it.
    """

    def __init__(self, make: Callable[[], tuple[MicroBatchPlan, float]], device: torch.device) -> None:
        self.divisor = torch.ones((), device=device)
        self._future: Future[tuple[MicroBatchPlan, float]] = Future()
        self._plan: MicroBatchPlan | None = None
        # A daemon: a process that stops for another reason must not wait for ranks that will never come.
        threading.Thread(target=self._work, args=(make,), name="distca-planning", daemon=True).start()

    def _work(self, make: Callable[[], tuple[MicroBatchPlan, float]]) -> None:
        try:
            self._future.set_result(make())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> MicroBatchPlan:
        """The plan, waiting for it if need be.

        Raises:
            Exception: whatever planning raised; with an input that cannot be used, the same on every rank.
        """
        if self._plan is None:
            self._plan, divisor = self._future.result()
            self.divisor.fill_(divisor)
        return self._plan

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, *more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`MicroBatchPlan.attend`."""
        return self.result().attend(q, k, v, spec, *more)
