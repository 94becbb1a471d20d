# SPDX-License-Identifier: Apache-2.0
"""A plan in the making: the ranks tell each other what they have, and the plan is computed when the first layer asks.

Neither the plan nor the loss's divisor is needed before the first layer's attention. On a GPU the host has queued that
layer's linear work by then, under which waiting for the other ranks and planning are hidden. Neither has a thread of
its own, which would take the interpreter from the host and leave the GPU idle at the start of a step (on H200s 6 ms
when planning had one).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed_distca.attention_server.agreement import GlobalMicroBatch
from deepspeed_distca.attention_server.server import MicroBatchPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec


class PendingPlan:
    """Stands for a :class:`MicroBatchPlan`.

    Args:
        gathered: waits for what the ranks have told each other.
        make: gives the plan and the divisor of the summed loss, from `gathered`.
        device: where the divisor is wanted.

    Attributes:
        divisor: fp32 scalar on the device; it gets its value when the plan is first used, which is before any later
            work on the stream reads it.
    """

    def __init__(
        self,
        gathered: Callable[[], GlobalMicroBatch],
        make: Callable[[Callable[[], GlobalMicroBatch]], tuple[MicroBatchPlan, float]],
        device: torch.device,
    ) -> None:
        self.divisor = torch.ones((), device=device)
        self._gathered, self._make, self._plan = gathered, make, None

    def result(self) -> MicroBatchPlan:
        """The plan, made now if it was not yet.

        Raises:
            Exception: of agreeing and planning; with an input that cannot be used, the same on every rank.
        """
        if self._plan is None:
            self._plan, divisor = self._make(self._gathered)
            self.divisor.fill_(divisor)
        return self._plan

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, *more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`MicroBatchPlan.attend`."""
        return self.result().attend(q, k, v, spec, *more)
