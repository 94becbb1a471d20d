# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings whose frequencies depend on the row: found by asking them, and made to depend on the document.

Some kinds of RoPE choose their frequencies by the longest position of a row ("longrope", "dynamic"). In a packed row
one long document would choose for all others, and a rank that stores a document's beginning would choose as if the
document ended there. Which modules do so is seen from what they return for the same positions in other rows, whatever
their kind is called. Three answers are possible:

- nothing depends on the row: almost all models;
- there are two sets of frequencies, one for rows up to a limit and one for longer ones: each token gets the set of its
  own document's whole length (:class:`RowRope`);
- beyond a limit the frequencies follow the length: exact up to that limit, for all documents.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from deepspeed_distca.compat.torch import copy_on_host
from deepspeed_distca.huggingface.decoders import UnsupportedModelError

_POSITIONS = "position_ids"
#: Beyond every length that models are made for, and still a whole number in fp32.
_FAR = 2**24 - 1
#: Numbers of axes that models have been seen to take: rows and columns, with time, with the text's.
_AXES = (2, 3, 4)


@dataclass(frozen=True)
class RowRule:
    """How a rotary module depends on the row.

    Attributes:
        layer_type: the argument of the module's forward for which this holds; None: it takes none.
        limit: rows of at most so many tokens have the same frequencies.
        two_sided: longer ones have another set, the same for all of them.
        axis: of tokens in what the module returns.
    """

    module: nn.Module
    layer_type: Any
    limit: int
    two_sided: bool
    axis: int

    @property
    def kind(self) -> str:
        """What the configuration calls it, if it does."""
        kinds = getattr(self.module, "rope_type", type(self.module).__name__)
        return kinds[self.layer_type] if isinstance(kinds, Mapping) else kinds


def row_rules(model: nn.Module) -> list[RowRule]:
    """The rotary modules of a model whose result for a position depends on other positions of the row.

    Looked at are modules without parameters that are given position ids. They are asked on the host, by a copy.

    Raises:
        UnsupportedModelError: one that depends on rows of any length, or one inside layers, where a recomputation
            would ask it again when the row's documents are forgotten.
    """
    return [
        rule
        for name, module in _rotary_modules(model)
        for layer_type in _layer_types(module)
        if (rule := _rule(model, name, module, layer_type)) is not None
    ]


@torch.no_grad()
def takes_axes(model: nn.Module) -> bool:
    """Whether a model may be given position ids of several axes, [axes, batch, tokens]: False where all its rotary
    modules are for one alone. Of a model without any it is not known, and True."""
    modules = [module for _, module in _rotary_modules(model)]
    return not modules or any(_takes_axes(module, kind) for module in modules for kind in _layer_types(module))


def longest_document(rules: list[RowRule]) -> int | None:
    """The longest document that is exact under these rules; None: any."""
    return min((rule.limit for rule in rules if not rule.two_sided), default=None)


