# SPDX-License-Identifier: Apache-2.0
"""Documents out of whatever a dataset yields: token lists, padded rows, rows that are already flattened.

Everything becomes a list of :class:`Document`; nothing here knows how documents are packed. A document's boundaries
are read from ``layout``, ``cu_seqlens`` (in transformers ``cu_seq_lens_q`` and ``cu_seq_lens_k``), a mask that numbers
documents, ``seq_idx`` and ``position_ids``, which must agree; without any, a row is one document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deepspeed_distca.layout import LENGTH, START, Layout

_BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
_DESCRIPTIONS = ("layout", *_BOUNDARIES, "attention_mask", "seq_idx", "position_ids")

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


def read_documents(
    features: Mapping[str, Any] | Sequence[Mapping[str, Any]], ignore_index: int = -100
) -> list[Document]:
    """The documents of a list of features (or of one feature), in order; empty ones are left out.

    A feature is a mapping with ``input_ids`` and optionally ``labels``, ``attention_mask``, ``position_ids`` and other
    boundaries. Values are lists, NumPy arrays or torch tensors of integers, [length] or [rows, length].

    A mask is 0 on padding, which is left out, and 1 on tokens, or a number of its own for each document (1, 1, 2, 2,
    2, 0), as is ``seq_idx``. ``cu_seqlens`` are [documents + 1] or [1, documents + 1] over all rows, or a line for
    each row; the last value may be repeated, and padding behind it left out. Position ids start at 0 in a document.

    Raises:
        TypeError: features that are not mappings, or values that are not integers.
        ValueError: shapes that do not fit, boundaries that contradict each other, padding inside documents, negative
            token ids, labels that are negative and not `ignore_index`, shift_labels that are others than the labels.
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
        try:
            documents += _read_feature(feature, ignore_index)
        except (TypeError, ValueError) as error:
            raise type(error)(f"feature {index}: {error}") from None
    return documents


def _read_feature(feature: Mapping[str, Any], ignore_index: int) -> list[Document]:
    ids = _integers(feature["input_ids"], "input_ids")
    if ids.ndim not in (1, 2):
        raise ValueError(f"input_ids must be [tokens] or [rows, tokens], got shape {list(ids.shape)}")
    labels = _like_input_ids(feature, "labels", ids)
    shifted = _like_input_ids(feature, "shift_labels", ids)
    if labels is None and shifted is not None:
        raise ValueError(
            "shift_labels without labels; pass labels, unshifted and as long as input_ids: they are shifted "
            "here, inside each document"
        )
    found = []
    for start, stop in _find_documents(feature, ids):
        tokens = ids.ravel()[start:stop]
        document = Document(tokens, tokens if labels is None else labels.ravel()[start:stop])
        _check_values(document, ignore_index)
        if shifted is not None and not np.array_equal(shifted.ravel()[start : stop - 1], document.labels[1:]):
            raise ValueError(
                f"shift_labels are not the next token's labels in the document at token {start}; the targets "
                "are made from labels here, so leave shift_labels out, or make them agree"
            )
        found.append(document)
    return found


def _check_values(document: Document, ignore_index: int) -> None:
    if document.input_ids.min() < 0:
        raise ValueError(f"input_ids holds {document.input_ids.min()}; token ids are never negative")
    if document.labels is document.input_ids or document.labels.min() >= 0:
        return
    wrong = document.labels[(document.labels < 0) & (document.labels != ignore_index)]
    if wrong.size:
        raise ValueError(f"labels holds {wrong[0]}; a label is a token id, or {ignore_index} where there is no target")


def _find_documents(feature: Mapping[str, Any], ids: np.ndarray) -> list[tuple[int, int]]:
    """The first token of each document and the one behind its last, counted through all rows."""
    tokens = ids.shape[-1]
    if all(feature.get(key) is None for key in _DESCRIPTIONS):  # as most documents come
        return [(start, start + tokens) for start in range(0, ids.size, tokens)] if tokens else []
    mask, numbers, positions = (
        None if values is None else values.ravel()
        for values in (_like_input_ids(feature, key, ids) for key in ("attention_mask", "seq_idx", "position_ids"))
    )
    if mask is not None and mask.min(initial=0) < 0:
        raise ValueError(
            f"attention_mask holds {mask.min()}; allowed are 0 on padding, and 1, or a number for each document"
        )
    real = np.ones(ids.size, dtype=bool) if mask is None else mask != 0
    claims = _claims_of_boundaries(feature, ids, real)
    if not ids.size:
        return []
    if mask is not None and mask.max() > 1:
        claims["attention_mask"] = _claim_of_numbers(mask, real, tokens, "attention_mask")
    if numbers is not None:
        if numbers[real].min(initial=0) < 0:
            raise ValueError(
                f"seq_idx holds {numbers[real].min()} at a token; if that is padding, leave it out or give "
                "an attention_mask that is 0 there"
            )
        claims["seq_idx"] = _claim_of_numbers(numbers, real, tokens, "seq_idx")
    if positions is not None:
        claims["position_ids"] = _changes(positions - np.arange(ids.size), tokens)
    begins = _agreed(claims or {"its row": np.arange(ids.size) % tokens == 0}, real, tokens)
    starts = np.flatnonzero(begins & real)
    if positions is not None and positions[starts].any():
        bad = starts[positions[starts] != 0][0]
        raise ValueError(
            f"position_ids: the document at token {bad} begins at position {positions[bad]}, not 0; a piece "
            "of a document needs an explicit layout that names its document and start"
        )
    return [(start, start + length) for start, length in zip(starts.tolist(), _lengths(begins, real), strict=True)]


