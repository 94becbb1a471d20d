# SPDX-License-Identifier: Apache-2.0
"""A plan in the making: the ranks agree on a thread, and the plan is computed when the first layer asks for it.

Neither the plan nor the loss's divisor is needed before the first layer's attention. On a GPU the host has queued that
layer's linear work by then, under which planning is hidden. The thread only waits for the other ranks. Planning, which
is Python and NumPy, would take the interpreter from the host there and leave the GPU idle (on H200s: 6 ms at the start
of a step).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from deepspeed_distca.attention_server.agreement import GlobalMicroBatch
from deepspeed_distca.attention_server.runtime import MicroBatchPlan
from deepspeed_distca.attention_server.tasks import AttentionSpec


class PendingPlan:
    """Stands for a :class:`MicroBatchPlan`.

    Args:
        gather: gives what the ranks agree on; runs on a thread and must not touch the device.
        make: gives the plan and the divisor of the summed loss. It is called with a function that waits for what was
            gathered.
        device: where the divisor is wanted.

    Attributes:
        divisor: fp32 scalar on the device; it gets its value when the plan is first used, which is before any later
            work on the stream reads it.
    """

    def __init__(
        self,
        gather: Callable[[], GlobalMicroBatch],
        make: Callable[[Callable[[], GlobalMicroBatch]], tuple[MicroBatchPlan, float]],
        device: torch.device,
    ) -> None:
        self.divisor = torch.ones((), device=device)
        self._gathered: Future[GlobalMicroBatch] = Future()
        self._make, self._plan = make, None
        # A daemon: a process that stops for another reason must not wait for ranks that will never come.
        threading.Thread(target=self._work, args=(gather,), name="distca-agreement", daemon=True).start()

    def _work(self, gather: Callable[[], GlobalMicroBatch]) -> None:
        try:
            self._gathered.set_result(gather())
        except BaseException as error:
            self._gathered.set_exception(error)

    def result(self) -> MicroBatchPlan:
        """The plan, made now if it was not yet.

        Raises:
            Exception: of agreeing and planning; with an input that cannot be used, the same on every rank.
        """
        if self._plan is None:
            self._plan, divisor = self._make(self._gathered.result)
            self.divisor.fill_(divisor)
        return self._plan

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, *more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`MicroBatchPlan.attend`."""
        return self.result().attend(q, k, v, spec, *more)
