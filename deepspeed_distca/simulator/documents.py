# SPDX-License-Identifier: Apache-2.0
"""Micro-batches of documents whose lengths are known, packed as people pack them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from deepspeed_distca.layout import Layout


def micro_batches(
    lengths: np.ndarray, ranks: int, tokens: int, count: int, seed: int, context: int | None = None
) -> Iterator[Layout]:
    """Documents in random order, one behind another into contexts; what a context's end cuts off is a document of its
    own in the next one. As many micro-batches as the documents fill, or `count`.

    Args:
        lengths: of the documents, int64 [n], all positive.
        tokens: of each rank.
        context: tokens of a context, of one rank or of several that follow on each other; None is a rank's.
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    ends, size = np.cumsum(lengths[order]), ranks * tokens
    for batch in range(min(count, int(ends[-1]) // size if len(ends) else 0)):
        low = batch * size
        inside = ends[np.searchsorted(ends, low, side="right") : np.searchsorted(ends, low + size)] - low
        documents = np.union1d(inside, np.arange(0, size, context or tokens))  # where they begin
        begin = np.union1d(documents, np.arange(0, size, tokens))
        document = np.searchsorted(documents, begin, side="right") - 1
        columns = begin // tokens, document, begin - documents[document], np.diff(begin, append=size)
        yield Layout(np.stack(columns, axis=1), ranks)


def too_few(lengths: np.ndarray, ranks: int, tokens: int) -> ValueError:
    """Documents that do not fill a micro-batch."""
    return ValueError(
        f"the {len(lengths)} documents have {int(lengths.sum())} tokens, a micro-batch of {ranks} ranks with "
        f"{tokens} each needs {ranks * tokens}; give more documents, fewer ranks or fewer tokens"
    )


def described(lengths: np.ndarray) -> dict[str, int]:
    """Their number, tokens, median, the length below which nine of ten are, and the longest."""
    median, most = np.percentile(lengths, [50, 90]).astype(int).tolist()
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "median": median,
        "nine_of_ten_below": most,
        "longest": int(lengths.max()),
    }


def in_words(documents: dict[str, int]) -> str:
    """One line of what :func:`described` found."""
    return (
        "{documents:,} documents, {tokens:,} tokens: half of them up to {median:,}, nine of ten up to "
        "{nine_of_ten_below:,}, the longest {longest:,}".format_map(documents)
    )
