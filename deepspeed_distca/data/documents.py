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

from deepspeed_distca.data import packed_params
from deepspeed_distca.data.claims import (
    DESCRIPTIONS,
    begins_of_cumulative,
    changes,
    descriptions_of,
    read_claims,
)
from deepspeed_distca.data.from_layout import IGNORE_INDEX
from deepspeed_distca.data.integers import integers, like_tokens
from deepspeed_distca.layout import LENGTH, START, Layout, LayoutError

#: Keys of a feature that are understood, the collator's own output among them; it reports that others are ignored.
KNOWN_KEYS = frozenset(
    {"input_ids", "labels", "shift_labels", "layout", "seq_lengths", *DESCRIPTIONS, packed_params.NAME}
    | {"max_seqlen", "max_length_q", "max_length_k", "num_targets", "step_targets"}
)
#: One feature, or several in order.
Features = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Document(NamedTuple):
    """One document: token ids and the label of every token (unshifted), both int64 [length]."""

    input_ids: np.ndarray
    labels: np.ndarray


def read_documents(features: Features, ignore_index: int = IGNORE_INDEX) -> list[Document]:
    """The documents of a list of features (or of one feature), in order; empty ones are left out.

    A feature is a mapping with ``input_ids`` and optionally ``labels``, ``attention_mask``, ``position_ids`` and other
    boundaries. Values are lists, NumPy arrays or torch tensors of integers, [length] or [rows, length].

    A mask is 0 on padding, which is left out, and 1 on tokens, or a number of its own for each document (1, 1, 2, 2,
    2, 0), as is ``seq_idx``. ``cu_seqlens`` are [documents + 1] or [1, documents + 1] over all rows, or a line for
    each row; the last value may be repeated, and padding behind it left out. Position ids start at 0 in a document.

    Raises:
        TypeError: features that are not mappings.
        ValueError: values that are not integers, shapes that do not fit, boundaries that contradict each other,
            padding inside documents, negative token ids, labels that are negative and not `ignore_index`,
            shift_labels that are others than the labels.
    """
    documents = []
    for index, feature in enumerate(listed(features)):
        try:
            documents += read_feature(feature, ignore_index)
        except (TypeError, ValueError) as error:
            raise type(error)(f"feature {index}: {error}") from None
    return documents


def listed(features: Features) -> Sequence[Mapping[str, Any]]:
    """One feature as a list of it.

    Raises:
        TypeError: something else than one or a list of them.
    """
    if isinstance(features, Mapping):
        return [features]
    if isinstance(features, str | bytes) or not isinstance(features, Sequence):
        raise TypeError(
            f'expected a list of features like [{{"input_ids": [...]}}, ...], got {type(features).__name__}'
        )
    return features


def read_feature(feature: Mapping[str, Any], ignore_index: int = IGNORE_INDEX) -> list[Document]:
    """The documents of one feature: see :func:`read_documents`, whose errors say which feature it was."""
    if not isinstance(feature, Mapping) or "input_ids" not in feature:
        what = f"the keys {sorted(map(str, feature))}" if isinstance(feature, Mapping) else repr(feature)[:80]
        raise TypeError(f'expected a mapping with "input_ids", got {what}')
    ids = integers("input_ids", feature["input_ids"])
    if ids.ndim not in (1, 2):
        raise ValueError(f"input_ids must be [tokens] or [rows, tokens], got shape {list(ids.shape)}")
    labels, shifted = (
        None if feature.get(key) is None else like_tokens(key, feature[key], *np.atleast_2d(ids).shape)
        for key in ("labels", "shift_labels")
    )
    if labels is None and shifted is not None:
        raise ValueError(
            "shift_labels without labels; pass labels, unshifted and as long as input_ids: they are shifted "
            "here, inside each document"
        )
    found = []
    for start, stop in _find_documents(feature, ids):
        tokens = ids.ravel()[start:stop]
        document = Document(tokens, tokens if labels is None else labels[start:stop])
        _check_values(document, ignore_index)
        if shifted is not None and not np.array_equal(shifted[start : stop - 1], document.labels[1:]):
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


def _cumulative(lengths: Any, tokens: int) -> np.ndarray:
    """Of the documents' lengths, as TRL's packed datasets have them."""
    values = integers("seq_lengths", lengths)
    if values.ndim != 1 or (values < 0).any() or values.sum() != tokens:
        raise LayoutError(
            f"seq_lengths must be the lengths of a row's documents, {tokens} tokens together, got "
            f"{values.tolist()[:8]} of shape {list(values.shape)}"
        )
    return np.append(0, np.cumsum(values))


def _find_documents(feature: Mapping[str, Any], ids: np.ndarray) -> list[tuple[int, int]]:
    """The first token of each document and the one behind its last, counted through all rows; without padding."""
    rows, tokens = np.atleast_2d(ids).shape
    said, layout, claim = descriptions_of(feature), feature.get("layout"), None
    if feature.get("seq_lengths") is not None:
        said["seq_lengths"] = _cumulative(feature["seq_lengths"], ids.size)
    if not said and layout is None:  # as most documents come
        return [(start, start + tokens) for start in range(0, ids.size, tokens)] if tokens else []
    shape = np.shape(said.get("position_ids", 0))
    if len(shape) > 2:
        raise ValueError(
            f"position_ids has shape {list(shape)}; multi-axis position ids are not packed: pass one position for "
            f"each token, of shape {list(ids.shape)}"
        )
    if layout is not None:
        if not isinstance(layout, Layout) or layout.num_ranks != 1 or layout.segments[:, START].any():
            raise ValueError(f"layout must be a Layout of one rank, whose documents are whole, got {layout!r:.80}")
        if layout.has_trees:
            raise ValueError("layout has trees, of which no documents can be read; give the texts themselves")
        ends = np.append(0, np.cumsum(layout.segments[:, LENGTH]))
        everything = np.ones(ids.size, dtype=bool)
        claim = np.where(begins_of_cumulative("layout", ends, rows, tokens, everything), 0, -1)
    begins, real, _ = read_claims(said, rows, tokens, claim)
    starts = np.flatnonzero(begins & real)
    ends = np.flatnonzero(begins | changes(real, tokens))
    lengths = np.diff(ends, append=ids.size)[real[ends]]
    return [(start, start + length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
