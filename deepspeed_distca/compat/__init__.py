# SPDX-License-Identifier: Apache-2.0
"""Names of other libraries that are not public: one function each, by library, and used nowhere else in the package.

A version of the library that nobody has tried may have lost them. So each function says which names it is made of, and
:func:`check` looks for them before anything depends on them: when the plugin is attached, or when what needs them is
asked for. It imports nothing of the package, and a library only where its names are used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, TypeVar

#: Versions with which every name was tried or, where it says so below, found in the library's source.
#: Run: torch 2.11.0, 2.13.0 and 2.14.1, and all of the others. Read: torch 2.12.0.
TRIED = {
    "torch": ("2.11.0", "2.12.0", "2.13.0", "2.14.1"),
    "deepspeed": ("0.19.8",),
    "transformers": ("5.17.0", "5.24.0"),
    "datasets": ("5.2.0",),
}

Need = Literal["engine", "pipeline", "zero_3", "ping_pong_zero_3", "peer_copy", "torch_varlen", "datasets"]

#: What needs a name, in words, and how to go on without it.
_NEEDS: dict[Need, tuple[str, str]] = {
    "engine": ("every engine with a `distca` block needs", "set `distca.enabled` to false"),
    "pipeline": ("pipeline stages need", "set `distca.enabled` to false"),
    "zero_3": ("ZeRO stage 3 needs", "use another stage"),
    "ping_pong_zero_3": ('`distca.overlap` "ping_pong" under ZeRO stage 3 needs', 'set it to "local_first"'),
    "peer_copy": ('`distca.advanced.exchange` "peer_copy" needs', 'set it to "nccl"'),
    "torch_varlen": ('`distca.kernel` "torch_varlen" needs', "choose another kernel"),
    "datasets": ("reading a Dataset of the datasets library needs", "give documents as a list of dicts"),
}

F = TypeVar("F", bound=Callable[..., Any])


class CompatError(RuntimeError):
    """The installed version of a library lacks a name that is not public and that is needed; the message names the
    library, its version, the name, the versions that were tried, and what to do."""


class Private(NamedTuple):
    """What a function of this package is made of.

    Attributes:
        names: each as a path, "torch.Tensor._version", or, for what only instances have, as a module and a text in
            its source, "torch.nn.modules.module: _buffers".
        need: what they are needed for.
    """

    names: tuple[str, ...]
    need: Need


def private(*names: str, need: Need = "engine") -> Callable[[F], F]:
    """Notes on a function which names it is made of: see :class:`Private`."""

    def note(function: F) -> F:
        noted: Any = function
        noted.private = Private(names, need)
        return function

    return note


def functions() -> Iterator[tuple[Callable[..., Any], Private]]:
    """All functions of this package, and what each is made of."""
    for library in TRIED:
        for _, function in inspect.getmembers(importlib.import_module(f"{__name__}.{library}"), inspect.isfunction):
            if hasattr(function, "private"):
                yield function, function.private


def check(*needs: Need) -> None:
    """Looks for all names that something needs.

    Raises:
        CompatError: some are not there.
    """
    problems = []
    for need in needs:
        found = {name for _, noted in functions() if noted.need == need for name in noted.names}
        for library in TRIED:
            gone = sorted(name for name in found if name.startswith(f"{library}.") and not _is_there(name))
            if gone:
                problems.append(_problem(library, gone, need))
    if problems:
        raise CompatError("; ".join(problems))


def _is_there(name: str) -> bool:
    module, _, text = name.partition(": ")
    if text:
        try:
            spec = find_spec(module)
            loader: Any = spec and spec.loader  # those of files know the source
            return spec is not None and text in (loader.get_source(module) or text)
        except ImportError:
            return False
    path = name.split(".")
    found: Any = importlib.import_module(path[0])
    for end, part in enumerate(path[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(path[:end]))
            except ImportError:
                return False
    return True


def _problem(library: str, gone: list[str], need: Need) -> str:
    who, otherwise = _NEEDS[need]
    tried = TRIED[library]
    versions = f"{', '.join(tried[:-1])} and {tried[-1]}" if len(tried) > 1 else tried[0]
    version = getattr(importlib.import_module(library), "__version__", "of unknown version")
    return (
        f"{library} {version} has no {' and no '.join(f'`{name}`' for name in gone)}, which is not public and which "
        f"{who}; tried with {library} {versions}: install one of these "
        f'(pip install "{library}=={tried[-1]}"), or {otherwise}'
    )
