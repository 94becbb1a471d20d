# SPDX-License-Identifier: Apache-2.0
"""Packing for one rank: which documents share a row, so that rows have (nearly) the same number of tokens; the rows as
a dataset, and the order in which ranks read them.

A pure function of lengths, budget and seed, so that every rank computes the same rows without talking to the others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple

import numpy as np
from torch.utils.data import Dataset, Sampler

from deepspeed_distca.data.checks import one_of
from deepspeed_distca.given import integer, integers

Overflow = Literal["error", "split", "drop"]


class Piece(NamedTuple):
    """Tokens [start, start + length) of a document; a whole document where it fits into a row."""

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class Packing:
    """Rows of pieces, and what became of the documents that are longer than a row.

    Attributes:
        rows: the pieces of each row, at most ``max_tokens`` tokens together; no row is empty.
        max_tokens: the budget they were packed for.
        split_documents: documents that were cut; every piece is a document of its own.
        dropped_documents: documents that were left out, and ``dropped_tokens`` their tokens.
    """

    rows: tuple[tuple[Piece, ...], ...]
    max_tokens: int
    split_documents: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return sum(piece.length for row in self.rows for piece in row)

    @property
    def fill(self) -> float:
        """Share of the budget that holds tokens, 1.0 when every row is full."""
        return self.tokens / (len(self.rows) * self.max_tokens) if self.rows else 1.0


@dataclass
class PackingCounts:
    """What packing has done so far.

    Attributes:
        documents, tokens: that were packed; a document that was cut counts once.
        packs: that hold them; unfilled_tokens is the room that was left in them.
        cut_documents: cut at a pack's end because no whole documents filled it exactly.
        split_documents: longer than a pack, and cut for that.
        dropped_documents, dropped_tokens: longer than a pack, and left out; or of an incomplete last step that was.
        empty_documents: without tokens, and left out.
    """

    documents: int = 0
    tokens: int = 0
    packs: int = 0
    unfilled_tokens: int = 0
    cut_documents: int = 0
    split_documents: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    empty_documents: int = 0


def cut(length: int, most: int) -> list[tuple[int, int]]:
    """(start, length) of the pieces that a document of ``length`` tokens is cut into, the last one the shortest."""
    return [(start, min(most, length - start)) for start in range(0, length, most)]


def pieces_of(
    documents: Iterable[tuple[int, int]], most: int, overflow: Overflow, counts: PackingCounts, limit: str
) -> Iterator[Piece]:
    """Documents, given as (document, length), after the overflow policy; empty ones are left out.

    Raises:
        ValueError: more tokens than `most` with "error"; `limit` says there what to change.
    """
    for document, length in documents:
        if 0 < length <= most:
            counts.documents += 1
            yield Piece(document, 0, length)
        elif length == 0:
            counts.empty_documents += 1
        elif overflow == "error":
            raise ValueError(f'document {document} has {length} tokens, {limit}, or choose overflow="split" or "drop"')
        elif overflow == "drop":
            counts.dropped_documents += 1
            counts.dropped_tokens += length
        else:
            counts.documents += 1
            counts.split_documents += 1
            yield from (Piece(document, start, tokens) for start, tokens in cut(length, most))


def pack_documents(
    lengths: Sequence[int] | np.ndarray, max_tokens: int, *, overflow: Overflow = "split", seed: int | None = None
) -> Packing:
    """Packs documents of the given lengths into rows of at most ``max_tokens`` tokens.

    Best fit: each piece goes into the fullest row that still has room for it, in the order of the documents, or in
    an order shuffled by ``seed``. Empty documents are left out. Documents longer than a row are, by ``overflow``,
    cut into pieces ("split"), left out and counted ("drop"), or refused ("error").

    Raises:
        ValueError: a budget below 1, lengths that are negative or no integers, an unknown policy, or a
            document that is too long ("error").
    """
    one_of("overflow", overflow, Overflow)
    integer("max_tokens", max_tokens, 1)
    lengths = integers("lengths", lengths, 0)
    order = np.arange(len(lengths)) if seed is None else np.random.default_rng(seed).permutation(len(lengths))
    documents = ((document, lengths[document]) for document in order.tolist())
    counts, limit = PackingCounts(), f"a row at most {max_tokens}; raise max_tokens"
    rows: list[list[Piece]] = []
    # Rows that are not full: perhaps as many as documents, but of no more kinds than a row has tokens.
    rooms: list[int] = []  # sorted
    with_room: dict[int, list[int]] = defaultdict(list)  # rows by their room, heaps
    for piece in pieces_of(documents, max_tokens, overflow, counts, limit):
        found = bisect_left(rooms, piece.length)
        if found < len(rooms):
            room = rooms[found]
            row = heappop(with_room[room])
            if not with_room[room]:
                del rooms[found]
        else:
            room, row = max_tokens, len(rows)
            rows.append([])
        rows[row].append(piece)
        room -= piece.length
        if room:
            if not with_room[room]:
                insort(rooms, room)
            heappush(with_room[room], row)
    dropped = counts.dropped_documents, counts.dropped_tokens
    return Packing(tuple(map(tuple, rows)), max_tokens, counts.split_documents, *dropped)


class PackedRows(Dataset):
    """The rows of a packing as lists of features, for a loader with ``batch_size=None``.

    Args:
        documents: the token ids of each document, or a feature for each: a mapping with "input_ids" and perhaps
            "labels".
        packing: of the documents' lengths, from :func:`deepspeed_distca.data.pack_documents`.
    """

    def __init__(self, documents: Sequence[Any], packing: Packing) -> None:
        self.documents = documents
        self.packing = packing

    def __len__(self) -> int:
        return len(self.packing.rows)

    def __getitem__(self, row: int) -> list[dict[str, Any]]:
        features = []
        for document, start, length in self.packing.rows[row]:
            feature = self.documents[document]
            if not isinstance(feature, Mapping):
                feature = {"input_ids": feature}
            features.append(
                {key: feature[key][start : start + length] for key in ("input_ids", "labels") if key in feature}
            )
        return features


class RowSampler(Sampler[int]):
    """The rows that one rank reads.

    The order is one endless stream, the same on every rank: epoch after epoch, each a shuffle of all rows. Rank r of R
    reads every R-th row of it. So all ranks read equally many rows, every row is read once an epoch, and a run
    resumes, on any number of ranks, from the number of rows that were read.

    Args:
        num_rows: rows of the dataset.
        rank, num_ranks: which of how many readers this is.
        micro_batches: how many rows to read; may exceed an epoch.
        seed: of the shuffles.
        start: rows that all ranks together have read before: 0, or where a run resumes: as many as the steps took that
            were taken whole.

    Raises:
        ValueError: no rows, a rank that does not exist, or other numbers below 0 or that are no integers.
    """

    def __init__(
        self, num_rows: int, *, rank: int, num_ranks: int, micro_batches: int, seed: int = 0, start: int = 0
    ) -> None:
        self.num_rows = integer("num_rows", num_rows)
        if num_rows < 1:
            raise ValueError("there are no rows to read: the dataset is empty")
        self.num_ranks = integer("num_ranks", num_ranks, 1)
        self.rank = integer("rank", rank, 0, self.num_ranks - 1)
        self.micro_batches, self.start = integer("micro_batches", micro_batches), integer("start", start)
        self.seed = integer("seed", seed)

    def __len__(self) -> int:
        return self.micro_batches

    def __iter__(self) -> Iterator[int]:
        epoch, order = -1, np.zeros(0, dtype=np.int64)
        for index in range(self.micro_batches):
            position = self.start + index * self.num_ranks + self.rank
            if position // self.num_rows != epoch:
                epoch = position // self.num_rows
                order = np.random.default_rng((self.seed, epoch)).permutation(self.num_rows)
            yield int(order[position % self.num_rows])
