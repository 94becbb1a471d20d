# SPDX-License-Identifier: Apache-2.0
"""The steps of an epoch: which documents they have, in which order, and how workers read them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from deepspeed_distca.data.documents import Document
from deepspeed_distca.data.global_loader.batches import Batch, Packs, StepBatches, join
from deepspeed_distca.data.global_loader.packer import GlobalPacker, Step
from deepspeed_distca.data.packing import PackingCounts
from deepspeed_distca.data.sources import IndexedDocuments, StreamedDocuments

#: Documents whose lengths are turned into Python integers at once.
_BLOCK = 8192


class Steps:
    """Steps of documents in the order of an epoch, the same on every rank.

    Args:
        source: of the documents.
        packing: options of :class:`GlobalPacker`.
        accumulation_steps: micro-batches of a step.
        seed, shuffle, shuffle_buffer: the order, see :class:`GlobalPackedLoader`.
        drop_last: leave an incomplete last step out.

    Attributes:
        identity: all that decides which documents are in which micro-batch, as plain values. Where they are stored may
            change in a resumed run, and with it the number of ranks and their budgets, as long as their sums do not.
    """

    def __init__(
        self,
        source: IndexedDocuments | StreamedDocuments,
        *,
        packing: dict[str, Any],
        accumulation_steps: int,
        seed: int,
        shuffle: bool,
        shuffle_buffer: int,
        drop_last: bool,
    ) -> None:
        self.accumulation_steps = accumulation_steps
        self._source, self._packing, self._packer = source, packing, GlobalPacker(**packing)
        self._seed, self._shuffle, self._buffer, self._drop_last = seed, shuffle, shuffle_buffer, drop_last
        self.identity = {
            **packing,
            "gradient_accumulation_steps": accumulation_steps,
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
            **self._describe_source(),
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
        if isinstance(self._source, StreamedDocuments):
            raise TypeError("the number of micro-batches of a stream is not known beforehand")
        steps = self._indexed(self._source, epoch, GlobalPacker(**self._packing))
        return self.accumulation_steps * sum(1 for _ in steps)

    def read(self, epoch: int, first: int, batches: StepBatches) -> tuple[Dataset[Any], Iterable[Packs] | None]:
        """A dataset and a sampler for ``DataLoader``, whose items are the batches of a step, joined, from step
        `first` on."""
        self._packer = GlobalPacker(**self._packing)
        if isinstance(self._source, StreamedDocuments):
            return _Stream(self, self._source, epoch, first, batches), None
        steps = self._indexed(self._source, epoch, self._packer)
        return _Indexed(self._source, batches), _SkipFirst(steps, first, batches.group)

    def streamed(
        self, source: StreamedDocuments, epoch: int, first: int, batches: StepBatches
    ) -> Iterator[list[Batch]]:
        """Batches of the steps of a stream from step `first` on.

        Raises:
            ValueError: the stream ends before that.
        """
        held: dict[int, Document] = {}
        left: dict[int, int] = {}  # tokens of held documents that were not in a step yet

        def documents() -> Iterator[tuple[int, int]]:
            rng = np.random.default_rng((self._seed, epoch)) if self._shuffle else None
            for index, document in enumerate(_shuffled(source.read(epoch), self._buffer, rng)):
                length = len(document.input_ids)
                if 0 < length <= self._packer.longest or (length and self._packer.overflow == "split"):
                    held[index], left[index] = document, length
                yield index, length

        found = 0
        for number, step in enumerate(self._steps(documents(), self._packer)):
            found = number + 1
            if number >= first:
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
        lengths = source.lengths
        order = np.arange(len(lengths))
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch)).permutation(order)
        blocks = (order[i : i + _BLOCK] for i in range(0, len(order), _BLOCK))
        documents = (pair for block in blocks for pair in zip(block.tolist(), lengths[block].tolist(), strict=True))
        return self._steps(documents, packer)

    def _steps(self, documents: Iterator[tuple[int, int]], packer: GlobalPacker) -> Iterator[Step]:
        return packer.steps(documents, self.accumulation_steps, drop_last=self._drop_last)

    def _describe_source(self) -> dict[str, Any]:
        if isinstance(self._source, StreamedDocuments):
            return {"documents": "a stream", "shuffle_buffer": self._buffer}
        lengths = self._source.lengths
        digest = hashlib.blake2b(lengths.astype("<i8").tobytes(), digest_size=8).hexdigest()
        return {"documents": f"{len(lengths)} of {int(lengths.sum())} tokens, lengths {digest}"}


class _SkipFirst:
    """Steps of one group as a sampler, without the first ones."""

    def __init__(self, steps: Iterator[Step], first: int, group: int) -> None:
        self._steps, self._first, self._group = steps, first, group

    def __iter__(self) -> Iterator[Packs]:
        for number, step in enumerate(self._steps):
            if number >= self._first:
                yield [packs[self._group] for packs in step]


class _Indexed(Dataset):
    """Batches of steps, whose packs are the index."""

    def __init__(self, documents: IndexedDocuments, batches: StepBatches) -> None:
        self._documents, self._batches = documents, batches

    def __getitem__(self, packs: Packs) -> tuple[torch.Tensor, list[Batch]]:
        return join(self._batches(packs, self._documents))


class _Stream(IterableDataset):
    """Batches of the steps of a stream, read where they are made."""

    def __init__(self, steps: Steps, source: StreamedDocuments, epoch: int, first: int, batches: StepBatches) -> None:
        self._steps, self._place = steps, (source, epoch, first, batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, list[Batch]]]:
        return map(join, self._steps.streamed(*self._place))


def _shuffled(documents: Iterator[Document], size: int, rng: np.random.Generator | None) -> Iterator[Document]:
    """Draws from a buffer of `size` documents that is filled up again; in order without a generator."""
    if rng is None:
        yield from documents
        return
    buffer: list[Document] = []
    for document in documents:
        if len(buffer) < size:
            buffer.append(document)
            continue
        index = int(rng.integers(size))
        yield buffer[index]
        buffer[index] = document
    for index in rng.permutation(len(buffer)).tolist():
        yield buffer[index]
