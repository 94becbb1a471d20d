# SPDX-License-Identifier: Apache-2.0
"""Looks on at a model's first planned forward: does every layer attend by the rule that it was planned with?

A model says how its layers attend in two ways: by the arguments of its attention calls, and by the masks it asks
transformers for. Masks are never built for planned forwards, so a rule that only the mask conveys (a window that the
attention call does not mention, chunks, blocks of bidirectional attention) would be lost without a word. Here both are
compared with the plan, once, and the model is refused by name where they differ.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from deepspeed_distca.huggingface.decoders import DISABLE, UnsupportedModelError

# Query rows at which a mask's rule is looked at, the row's last among them.
_ROWS = 16


class _Rule(NamedTuple):
    """What a mask would have said.

    Attributes:
        token: stands for the mask.
        window: its window.
        causal: it is causal attention in that window, inside documents or not.
    """

    token: torch.Tensor
    window: int | None
    causal: bool


class FirstForward:
    """The witness of one forward, between :meth:`start` and :meth:`stop`.

    Args:
        model: the decoder.
        windows: by attention module, the window it was planned with.
        position_ids: [batch, tokens] or [1, tokens], as forward got them; None: rows are documents.

    Attributes:
        under_way: witnesses of forwards that run, the innermost last. The mask function looks here for its own, since
            transformers gives it no keyword arguments of forward.
    """

    under_way: ClassVar[list[FirstForward]] = []

    def __init__(
        self, model: nn.Module, windows: dict[nn.Module, int | None], position_ids: torch.Tensor | None
    ) -> None:
        self._name, self._windows, self._position_ids = type(model).__name__, windows, position_ids
        self._rules: list[_Rule] = []
        self._calls: list[nn.Module] = []

    def start(self) -> None:
        """The forward begins."""
        self.under_way.append(self)

    def stop(self) -> None:
        """It ended, or failed."""
        self.under_way.remove(self)

    def attention_call(self, module: nn.Module, window: int | None, mask: torch.Tensor | None) -> bool:
        """Counts an attention module's call, and checks its window and the rule of its mask.

        Returns:
            whether the mask only stands for a rule that is the plan's too.

        Raises:
            UnsupportedModelError: the module attends by another rule than it was planned with.
        """
        self._calls.append(module)
        planned = self._windows.get(module)
        kind = f"{self._name}: {type(module).__name__}"
        if planned != window:
            raise UnsupportedModelError(
                f"{kind} asks for a window of {window} keys where its configuration says {planned}. {DISABLE}"
            )
        if mask is None:
            return False
        storage = mask.untyped_storage().data_ptr()  # a slice of the token stands for it too
        rule = next((r for r in self._rules if r.token.untyped_storage().data_ptr() == storage), None)
        if rule is None:
            return False
        if (rule.window or None) != (window or None):
            raise UnsupportedModelError(
                f"{kind} masks by a window of {rule.window} keys, but its attention call conveys {window}; what only "
                f"a mask conveys cannot be honoured. {DISABLE}"
            )
        if not rule.causal:
            raise UnsupportedModelError(
                f"{kind} masks by a rule that is not causal attention inside documents; only that can be honoured. "
                f"{DISABLE}"
            )
        return True

    def mask_rule(
        self, mask_function: Any, q_length: int, kv_length: int, device: Any = None, **arguments: Any
    ) -> torch.Tensor:
        """Looks at the rule of a mask, and returns a token for it that goes to the layers in the mask's place."""
        window = arguments.get("local_size")
        rows = torch.linspace(0, q_length - 1, min(_ROWS, q_length), device=device).long().unique()
        zero = torch.zeros((), dtype=torch.long, device=device)
        keys = torch.arange(kv_length, device=device)
        positions = keys
        if self._position_ids is not None:
            positions = self._position_ids.reshape(-1, self._position_ids.shape[-1])[0].to(device)
        document = torch.cumsum(torch.diff(positions, prepend=positions[:1] - 1) != 1, 0)
        exact = True
        for row in rows:
            allowed = torch.as_tensor(mask_function(zero, zero, row, keys)).expand(kv_length)
            causal = keys <= row
            if window:
                causal &= keys > row - window
            # Some models' masks do not know of packed documents; the plan does.
            inside = causal & (document == document[row])
            exact &= torch.equal(allowed, inside) or torch.equal(allowed, causal)
        token = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
        self._rules.append(_Rule(token, window, exact))
        return token

    def finish(self) -> None:
        """After the forward: every attention module was called, once.

        Raises:
            UnsupportedModelError: some went another way.
        """
        calls, modules = len(self._calls), len(self._windows)
        if not calls == len(set(self._calls)) == modules:
            kinds = sorted({type(m).__name__ for m in self._windows})
            raise UnsupportedModelError(
                f"{self._name}: {calls} attention calls were dispatched, but there are {modules} attention modules "
                f"({', '.join(kinds)}); some go another way, so the plan would be wrong. {DISABLE} and report it"
            )
