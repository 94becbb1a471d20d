# SPDX-License-Identifier: Apache-2.0
"""Numbers that somebody gave, in a call or a file: one check for all of them, and what a message shows of them."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np

_SHOWN = 80


def integer(name: str, value: Any, low: int, high: int, unit: str = "") -> int:
    """The value, where it is an integer in low..high and no bool.

    Raises:
        ValueError: it is not; the message names it and what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer >= {low} and <= {high}{unit}, got {shown(value)}")
    return int(value)


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
