# SPDX-License-Identifier: Apache-2.0
"""The batches of a step: which micro-batch its documents are in, where they are stored, and a rank's part of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_distca.data.documents import Document
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.data.global_loader.placement import place, work_of
from deepspeed_distca.data.global_loader.regrouping import regroup
from deepspeed_distca.data.packing import Piece
from deepspeed_distca.data.sources import IndexedDocuments
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import CostModel

Batch = dict[str, Any]
#: For each micro-batch of a step, the pieces of a group's pack and the documents that they are of.
Packs = list[list[Piece]]


@dataclass(frozen=True)
class _Place:
    """Where a tensor of a batch lies in the tensor of its step."""

    start: int
    shape: torch.Size


def join(batches: Sequence[Batch]) -> tuple[torch.Tensor, list[Batch]]:
    """All int64 tensors of a step's batches as one, and the batches with places in it instead: a worker hands each
    tensor over in a file descriptor of its own, of which a process may have about a thousand."""
    tensors: list[torch.Tensor] = []
    start, placed = 0, []
    for batch in batches:
        left = dict(batch)
        for key, value in batch.items():
            if torch.is_tensor(value) and value.dtype == torch.int64:
                left[key] = _Place(start, value.shape)
                tensors.append(value.reshape(-1))
                start += value.numel()
        placed.append(left)
    return torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.int64), placed


def divide_again(joined: torch.Tensor, batches: Sequence[Batch]) -> list[Batch]:
    """What ``join`` was given; tensors are parts of the joined one."""

    def found(value: Any) -> Any:
        if not isinstance(value, _Place):
            return value
        return joined[value.start : value.start + value.shape.numel()].view(value.shape)

    return [{key: found(value) for key, value in batch.items()} for batch in batches]


class StepBatches:
    """Makes the batches of one rank for the micro-batches of a step; what workers need, and no more.

    Args:
        rank: among the ranks of its group.
        group: of ranks that share documents.
        budgets: tokens of each rank of the group.
        placement: keyword arguments of ``place``.
        regroup: whether documents may change micro-batches.
    """

    def __init__(self, *, rank: int, group: int, budgets: list[int], placement: dict[str, Any], regroup: bool) -> None:
        self.rank, self.group, self.budgets, self.placement, self.regroup = rank, group, budgets, placement, regroup

    def __call__(self, packs: Packs, documents: Mapping[int, Document] | IndexedDocuments) -> list[Batch]:
        """One batch for each pack, all with the targets of the step."""
        batches = [self._batch(pieces, documents) for pieces in self.regrouped(packs)]
        targets = sum(batch["num_targets"] for batch in batches)
        return [{**batch, "step_targets": targets} for batch in batches]

    def _batch(self, pieces: list[Piece], documents: Mapping[int, Document] | IndexedDocuments) -> Batch:
        layout = self.layout([piece.length for piece in pieces])
        ids, labels = {}, {}
        for number in {segment.document for segment in layout.rank(self.rank)}:
            document, start, length = pieces[number]
            found = documents[document]
            ids[number] = found.input_ids[start : start + length]
            labels[number] = found.labels[start : start + length]
        return batch_from_layout(ids, layout, self.rank, labels)

    def regrouped(self, packs: Packs) -> Packs:
        """The pieces of the step by the micro-batch that they are trained in."""
        if not self.regroup:
            return packs
        work = work_of(self.placement["cost"] or CostModel.fitted(), self.placement["window"])
        lengths = [[piece.length for piece in pack] for pack in packs]
        ranks = sum(tokens > 0 for tokens in self.budgets)
        groups = regroup(lengths, ranks, max(self.budgets), lambda length: work(0, length))
        pieces = [piece for pack in packs for piece in pack]
        return packs if groups is None else [[pieces[i] for i in group] for group in groups]

    def layout(self, lengths: Sequence[int]) -> Layout:
        """Where the tokens of documents of these lengths are stored."""
        return place(lengths, self.budgets, **self.placement)
