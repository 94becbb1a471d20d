# SPDX-License-Identifier: Apache-2.0
"""The packed-sequence collator: documents in, one row for ``engine(**batch)`` out.

It owns the boundaries of documents: labels are shifted inside each document here, before anything is cut, so that
no later stage has to guess where a document ends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from deepspeed_distca.data.documents import KNOWN_KEYS, Document, read_documents
from deepspeed_distca.data.packing import Overflow, check_overflow, cut
from deepspeed_distca.layout import Layout

logger = logging.getLogger(__name__)

Features = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Fit(NamedTuple):
    """The documents of a row after the overflow policy, and what it did."""

    documents: list[Document]
    split_documents: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0


class PackedSequenceCollator:
    """Packs documents into one row without padding.

    Args:
        max_tokens: the budget; None for no limit.
        overflow: what becomes of documents that exceed it.
            "error": a row of more than ``max_tokens`` tokens is refused.
            "drop": a document that does not fit into what is left of the row is left out whole; later documents that
            do fit are still taken.
            "split": a document longer than ``max_tokens`` is cut into pieces of at most that many tokens, each a
            document of its own that attends to nothing before it. No token is lost, so the row has as many tokens as
            it was given: hand over rows made by :func:`deepspeed_distca.data.pack_documents` to bound it as well.
            What was dropped or split is logged, and :meth:`fit` gives the counts for any features.
        ignore_index: the label of a token that has no loss, in what is given and in what is returned.

    The batch:

    ==============  =======================================================================================
    input_ids       int64 [1, tokens], the documents one after another
    labels          int64 [1, tokens], HuggingFace style: unshifted, ``ignore_index`` on every first token
    shift_labels    int64 [1, tokens], the target of each position: the label of the next token of the same
                    document, ``ignore_index`` on its last one. HuggingFace models use it as it is
    position_ids    int64 [1, tokens], from 0 in every document
    cu_seqlens      int32 [documents + 1], where documents start, and the end
    max_seqlen      int, the longest document
    layout          :class:`deepspeed_distca.layout.Layout` of one rank
    num_targets     int, positions that have a target
    ==============  =======================================================================================

    Features are what :func:`deepspeed_distca.data.documents.read_documents` takes: lists, arrays or tensors, padded
    or already flattened by transformers' ``DataCollatorWithFlattening``. No features at all give a row of no tokens,
    for a rank that has nothing of its own to train on.

    Stateless and free of communication: it may run in data-loader workers, ahead of time, and be skipped on resume.
    """

    def __init__(
        self, max_tokens: int | None = None, overflow: Overflow = "error", *, ignore_index: int = -100
    ) -> None:
        check_overflow(max_tokens, overflow)
        self.max_tokens = max_tokens
        self.overflow = overflow
        self.ignore_index = int(ignore_index)
        self._reported: set[str] = set()  # of messages only; no batch depends on it

    def __call__(self, features: Features) -> dict[str, Any]:
        """One row of the given documents.

        Raises:
            TypeError, ValueError: features that cannot be read, or a row over budget with ``overflow="error"``.
        """
        fit = self.fit(features)
        self._report_overflow(fit)
        self._report_unknown(features)
        lengths = [len(document.input_ids) for document in fit.documents]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        starts = cu_seqlens[:-1]
        input_ids = _concatenate([document.input_ids for document in fit.documents])
        labels = _concatenate([document.labels for document in fit.documents])
        labels[starts] = self.ignore_index
        # The last token of a document meets the next one's first label, which has just been masked: no target.
        shift_labels = np.append(labels[1:], np.full(min(1, len(labels)), self.ignore_index))
        position_ids = np.arange(len(input_ids)) - np.repeat(starts, lengths)
        return {
            "input_ids": _row(input_ids),
            "labels": _row(labels),
            "shift_labels": _row(shift_labels),
            "position_ids": _row(position_ids),
            "cu_seqlens": torch.from_numpy(cu_seqlens.astype(np.int32)),
            "max_seqlen": max(lengths, default=0),
            "layout": Layout.from_lengths([lengths]),
            "num_targets": int((shift_labels != self.ignore_index).sum()),
        }

    def fit(self, features: Features) -> Fit:
        """The documents that a row of these features will hold, and the counts of what was split and dropped."""
        documents = read_documents(features, self.ignore_index)
        if self.max_tokens is None:
            return Fit(documents)
        if self.overflow == "split":
            return _split(documents, self.max_tokens)
        if self.overflow == "drop":
            return _drop(documents, self.max_tokens)
        tokens = sum(len(document.input_ids) for document in documents)
        if tokens > self.max_tokens:
            longest = max(len(document.input_ids) for document in documents)
            raise ValueError(
                f"a row of {tokens} tokens (the longest of its {len(documents)} documents has {longest}) exceeds "
                f"max_tokens={self.max_tokens}; put fewer documents into it, raise max_tokens, or choose "
                'overflow="split" or "drop"'
            )
        return Fit(documents)

    def _report_overflow(self, fit: Fit) -> None:
        if fit.dropped_documents:
            self._report(
                "drop",
                f"{fit.dropped_documents} documents ({fit.dropped_tokens} tokens) did not fit into a row of "
                f"{self.max_tokens} tokens and were dropped",
            )
        if fit.split_documents:
            self._report(
                "split",
                f"{fit.split_documents} documents longer than {self.max_tokens} tokens were split; each piece is a "
                f"document of its own, and the row has {sum(len(d.input_ids) for d in fit.documents)} tokens",
            )

    def _report_unknown(self, features: Features) -> None:
        features = [features] if isinstance(features, Mapping) else features
        unknown = sorted({str(key) for feature in features for key in feature if key not in KNOWN_KEYS})
        if unknown:
            self._report(f"unknown {unknown}", f"these keys of the features are ignored: {', '.join(unknown)}")

    def _report(self, kind: str, message: str) -> None:
        """A warning the first time, information after that: a long run repeats it with every batch."""
        logger.log(
            logging.INFO if kind in self._reported else logging.WARNING, "packed-sequence collator: %s", message
        )
        self._reported.add(kind)


def _split(documents: list[Document], max_tokens: int) -> Fit:
    pieces, split = [], 0
    for document in documents:
        cuts = cut(len(document.input_ids), max_tokens)
        split += len(cuts) > 1
        pieces += [Document(*(column[start : start + n] for column in document)) for start, n in cuts]
    return Fit(pieces, split_documents=split)


def _drop(documents: list[Document], max_tokens: int) -> Fit:
    kept, room, dropped, dropped_tokens = [], max_tokens, 0, 0
    for document in documents:
        length = len(document.input_ids)
        if length <= room:
            kept.append(document)
            room -= length
        else:
            dropped, dropped_tokens = dropped + 1, dropped_tokens + length
    return Fit(kept, dropped_documents=dropped, dropped_tokens=dropped_tokens)


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    """A fresh array, so that what the dataset holds is never written to."""
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _row(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))[None]
