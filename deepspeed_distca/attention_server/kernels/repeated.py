# SPDX-License-Identifier: Apache-2.0
"""Calls of a library's function that differ in nothing but where their tensors lie.

flash-attention 4 finds out in hundreds of lines of Python what it launches and in what memory, anew in each of a
model's layers, which takes a small step's host longer than the launches do. So the first call of a batch of tasks is
recorded: what tensors the library makes, what it launches, and with which of them. Calls of the other layers repeat
just that.

The library is left as it is. Its functions are copied, with a namespace of their own: there torch's makers are those
of ``borrowed``, so that a side stream's memory can be lent, and the caches through which the library launches its
compiled kernels (attributes ``compile_cache``) tell what they give. A recorded call is repeated only if

- every tensor of its launches was given or made, and is told from all others by its place,
- and the same launches were tried out once, in small, on tensors of their own: repeated with NaN in all memory that is
  made for them, they gave what the library itself gives.

Any other call is left to the library, and so is every one if a version of it works in another way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from deepspeed_distca.attention_server import borrowed

logger = logging.getLogger(__name__)

#: The makers of tensors that a library's functions get in the place of torch's.
_MAKERS = ("empty", "empty_like", "zeros", "zeros_like")
#: Alignment in bytes of all tensors of a call that is repeated: others a library may have to copy first.
_ALIGNED = 16
#: Relative error, in norm, of results in 16 bits that are computed twice, in any order.
_NEAR = 1e-2


class Call(NamedTuple):
    """Arguments of a library's function, and those of them that it writes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[torch.Tensor, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, torch.Tensor)]


class _Make(NamedTuple):
    """A tensor is made."""

    maker: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Launch(NamedTuple):
    """A compiled kernel is launched; `tensors` says which tensors, given or made, are at which places of `args`."""

    kernel: Callable[..., Any]
    args: list[Any]
    tensors: list[tuple[int, int]]


@dataclass(frozen=True)
class Program:
    """What a call does."""

    steps: list[_Make | _Launch]

    @property
    def structure(self) -> tuple[Any, ...]:
        """The same for calls that do the same with other tensors."""
        return tuple(
            (step.maker,) if isinstance(step, _Make) else (id(step.kernel), *step.tensors) for step in self.steps
        )

    def run(self, given: Sequence[torch.Tensor], *, poisoned: bool = False) -> None:
        """Does it with the tensors of another call.

        Args:
            poisoned: what is made without a value is not a number, or 0.
        """
        tensors = [t.detach() if t.requires_grad else t for t in given]
        for step in self.steps:
            if isinstance(step, _Make):
                made = step.maker(*step.args, **step.kwargs)
                if poisoned and step.maker in (borrowed.empty, borrowed.empty_like):
                    made.fill_(torch.nan if made.is_floating_point() else 0)
                tensors.append(made)
                continue
            args = step.args.copy()
            for place, tensor in step.tensors:
                args[place] = tensors[tensor]
            step.kernel(*args)


#: Of the calls of one batch of tasks; None: not to be repeated.
Programs = dict[tuple[Any, ...], Program | None]


def no_programs(batch: object) -> Programs:
    """For ``TaskBatch.once``."""
    return {}


class _Here(threading.local):
    #: What a call that is being recorded does: makers with what they made, kernels with their arguments.
    steps: list[tuple[Any, ...]] | None = None


_here = _Here()


