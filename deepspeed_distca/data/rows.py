# SPDX-License-Identifier: Apache-2.0
"""Packed rows as a dataset, and the order in which ranks read them.

The order is one endless stream, the same on every rank: epoch after epoch, each a shuffle of all rows. Rank r of R
reads every R-th row of it. So all ranks read equally many rows, every row is read once an epoch, and a run resumes,
on any number of ranks, from the number of rows that were read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from deepspeed_distca.data.packing import Packing
from deepspeed_distca.data.states import whole_number


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

    Args:
        num_rows: rows of the dataset.
        rank, num_ranks: which of how many readers this is.
        micro_batches: how many rows to read; may exceed an epoch.
        seed: of the shuffles.
        start: rows that all ranks together have read before: 0, or where a run resumes: as many as the steps took that
            were taken whole.

    Raises:
        TypeError: numbers that are no integers.
        ValueError: no rows, a rank that does not exist, or other numbers below 0.
    """

    def __init__(
        self, num_rows: int, *, rank: int, num_ranks: int, micro_batches: int, seed: int = 0, start: int = 0
    ) -> None:
        self.num_rows = whole_number(num_rows, "num_rows")
        if num_rows < 1:
            raise ValueError("there are no rows to read: the dataset is empty")
        self.num_ranks = whole_number(num_ranks, "num_ranks", low=1)
        self.rank = whole_number(rank, "rank", high=self.num_ranks - 1)
        self.micro_batches, self.start = whole_number(micro_batches, "micro_batches"), whole_number(start, "start")
        self.seed = whole_number(seed, "seed")

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
