# SPDX-License-Identifier: Apache-2.0
"""A plan that was asked for: the ranks tell each other what they have, and the first layer that needs it has it made.

Neither the plan nor the loss's divisor is needed before the first layer's attention. On a GPU the host has queued that
layer's linear work by then, under which waiting for the other ranks and planning are hidden. Neither has a thread of
its own, which would take the interpreter from the host and leave the GPU idle at the start of a step (on H200s 6 ms
when planning had one). Nor does the first layer do more than it must: making and comparing the plan of backward is
left to the next layers, when the GPU has the first one's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from deepspeed_distca.attention_server.coordination.agreement import GlobalMicroBatch
from deepspeed_distca.attention_server.step_plan import StepPlan


class PlanRequest:
    """Travels with a micro-batch in the place of its :class:`StepPlan`.

    Args:
        gathered: waits for what the ranks have told each other.
        make: from what was gathered, and what :meth:`result` was told, gives the plan and the divisor of the summed
            loss, as far as the first layer's forward needs them; what is left of making it is done in the following
            steps of the iteration.
        device: where the divisor is wanted.

    Attributes:
        divisor: fp32 scalar on the device; it has its value from the first :meth:`result` on, which is before any
            later work on the stream reads it.
        kept_layers: of how many checkpointed layers core attention is kept, from the first :meth:`result` on.
        wanted: what the first :meth:`result` was told.
    """

    def __init__(
        self,
        gathered: Callable[[], GlobalMicroBatch],
        make: Callable[[GlobalMicroBatch, bool | None], Iterator[tuple[StepPlan, float]]],
        device: torch.device,
    ) -> None:
        self.divisor = torch.ones((), device=device)
        self.kept_layers = 0
        self.wanted: bool | None = None
        self._gathered, self._make = gathered, make
        self._plan: StepPlan | None = None
        self._steps: Iterator[tuple[StepPlan, float]] = iter(())

    @property
    def answered(self) -> bool:
        """Whether some layer has asked for the plan and got it."""
        return self._plan is not None

    def result(self, wanted: bool | None = None) -> StepPlan:
        """The plan, with one further step of making it as long as there are any: called by one layer after another.
        Collective.

        Args:
            wanted: whether backward comes to the layer that asks; None: that is not known. The first one's is compared
                over ranks: in backward they need each other in all layers, or in none.

        Raises:
            Exception: of agreeing and planning; with an input that cannot be used, the same on every rank.
        """
        if self._plan is None:
            everyone, self.wanted = self._gathered(), wanted
            self._steps = self._make(everyone, wanted)
            self._plan, divisor = next(self._steps)
            self.kept_layers = everyone.kept_layers
            self.divisor.fill_(divisor)
        else:
            next(self._steps, None)
        return self._plan

    def finish(self) -> None:
        """Takes all steps that are left, if the first was: before backward. Collective."""
        for _ in self._steps:
            pass
