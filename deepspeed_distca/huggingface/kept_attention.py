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

_Tensors = tuple[torch.Tensor, ...]


class KeptAttention:
    """What is kept of one micro-batch: out [T, heads, v_head_dim] and lse [heads, T] of checkpointed layers, each
    until its recomputation; of two nano-batches those of either.

    Args:
        limit: called for the number of layers of which it is kept, the first ones; None: of all. Ranks that exchange
            rows need the same.
        always: keep that of every layer, and have it for every further call. For pipelines, whose stages do not
            recompute at the same time: a layer that exchanged rows again would find nobody there.

    Attributes:
        reentrant: gradients were off in some layer, as they are in a reentrant checkpoint.
    """

    def __init__(self, limit: Callable[[], int] | None = None, *, always: bool = False) -> None:
        self._limit, self._always = limit, always
        self.reentrant = False
        self._keeps: dict[nn.Module, bool] = {}  # by layer that is recomputed
        #: By attention module and nano-batch, from the first call on; None: there is nothing (any more) to be used.
        self._kept: dict[tuple[nn.Module, int | None], _Kept | None] = {}
        #: Called twice: nobody could tell which call is recomputed.
        self._repeated: set[tuple[nn.Module, int | None]] = set()
        #: By attention module, of which nothing else is kept: what the other nano-batch's recomputation needs of one.
        self._keys: dict[nn.Module, _Kept] = {}

    @property
    def wanted(self) -> int:
        """Layers that are recomputed, as far as forward has come."""
        return len(self._keeps)

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
        half = plan if isinstance(plan, HalfPlan) else None
        key = module, half.nano if half else None
        # Selective checkpointing matches the operations of the two passes by counting them, and those of core
        # attention are in one pass only: it may see them in neither.
        with without_modes():
            first = self._kept.get(key) if self._always else None
            if first is not None:
                result = first.result()
                if result is None:
                    raise RuntimeError(
                        f"{type(module).__name__} changed the result of core attention in place, and asks for it "
                        "again in recomputation; change a copy, or do without activation checkpointing"
                    )
                return plan.attend(q, k, v, spec, result)
            if in_backward() and not self._always:
                result, keys = self._take(key)
                if half is None or keys is None:
                    out, lse = plan.attend(q, k, v, spec, result)
                else:
                    if half.nano == 1:  # which is recomputed first
                        self._keys[module] = _Kept.of(*half.for_other(k, v, spec.window))
                    out, lse = half.attend_again(q, k, v, spec, keys)
                # A checkpoint within the one that is recomputed; of a nano-batch it cannot be computed once more.
                if in_checkpoint() and key not in self._repeated and (half or self._has_room(module)):
                    self._kept[key] = _Kept.of(out, lse)
                return out, lse
            if key in self._kept:
                self._repeated.add(key)
                self._keys.pop(module, None)
            out, lse = plan.attend(q, k, v, spec, None)
            self.reentrant |= not torch.is_grad_enabled()
            recomputed = in_checkpoint() and key not in self._repeated
            keep = self._always or (recomputed and self._has_room(module))
            self._kept[key] = _Kept.of(out, lse) if keep else None
            if half and half.nano == 0 and recomputed and not keep:
                self._keys[module] = _Kept.of(*half.for_other(k, v, spec.window))
            return out, lse

    def _take(self, key: tuple[nn.Module, int | None]) -> tuple[_Tensors | None, _Tensors | None]:
        """For recomputation, out and lse, or else, for a nano-batch, the keys and values of the other one; each None
        where there are none. They are not given again."""
        kept, self._kept[key] = self._kept.get(key), None
        result = kept.result() if kept else None
        module, nano = key
        if result is not None or nano is None or module not in self._keys:
            return result, None
        return None, self._keys.pop(module).result()

    def _has_room(self, module: nn.Module) -> bool:
        if module not in self._keeps:
            self._keeps[module] = self._limit is None or sum(self._keeps.values()) < self._limit()
        return self._keeps[module]

    def __len__(self) -> int:
        """Of how many layers something waits for recomputation."""
        return len({module for (module, _), kept in self._kept.items() if kept is not None})


class _Kept(NamedTuple):
    tensors: _Tensors
    versions: list[int]

    @classmethod
    def of(cls, *tensors: torch.Tensor) -> _Kept:
        return cls(tuple(t.detach() for t in tensors), [version_of(t) for t in tensors])

    def result(self) -> _Tensors | None:
        """What was kept, unless the model changed some of it in place after the first pass."""
        return self.tensors if [version_of(t) for t in self.tensors] == self.versions else None
