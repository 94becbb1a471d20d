# SPDX-License-Identifier: Apache-2.0
"""The batch of one rank from a global layout, whose documents may continue on other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepspeed_distca.layout import Layout, LayoutError

IGNORE_INDEX = -100


def batch_from_layout(
    documents: Mapping[int, Sequence[int] | np.ndarray],
    layout: Layout,
    rank: int,
    labels: Mapping[int, Sequence[int] | np.ndarray] | None = None,
) -> dict[str, Any]:
    """What ``engine(**batch)`` takes on one rank, for a layout that all ranks share.

    A token's target is the next token of its document wherever that is stored, so no target is lost at a cut.

    Args:
        documents: token ids by document id; at least those with a segment on this rank, whole.
        layout: of all ranks.
        rank: whose batch to make.
        labels: targets by document id, as long as the tokens, -100 where there is none; the tokens themselves if
            left out.

    Returns:
        input_ids, labels, shift_labels, position_ids int64 [1, tokens]; layout; num_targets int.

    Raises:
        LayoutError: a document shorter than its segment says, or not given.
    """
    ids, given, targets, positions = [], [], [], []
    for document, start, length in layout.rank(rank):
        tokens = np.asarray(documents.get(document, ()), dtype=np.int64)
        end = start + length
        if len(tokens) < end:
            raise LayoutError(
                f"rank {rank}: the layout has positions [{start}, {end}) of document {document}, which has "
                f"{len(tokens)} tokens"
            )
        values = tokens if labels is None else np.asarray(labels[document], dtype=np.int64)
        shifted = np.append(values[1:], IGNORE_INDEX)
        own = values.copy()
        own[0] = IGNORE_INDEX  # the first token is nobody's target
        ids.append(tokens[start:end])
        given.append(own[start:end])
        targets.append(shifted[start:end])
        positions.append(np.arange(start, end))
    row = {
        key: torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))[None]
        for key, parts in (
            ("input_ids", ids),
            ("labels", given),
            ("shift_labels", targets),
            ("position_ids", positions),
        )
    }
    return {**row, "layout": layout, "num_targets": int((row["shift_labels"] != IGNORE_INDEX).sum())}
