# SPDX-License-Identifier: Apache-2.0
"""Numbers that somebody gave, in a call or a file: one check for all of them, and what a message shows of them."""

from __future__ import annotations

import sys
from math import isfinite
from typing import Any

import numpy as np

_SHOWN = 80


def integer(name: str, value: Any, low: int = 0, high: int | None = None, unit: str = "") -> int:
    """The value as Python's, where it is an integer of low..high, of Python or NumPy, and no bool.

    Raises:
        ValueError: it is not; the message names it and what is allowed.
    """
    most = sys.maxsize if high is None else high
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= most:
        allowed = f">= {low}{unit}" if high is None else f">= {low} and <= {high}{unit}"
        raise ValueError(f"{name} must be an integer {allowed}, got {shown(value)}")
    return int(value)


def integers(name: str, values: Any, low: int | None = None) -> list[int]:
    """A sequence or an array of integers as Python's.

    Raises:
        ValueError: values of another type, which are not rounded, or below `low`.
    """
    array = np.asarray(values).ravel()
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, got {shown(values)} ({array.dtype})")
    if low is not None and array.size and array.min() < low:
        raise ValueError(f"{name} must be at least {low}, got {array.min()}")
    return array.tolist()


def number(name: str, value: Any, low: float, high: float) -> float:
    """The value, where it is a finite number in low..high and no bool.

    Raises:
        ValueError: as for :func:`integer`.
    """
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not real or not low <= value <= high or not isfinite(value):
        raise ValueError(f"{name} must be a finite number >= {low} and <= {high}, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """`repr`, cut where it is long, also of what has none: an integer of very many digits, lists nested too deep."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a very large {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
