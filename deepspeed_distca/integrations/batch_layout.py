# SPDX-License-Identifier: Apache-2.0
"""What a batch says about itself: where its documents lie on this rank, and how many targets it has."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deepspeed_distca.layout import LENGTH, START, Layout, LayoutError

#: Keys of a collated batch that describe it and are not arguments of a model.
DESCRIPTION = ("layout", "cu_seqlens", "max_seqlen", "num_targets", "step_targets")


def batch_layout(
    kwargs: Mapping[str, Any], description: Mapping[str, Any], place: tuple[int, int] | None = None
) -> Layout:
    """Documents of this rank's rows: from the collator, else from cu_seqlens, a padding mask or position ids.

    The last three may lie on a device; reading them waits for it, once per micro-batch.

    Args:
        place: this rank's among those that share a layout, and how many these are; None: a layout of several ranks is
            not compared with the batch.

    Raises:
        LayoutError: what describes the documents is no layout, or one of other tokens than the batch has.
    """
    ids = kwargs.get("input_ids")
    ids = kwargs.get("inputs_embeds") if ids is None else ids
    if ids is None:
        raise LayoutError("neither input_ids nor inputs_embeds was given")
    batch, tokens = ids.shape[:2]
    layout = description["layout"]
    if layout is not None:
        if not isinstance(layout, Layout):
            raise LayoutError(f"layout must be a Layout, got {type(layout).__name__}")
        layout.validate()
        _compare(layout, batch, tokens, place)
        return layout
    for key in ("cu_seqlens", "cu_seq_lens_q"):
        cu_seqlens = description.get(key) if key in description else kwargs.get(key)
        if cu_seqlens is not None:
            cu_seqlens = torch.as_tensor(cu_seqlens).cpu().numpy()
            if cu_seqlens.size == 0 or int(cu_seqlens[-1]) != batch * tokens:
                raise LayoutError(f"{key} ends at {cu_seqlens[-1:]}, but the batch has {batch} x {tokens} tokens")
            return Layout.from_cu_seqlens(cu_seqlens)
    mask = kwargs.get("attention_mask")
    position_ids = kwargs.get("position_ids")
    if position_ids is not None and position_ids.ndim > 2:
        raise LayoutError(
            f"position_ids of shape {list(position_ids.shape)} (multi-axis) do not say where documents begin; give "
            "[batch, tokens] position ids or a layout"
        )
    if position_ids is not None and (
        position_ids.shape[-1] != tokens or position_ids.numel() not in (tokens, batch * tokens)
    ):
        raise LayoutError(f"position_ids is {list(position_ids.shape)}, but the batch has {batch} x {tokens} tokens")
    if mask is not None and not bool(mask.all()):
        if tuple(mask.shape) != (batch, tokens):
            raise LayoutError(f"attention_mask is {list(mask.shape)}, but the batch has {batch} x {tokens} tokens")
        return _padded(mask)
    if position_ids is None:
        return Layout.from_lengths([[tokens] * batch if tokens else []])
    return Layout.from_position_ids(position_ids.expand(batch, tokens).cpu().numpy())


def _compare(layout: Layout, batch: int, tokens: int, place: tuple[int, int] | None) -> None:
    """Raises LayoutError unless the layout's part for this rank has as many tokens as the batch."""
    if layout.num_ranks > 1 and place is None:
        return
    rank, ranks = place if layout.num_ranks > 1 else (0, 1)
    if layout.num_ranks != ranks:
        raise LayoutError(f"the layout has {layout.num_ranks} ranks, but {ranks} share attention")
    described = int(layout.tokens[rank])
    if described != batch * tokens:
        where = f" for rank {rank}" if layout.num_ranks > 1 else ""
        raise LayoutError(
            f"the layout has {described} tokens{where}, input_ids has {batch} x {tokens}; the layout must describe "
            "the very tokens of the batch"
        )


def filled(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A batch without tokens gets one, without a target: see ``Layout.filled``."""
    ids = kwargs.get("input_ids")
    ids = kwargs.get("inputs_embeds") if ids is None else ids
    if ids is None or ids.shape[1]:
        return kwargs
    values = {"input_ids": 0, "inputs_embeds": 0, "position_ids": 0, "labels": -100, "shift_labels": -100}
    return {
        key: value.new_full((1, 1, *value.shape[2:]), values[key])
        if key in values and torch.is_tensor(value)
        else value
        for key, value in kwargs.items()
    }


def with_position_ids(kwargs: dict[str, Any], description: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The arguments with position ids, where only a layout or cu_seqlens told documents apart and no ids were given.

    Raises:
        LayoutError: a layout of several ranks without position ids.
    """
    if kwargs.get("position_ids") is not None or description["layout"] is description["cu_seqlens"] is None:
        return kwargs
    if layout.num_ranks > 1:
        raise LayoutError("a layout of several ranks needs position_ids beside it: true positions in each document")
    ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    rows = [np.arange(start, start + length) for start, length in layout.segments[:, [START, LENGTH]].tolist()]
    return {**kwargs, "position_ids": torch.from_numpy(np.concatenate(rows)).view(ids.shape[:2]).to(ids.device)}


def _padded(mask: torch.Tensor) -> Layout:
    """Rows with padding: every run of real tokens is a document, and so is every run of padding, which no real token
    sees. Exact, at the price of attention among the padding; packing is faster."""
    values = mask.bool().cpu().numpy()
    lengths: list[int] = []
    for row in values:
        borders = [0, *((row[1:] != row[:-1]).nonzero()[0] + 1).tolist(), len(row)]
        if sum(bool(row[a]) for a in borders[:-1]) > 1:
            raise LayoutError("attention_mask: a row has several runs of real tokens; describe them by position_ids")
        lengths += [b - a for a, b in itertools.pairwise(borders)]
    return Layout.from_lengths([lengths])


def count_targets(kwargs: Mapping[str, Any], description: Mapping[str, Any]) -> int:
    """Target tokens of this rank; from the collator, or counted (on a device: a wait, once per micro-batch)."""
    if description["num_targets"] is not None:
        return int(description["num_targets"])
    labels = kwargs.get("shift_labels")
    if labels is None and kwargs.get("labels") is not None:
        labels = kwargs["labels"][..., 1:]
    return 0 if labels is None else int((labels != -100).sum())
