# SPDX-License-Identifier: Apache-2.0
"""Saved states of loaders: what comes back from a file is checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any


def check_version(state: Any, version: int, name: str) -> None:
    """Raises ValueError for a state with another version than this."""
    if isinstance(state, Mapping) and "version" in state and repr(plain(state["version"])) != repr(version):
        raise ValueError(
            f"{name}: expected version {version}, got {state['version']!r}; it was saved by another version of "
            "deepspeed_distca"
        )


def check_keys(state: Any, keys: Iterable[str], name: str) -> None:
    """Raises TypeError for a state that is no mapping, ValueError unless it has exactly these keys."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{name} must be what state_dict() returned, got {state!r:.80} ({type(state).__name__})")
    keys = list(keys)
    wrong = [(key, "missing") for key in keys if key not in state]
    wrong += [(key, "unknown") for key in state if key not in keys]
    if wrong:
        words = ", ".join(f"{key!r} is {what}" for key, what in wrong)
        raise ValueError(f"{name}: {words}; the keys are {keys}")


def plain(value: Any) -> Any:
    """Tuples as lists and NumPy's integers as Python's, as they may come back from a file."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
