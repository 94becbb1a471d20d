# SPDX-License-Identifier: Apache-2.0
"""What whole micro-batches show of a model that is to run in two nano-batches without having been told to.

With ``overlap`` "ping_pong" a model that cannot is refused. Where the choice is ours it has to go on whole, and what
stands against halves often does not show before a forward runs: arguments that cannot be divided, layers under
reentrant checkpointing of any make, recomputation that does not find its attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from deepspeed_distca.attention_server.task_batch import AttentionSpec


class Plan(Protocol):
    """What is needed of a micro-batch's plan: see ``PendingPlan``."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, *more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Core attention of one layer."""


class Trial:
    """Finds what stands against halves.

    Attributes:
        fault: what was found, in words; None so far.
    """

    def __init__(self) -> None:
        self.fault: str | None = None

    def watched(self, plan: Plan) -> Plan:
        """The same plan, for layers that are looked on in forward and in recomputation."""
        return _Watched(plan, self)

    def rehearse(self, run: Callable[[], None]) -> None:
        """Tries what halves would need; whatever it raises is the fault, of a model that runs well whole."""
        try:
            run()
        except Exception as error:
            self.fault = self.fault or f"{type(error).__name__}: {error}"


class _Watched:
    def __init__(self, plan: Plan, trial: Trial) -> None:
        self._plan, self._trial = plan, trial

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, kept: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.is_grad_enabled():
            self._trial.fault = "reentrant activation checkpointing"
        elif kept is None and torch._C._current_graph_task_id() != -1:
            self._trial.fault = "recomputation of layers whose core attention is not kept"
        return self._plan.attend(q, k, v, spec, kept)
