# SPDX-License-Identifier: Apache-2.0
"""What servers have of documents while work is being moved: rows stored, keys to be received, queries computed."""

from __future__ import annotations

import numpy as np

from deepspeed_distca.scheduler.cost_model import key_start
from deepspeed_distca.scheduler.tasks import PIECE_DOCUMENT, PIECE_END, PIECE_RANK, PIECE_START


class Holdings:
    """Row ranges by document and server, at first with everything computed at home.

    Documents go by numbers that only their geometry decides, not by their ids.
    """

    def __init__(self, pieces: np.ndarray, window: int | None) -> None:
        """Args:
        pieces: see ``home_pieces``.
        window: keys a query sees, or None.
        """
        self._window = window
        #: The number of each piece's document [num_pieces], and the id of each number.
        self.document, self.ids, self._first = number_documents(pieces)
        self._pieces = pieces.tolist()
        # A document's state is made when it is first asked for: most documents stay where they are.
        self._homes: dict[int, list[int]] = {}
        self._servers: dict[int, list[int]] = {}
        self._stored: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._keys: dict[tuple[int, int], list[tuple[int, int]]] = {}
        # Which server computes the queries that end, and that begin, at a position.
        self._ends: dict[tuple[int, int], int] = {}
        self._begins: dict[tuple[int, int], int] = {}

    def is_whole(self, document: int) -> bool:
        """The document is one piece, and neither moved nor asked for yet."""
        i = self._first[document]
        if document in self._homes:
            return False
        return i + 1 == len(self._pieces) or self._pieces[i + 1][PIECE_DOCUMENT] != self._pieces[i][PIECE_DOCUMENT]

    def homes(self, document: int) -> list[int]:
        """The ranks that store rows of a document, by position."""
        if document not in self._homes:
            self._enter(document)
        return self._homes[document]

    def servers(self, document: int) -> list[int]:
        """The servers that compute or once computed some of a document, in order of arrival."""
        if document not in self._homes:
            self._enter(document)
        return self._servers[document]

    def touches(self, document: int, server: int, start: int, end: int) -> tuple[bool, bool]:
        """Whether the server computes queries that end where [start, end) begins, and that begin where it ends."""
        if document not in self._homes:
            self._enter(document)
        return self._ends.get((document, start)) == server, self._begins.get((document, end)) == server

    def missing(self, document: int, server: int, start: int, end: int) -> int:
        """Key/value rows that queries [start, end) need and the server neither stores nor receives so far."""
        if document not in self._homes:
            self._enter(document)
        low = key_start(start, self._window)
        held = self._keys.get((document, server))
        if held is None:
            return end - low
        if self._window is None:
            return max(0, end - held[0][1])  # held is one range from 0, up to what was stored or received
        return _uncovered(low, end, sorted([*held, *self._stored.get((document, server), ())]))

    def move(self, document: int, giver: int, start: int, end: int, a: int, b: int, server: int) -> None:
        """Of queries [start, end), which `giver` computes, `server` computes [a, b) from now on."""
        if a > start:
            self._ends[document, a] = giver
        if b < end:
            self._begins[document, b] = giver
        self._compute(document, server, a, b)

    def _compute(self, document: int, server: int, start: int, end: int) -> None:
        self._begins[document, start] = server
        self._ends[document, end] = server
        pair, low = (document, server), key_start(start, self._window)
        held = self._keys.get(pair)
        if held is None:
            self._keys[pair] = [(low, end)]
            self._servers[document].append(server)
        elif self._window is None:
            held[0] = (0, max(end, held[0][1]))
        else:
            held.append((low, end))

    def _enter(self, document: int) -> None:
        homes = self._homes[document] = []
        self._servers[document] = []
        i = self._first[document]
        name = self._pieces[i][PIECE_DOCUMENT]
        while i < len(self._pieces) and self._pieces[i][PIECE_DOCUMENT] == name:
            start, end, rank = (self._pieces[i][c] for c in (PIECE_START, PIECE_END, PIECE_RANK))
            self._stored.setdefault((document, rank), []).append((start, end))
            self._compute(document, rank, start, end)
            if rank not in homes:
                homes.append(rank)
            i += 1


def number_documents(pieces: np.ndarray) -> tuple[np.ndarray, list[int], list[int]]:
    """Numbers documents by where they lie: by the rank of their first piece, length, and all pieces.

    Returns:
        The number of each piece's document [num_pieces]; the id, and the index of the first piece, of each number.
    """
    document = pieces[:, PIECE_DOCUMENT]
    first = np.flatnonzero(np.append(True, document[1:] != document[:-1]))
    count = np.diff(np.append(first, len(document)))
    length = pieces[first + count - 1, PIECE_END]
    tie = np.zeros(len(first), dtype=np.int64)
    several = np.flatnonzero(count > 1)
    shapes = [pieces[first[i] : first[i] + count[i], PIECE_START:].tolist() for i in several.tolist()]
    for place, i in enumerate(sorted(range(len(several)), key=shapes.__getitem__)):
        tie[several[i]] = place + 1
    order = np.lexsort((tie, length, pieces[first, PIECE_RANK]))
    number = np.empty(len(first), dtype=np.int64)
    number[order] = np.arange(len(first))
    return np.repeat(number, count), document[first[order]].tolist(), first[order].tolist()


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
