# SPDX-License-Identifier: Apache-2.0
"""The packed-sequence collator: documents in, one row for ``engine(**batch)`` out.

It owns the boundaries of documents: targets are made inside each of them, before anything is cut.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from deepspeed_distca.data.checks import one_of
from deepspeed_distca.data.documents import KNOWN_KEYS, Document, Features, listed, read_documents
from deepspeed_distca.data.from_layout import IGNORE_INDEX, ROWS, batch_from_layout
from deepspeed_distca.data.packing import Overflow, cut
from deepspeed_distca.given import integer
from deepspeed_distca.layout import Layout

logger = logging.getLogger(__name__)


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
        self, max_tokens: int | None = None, overflow: Overflow = "error", *, ignore_index: int = IGNORE_INDEX
    ) -> None:
        one_of("overflow", overflow, Overflow)
        self.max_tokens = None if max_tokens is None else integer("max_tokens", max_tokens, 1)
        self.overflow = overflow
        self.ignore_index = int(ignore_index)
        self._reported: set[str] = set()  # of messages only; no batch depends on it

    def __call__(self, features: Features) -> dict[str, Any]:
        """One row of the given documents.

        Raises:
            TypeError, ValueError: features that cannot be read, or a row over budget with ``overflow="error"``.
        """
        fit = self.fit(features)
        lengths = [len(document.input_ids) for document in fit.documents]
        self._report_all(features, fit, sum(lengths))
        ids, labels = ({i: document[column] for i, document in enumerate(fit.documents)} for column in (0, 1))
        batch = batch_from_layout(ids, Layout.from_lengths([lengths]), 0, labels, ignore_index=self.ignore_index)
        return {
            **{key: batch[key] for key in ROWS},
            "cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            "max_seqlen": max(lengths, default=0),
            **batch,
        }

    def fit(self, features: Features) -> Fit:
        """The documents that a row of these features will hold, and the counts of what was split and dropped."""
        documents = read_documents(features, self.ignore_index)
        if self.max_tokens is None:
            return Fit(documents)
        lengths = [len(document.input_ids) for document in documents]
        if self.overflow == "error" and sum(lengths) > self.max_tokens:
            raise ValueError(
                f"a row of {sum(lengths)} tokens (the longest of its {len(documents)} documents has {max(lengths)}) "
                f"exceeds max_tokens={self.max_tokens}; put fewer documents into it, raise max_tokens, or choose "
                'overflow="split" or "drop"'
            )
        found: list[Document] = []
        split = dropped = dropped_tokens = 0
        room = self.max_tokens
        for document, length in zip(documents, lengths, strict=True):
            if self.overflow == "drop" and length > room:
                dropped, dropped_tokens = dropped + 1, dropped_tokens + length
                continue
            room -= length
            cuts = cut(length, self.max_tokens)
            split += len(cuts) > 1
            found += [Document(*(column[start : start + n] for column in document)) for start, n in cuts]
        return Fit(found, split, dropped, dropped_tokens)

    def _report_all(self, features: Features, fit: Fit, tokens: int) -> None:
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
                f"document of its own, and the row has {tokens} tokens",
            )
        unknown = sorted({str(key) for feature in listed(features) for key in feature if key not in KNOWN_KEYS})
        if unknown:
            self._report(f"unknown {unknown}", f"these keys of the features are ignored: {', '.join(unknown)}")

    def _report(self, kind: str, message: str) -> None:
        """A warning the first time, information after that: a long run repeats it with every batch."""
        logger.log(
            logging.INFO if kind in self._reported else logging.WARNING, "packed-sequence collator: %s", message
        )
        self._reported.add(kind)
