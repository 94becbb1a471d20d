# SPDX-License-Identifier: Apache-2.0
"""Saved states of loaders and the numbers in batches: what comes back from a file or from others is checked."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import numpy as np


def whole_number(value: Any, name: str, low: int = 0, high: int | None = None) -> int:
    """`value` as an int, of Python or NumPy.

    Raises:
        TypeError: a bool, a float, or anything else that is no integer.
        ValueError: below `low` or above `high`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
    number = int(value)
    high = sys.maxsize if high is None else high
    if not low <= number <= high:
        allowed = f"at least {low}" if number < low and high == sys.maxsize else f"in {low}..{high}"
        # Python refuses to write integers of very many digits.
        shown = number if abs(number).bit_length() < 256 else f"an integer of {number.bit_length()} bits"
        raise ValueError(f"{name} must be {allowed}, got {shown}")
    return number


def whole_numbers(values: Any, name: str) -> list[int]:
    """A sequence or an array of integers as Python's.

    Raises:
        TypeError: values of another type; they are not rounded.
    """
    array = np.asarray(values).ravel()
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be whole numbers, got {array.dtype} ({str(values)[:60]})")
    return array.tolist()


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
