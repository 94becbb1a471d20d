# SPDX-License-Identifier: Apache-2.0
"""The steps of an epoch: which documents they have, in which order, which micro-batch these are in, where they are
stored, and a rank's batches of them, as workers make them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from deepspeed_distca.data.documents import Document
from deepspeed_distca.data.from_layout import ROWS, batch_from_layout
from deepspeed_distca.data.global_loader.packer import GlobalPacker, Step
from deepspeed_distca.data.global_loader.placement import place, work_of
from deepspeed_distca.data.global_loader.regrouping import regroup
from deepspeed_distca.data.packing import PackingCounts, Piece
from deepspeed_distca.data.sources import IndexedDocuments, StreamedDocuments
from deepspeed_distca.layout import Layout

Batch = dict[str, Any]
Planner = Callable[[Layout], Any]
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
        planner: plans a micro-batch ahead, from its layout; see ``GlobalPackedLoader.plan_ahead``.
    """

    rank: int
    group: int
    budgets: list[int]
    placement: dict[str, Any]
    regroup: bool
    planner: Planner | None = None

    def __call__(self, packs: Packs, documents: Mapping[int, Document] | IndexedDocuments) -> Joined:
        """One batch for each pack, all with the targets of the step, joined."""
        batches = [self._batch(pieces, documents) for pieces in self.regrouped(packs)]
        targets = sum(batch["num_targets"] for batch in batches)
        return join([{**batch, "step_targets": targets} for batch in batches])

    def _batch(self, pieces: list[Piece], documents: Mapping[int, Document] | IndexedDocuments) -> Batch:
        layout = place([piece.length for piece in pieces], self.budgets, **self.placement)
        ids, labels = {}, {}
        for number in {segment.document for segment in layout.rank(self.rank)}:
            document, start, length = pieces[number]
            ids[number], labels[number] = (column[start : start + length] for column in documents[document])
        batch = batch_from_layout(ids, layout, self.rank, labels)
        if self.planner is not None:
            batch["planned"] = self.planner(layout.filled())  # the front door's layout
        return batch

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


@dataclass
class Steps:
    """Steps of documents in the order of an epoch, the same on every rank.

    Attributes:
        source: of the documents.
        packing: options of :class:`GlobalPacker`.
        accumulation_steps: micro-batches of a step.
        seed, shuffle, shuffle_buffer: the order, see :class:`GlobalPackedLoader`.
        drop_last: leave an incomplete last step out.
    """

    source: IndexedDocuments | StreamedDocuments
    packing: dict[str, Any]
    accumulation_steps: int
    seed: int
    shuffle: bool
    shuffle_buffer: int
    drop_last: bool

    def __post_init__(self) -> None:
        self._packer = GlobalPacker(**self.packing)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that decides which documents are in which micro-batch, as plain values. Where they are stored may change
        in a resumed run, and with it the number of ranks and their budgets, as long as their sums do not."""
        if isinstance(self.source, StreamedDocuments):
            documents = {"documents": "a stream", "shuffle_buffer": self.shuffle_buffer}
        else:
            lengths = self.source.lengths
            digest = hashlib.blake2b(lengths.astype("<i8").tobytes(), digest_size=8).hexdigest()
            documents = {"documents": f"{len(lengths)} of {int(lengths.sum())} tokens, lengths {digest}"}
        return {
            **self.packing,
            "gradient_accumulation_steps": self.accumulation_steps,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            **documents,
        }

    @property
    def counts(self) -> PackingCounts:
        """Of the epoch that is read."""
        return self._packer.counts

    def micro_batches(self, epoch: int) -> int:
        """Of an epoch of indexed documents.

        Raises:
            TypeError: for a stream.
        """
        if isinstance(self.source, StreamedDocuments):
            raise TypeError("the number of micro-batches of a stream is not known beforehand")
        steps = self._indexed(self.source, epoch, GlobalPacker(**self.packing))
        return self.accumulation_steps * sum(1 for _ in steps)

    def read(self, epoch: int, first: int, batches: StepBatches) -> tuple[Dataset[Any], Iterable[Packs] | None]:
        """A dataset and a sampler for ``DataLoader``, whose items are the joined batches of a step, from step `first`
        on."""
        self._packer = GlobalPacker(**self.packing)
        if isinstance(self.source, StreamedDocuments):
            return _Stream(self, self.source, epoch, first, batches), None
        steps = islice(self._indexed(self.source, epoch, self._packer), first, None)
        return _Indexed(self.source, batches), ([packs[batches.group] for packs in step] for step in steps)

    def streamed(self, source: StreamedDocuments, epoch: int, first: int, batches: StepBatches) -> Iterator[Joined]:
        """Joined batches of the steps of a stream from step `first` on.

        Raises:
            ValueError: the stream ends before that.
        """
        held: dict[int, Document] = {}
        left: dict[int, int] = {}  # tokens of held documents that were not in a step yet

        def documents() -> Iterator[tuple[int, int]]:
            for index, document in enumerate(
                _shuffled(source.read(epoch), self.shuffle_buffer, self._generator(epoch))
            ):
                length = len(document.input_ids)
                if 0 < length <= self._packer.longest or (length and self._packer.overflow == "split"):
                    held[index], left[index] = document, length
                yield index, length

        found = 0
        for step in self._steps(documents(), self._packer):
            found += 1
            if found > first:
                yield batches([packs[batches.group] for packs in step], held)
            for piece in (piece for packs in step for pack in packs for piece in pack):
                left[piece.document] -= piece.length
                if not left[piece.document]:
                    del left[piece.document], held[piece.document]
        if found < first:
            raise ValueError(
                f"the stream ended after {found} steps of epoch {epoch}, but the state that was loaded is at step "
                f"{first}: it has other documents than the run that saved the state"
            )

    def _indexed(self, source: IndexedDocuments, epoch: int, packer: GlobalPacker) -> Iterator[Step]:
        generator, order = self._generator(epoch), np.arange(len(source))
        if generator is not None:
            order = generator.permutation(order)
        return self._steps(zip(map(int, order), map(int, source.lengths[order]), strict=True), packer)

    def _steps(self, documents: Iterator[tuple[int, int]], packer: GlobalPacker) -> Iterator[Step]:
        return packer.steps(documents, self.accumulation_steps, drop_last=self.drop_last)

    def _generator(self, epoch: int) -> np.random.Generator | None:
        return np.random.default_rng((self.seed, epoch)) if self.shuffle else None


class _Indexed(Dataset):
    """Batches of steps, whose packs are the index."""

    def __init__(self, documents: IndexedDocuments, batches: StepBatches) -> None:
        self._documents, self._batches = documents, batches

    def __getitem__(self, packs: Packs) -> Joined:
        return self._batches(packs, self._documents)


class _Stream(IterableDataset):
    """Batches of the steps of a stream, read where they are made."""

    def __init__(self, steps: Steps, *place: Any) -> None:
        self._steps, self._place = steps, place

    def __iter__(self) -> Iterator[Joined]:
        return self._steps.streamed(*self._place)


def _shuffled(documents: Iterator[Document], size: int, rng: np.random.Generator | None) -> Iterator[Document]:
    """Draws from a buffer of `size` documents that is filled up again; in order without a generator."""
    if rng is None:
        yield from documents
        return
    buffer = list(islice(documents, size))
    for document in documents:
        index = int(rng.integers(size))
        yield buffer[index]
        buffer[index] = document
    for index in rng.permutation(len(buffer)).tolist():
        yield buffer[index]
