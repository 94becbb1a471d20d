# SPDX-License-Identifier: Apache-2.0
"""The batch of one rank from a layout, whose documents may continue on other ranks. Labels are shifted here, inside
each document, so that no later stage has to guess where a document ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepspeed_distca.layout import Layout, LayoutError

IGNORE_INDEX = -100
#: What a batch has of every token.
ROWS = ("input_ids", "labels", "shift_labels", "position_ids")


def batch_from_layout(
    documents: Mapping[int, Sequence[int] | np.ndarray],
    layout: Layout,
    rank: int,
    labels: Mapping[int, Sequence[int] | np.ndarray] | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
) -> dict[str, Any]:
    """What ``engine(**batch)`` takes on one rank, for a layout that all ranks share.

    A token's target is the next token of its document wherever that is stored, so no target is lost at a cut.

    Args:
        documents: token ids by document id; at least those with a segment on this rank, whole.
        layout: of all ranks.
        rank: whose batch to make.
        labels: targets by document id, as long as the tokens, `ignore_index` where there is none; the tokens
            themselves if left out.

    Returns:
        input_ids, labels, shift_labels, position_ids int64 [1, tokens]; layout; num_targets int.

    Raises:
        LayoutError: a document shorter than its segment says, or not given; a layout with trees.
    """
    if layout.has_trees:
        raise LayoutError("the layout has trees, whose targets differ by branch: PrefixCollator makes such batches")
    rows = np.full((len(ROWS), int(layout.tokens[rank])), ignore_index, dtype=np.int64)
    ids, own, targets, positions = rows
    row = 0
    for document, start, length in layout.rank(rank):
        tokens = np.asarray(documents.get(document, ()), dtype=np.int64)
        end = start + length
        if len(tokens) < end:
            raise LayoutError(
                f"rank {rank}: the layout has positions [{start}, {end}) of document {document}, which has "
                f"{len(tokens)} tokens"
            )
        values = tokens if labels is None else np.asarray(labels[document], dtype=np.int64)
        following = values[start + 1 : end + 1]
        first = int(start == 0)  # the first token is nobody's target
        ids[row : row + length] = tokens[start:end]
        own[row + first : row + length] = values[start + first : end]
        targets[row : row + len(following)] = following
        positions[row : row + length] = np.arange(start, end)
        row += length
    batch: dict[str, Any] = {key: torch.from_numpy(values)[None] for key, values in zip(ROWS, rows, strict=True)}
    return {**batch, "layout": layout, "num_targets": int((targets != ignore_index).sum())}
