# SPDX-License-Identifier: Apache-2.0
"""Documents out of whatever a dataset yields: token lists, padded rows, rows that are already flattened.

Everything becomes a list of :class:`Document`; nothing here knows how documents are packed. A document's boundaries
are read from ``cu_seqlens`` (in transformers ``cu_seq_lens_q`` and ``cu_seq_lens_k``), ``position_ids`` and
``seq_idx``, which must agree; without any, a row is one document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deepspeed_distca.layout import LENGTH, Layout, LayoutError

_BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")

#: Keys of a feature that are understood, the collator's own output among them; it reports that others are ignored.
KNOWN_KEYS = frozenset(
    {"input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "seq_idx", "layout"}
    | {"max_seqlen", "max_length_q", "max_length_k", "num_targets", "step_targets"}
    | set(_BOUNDARIES)
)


class Document(NamedTuple):
    """One document: token ids and the label of every token (unshifted), both int64 [length]."""

    input_ids: np.ndarray
    labels: np.ndarray


def read_documents(features: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Document]:
    """The documents of a list of features (or of one feature), in order; empty ones are left out.

    A feature is a mapping with ``input_ids`` and optionally ``labels``, ``attention_mask`` (1 on tokens, 0 on
    padding before or behind them; padding is stripped), ``position_ids`` and boundaries. Values are lists, NumPy
    arrays or torch tensors of integers, [length] or [rows, length].

    Raises:
        TypeError: features that are not mappings, or values that are not integers.
        ValueError: shapes that do not fit, boundaries that contradict each other, masks with holes.
    """
    if isinstance(features, Mapping):
        features = [features]
    if isinstance(features, str | bytes) or not isinstance(features, Sequence):
        raise TypeError(
            f'expected a list of features like [{{"input_ids": [...]}}, ...], got {type(features).__name__}'
        )
    documents = []
    for index, feature in enumerate(features):
        if not isinstance(feature, Mapping) or "input_ids" not in feature:
            what = f"the keys {sorted(map(str, feature))}" if isinstance(feature, Mapping) else repr(feature)[:80]
            raise TypeError(f'feature {index}: expected a mapping with "input_ids", got {what}')
        documents += _read_feature(feature, f"feature {index}")
    return documents


def _read_feature(feature: Mapping[str, Any], where: str) -> list[Document]:
    ids = _integers(feature["input_ids"], "input_ids", where)
    if ids.ndim not in (1, 2):
        raise ValueError(f"{where}: input_ids must be [tokens] or [rows, tokens], got shape {list(ids.shape)}")
    labels = _like_input_ids(feature, "labels", ids, where)
    if labels is None and feature.get("shift_labels") is not None:
        raise ValueError(
            f"{where}: shift_labels without labels; pass labels, unshifted and as long as input_ids: they are shifted "
            "here, inside each document"
        )
    mask = _like_input_ids(feature, "attention_mask", ids, where)
    positions = _like_input_ids(feature, "position_ids", ids, where)
    sequence = _like_input_ids(feature, "seq_idx", ids, where)
    boundaries = _read_boundaries(feature, ids, where)
    documents = []
    for row in range(len(np.atleast_2d(ids))):
        columns = [None if a is None else np.atleast_2d(a)[row] for a in (ids, labels, positions, sequence)]
        if mask is not None:
            kept = _unpadded(np.atleast_2d(mask)[row], where)
            if boundaries is not None and kept != slice(0, len(columns[0])):
                raise ValueError(
                    f"{where}: attention_mask marks padding in a row whose boundaries are given by cu_seqlens; "
                    "leave the padding out of the row and of cu_seqlens"
                )
            columns = [None if a is None else a[kept] for a in columns]
        row_ids, row_labels, row_positions, row_sequence = columns
        row_labels = row_ids if row_labels is None else row_labels
        start = 0
        for length in _lengths(len(row_ids), boundaries, row_positions, row_sequence, where):
            documents.append(Document(row_ids[start : start + length], row_labels[start : start + length]))
            start += length
    return documents


def _lengths(
    tokens: int, boundaries: np.ndarray | None, positions: np.ndarray | None, sequence: np.ndarray | None, where: str
) -> list[int]:
    """Lengths of the documents in one row, from every source there is."""
    if not tokens:
        return []
    found: dict[str, list[int]] = {}
    try:
        if boundaries is not None:
            found["cu_seqlens"] = Layout.from_cu_seqlens(boundaries).segments[:, LENGTH].tolist()
        if positions is not None:
            found["position_ids"] = Layout.from_position_ids(positions).segments[:, LENGTH].tolist()
    except LayoutError as error:
        raise ValueError(f"{where}: {error}") from None
    if sequence is not None:
        starts = np.flatnonzero(np.diff(sequence, prepend=sequence[0] - 1))
        found["seq_idx"] = np.diff(starts, append=tokens).tolist()
    (first, lengths), *others = found.items() or [("row", [tokens])]
    for other, lengths_there in others:
        if lengths_there != lengths:
            raise ValueError(
                f"{where}: by {first} the documents have lengths {lengths[:8]}, by {other} {lengths_there[:8]}; they "
                "must agree, and position ids must start at 0 in every document and rise by one"
            )
    return lengths


def _read_boundaries(feature: Mapping[str, Any], ids: np.ndarray, where: str) -> np.ndarray | None:
    found = {key: _integers(feature[key], key, where).ravel() for key in _BOUNDARIES if feature.get(key) is not None}
    if not found:
        return None
    first, *others = found
    for other in others:
        if not np.array_equal(found[first], found[other]):
            raise ValueError(
                f"{where}: {first} and {other} differ ({found[first].tolist()[:8]} and {found[other].tolist()[:8]}); "
                "queries and keys of a training row have the same boundaries"
            )
    if ids.ndim == 2 and len(ids) != 1:
        raise ValueError(
            f"{where}: {first} describes one packed row, but input_ids has shape {list(ids.shape)}; pass one feature "
            "for each row"
        )
    boundaries = found[first]
    if boundaries.size == 0 or boundaries[-1] != ids.size:
        raise ValueError(f"{where}: {first} ends at {boundaries[-1:].tolist()}, but input_ids has {ids.size} tokens")
    return boundaries


def _unpadded(mask: np.ndarray, where: str) -> slice:
    ones = np.flatnonzero(mask)
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            f"{where}: attention_mask must be 1 on tokens and 0 on padding, got {np.unique(mask).tolist()[:8]}; "
            "documents of one row are told apart by position_ids or cu_seqlens"
        )
    if ones.size == 0:
        return slice(0, 0)
    kept = slice(int(ones[0]), int(ones[-1]) + 1)
    if kept.stop - kept.start != ones.size:
        raise ValueError(
            f"{where}: attention_mask has a hole: padding may stand before or behind a document's tokens, not among "
            "them; pass one feature for each document"
        )
    return kept


def _like_input_ids(feature: Mapping[str, Any], key: str, ids: np.ndarray, where: str) -> np.ndarray | None:
    if feature.get(key) is None:
        return None
    values = _integers(feature[key], key, where)
    if key == "position_ids" and values.ndim > 2:
        raise ValueError(
            f"{where}: position_ids has shape {list(values.shape)}; multi-axis (3-D) position ids are not supported: "
            f"pass one position for each token, of shape {list(ids.shape)}"
        )
    if ids.ndim + values.ndim == 3 and values.size == ids.size and 1 in (len(values), len(ids)):
        values = values.reshape(ids.shape)  # one row, written as [tokens] here and as [1, tokens] there
    if values.shape != ids.shape:
        raise ValueError(
            f"{where}: {key} has shape {list(values.shape)}, input_ids {list(ids.shape)}; they must agree"
        )
    return values


def _integers(values: Any, key: str, where: str) -> np.ndarray:
    """int64 copy-free where possible, of a list, an array or a tensor on any device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{where}: {key} is a ragged list; pass one feature for each document") from None
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype == bool and key == "attention_mask":
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{where}: {key} must hold integers, got {array.dtype} ({str(values)[:60]})")
    return array.astype(np.int64, copy=False)
