# SPDX-License-Identifier: Apache-2.0
"""Core attention that is not repeated when activation checkpointing recomputes a layer.

Out and lse of the first pass are kept until the recomputation asks for them, so that it neither runs the quadratic
kernel nor exchanges anything. They lie in an object that travels beside the micro-batch's plan as a keyword argument
of forward: recomputation finds it where it finds the plan, whoever checkpoints (transformers, torch or DeepSpeed,
reentrant or not), and it dies with the micro-batch's graph.

Nothing depends on finding something: where nothing was kept, core attention is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from deepspeed_distca.attention_server.nano_batches import HalfPlan
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.compat.torch import in_backward, in_checkpoint, version_of, without_modes


class KeptAttention:
    """What is kept of one micro-batch: out [T, heads, v_head_dim] and lse [heads, T] of every checkpointed layer, each
    until its recomputation.

    Args:
        limit: called for the number of layers of which it is kept, the first ones; None: of all. Ranks that exchange
            rows need the same.
        always: keep that of every layer, and have it for every further call. For pipelines, whose stages do not
            recompute at the same time: a layer that exchanged rows again would find nobody there.

    Attributes:
        wanted: layers that are recomputed, as far as forward has come.
    """

    def __init__(self, limit: Callable[[], int] | None = None, *, always: bool = False) -> None:
        self._limit, self._always = limit, always
        self.wanted = self._given = 0
        #: By attention module, from its first call on; None: there is nothing (any more) to be used.
        self._kept: dict[nn.Module, _Kept | None] = {}

    def attend(
        self,
        module: nn.Module,
        plan: StepPlan | HalfPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Core attention of a module: computed in a first pass, taken from what was kept in its recomputation."""
        # Selective checkpointing matches the operations of the two passes by counting them, and those of core
        # attention are in one pass only: it may see them in neither.
        with without_modes():
            first = self._kept.get(module) if self._always else None
            if first is not None:
                result = first.result()
                if result is None:
                    raise RuntimeError(
                        f"{type(module).__name__} changed the result of core attention in place, and asks for it "
                        "again in recomputation; change a copy, or do without activation checkpointing"
                    )
                return plan.attend(q, k, v, spec, result)
            if in_backward() and not self._always:
                kept, self._kept[module] = self._kept.get(module), None
                return plan.attend(q, k, v, spec, kept.result() if kept else None)
            again = module in self._kept
            out, lse = plan.attend(q, k, v, spec, None)
            # Of a module that was called twice nobody could tell which call is recomputed.
            keep = self._always or (in_checkpoint() and not again and self._has_room())
            self._kept[module] = _Kept.of(out, lse) if keep else None
            return out, lse

    def _has_room(self) -> bool:
        self.wanted += 1
        room = self._limit is None or self._given < self._limit()
        self._given += room
        return room

    def __len__(self) -> int:
        """How many layers wait for their recomputation."""
        return sum(kept is not None for kept in self._kept.values())


class _Kept(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    version: tuple[int, int]

    @classmethod
    def of(cls, out: torch.Tensor, lse: torch.Tensor) -> _Kept:
        return cls(out.detach(), lse.detach(), (version_of(out), version_of(lse)))

    def result(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Out and lse, unless the model changed one of them in place after the first pass."""
        return (self.out, self.lse) if (version_of(self.out), version_of(self.lse)) == self.version else None
