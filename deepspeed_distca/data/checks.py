# SPDX-License-Identifier: Apache-2.0
"""Checks of what callers say, and of loaders' states that come back from a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, get_args


def one_of(name: str, value: Any, literal: Any) -> None:
    """Raises ValueError for a value that is not one of a ``Literal``."""
    allowed = get_args(literal)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_state(state: Any, keys: Iterable[str], name: str, version: int | None = None) -> None:
    """Raises TypeError for a state that is no mapping, ValueError unless it has this version and just these keys."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{name} must be what state_dict() returned, got {state!r:.80} ({type(state).__name__})")
    if version is not None and "version" in state and repr(plain(state["version"])) != repr(version):
        raise ValueError(
            f"{name}: expected version {version}, got {state['version']!r}; it was saved by another version of "
            "deepspeed_distca"
        )
    keys = list(keys)
    wrong = [f"{key!r} is missing" for key in keys if key not in state]
    wrong += [f"{key!r} is unknown" for key in state if key not in keys]
    if wrong:
        raise ValueError(f"{name}: {', '.join(wrong)}; the keys are {keys}")


def plain(value: Any) -> Any:
    """Tuples as lists and NumPy's integers as Python's, as they may come back from a file."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