class RowRope:
    """Has every token rotated by the frequencies of its own document, while a forward has a plan.

    Args:
        model: the decoder.

    Attributes:
        rules: of the modules that have two sets of frequencies, by layer type.

    Raises:
        UnsupportedModelError: see :func:`row_rules`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.rules: dict[nn.Module, dict[Any, RowRule]] = {}
        for rule in row_rules(model):
            if rule.two_sided:
                self.rules.setdefault(rule.module, {})[rule.layer_type] = rule
        self._lengths: np.ndarray | None = None
        self._handles = [m.register_forward_hook(self._after, with_kwargs=True) for m in self.rules]

    def begin(self, lengths: np.ndarray) -> None:
        """A planned forward begins.

        Args:
            lengths: how long the document of each token is as a whole, int64 [batch, tokens], wherever it is stored.
        """
        self._lengths = lengths

    def end(self) -> None:
        """It ended, or failed."""
        self._lengths = None

    def remove(self) -> None:
        """Leaves the modules as they were."""
        self.end()
        for handle in self._handles:
            handle.remove()

    def _after(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> Any:
        lengths = self._lengths
        if lengths is None or module not in self.rules:
            return None  # no planned forward, or a copy that brought this hook along
        signature = inspect.signature(module.forward)
        given = dict(signature.bind(*args, **kwargs).arguments)
        rule = self.rules[module].get(given.get("layer_type"))
        if rule is None or not (lengths > rule.limit).any():
            return None  # no position goes beyond the limit, so the module has chosen right
        positions = given[_POSITIONS]
        beyond = positions.new_full((*positions.shape[:-1], 1), rule.limit)
        tokens = positions.shape[-1]
        longer = module.forward(**{**given, _POSITIONS: torch.cat([positions, beyond], -1)})
        longer = _map(lambda t: t.narrow(rule.axis, 0, tokens), longer)
        which = torch.from_numpy(lengths > rule.limit)
        if which.all():
            return longer
        # Positions of short documents are below the limit, those of others need only be something.
        shorter = module.forward(**{**given, _POSITIONS: positions.clamp(max=rule.limit - 1)})
        which = (which.pin_memory() if positions.is_cuda else which).to(positions.device, non_blocking=True)

        def choose(long: torch.Tensor, short: torch.Tensor) -> torch.Tensor:
            return torch.where(which.view(*which.shape, *[1] * (long.ndim - rule.axis - 1)), long, short)

        return _map(choose, longer, shorter)


# ---------------------------------------------------------------------------------------------------------------
# Asking a module.


def _rotary_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules without parameters that are given position ids, with their names."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if not any(True for _ in module.parameters()) and _POSITIONS in _parameters(module)
    ]


def _takes_axes(module: nn.Module, layer_type: Any) -> bool:
    """Whether a module returns the same of a row with some number of axes as of one with one axis. Those that know of
    one alone return something for each, or fail."""
    row = (0, 1, 2, 3, 4)
    try:
        one = _ask(module, layer_type, row)
    except Exception:
        return True  # it wants other arguments: not known
    for axes in _AXES:
        with suppress(Exception):
            if [t.shape for t in _ask(module, layer_type, (row,) * axes)] == [t.shape for t in one]:
                return True
    return False


@torch.no_grad()
def _rule(model: nn.Module, name: str, module: nn.Module, layer_type: Any) -> RowRule | None:
    def row(longest: int, *before: int) -> list[torch.Tensor]:
        """Of a row, after rows with these longest positions."""
        return _ask(module, layer_type, *((0, 1, 0, 1, position) for position in (*before, longest)))

    try:
        near, far, alone = row(1), row(_FAR), _ask(module, layer_type, (1,))
    except Exception:
        # It wants other arguments, such as an image's grid, or looks its angles up in a table of some length, which
        # is the same for every row.
        return None
    axes = {tuple(i for i, size in enumerate(t.shape) if size == 5) for t in near}
    if len(axes) != 1 or len(of_positions := next(iter(axes))) != 1:
        return None
    (axis,) = of_positions

    def differ(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        pairs = zip(one, other, strict=True)
        return not all(torch.equal(a.narrow(axis, 0, 4), b.narrow(axis, 0, 4)) for a, b in pairs)

    def changes(longest: int) -> bool:
        """Whether such a row is not as the shortest one, or would not be after a long one, as in an evaluation."""
        return differ(near, row(longest)) or differ(near, row(longest, _FAR))

    # The longest row that is as the shortest one; 0: any is.
    limit = 0
    if differ(near, far):
        changed = next(p for p in (*(2**i for i in range(1, 24)), _FAR) if changes(p))
        limit = bisect_left(range(changed), True, lo=changed // 2, key=changes)
    full = f"{type(model).__name__}: {name} ({type(module).__name__})"
    pairs = zip(alone, near, strict=True)
    same_alone = all(torch.allclose(a.select(axis, 0), b.select(axis, 1), rtol=1e-4, atol=1e-5) for a, b in pairs)
    if not same_alone or 0 < limit < 4:
        raise _refused(f"{full} gives a token other frequencies when others are in its row")
    if not limit:
        return None
    beyond = row(limit)
    two_sided = not any(differ(beyond, row(p)) for p in (limit + 1, 2 * limit, 16 * limit, _FAR))
    parent = model.get_submodule(name.rpartition(".")[0])
    if two_sided and (axis < 1 or _in_a_layer(model, parent)):
        raise _refused(f"{full} chooses its frequencies by the longest position of a row, inside a layer")
    return RowRule(module, layer_type, limit, two_sided, axis)


def _refused(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what}, so that packed documents would change each other. Choose another rope_type, or set "
        "`distca.enabled` to false for this model"
    )


def _in_a_layer(model: nn.Module, parent: nn.Module) -> bool:
    """Whether a module is one of several of its kind: what is recomputed."""
    return sum(type(m) is type(parent) for m in model.modules()) > 1


def _ask(module: nn.Module, layer_type: Any, *rows: tuple[Any, ...]) -> list[torch.Tensor]:
    """What a fresh copy of a module, asked one after another, returns for the last row of positions, or for one row of
    each axis."""
    output, twin = None, copy_on_host(module)
    for positions in rows:
        given = torch.tensor(positions)
        arguments: dict[str, Any] = {_POSITIONS: given.unsqueeze(-2)}
        if "layer_type" in _parameters(module) and layer_type is not None:
            arguments["layer_type"] = layer_type
        first = next(iter(_parameters(module)))
        if first != _POSITIONS:
            arguments[first] = torch.zeros(1, given.shape[-1], 1)
        output = type(module).forward(twin, **arguments)
    return _tensors(output)


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """What a module's forward takes, beside itself."""
    parameters = inspect.signature(type(module).forward).parameters
    return dict(list(parameters.items())[1:])


def _layer_types(module: nn.Module) -> list[Any]:
    """For which kinds of layers a module may be asked; [None]: it makes no difference between them."""
    kinds = getattr(module, "rope_type", None)
    return list(kinds) if isinstance(kinds, Mapping) and "layer_type" in _parameters(module) else [None]


def _tensors(output: Any) -> list[torch.Tensor]:
    return [output] if torch.is_tensor(output) else [t for t in output if torch.is_tensor(t)]


def _map(function: Callable[..., torch.Tensor], *outputs: Any) -> Any:
    """An output whose :func:`_tensors` are made from those of one or several of its kind."""
    if torch.is_tensor(outputs[0]):
        return function(*outputs)
    parts = zip(*outputs, strict=True)
    return type(outputs[0])(function(*p) if torch.is_tensor(p[0]) else p[0] for p in parts)
