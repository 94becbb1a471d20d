# SPDX-License-Identifier: Apache-2.0
"""A plan that was asked for: the ranks tell each other what they have, and the first layer that needs it has it made.

Neither the plan nor the loss's divisor is needed before the first layer's attention. On a GPU the host has queued that
layer's linear work by then, under which waiting for the other ranks and planning are hidden. Neither has a thread of
its own, which would take the interpreter from the host and leave the GPU idle at the start of a step (on H200s 6 ms
when planning had one).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepspeed_distca.attention_server.coordination.agreement import GlobalMicroBatch
from deepspeed_distca.attention_server.step_plan import StepPlan


class PlanRequest:
    """Travels with a micro-batch in the place of its :class:`StepPlan`.

    Args:
        gathered: waits for what the ranks have told each other.
        make: gives the plan and the divisor of the summed loss, from what was gathered.
        device: where the divisor is wanted.

    Attributes:
        divisor: fp32 scalar on the device; it has its value from the first :meth:`result` on, which is before any
            later work on the stream reads it.
        kept_layers: of how many checkpointed layers core attention is kept, from the first :meth:`result` on.
    """

    def __init__(
        self,
        gathered: Callable[[], GlobalMicroBatch],
        make: Callable[[GlobalMicroBatch], tuple[StepPlan, float]],
        device: torch.device,
    ) -> None:
        self.divisor = torch.ones((), device=device)
        self.kept_layers = 0
        self._gathered, self._make = gathered, make
        self._plan: StepPlan | None = None

    def result(self) -> StepPlan:
        """The plan, made now if it was not yet. Collective the first time.

        Raises:
            Exception: of agreeing and planning; with an input that cannot be used, the same on every rank.
        """
        if self._plan is None:
            everyone = self._gathered()
            self._plan, divisor = self._make(everyone)
            self.kept_layers = everyone.kept_layers
            self.divisor.fill_(divisor)
        return self._plan
