# SPDX-License-Identifier: Apache-2.0
"""Packed rows for transformers' Trainer, TRL and Accelerate, whose loaders hand single features to a collator."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import Dataset

from deepspeed_distca.data.packing import PackedRows


class FlatRows(Dataset):
    """Each row of packed documents as one feature, for a loader with a batch size of 1.

    A feature has ``input_ids`` and ``position_ids``, which start at 0 in every document, and ``labels`` where the
    documents have them: all columns that a HuggingFace model takes, so that Trainer removes none of them.
    :class:`deepspeed_distca.PackedSequenceCollator` makes the batch.

    Args:
        rows: the packed rows.
        start, stop: which of them; all if left out.
    """

    def __init__(self, rows: PackedRows, start: int = 0, stop: int | None = None) -> None:
        self._rows, self._which = rows, range(len(rows))[start:stop]

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int) -> dict[str, Any]:
        documents = self._rows[self._which[index]]
        feature = {key: np.concatenate([np.asarray(d[key]) for d in documents]) for key in documents[0]}
        feature["position_ids"] = np.concatenate([np.arange(len(d["input_ids"])) for d in documents])
        return feature
