# SPDX-License-Identifier: Apache-2.0
"""The layout of a batch, from what it says about documents."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from deepspeed_distca.data.claims import CUMULATIVE, descriptions_of, read_claims
from deepspeed_distca.data.integers import integers, on_host
from deepspeed_distca.huggingface.front_door.trees import check_descriptions
from deepspeed_distca.huggingface.front_door.values import shape_of, tokens_of
from deepspeed_distca.layout import RANK, START, Layout, LayoutError


def documents_of(
    given: Mapping[str, Any], arguments: dict[str, Any], rows: int, tokens: int, place: tuple[int, int] | None
) -> tuple[Layout, np.ndarray, dict[str, Any]]:
    """The layout of a batch with tokens, which of them are real, bool [rows * tokens], and the model's arguments with
    the mask that it gets."""
    layout = given.get("layout")
    if layout is not None:
        _check_layout(layout, rows, tokens, place)
    descriptions = descriptions_of(given)
    if layout is not None and layout.has_trees:
        check_descriptions(layout, descriptions, rows, tokens, rank_in(layout, place))
        real, mask = np.ones(rows * tokens, dtype=bool), arguments.get("attention_mask")
        return layout.filled(), real, _with_mask(arguments, real if on_host(mask) else None, rows, tokens)
    # On the host everything is compared. Of what is on a device nothing is read where the host knows the documents.
    at_hand = {key: value for key, value in descriptions.items() if on_host(value)}
    known = layout is not None or any(key in at_hand for key in (*CUMULATIVE, "seq_idx"))
    known = known or ("position_ids" in at_hand and "attention_mask" not in descriptions)
    said = at_hand if known else descriptions
    claim = None
    if layout is not None:
        if not said and rows == 1:  # nothing to compare
            return layout.filled(), np.ones(tokens, dtype=bool), _with_mask(arguments, None, rows, tokens)
        here = layout.segments[:, RANK] == rank_in(layout, place)
        at, claim = layout.rows[here], np.full(rows * tokens, -1)
        inside = at < claim.size
        claim[at[inside]] = layout.segments[here, START][inside]
    begins, real, told = read_claims(said, rows, tokens, claim)
    if layout is None:
        layout = Layout.from_cu_seqlens(np.append(np.flatnonzero(begins), rows * tokens))
    return layout.filled(), real, _with_mask(arguments, real if told else None, rows, tokens)


#: Names of what describes documents in other libraries: cu_seqlens_q, seq_lengths, document_ids, sample_ids and so on.
_LIKE_DOCUMENTS = re.compile(r"cu_|seq|doc|segment|sample|len", re.I)


def unread_description(given: Mapping[str, Any], read: Container[str]) -> str | None:
    """What a batch tells of several documents in a row by a name that nothing reads: a model takes it among any
    arguments, and does nothing with it. Told by its values: where documents begin, how long they are, or the number of
    each token's. Waits for a device if it is there.

    Args:
        read: names of arguments that the model takes, and of descriptions that are understood.
    """
    for name, value in given.items():
        if value is not None and name not in read and _LIKE_DOCUMENTS.search(name):
            rows, tokens = shape_of(given)
            with suppress(LayoutError, TypeError, ValueError):
                if _documents_told(name, value, rows, tokens) > rows:
                    return name
    return None


def _documents_told(name: str, value: Any, rows: int, tokens: int) -> int:
    """How many documents all rows have together by some numbers; 0: they say nothing of documents."""
    nested = isinstance(value, list | tuple) and all(np.ndim(part) == 1 for part in value)
    numbers = np.concatenate([integers(name, part) for part in value]) if nested else integers(name, value)
    flat, total = numbers.ravel(), rows * tokens
    if not flat.size:
        return 0
    if flat[0] == 0 and flat[-1] == total and (np.diff(flat) >= 0).all():
        return len(np.unique(flat)) - 1
    if flat.min() >= 0 and flat.sum() == total and flat.max() <= tokens:
        return int((flat > 0).sum())
    if flat.size == total:
        return rows + int((np.diff(flat.reshape(rows, tokens), axis=1) != 0).sum())
    return 0


def rank_in(layout: Layout, place: tuple[int, int] | None) -> int:
    """This rank's in the layout."""
    return place[0] if place is not None and layout.num_ranks > 1 else 0


def _check_layout(layout: Any, rows: int, tokens: int, place: tuple[int, int] | None) -> None:
    if not isinstance(layout, Layout):
        raise LayoutError(f"layout must be a Layout, got {type(layout).__name__}")
    layout.validate()
    rank, ranks = 0, 1
    if layout.num_ranks > 1:
        if place is None:
            return
        rank, ranks = place
    if layout.num_ranks != ranks:
        raise LayoutError(f"the layout has {layout.num_ranks} ranks, but {ranks} share attention")
    described = int(layout.tokens[rank])
    if described != rows * tokens:
        where = f" for rank {rank}" if layout.num_ranks > 1 else ""
        raise LayoutError(
            f"the layout has {described} tokens{where}, input_ids has {rows} x {tokens}; the layout must describe "
            "the very tokens of the batch"
        )


def empty_layout(layout: Any, place: tuple[int, int] | None) -> Layout:
    """Of a batch without tokens; the others may have some."""
    if layout is None:
        return Layout.from_lengths([[]]).filled()
    _check_layout(layout, 1, 0, place)
    return layout.filled()


def _with_mask(arguments: dict[str, Any], real: np.ndarray | None, rows: int, tokens: int) -> dict[str, Any]:
    """The mask for whatever else reads it (router losses): 1 on real tokens; none where all are, or none is. `real` is
    None where nothing that tells of padding was read."""
    mask = arguments.get("attention_mask")
    if real is None or (mask is None and real.all()):
        return arguments if mask is None else {**arguments, "attention_mask": (mask != 0).long()}
    if real.all() or not real.any():
        return {**arguments, "attention_mask": None}
    like = tokens_of(arguments) if mask is None else mask
    device = like.device if torch.is_tensor(like) else None
    return {**arguments, "attention_mask": torch.from_numpy(real).view(rows, tokens).long().to(device)}
