# SPDX-License-Identifier: Apache-2.0
"""Documents that are trees, by their branches: see :class:`~.layout.Layout`. Plain NumPy and Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from deepspeed_distca.given import shown

#: Columns of ``Layout.branches``; BRANCH_START and BRANCH_LENGTH are rows of the document.
BRANCH_DOCUMENT, BRANCH_START, BRANCH_LENGTH, BRANCH_PARENT = range(4)

#: Columns of ``Layout.contexts``.
CONTEXT_DOCUMENT, CONTEXT_START, CONTEXT_LENGTH, CONTEXT_RANK, CONTEXT_ROW = range(5)

#: A branch of a tree: first row, rows, and the first row of its parent, -1 for none.
Branch = tuple[int, int, int]


class LayoutError(ValueError):
    """A layout that no plan can be made for; the message says what was given and what is allowed."""


def by_document(branches: np.ndarray) -> dict[int, list[Branch]]:
    """The branches of each tree, from ``Layout.branches``."""
    found: dict[int, list[Branch]] = {}
    for document, start, length, parent in branches.tolist():
        found.setdefault(document, []).append((start, length, parent))
    return found


def depths_of(branches: np.ndarray) -> np.ndarray:
    """How many tokens lie above each branch, int64 [num_branches]."""
    ends: dict[tuple[int, int], int] = {}
    found = []
    for document, start, length, parent in branches.tolist():
        found.append(ends.get((document, parent), 0))
        ends[document, start] = found[-1] + length
    return np.array(found, dtype=np.int64)


def lengths_of_texts(branches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the shortest and of the longest text of each tree, from its first branch to one from which none goes
    on; int64 [trees] each, in the order of ``Layout.branches``."""
    parents = {(document, parent) for document, _, _, parent in branches.tolist()}
    ends = (depths_of(branches) + branches[:, BRANCH_LENGTH]).tolist()
    found: dict[int, list[int]] = {}
    for (document, start, _, _), end in zip(branches.tolist(), ends, strict=True):
        if (document, start) not in parents:
            found.setdefault(document, []).append(end)
    shortest, longest = ([pick(ends) for ends in found.values()] for pick in (min, max))
    return np.array(shortest, dtype=np.int64), np.array(longest, dtype=np.int64)


def branches_apart(segments: np.ndarray, rows: np.ndarray, branches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every branch as a document of its own: segments and contexts, see ``Layout.for_window``.

    Args:
        segments, rows, branches: of a layout.
    """
    trees = by_document(branches)
    found, contexts, numbers = list[tuple[int, ...]](), list[tuple[int, ...]](), dict[int, int]()
    documents = 0  # so many have a number
    for (rank, document, start, length), first in zip(segments.tolist(), rows.tolist(), strict=True):
        if document not in trees:
            number = numbers.setdefault(document, documents)
            documents += number == documents
            found.append((rank, number, start, length))
            continue
        above: dict[int, list[tuple[int, int]]] = {-1: []}  # (row, rows) of all down to a branch, by its start
        for begin, size, parent in trees[document]:
            depth = 0
            for row, count in above[parent]:
                contexts.append((documents, depth, count, rank, row))
                depth += count
            found.append((rank, documents, depth, size))
            above[begin] = [*above[parent], (first + begin, size)]
            documents += 1
    return np.array(found, dtype=np.int64), np.array(contexts, dtype=np.int64)


def read_tree(given: Iterable[Any], where: str) -> list[Branch]:
    """A tree from its branches as (length, place of the parent).

    Raises:
        LayoutError: see ``Layout.from_trees``.
    """
    found: list[Branch] = []
    row = 0
    for index, branch in enumerate(given):
        try:
            length, parent = branch
        except (TypeError, ValueError):
            raise LayoutError(f"{where}, branch {index}: expected (length, parent), got {shown(branch)}") from None
        if parent is not None and (isinstance(parent, bool) or not isinstance(parent, int | np.integer)):
            raise LayoutError(f"{where}, branch {index}: the parent must be a branch's place or None, got {parent!r}")
        if parent is not None and not 0 <= parent < index:
            what = "itself" if parent == index else f"branch {parent}"
            raise LayoutError(
                f"{where}, branch {index} goes on from {what}; it can go on from one of the branches before it"
                + (f", 0 to {index - 1}" if index else ", and the first one from none (None)")
            )
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
            raise LayoutError(f"{where}, branch {index}: the length must be an integer >= 1, got {length!r}")
        found.append((row, int(length), -1 if parent is None else found[parent][0]))
        row += int(length)
    if not found:
        raise LayoutError(f"{where}: a tree needs at least one branch")
    return found


def check_tree(document: int, branches: list[Branch], length: int) -> None:
    """Raises LayoutError unless the branches are a tree, depth first, of so many rows in all."""
    row, above = 0, list[int]()  # the branches from the root to the last one, by their starts
    for start, rows, parent in branches:
        if start != row or rows < 1:
            raise LayoutError(
                f"document {document}: a branch of {rows} rows starts at {start} where {row} was expected; branches "
                "have at least one row and cover their document from 0 to its end, one after another"
            )
        if (parent == -1) != (start == 0):
            raise LayoutError(
                f"document {document}: the branch at row {start} has {'no parent' if start else f'parent {parent}'}; "
                "the first branch of a tree has none (-1), and every other one goes on from one before it"
            )
        while above and above[-1] != parent:
            above.pop()
        if not above and start:
            known = [begin for begin, _, _ in branches if begin < start]
            raise LayoutError(
                f"document {document}: the branch at row {start} goes on from the one at row {parent}, "
                + (
                    "behind which lies another that does not; what goes on from a branch must lie right behind it "
                    "(depth first)"
                    if parent in known
                    else f"but there is none before it; those before it start at rows {known[:8]}"
                )
            )
        above.append(start)
        row += rows
    if row != length:
        raise LayoutError(
            f"document {document}: its branches have {row} rows, its segment has {length}; they must cover it"
        )
