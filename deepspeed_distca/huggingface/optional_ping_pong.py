# SPDX-License-Identifier: Apache-2.0
"""Two nano-batches for a model that was not told to run in them: only where nothing but its speed can tell.

Until a plan favours two nano-batches the model is left as it is, and no plan is waited for before the first layer. The
first micro-batch after that runs whole and is looked on (see ``ping_pong_trial``). Then a rank says before each
micro-batch whether it could run it in two; ranks tell each other (``Agreement``), and divide it if all of them can. So
a rank that cannot, for whatever reason of its own, keeps all of them to whole micro-batches, which exchange other
messages than halves.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.utils.checkpoint
from torch import nn
from transformers import PreTrainedModel

from deepspeed_distca.huggingface.attention_names import AttentionNames
from deepspeed_distca.huggingface.ping_pong import PingPong, base_of
from deepspeed_distca.huggingface.ping_pong_trial import Trial

logger = logging.getLogger(__name__)

#: Where hooks come from that may see a module's tokens in two parts: they count, give on what passes through, or
#: switch an attention function.
_HARMLESS_HOOKS = (
    "transformers.utils.output_capturing",
    "transformers.modeling_utils",
    "deepspeed.",
    AttentionNames.__module__,
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = [f"_global{name}" for name in _HOOKS]


class OptionalPingPong:
    """Makes a decoder run in two nano-batches from when that was favoured on, unless something stands against it.

    Args:
        decoder: the model.
        modules: its attention modules.
        root: the engine's module, which holds the decoder.

    Attributes:
        trial: its ``fault`` is what stands against it: from then on micro-batches run whole.
    """

    def __init__(self, decoder: PreTrainedModel, modules: list[nn.Module], root: nn.Module) -> None:
        self.trial = Trial()
        self._decoder, self._modules, self._root = decoder, modules, root
        self._base = base_of(decoder, modules)
        self._ping_pong: PingPong | None = None
        self._told = False

    @property
    def split(self) -> bool:
        """Whether the last training forward was in two nano-batches."""
        return self._ping_pong is not None and self._ping_pong.split

    def ready(self, favoured: bool) -> bool:
        """Whether this rank could run the coming micro-batch in two. Called before each, before the base's forward;
        where that is the decoder's own, it is under way, and what is installed here is first called in the next.

        Args:
            favoured: whether plans have favoured it so far.
        """
        if not favoured:
            return False
        fault = self.trial.fault or _fault(self._root, self._base)
        if fault:
            if not self._told:
                logger.warning("distca: micro-batches are not divided into two nano-batches: %s", fault)
            self.trial.fault, self._told = fault, True
            self.remove()
            return False
        if self._ping_pong is None:
            self._ping_pong = PingPong(self._decoder, self._modules, self.trial)
        return self._ping_pong.seen

    def remove(self) -> None:
        """Gives the model its own forward back."""
        if self._ping_pong is not None:
            self._ping_pong.remove()
            self._ping_pong = None


def _fault(root: nn.Module, base: nn.Module) -> str | None:
    """What stands against halves and can be seen from outside."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return "a mode of torch is active, which the thread of a nano-batch would not have"
    if any(getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS):
        return "a hook on all modules, which would be called with half of the tokens"
    for module in root.modules():
        forward = module.__dict__.get("forward")
        # What is excepted from compilation, as the halves' own forward is, carries both.
        compiled = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
        if compiled or module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            return "the model is compiled, and halves are not"
    for module in base.modules():
        if getattr(module, "gradient_checkpointing", False) and not _never_reentrant(module):
            return "activation checkpointing that is reentrant, or not transformers' own"
        hook = None if module is base else _foreign_hook(module)
        if hook:
            return f"a hook of {hook} on {type(module).__name__}, which would be called with half of the tokens"
    return None


def _never_reentrant(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    if not isinstance(function, functools.partial) or function.func is not torch.utils.checkpoint.checkpoint:
        return False
    return function.keywords.get("use_reentrant") is False


def _foreign_hook(module: nn.Module) -> str | None:
    """Where a hook comes from that may have to see all tokens at once."""
    origins = (getattr(hook, "__module__", None) or "?" for name in _HOOKS for hook in getattr(module, name).values())
    return next((origin for origin in origins if not origin.startswith(_HARMLESS_HOOKS)), None)
