# SPDX-License-Identifier: Apache-2.0
"""What servers have of documents while work is being moved: rows stored, keys to be received, queries computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deepspeed_distca.layout import PIECE_DOCUMENT, PIECE_END, PIECE_RANK, PIECE_START
from deepspeed_distca.scheduler.cost_model import key_start


class Holdings:
    """Row ranges by document and server, at first with everything computed at home.

    Documents go by numbers that only their geometry decides, not by their ids.
    """

    def __init__(self, pieces: np.ndarray, documents: Documents, window: int | None) -> None:
        """Args:
        pieces: see ``Layout.pieces``.
        documents: how they are numbered.
        window: keys a query sees, or None.
        """
        self._pieces, self._documents, self._window = pieces, documents, window
        # A document's state is made when it is first asked for: most documents stay where they are.
        self._homes: dict[int, list[int]] = {}
        self._servers: dict[int, list[int]] = {}
        self._stored: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._keys: dict[tuple[int, int], list[tuple[int, int]]] = {}
        # Which server computes the queries that end, and that begin, at a position.
        self._ends: dict[tuple[int, int], int] = {}
        self._begins: dict[tuple[int, int], int] = {}

    def is_whole(self, document: int) -> bool:
        """The document is one piece, of which nothing moved, and its state was not needed yet."""
        return document not in self._homes and document not in self._documents.several

    def homes(self, document: int) -> list[int]:
        """The ranks that store rows of a document, by position."""
        if document not in self._homes:
            if document not in self._documents.several:
                return [self._home(document)]
            self._enter(document)
        return self._homes[document]

    def servers(self, document: int) -> list[int]:
        """The servers that compute or once computed some of a document, in order of arrival."""
        return self._servers[document] if document in self._homes else self.homes(document)

    def touches(self, document: int, server: int, start: int, end: int) -> tuple[bool, bool]:
        """Whether the server computes queries that end where [start, end) begins, and that begin where it ends."""
        if document not in self._homes:
            if document not in self._documents.several and server != self._home(document):
                return False, False
            self._enter(document)
        return self._ends.get((document, start)) == server, self._begins.get((document, end)) == server

    def missing(self, document: int, server: int, start: int, end: int) -> int:
        """Key/value rows that queries [start, end) need and the server neither stores nor receives so far."""
        low, end = self._keys_of(document, start, end)
        if document not in self._homes:
            if document not in self._documents.several and server != self._home(document):
                return end - low
            self._enter(document)
        held = self._keys.get((document, server))
        if held is None:
            return end - low
        if self._window is None:
            return max(0, end - held[0][1])  # held is one range from 0, up to what was stored or received
        return _uncovered(low, end, sorted([*held, *self._stored.get((document, server), ())]))

    def move(self, document: int, giver: int, start: int, end: int, a: int, b: int, server: int) -> None:
        """Of queries [start, end), which `giver` computes, `server` computes [a, b) from now on."""
        if document not in self._homes:
            self._enter(document)
        if a > start:
            self._ends[document, a] = giver
        if b < end:
            self._begins[document, b] = giver
        self._compute(document, server, a, b)

    def _compute(self, document: int, server: int, start: int, end: int) -> None:
        self._begins[document, start] = server
        self._ends[document, end] = server
        pair, (low, end) = (document, server), self._keys_of(document, start, end)
        held = self._keys.get(pair)
        if held is None:
            self._keys[pair] = [(low, end)]
            self._servers[document].append(server)
        elif self._window is None:
            held[0] = (0, max(end, held[0][1]))
        else:
            held.append((low, end))

    def _keys_of(self, document: int, start: int, end: int) -> tuple[int, int]:
        """The keys that queries [start, end) need."""
        if document in self._documents.full:
            return 0, self._documents.full[document]
        return 0 if self._window is None else key_start(start, self._window), end

    def _home(self, document: int) -> int:
        """The rank of a document's first piece."""
        return int(self._pieces[self._documents.first[document], PIECE_RANK])

    def _enter(self, document: int) -> None:
        homes = self._homes[document] = []
        self._servers[document] = []
        first, count = int(self._documents.first[document]), self._documents.several.get(document, 1)
        for _, start, end, rank in self._pieces[first : first + count].tolist():
            self._stored.setdefault((document, rank), []).append((start, end))
            self._compute(document, rank, start, end)
            if rank not in homes:
                homes.append(rank)


class Documents(NamedTuple):
    """Documents by the numbers of :func:`number_documents`. In trees these are units (see ``units``): each with rows
    and keys of its own, though units of one tree may share them.

    Attributes:
        of_piece: int64 [num_pieces], the number of each piece's document.
        ids, first: int64 [num_documents], its id and the index of its first piece.
        several: how many pieces those have that have more than one.
        full: how many keys each query attends to, of full units (see ``units``); all others are causal.
    """

    of_piece: np.ndarray
    ids: np.ndarray
    first: np.ndarray
    several: dict[int, int]
    full: dict[int, int]


def number_documents(pieces: np.ndarray, full: Mapping[int, int] | None = None) -> Documents:
    """Numbers documents by where they lie: by the rank of their first piece, length, and all pieces.

    Args:
        pieces: see ``Layout.pieces``, or ``Units.pieces``: a unit counts as a document.
        full: see ``Units.full``.
    """
    of_piece, ids, first, several, _ = documents_in_order(pieces)
    length = pieces[np.append(first[1:], len(pieces)) - 1, PIECE_END]
    tie = np.zeros(len(first), dtype=np.int64)
    shapes = {i: pieces[first[i] : first[i] + count, PIECE_START:].tolist() for i, count in several.items()}
    for place, i in enumerate(sorted(shapes, key=shapes.__getitem__)):
        tie[i] = place + 1
    order = np.lexsort((tie, length, pieces[first, PIECE_RANK]))
    number = np.empty(len(first), dtype=np.int64)
    number[order] = np.arange(len(first))
    counts = {int(number[i]): count for i, count in several.items()}
    keys = {i: full[unit] for i, unit in enumerate(ids[order].tolist()) if unit in full} if full else {}
    return Documents(number[of_piece], ids[order], first[order], counts, keys)


def documents_in_order(pieces: np.ndarray) -> Documents:
    """Numbers documents by their ids, where these tell no more than where documents lie.

    Args:
        pieces: int64 [n, 4], sorted by the first column, the document.
    """
    document = pieces[:, PIECE_DOCUMENT]
    new = np.append(True, document[1:] != document[:-1])[: len(document)]
    first = np.flatnonzero(new)
    count = np.diff(np.append(first, len(document)))
    several = np.flatnonzero(count > 1)
    counts = dict(zip(several.tolist(), count[several].tolist(), strict=True))
    return Documents(np.cumsum(new) - 1, document[first], first, counts, {})


def _uncovered(low: int, high: int, ranges: list[tuple[int, int]]) -> int:
    """Rows of [low, high) in none of the ranges, which are sorted."""
    rows, reach = 0, low
    for x, y in ranges:
        if x >= high:
            break
        if x > reach:
            rows += x - reach
        reach = max(reach, y)
    return rows + max(0, high - reach)
