# SPDX-License-Identifier: Apache-2.0
"""Layouts of the two length distributions of arXiv 2510.18121, sampled as its figures were.

The distributions lie beside this file as quantiles, with the published sampling: which documents are dropped, repeated
or stretched, and in which order. Documents are packed in that order into contexts, cut at context borders (what is cut
off is a new document), and contexts are laid over the servers, which hold equally many tokens each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_distca.layout import Layout, Segment

NAMES = ("pretrain", "prolong")
_LENGTH_MULTIPLE = 16


def document_lengths(name: str, context: int, shuffle: int | None = None) -> np.ndarray:
    """Lengths of the sampled documents in packing order, int64.

    Args:
        name: one of NAMES.
        context: tokens of a context, which the sampling depends on: 131072, 262144, 393216 or 524288.
        shuffle: seed of a random order in place of the published one.
    """
    given = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    how = given["as_published"]
    pool = _draw_pool(given)
    rng = np.random.default_rng(how["seed"])
    is_long = pool >= how["long_threshold"]
    long = np.tile(pool[is_long], how["upsample_long"])
    short = pool[~is_long]
    short = short[: int(len(short) * how["keep_short"])]
    if name == "pretrain":
        drawn = rng.choice(np.concatenate([short, long]), size=how["draw"], replace=False)
        documents = drawn * how["scale_all_lengths"][str(context)]
    else:
        replace = how["replace_long"]
        replaced = rng.random(len(long)) < replace["probability"]
        documents = np.concatenate([np.where(replaced, replace["length"][str(context)], long), short])
    if shuffle is not None:
        documents = np.random.default_rng(shuffle).permutation(documents)
    return -(-documents // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


def layouts(
    name: str,
    *,
    context: int,
    servers: int,
    tokens: int,
    batches: int,
    shuffle: int | None = None,
    head_tail: bool = False,
) -> Iterator[Layout]:
    """At most `batches` layouts, fewer where the documents do not last: consecutive contexts over `servers` ranks of
    `tokens` tokens.

    Args:
        head_tail: a document that passes a rank's end leaves a head and a mirrored tail piece there, not only a head.
    """
    contexts = _pack(document_lengths(name, context, shuffle).tolist(), context)
    per_batch = servers * tokens // context
    for batch in range(min(batches, len(contexts) // per_batch)):
        documents = [n for part in contexts[batch * per_batch : (batch + 1) * per_batch] for n in part]
        yield _spread(documents, servers, tokens, head_tail)


def _draw_pool(given: dict[str, Any]) -> np.ndarray:
    """Every document of the data set: lengths at the middles of equal shares of the distribution, in a fixed order."""
    count = given["documents"]
    share, length = np.array(given["quantiles"]).T
    lengths = np.exp(np.interp((np.arange(count) + 0.5) / count, share, np.log(length))).astype(np.int64)
    return np.random.default_rng(0).permutation(lengths)


def _pack(lengths: Sequence[int], context: int) -> list[list[int]]:
    """Full contexts of document lengths; the last one, if it is not full, is left out."""
    full, current, room = [], [], context
    for length in lengths:
        while length:
            part = min(length, room)
            current.append(part)
            length, room = length - part, room - part
            if not room:
                full.append(current)
                current, room = [], context
    return full


def _spread(documents: Sequence[int], servers: int, tokens: int, head_tail: bool) -> Layout:
    """Documents in order over ranks of `tokens` tokens each."""
    ranks: list[list[Segment]] = [[]]
    room = tokens
    for document, length in enumerate(documents):
        low, high = 0, length  # what is not placed yet
        while low < high:
            if not room:
                ranks.append([])
                room = tokens
            part = min(high - low, room)
            room -= part
            head = part // 2 if head_tail and part < length else part
            if head:
                ranks[-1].append(Segment(document, low, head))
            if part > head:
                ranks[-1].append(Segment(document, high - (part - head), part - head))
            low, high = low + head, high - (part - head)
    return Layout.from_ranks(ranks + [[]] * (servers - len(ranks)))
