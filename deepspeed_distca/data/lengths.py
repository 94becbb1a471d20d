# SPDX-License-Identifier: Apache-2.0
"""Lengths of documents, out of the files in which people have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_distca.data.sources import ArrowDocuments
from deepspeed_distca.scheduler.strict_json import loads

#: Of the tokens of all documents, which are counted in int64.
_LIMIT = 2**63


def read_lengths(path: Path, column: str | None = None) -> np.ndarray:
    """Lengths of documents, int64 [n]; empty ones are left out.

    Args:
        path: a JSON list of lengths; JSON lines, a Parquet file or a folder of ``datasets.save_to_disk``, whose column
            holds lengths, or lists of tokens.
        column: "length" where there is one, else "input_ids".

    Raises:
        OSError, ValueError, TypeError: what cannot be read.
    """
    if path.is_dir() or path.suffix == ".parquet":
        values = _read_dataset(path, column)
    elif path.suffix == ".jsonl":
        lines = path.read_text(encoding="utf-8").splitlines()
        values = np.array([_length(line, column, n + 1) for n, line in enumerate(lines) if line.strip()])
    else:
        given = read_json(path.read_text(encoding="utf-8"), str(path))
        if not isinstance(given, list) or not all(type(n) is int for n in given):
            raise ValueError(f"{path}: expected a JSON list of lengths, [812, 65536, ...]")
        values = np.array(given)
    if values.size and (values.dtype.kind not in "iu" or int(values.min()) < 0 or values.sum(dtype=float) >= _LIMIT):
        raise ValueError(f"{path}: lengths must be whole numbers from 0 on, below 2^63 together")
    values = values.astype(np.int64)
    if not values.any():
        raise ValueError(f"{path}: no document has a token")
    return values[values > 0]


def read_json(text: str, where: str) -> Any:
    """A JSON text; `where` it stands is said in errors.

    Raises:
        ValueError: it is not valid.
    """
    try:
        return loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None


def _length(text: str, column: str | None, line: int) -> int:
    given = read_json(text, f"line {line}")
    if isinstance(given, dict):
        key = column or ("length" if "length" in given else "input_ids")
        if key not in given:
            raise ValueError(f"line {line} has no {key!r}, but {sorted(given)[:8]}; name a column by --column")
        given = given[key]
    if isinstance(given, list):
        return len(given)
    if type(given) is not int:
        raise ValueError(f"line {line}: expected a length or a list of tokens, got {type(given).__name__}")
    return given


def _read_dataset(path: Path, column: str | None) -> np.ndarray:
    import datasets

    data = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.Dataset.from_parquet(str(path))
    if isinstance(data, dict):
        raise ValueError(f"{path} has the splits {sorted(data)}; give the folder of one of them")
    column = column or ("length" if "length" in data.column_names else "input_ids")
    if column not in data.column_names:
        raise ValueError(f"{path} has the columns {data.column_names}, but no {column!r}; name one by --column")
    if hasattr(data.features[column], "feature"):
        lists = data.select_columns([column])
        return ArrowDocuments(lists if column == "input_ids" else lists.rename_column(column, "input_ids")).lengths
    return np.asarray(data.with_format("numpy")[column][:])
