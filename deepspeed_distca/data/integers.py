# SPDX-License-Identifier: Apache-2.0
"""Whole numbers out of lists, arrays and tensors, wherever these lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepspeed_distca.layout import LayoutError


def on_host(value: Any) -> bool:
    """Whether it can be read without waiting for a device."""
    return getattr(getattr(value, "device", None), "type", "cpu") == "cpu"


def integers(name: str, given: Any) -> np.ndarray:
    """int64 of a list, an array or a tensor; one on a device is waited for.

    Raises:
        LayoutError: ragged, or no whole numbers.
    """
    values = given.detach().cpu().numpy() if hasattr(given, "detach") else given
    try:
        values = np.asarray(values)
    except ValueError:
        raise LayoutError(f"{name} is a ragged list; give one of whole numbers") from None
    if values.dtype == bool and name == "attention_mask":
        return values.astype(np.int64)
    if values.size and values.dtype.kind not in "iu":
        hint = " (1 on tokens, 0 on padding)" if name == "attention_mask" else ""
        raise LayoutError(f"{name} must hold integers{hint}, got {values.dtype}")
    return values.astype(np.int64, copy=False)


def like_tokens(name: str, given: Any, rows: int, tokens: int) -> np.ndarray:
    """int64 [rows * tokens] of numbers for each token, [rows, tokens], or [tokens] of a single row.

    Raises:
        LayoutError: another shape, or no whole numbers.
    """
    values = integers(name, given)
    if values.shape == (tokens,) and rows == 1:
        values = values[None]
    if values.shape != (rows, tokens):
        raise LayoutError(f"{name} has shape {list(values.shape)}, but the batch has {rows} x {tokens} tokens")
    return values.ravel()