def _agreed(claims: Mapping[str, np.ndarray], real: np.ndarray, tokens: int) -> np.ndarray:
    """Where documents and padding begin, bool like each of the claims, which must say the same of real tokens."""
    edges = _changes(real, tokens)
    runs = np.flatnonzero(edges & real)
    for start in runs[1:][np.diff(runs // tokens) == 0].tolist():  # behind padding that is not a row's first
        for name, begins in claims.items():
            if not begins[start]:
                raise ValueError(
                    f"attention_mask has padding before token {start}, where by {name} a document goes on; "
                    "padding may stand before or behind a document's tokens, not as a hole among them; pass one "
                    "feature for each document, or tell them apart by position_ids or cu_seqlens"
                )
    (first, expected), *others = ((name, begins | edges) for name, begins in claims.items())
    for other, begins in others:
        if not np.array_equal(begins & real, expected & real):
            raise ValueError(
                f"by {first} the documents have lengths {_lengths(expected, real)[:8]}, by {other} "
                f"{_lengths(begins, real)[:8]}; they must agree, and position ids must start at 0 in every document "
                "and rise by one"
            )
    return expected


def _changes(values: np.ndarray, tokens: int) -> np.ndarray:
    """Where a value is not its left neighbour's, and where a row of so many tokens begins; bool, like the values."""
    begins = np.ones(values.size, dtype=bool)
    begins[1:] = values[1:] != values[:-1]
    begins[::tokens] = True
    return begins


def _lengths(begins: np.ndarray, real: np.ndarray) -> list[int]:
    """Lengths of the documents that are no padding; padding has been cut off them."""
    starts = np.flatnonzero(begins)
    return np.diff(starts, append=begins.size)[real[starts]].tolist()


def _claim_of_numbers(numbers: np.ndarray, real: np.ndarray, tokens: int, name: str) -> np.ndarray:
    """Where documents begin by numbers that tell them apart. One that comes back in its row is a document with a
    hole, or a mistake."""
    begins = _changes(numbers, tokens)
    starts = np.flatnonzero(begins & real)
    kinds, times = np.unique(np.stack([starts // tokens, numbers[starts]]), axis=1, return_counts=True)
    if (times > 1).any():
        raise ValueError(
            f"{name}: {kinds[1, times > 1][0]} comes back after another number; a document's tokens stand one after "
            "another, and every document of a row has a number of its own"
        )
    return begins


def _claims_of_boundaries(feature: Mapping[str, Any], ids: np.ndarray, real: np.ndarray) -> dict[str, np.ndarray]:
    """Where documents begin, bool [tokens of all rows], by the layout and each kind of cu_seqlens."""
    rows, tokens = np.atleast_2d(ids).shape
    claims = {}
    for key in ("layout", *_BOUNDARIES):
        given = feature.get(key)
        if given is None:
            continue
        if key == "layout":
            if not isinstance(given, Layout) or given.num_ranks != 1 or given.segments[:, START].any():
                raise ValueError(f"layout must be a Layout of one rank, whose documents are whole, got {given!r:.80}")
            given = np.append(0, np.cumsum(given.segments[:, LENGTH]))
        values = _integers(given, key)
        if values.ndim > 2 or (values.ndim == 2 and len(values) not in (1, rows)):
            raise ValueError(
                f"{key} must be [documents + 1], or a line of it for each row, got shape "
                f"{list(values.shape)} beside input_ids of {list(ids.shape)}"
            )
        if values.ndim == 2 and len(values) > 1:
            if not values.size or values[:, 0].any() or (values[:, -1] != tokens).any():
                raise ValueError(f"each line of {key} must go from 0 to the row's {tokens} tokens")
            values = np.append(0, (values + tokens * np.arange(rows)[:, None])[:, 1:])
        values = values.ravel()
        if values.size == 0 or values[0] != 0 or (np.diff(values) < 0).any():
            raise ValueError(f"{key} must start at 0 and never decrease, got {values.tolist()[:16]}")
        end = int(values[-1])
        if end > ids.size or real[end:].any():
            raise ValueError(
                f"{key} ends at [{end}], but input_ids has {ids.size} tokens; only padding, by an "
                "attention_mask, may stand behind the end"
            )
        claims[key] = np.bincount(values, minlength=ids.size + 1)[: ids.size] > 0
        firsts = slice(None, None, max(1, tokens))
        crossed = np.flatnonzero(~claims[key][firsts] & real[firsts])
        if len(crossed):
            raise ValueError(f"by {key} a document crosses the beginning of row {crossed[0]}; rows are apart")
    return claims


def _like_input_ids(feature: Mapping[str, Any], key: str, ids: np.ndarray) -> np.ndarray | None:
    if feature.get(key) is None:
        return None
    values = _integers(feature[key], key)
    if key == "position_ids" and values.ndim > 2:
        raise ValueError(
            f"position_ids has shape {list(values.shape)}; multi-axis (3-D) position ids are not supported: "
            f"pass one position for each token, of shape {list(ids.shape)}"
        )
    if ids.ndim + values.ndim == 3 and values.size == ids.size and 1 in (len(values), len(ids)):
        values = values.reshape(ids.shape)  # one row, written as [tokens] here and as [1, tokens] there
    if values.shape != ids.shape:
        raise ValueError(f"{key} has shape {list(values.shape)}, input_ids {list(ids.shape)}; they must agree")
    return values


def _integers(values: Any, key: str) -> np.ndarray:
    """int64 copy-free where possible, of a list, an array or a tensor on any device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{key} is a ragged list; pass one feature for each document") from None
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype == bool and key == "attention_mask":
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{key} must hold integers, got {array.dtype} ({str(values)[:60]})")
    return array.astype(np.int64, copy=False)
