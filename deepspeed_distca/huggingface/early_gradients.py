# SPDX-License-Identifier: Apache-2.0
"""Losses that give parameters their gradients in forward already, which no factor reaches afterwards.

DeepSpeed's ``TiledFusedLogitsLoss`` is one: it goes backward through the head, piece by piece, while the loss is made.
A model whose loss is a mean over its own targets is weighted by a factor of the loss, and DeepSpeed divides every loss
by the number of micro-batches of a step, on which the weights count; the head's gradient would stay without. A model
that divides by ``num_items_in_batch`` where the pieces are made is exact, without gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed_distca.huggingface.decoders import UnsupportedModelError


class EarlyGradients:
    """Watches a model's first forward in training whose loss gets a factor afterwards; takes itself out after it.

    Args:
        model: the decoder.
        failed: told of the error before it is raised.
    """

    def __init__(self, model: nn.Module, failed: Callable[[BaseException], None]) -> None:
        self._model, self._failed = model, failed
        self._watches: list[Any] = []
        self._early = 0
        self._handles = [
            # Before the plugin's other hooks, which change the arguments.
            model.register_forward_pre_hook(torch.compiler.disable(self._before), with_kwargs=True, prepend=True),
            model.register_forward_hook(torch.compiler.disable(self._after), always_call=True),
        ]

    def remove(self) -> None:
        """Leaves the model as it was."""
        for handle in (*self._handles, *self._watches):
            handle.remove()

    def _before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        weighted = kwargs.get("labels") is not None and kwargs.get("num_items_in_batch") is None
        if model is self._model and model.training and torch.is_grad_enabled() and weighted:
            trained = [p for p in model.parameters() if p.requires_grad]
            self._watches = [p.register_post_accumulate_grad_hook(self._note) for p in trained]

    def _note(self, parameter: torch.Tensor) -> None:
        self._early += 1

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        if model is not self._model or not self._watches:
            return
        for watch in self._watches:
            watch.remove()
        self._watches = []
        if self._early:
            self._early = 0
            error = UnsupportedModelError(
                f"{type(model).__name__}: its loss gives parameters their gradients in forward already (as tiled "
                "losses do), where factors that come afterwards are too late: those that weight it by target tokens, "
                "and DeepSpeed's division by the micro-batches of a step. Divide it by num_items_in_batch, an "
                "argument of forward, in the function that is tiled. With gradient accumulation give "
                "num_items_in_batch yourself and call engine.backward(loss, scale_wrt_gas=False), as Trainer does. Or "
                "set `distca.token_weighted_loss` to false"
            )
            self._failed(error)
            raise error
        if output is not None:
            self.remove()
