# SPDX-License-Identifier: Apache-2.0
"""What the layers of one micro-batch call for their core attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepspeed_distca.attention_server.core_attention import core_attention
from deepspeed_distca.attention_server.kernels import Kernel
from deepspeed_distca.attention_server.steps import LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec


# Not compared by value: it is held weakly, and is one micro-batch's.
@dataclass(frozen=True, eq=False)
class StepPlan:
    """The plans of a micro-batch's layers.

    Attributes:
        layers: by window.
        kernel: gives the kernel for q, k, v and a spec.
        halves: the same in two nano-batches, where the micro-batch may run so.
    """

    layers: dict[int | None, LayerPlan]
    kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec], Kernel]
    halves: StepPlan | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """Of this rank, of each part."""
        plan = next(iter(self.layers.values()))
        return tuple(part.rows for part in plan.forward.parts)

    def layer(self, window: int | None) -> LayerPlan:
        """The plan of layers with a window.

        Raises:
            ValueError: a window that was not planned.
        """
        if window not in self.layers:
            raise ValueError(
                f"a layer asks for a window of {window} keys, but plans were made for {list(self.layers)}; the "
                "model's attention modules must carry their window as `sliding_window`"
            )
        return self.layers[window]

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        kept: tuple[torch.Tensor, ...] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Core attention of one layer: see :func:`~.core_attention.core_attention`."""
        return core_attention(q, k, v, self.layer(spec.window), spec, self.kernel(q, k, v, spec), kept)
