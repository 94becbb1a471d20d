# SPDX-License-Identifier: Apache-2.0
"""Batches whose layout has trees: what their other descriptions say must be what the layout says, and what a tree
cannot be exact in is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from deepspeed_distca.data.from_layout import IGNORE_INDEX
from deepspeed_distca.data.integers import integers, on_host
from deepspeed_distca.huggingface.contract import Contract
from deepspeed_distca.huggingface.front_door.values import BatchError, Here
from deepspeed_distca.layout import DOCUMENT, LENGTH, RANK, Layout, LayoutError
from deepspeed_distca.trees import Branch, by_document, lengths_of_texts


def check_descriptions(layout: Layout, said: Mapping[str, Any], rows: int, tokens: int, rank: int) -> None:
    """Compares what a batch says beside its layout (see ``data.claims``), as far as it is on the host.

    Raises:
        LayoutError: another description than position ids and a mask without padding, position ids that are not the
            layout's, or a row that ends inside a document.
    """
    others = [key for key in said if key not in ("position_ids", "attention_mask")]
    if others:
        raise LayoutError(
            f"{others[0]} was given beside a layout with trees; nothing but the layout says which branches go on from "
            "which: leave it out"
        )
    mask = said.get("attention_mask")
    if mask is not None and on_host(mask) and not bool((torch.as_tensor(mask) == 1).all()):
        raise LayoutError(
            "attention_mask: a batch with trees has no padding, and its layout names its documents; leave the mask out"
        )
    mine = layout.segments[layout.segments[:, RANK] == rank]
    inside = np.setdiff1d(np.arange(0, rows * tokens, tokens), np.cumsum(mine[:, LENGTH]) - mine[:, LENGTH])
    if inside.size:
        raise LayoutError(
            f"the end of row {int(inside[0]) // tokens - 1} lies inside a document of the layout; a batch with trees "
            "is one row of all documents, or cut where documents end"
        )
    positions = said.get("position_ids")
    if positions is None or not on_host(positions):
        return
    found, expected = integers("position_ids", positions).reshape(-1), layout.position_ids(rank)
    if found.size != expected.size:
        raise LayoutError(
            f"position_ids have shape {list(np.shape(positions))}; with trees allowed: [{rows}, {tokens}], one for "
            "each token"
        )
    if (found != expected).any():
        bad = int(np.flatnonzero(found != expected)[0])
        raise LayoutError(
            f"position_ids and the layout contradict each other: token {bad % tokens} of row {bad // tokens} has "
            f"position {int(found[bad])}, in the layout {int(expected[bad])} tokens come before it. Where a branch "
            "begins, positions go on from its parent's last one (Layout.position_ids gives them)"
        )


def check_model(layout: Layout, contract: Contract) -> None:
    """Raises LayoutError where a model cannot be exact on the trees of a layout."""
    reasons = {
        "something beside core attention passes through a document": contract.rows != "packed",
        "it takes no position ids": not contract.takes_positions,
        "it gives one result for a row": contract.whole_rows,
    }
    for why, holds in reasons.items():
        if holds:
            raise LayoutError(f"{contract.name} cannot run on trees: {why}. Give it the texts apart")
    shortest, longest = lengths_of_texts(layout.branches)
    for limit in contract.rope_limits:
        if ((shortest <= limit) & (longest > limit)).any():
            raise LayoutError(
                f"a tree has texts of up to {limit} tokens and longer ones; this model's rotary frequencies are "
                "others for documents beyond that length (rope_type of its configuration), so that they cannot share "
                "their beginning. Give them apart"
            )


def chains(layout: Layout, here: Here) -> Here:
    """The segments of a rank with its trees cut into chains: rows each of which attends to the one before it. As
    segments, each of a document of its own."""
    found: list[tuple[int, int, int, int]] = []
    lengths: list[int] = []
    branches = by_document(layout.branches)
    for (rank, document, start, length), all_rows in zip(here.segments.tolist(), here.whole.tolist(), strict=True):
        if document not in branches:
            found.append((rank, document, start, length))
            lengths.append(all_rows)
            continue
        ends = _ends(branches[document])
        for begin, rows, parent in branches[document]:
            if ends.get(parent) == begin:  # the first branch that goes on from its parent
                found[-1] = (*found[-1][:3], found[-1][3] + rows)
                lengths[-1] += rows
            else:
                found.append((rank, document, 0, rows))
                lengths.append(rows)
    segments = np.array(found, dtype=np.int64).reshape(-1, 4)
    return replace(here, segments=segments, whole=np.array(lengths, dtype=np.int64))


def check_targets(arguments: Mapping[str, Any], layout: Layout, rank: int, contract: Contract) -> None:
    """Targets of rows behind which several branches begin: what comes next must be the same in all of them.

    Raises:
        BatchError: it is not. Only looked at on the host.
    """
    ids, targets = arguments.get("input_ids"), arguments.get("shift_labels")
    if targets is None and arguments.get("labels") is not None and contract.targets == "next":
        targets = torch.nn.functional.pad(arguments["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
    if ids is None or targets is None or not on_host(ids) or not on_host(targets):
        return
    ids, targets = ids.reshape(-1), targets.reshape(-1)
    first = dict(zip(layout.segments[:, DOCUMENT].tolist(), layout.rows.tolist(), strict=True))
    here = set(layout.segments[layout.segments[:, RANK] == rank, DOCUMENT].tolist())
    for document, branches in by_document(layout.branches).items():
        if document not in here:
            continue
        row, ends = first[document], _ends(branches)
        following: dict[int, set[int]] = {}
        for begin, _, parent in branches:
            if parent >= 0:
                following.setdefault(parent, set()).add(int(ids[row + begin]))
        for parent, tokens in following.items():
            last = row + ends[parent] - 1
            if len(tokens) > 1 and targets[last] != IGNORE_INDEX:
                raise BatchError(
                    f"token {last} has the target {int(targets[last])}, but the branches that go on from it begin "
                    f"with {sorted(tokens)[:8]}. A token has one target: let each branch begin with a copy of the "
                    f"last token that its texts share, as PrefixCollator does, or give that one none ({IGNORE_INDEX})"
                )


def _ends(branches: list[Branch]) -> dict[int, int]:
    """Where each branch ends, by its start."""
    return {start: start + length for start, length, _ in branches}
