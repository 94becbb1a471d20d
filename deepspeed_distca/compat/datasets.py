# SPDX-License-Identifier: Apache-2.0
"""What is not public of datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed_distca.compat import private

if TYPE_CHECKING:
    from datasets import Dataset


@private("datasets.arrow_dataset: self._indices: ", need="datasets")
def row_numbers(data: Dataset) -> Any | None:
    """Arrow's column of the rows of a dataset's table that it has, in order; None: all, in the table's order. The
    public ``flatten_indices`` writes a copy of the data."""
    indices = getattr(data, "_indices", None)
    return None if indices is None else indices.column(0)


@private("datasets.iterable_dataset: self._distributed = distributed", need="datasets")
def is_split_by_node(data: Any) -> bool:
    """Whether ``split_dataset_by_node`` has given each rank another part of a stream."""
    return getattr(data, "_distributed", None) is not None
