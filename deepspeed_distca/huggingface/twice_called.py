# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 and modules that are called twice before their backward.

DeepSpeed frees a module's parameters in backward when as many of its inputs have their gradients as its forward
counted in ``ds_grads_remaining``. Every forward starts this count anew. With two nano-batches it then ends after the
first of them, and the other one meets parameters of size 0; and a recomputation in backward loses what remained. Two
hooks around DeepSpeed's own put the count right.
"""

from __future__ import annotations

from deepspeed.utils import z3_leaf_module
from torch import nn

from deepspeed_distca.compat.deepspeed import counts_gradients, gradients_to_come, set_gradients_to_come
from deepspeed_distca.compat.torch import in_backward
from deepspeed_distca.config import BLOCK, DistCAConfigError
from deepspeed_distca.huggingface.ping_pong import PingPong


class TwiceCalled:
    """Lets DeepSpeed's counts span both calls of a module.

    Args:
        model: a model with DeepSpeed's hooks.
        ping_pong: knows which of its nano-batches is running.

    Raises:
        DistCAConfigError: a module that DeepSpeed does not look into, and so cannot be called twice.
    """

    def __init__(self, model: nn.Module, ping_pong: PingPong) -> None:
        for module in model.modules():
            if z3_leaf_module(module):
                raise DistCAConfigError(
                    f"{type(module).__name__} is a ZeRO-3 leaf module, whose gradients DeepSpeed reduces after every "
                    "call; two nano-batches call it twice. Set "
                    '"zero_optimization": {"leaf_module": {"classes": []}} if its experts are one parameter (as in '
                    f'transformers 5), or `{BLOCK}.overlap` to "local_first"'
                )
        self._ping_pong = ping_pong
        self._before: dict[nn.Module, int] = {}
        self._handles = []
        for module in model.modules():
            if counts_gradients(module):
                self._handles += [
                    module.register_forward_pre_hook(self._remember, prepend=True),
                    module.register_forward_pre_hook(self._correct),
                ]

    def remove(self) -> None:
        """Takes the hooks out."""
        for handle in self._handles:
            handle.remove()

    def _remember(self, module: nn.Module, args: tuple) -> None:
        if self._ping_pong.split:
            self._before[module] = gradients_to_come(module)

    def _correct(self, module: nn.Module, args: tuple) -> None:
        if not self._ping_pong.split:
            return
        before = self._before.pop(module, 0)
        if in_backward():
            set_gradients_to_come(module, before)  # recomputation: its own graph is never run backward
        elif self._ping_pong.running == 1:
            set_gradients_to_come(module, before + gradients_to_come(module))