class Repeated:
    """A function of a library whose calls are repeated where that is known to be the same.

    Args:
        function: returns nothing that is needed beside the tensors that it is given to write.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = _copied(function)
        self._tried: dict[tuple[Any, ...], bool] = {}  # by structure

    def __call__(self, call: Call, programs: Programs, example: Callable[[], Call]) -> None:
        """Calls the function, or repeats a call of it.

        Args:
            programs: of the batch.
            example: makes a call like this one with few rows and random values, other ones each time.
        """
        given = call.tensors
        if not isinstance(self._function, FunctionType) or not all(map(_is_plain, given)):
            self._function(*call.args, **call.kwargs)
            return
        key = self, *(_alike(x) for x in call.args), *(_alike(x) for x in call.kwargs.values())
        if key not in programs:
            program = self._record(call)
            programs[key] = program if program is not None and self._is_known(program, example) else None
        elif (program := programs[key]) is not None:
            program.run(given)
        else:
            self._function(*call.args, **call.kwargs)

    def _record(self, call: Call) -> Program | None:
        """Calls the function, and finds what it does; None where that cannot be told."""
        _here.steps = []
        try:
            self._function(*call.args, **call.kwargs)
            return _program(call.tensors, _here.steps)
        finally:
            _here.steps = None

    def _is_known(self, program: Program, example: Callable[[], Call]) -> bool:
        """Whether programs like this one do what the library does."""
        structure = program.structure
        if structure not in self._tried:
            try:
                self._tried[structure] = self._try_out(structure, example)
            except Exception as error:  # whatever it is: the library's own way is left
                logger.debug("distca: calls of %s are not repeated: %s", self._function, error)
                self._tried[structure] = False
        return self._tried[structure]

    @torch.no_grad()
    def _try_out(self, structure: tuple[Any, ...], example: Callable[[], Call]) -> bool:
        """Waits for the device, on the current stream. All that is made is lent, if anything is: no other stream is to
        hold memory. What the stream waits for is under way, since ranks dispatch a layer's rows before they serve."""
        program, other = self._record(example()), example()
        if program is None or program.structure != structure:
            return False
        self._function(*other.args, **other.kwargs)
        expected = [borrowed.empty_like(result).copy_(result) for result in other.results]
        for result in other.results:
            result.fill_(torch.nan)
        program.run(other.tensors, poisoned=True)
        return all(
            float(_wide(got).sub_(wanted).norm()) <= _NEAR * float(_wide(wanted).norm())
            for got, wanted in zip(other.results, expected, strict=True)
        )


def _wide(x: torch.Tensor) -> torch.Tensor:
    return borrowed.empty_like(x, dtype=torch.float32).copy_(x)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNED == 0


def _alike(x: Any) -> Any:
    """What of an argument must be the same in calls that are alike."""
    return (x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor) else x


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _program(given: list[torch.Tensor], recorded: list[tuple[Any, ...]]) -> Program | None:
    """Of what was recorded of a call with these tensors."""
    places = {_place(tensor): number for number, tensor in enumerate(given)}
    number, steps = len(given), list[_Make | _Launch]()
    if len(places) < number:
        return None  # one tensor in two arguments' places: the next call may have two
    for what, args, kwargs, made in recorded:
        if made is not None:
            places[_place(made)] = number
            number += 1
            steps.append(_Make(what, args, kwargs))
            continue
        if kwargs:
            return None
        at = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
        others = [x for i, x in enumerate(args) if i not in at]
        if not all(_place(args[i]) in places for i in at) or not all(map(_is_constant, others)):
            return None
        tensors = [(i, places[_place(args[i])]) for i in at]
        steps.append(_Launch(what, [None if i in at else x for i, x in enumerate(args)], tensors))
    return Program(steps) if any(isinstance(step, _Launch) for step in steps) else None


def _is_constant(x: Any) -> bool:
    if isinstance(x, tuple | list):
        return all(map(_is_constant, x))
    return x is None or isinstance(x, bool | int | float | str)


def _copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose namespace is a copy of its module's: there torch's makers are recorded, and so are the
    launches of all functions that keep compiled kernels.

    One that is none of plain Python's, or does not know torch by that name, is given back as it is.
    """
    names = getattr(function, "__globals__", {})
    if not isinstance(function, FunctionType) or names.get("torch") is not torch:
        return function
    mine = ModuleType("torch")
    mine.__dict__.update(torch.__dict__, **{name: _recorded(getattr(borrowed, name)) for name in _MAKERS})
    namespace: dict[str, Any] = {**names, "torch": mine}

    def copy(original: FunctionType) -> FunctionType:
        made = FunctionType(
            original.__code__, namespace, original.__name__, original.__defaults__, original.__closure__
        )
        made.__kwdefaults__ = original.__kwdefaults__
        made.__dict__.update(original.__dict__)
        if hasattr(original, "compile_cache"):
            made.compile_cache = _Kernels(original.compile_cache)  # type: ignore[attr-defined]
        return made

    for name, value in names.items():
        if isinstance(value, FunctionType) and value.__globals__ is names and hasattr(value, "compile_cache"):
            namespace[name] = copy(value)
    return copy(function)


def _recorded(maker: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = maker(*args, **kwargs)
        if _here.steps is not None:
            _here.steps.append((maker, args, kwargs, tensor))
        return tensor

    return make


class _Kernels:
    """A library's cache of compiled kernels, whose launches are recorded."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        kernel = self._cache[key]
        return kernel if _here.steps is None else partial(_launch, kernel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _launch(kernel: Callable[..., Any], *args: Any, **kwargs: Mapping[str, Any]) -> Any:
    steps = _here.steps
    assert steps is not None
    steps.append((kernel, args, kwargs, None))
    return kernel(*args, **kwargs)
