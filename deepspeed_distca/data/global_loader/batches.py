# SPDX-License-Identifier: Apache-2.0
"""The batches of a step: which micro-batch its documents are in, where they are stored, and a rank's part of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_distca.data.documents import Document
from deepspeed_distca.data.from_layout import ROWS, batch_from_layout
from deepspeed_distca.data.global_loader.placement import place, work_of
from deepspeed_distca.data.global_loader.regrouping import regroup
from deepspeed_distca.data.packing import Piece
from deepspeed_distca.data.sources import IndexedDocuments
from deepspeed_distca.layout import Layout

Batch = dict[str, Any]
#: For each micro-batch of a step, the pieces of a group's pack and the documents that they are of.
Packs = list[list[Piece]]
#: The rows of a step's batches [rows, tokens], and of each batch its tokens and what else it has.
Joined = tuple[torch.Tensor, list[tuple[int, Batch]]]


def join(batches: Sequence[Batch]) -> Joined:
    """All rows of a step's batches as one tensor: a worker hands each tensor over in a file descriptor of its own, of
    which a process may have about a thousand."""
    rows = [torch.cat([batch[key] for key in ROWS]) for batch in batches]
    rest = [{key: value for key, value in batch.items() if key not in ROWS} for batch in batches]
    return torch.cat(rows, dim=1), [(part.shape[1], other) for part, other in zip(rows, rest, strict=True)]


def divide_again(rows: torch.Tensor, rest: Sequence[tuple[int, Batch]]) -> list[Batch]:
    """What ``join`` was given; tensors are parts of the joined one."""
    parts = rows[:, None].split([tokens for tokens, _ in rest], dim=2)
    return [{**dict(zip(ROWS, part, strict=True)), **other} for part, (_, other) in zip(parts, rest, strict=True)]


@dataclass(frozen=True)
class StepBatches:
    """Makes the batches of one rank for the micro-batches of a step; what workers need, and no more.

    Attributes:
        rank: among the ranks of its group.
        group: of ranks that share documents.
        budgets: tokens of each rank of the group.
        placement: keyword arguments of ``place``.
        regroup: whether documents may change micro-batches.
    """

    rank: int
    group: int
    budgets: list[int]
    placement: dict[str, Any]
    regroup: bool

    def __call__(self, packs: Packs, documents: Mapping[int, Document] | IndexedDocuments) -> Joined:
        """One batch for each pack, all with the targets of the step, joined."""
        batches = [self._batch(pieces, documents) for pieces in self.regrouped(packs)]
        targets = sum(batch["num_targets"] for batch in batches)
        return join([{**batch, "step_targets": targets} for batch in batches])

    def _batch(self, pieces: list[Piece], documents: Mapping[int, Document] | IndexedDocuments) -> Batch:
        layout = self.layout([piece.length for piece in pieces])
        ids, labels = {}, {}
        for number in {segment.document for segment in layout.rank(self.rank)}:
            document, start, length = pieces[number]
            ids[number], labels[number] = (column[start : start + length] for column in documents[document])
        return batch_from_layout(ids, layout, self.rank, labels)

    def regrouped(self, packs: Packs) -> Packs:
        """The pieces of the step by the micro-batch that they are trained in."""
        if not self.regroup:
            return packs
        work = work_of(self.placement["cost"], self.placement["window"])
        lengths = [[piece.length for piece in pack] for pack in packs]
        ranks = sum(tokens > 0 for tokens in self.budgets)
        groups = regroup(lengths, ranks, max(self.budgets), lambda length: work(0, length))
        pieces = [piece for pack in packs for piece in pack]
        return packs if groups is None else [[pieces[i] for i in group] for group in groups]

    def layout(self, lengths: Sequence[int]) -> Layout:
        """Where the tokens of documents of these lengths are stored."""
        return place(lengths, self.budgets, **self.placement)
