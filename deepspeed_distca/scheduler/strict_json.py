# SPDX-License-Identifier: Apache-2.0
"""JSON as the command line and stored cost models read it: a repeated key is an error, not the last one's value."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str) -> Any:
    """What the text says.

    Raises:
        ValueError: it is no JSON, repeats a key, or is nested too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is repeated")
    return out
