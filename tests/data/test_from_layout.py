# SPDX-License-Identifier: Apache-2.0
"""The rows of a rank: every token's target is the next one of its document, wherever that is stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepspeed_distca.data.from_layout import ROWS, batch_from_layout
from deepspeed_distca.layout import Layout, LayoutError

#: Document 7 in three pieces over two ranks, document 3 whole.
LAYOUT = Layout.from_ranks([[(7, 0, 2), (7, 4, 1)], [(3, 0, 3), (7, 2, 2)]])
IDS = {7: [10, 11, 12, 13, 14], 3: np.array([5, 6, 7], dtype=np.int32)}


def rows(batch: dict) -> list[list[int]]:
    assert all(batch[key].shape == batch["input_ids"].shape and batch[key].dtype == torch.int64 for key in ROWS)
    return [batch[key][0].tolist() for key in ROWS]


def test_pieces_of_documents() -> None:
    first, second = (batch_from_layout(IDS, LAYOUT, rank) for rank in range(2))
    assert rows(first) == [[10, 11, 14], [-100, 11, 14], [11, 12, -100], [0, 1, 4]]
    assert rows(second) == [[5, 6, 7, 12, 13], [-100, 6, 7, 12, 13], [6, 7, -100, 13, 14], [0, 1, 2, 2, 3]]
    assert (first["num_targets"], second["num_targets"]) == (2, 4)
    assert first["layout"] is second["layout"] is LAYOUT


def test_labels_of_ones_own() -> None:
    labels = {7: [10, -1, 12, -1, 14], 3: [5, 6, -1]}
    batch = batch_from_layout(IDS, LAYOUT, 1, labels, ignore_index=-1)
    assert rows(batch)[1:3] == [[-1, 6, -1, 12, -1], [6, -1, -1, -1, 14]]
    assert batch["num_targets"] == 2 and IDS[7] == [10, 11, 12, 13, 14]


def test_a_rank_without_tokens_and_documents_that_are_not_there() -> None:
    empty = batch_from_layout({}, Layout.from_ranks([[], [(0, 0, 1)]]), 0)
    assert rows(empty) == [[]] * 4 and empty["num_targets"] == 0
    for documents, has in (({3: [5, 6, 7]}, 0), ({3: [5, 6, 7], 7: [1, 2, 3]}, 3)):
        with pytest.raises(LayoutError, match=rf"positions \[2, 4\) of document 7, which has {has} tokens"):
            batch_from_layout(documents, LAYOUT, 1)
