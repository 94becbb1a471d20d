# SPDX-License-Identifier: Apache-2.0
"""Micro-batches as PipelineEngine takes them, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepspeed_distca.huggingface.contract import Contract
from deepspeed_distca.huggingface.front_door import admit, stand_in
from deepspeed_distca.layout import DOCUMENT, LENGTH, RANK, START, Layout, LayoutError

#: ((input_ids, position_ids), labels): what the first and the last stage load.
PipelineBatch = tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]

#: Pipelines compute their loss from shift_labels and give positions to every stage.
CONTRACT = Contract()


def pipeline_batch(batch: Mapping[str, Any] | PipelineBatch) -> PipelineBatch:
    """A batch of :class:`deepspeed_distca.PackedSequenceCollator` as PipelineEngine takes it.

    For ``engine.set_batch_fn``. Needed without the plugin only; with it, batches are converted anyway. A batch of no
    tokens gets one, without a target.

    Args:
        batch: input_ids and shift_labels int64 [1, tokens], and position_ids or a description of the documents; or
            what is in PipelineEngine's form already.

    Raises:
        TypeError, KeyError: neither, or keys that are missing.
    """
    batch = _as_mapping(batch)
    missing = {"input_ids", "shift_labels"} - set(batch)
    if missing:
        raise KeyError(
            f"{sorted(missing)} missing in a batch with the keys {sorted(map(str, batch))}: use "
            "PackedSequenceCollator as the loader's collate_fn"
        )
    layout = batch.get("layout")
    shared = isinstance(layout, Layout) and layout.num_ranks > 1
    # Which part of a layout of several replicas this is, is not known here; `describe` compares it.
    given = stand_in(batch) if shared else admit(batch, CONTRACT).arguments
    if given.get("position_ids") is None:
        raise KeyError("neither position_ids nor a layout nor cu_seqlens is in the batch")
    return (given["input_ids"], given["position_ids"]), given["shift_labels"]


@dataclass(frozen=True)
class Described:
    """One replica's micro-batch.

    Attributes:
        segments: int64 [num_segments, 3], columns (document, start, length), in storage order.
        shared: documents are numbered over all replicas of the group and may continue on others.
        targets: how many target tokens it has.
    """

    segments: np.ndarray
    shared: bool
    targets: int


def describe(batch: Any, place: tuple[int, int], contract: Contract = CONTRACT) -> Described:
    """What a micro-batch, in either form, says of itself.

    Args:
        place: this replica's among those that share a layout, where the batch has such a one, and how many these are.
        contract: of the model.

    Raises:
        ValueError, TypeError: a batch that is neither, or whose documents cannot be told apart.
    """
    batch = _as_mapping(batch)
    micro_batch = admit(batch, contract, place=place).micro_batch
    layout = micro_batch.layout
    if layout.has_trees:
        raise LayoutError("pipelines take no trees; give each text by itself (PackedSequenceCollator)")
    shared = layout.num_ranks > 1
    rows = layout.segments[layout.segments[:, RANK] == (place[0] if shared else 0)]
    return Described(rows[:, [DOCUMENT, START, LENGTH]], shared, micro_batch.targets)


def _as_mapping(batch: Any) -> Mapping[str, Any]:
    if isinstance(batch, Mapping):
        return batch
    try:
        (input_ids, position_ids), labels = batch
    except (TypeError, ValueError):
        raise TypeError(
            "a micro-batch must be a mapping as PackedSequenceCollator makes it, or ((input_ids, position_ids), "
            f"labels); got {type(batch).__name__}"
        ) from None
    return {"input_ids": input_ids, "position_ids": position_ids, "shift_labels": labels}


def to_message(micro_batches: list[Described]) -> np.ndarray:
    """All micro-batches of a batch as int64, for the other ranks."""
    heads = np.array([(len(m.segments), int(m.shared), m.targets) for m in micro_batches], dtype=np.int64)
    return np.concatenate([[len(heads)], heads.ravel(), *(m.segments.ravel() for m in micro_batches)])


def from_message(message: np.ndarray) -> list[Described]:
    """The inverse of :func:`to_message`."""
    heads, rows = np.split(message[1:].reshape(-1, 3), [message[0]])
    segments = np.split(rows, heads[:, 0].cumsum()[:-1])
    both = zip(segments, heads.tolist(), strict=True)
    return [Described(mine, bool(shared), targets) for mine, (_, shared, targets) in both]


def merge(replicas: list[Described]) -> Layout:
    """One layout over replicas of what each of them has of a micro-batch.

    Raises:
        LayoutError: shared layouts on some only, or segments that do not make whole documents.
    """
    if len({m.shared for m in replicas}) > 1:
        raise LayoutError(
            "some replicas gave the layout of all replicas, others only their own; give one or the other"
        )
    rows, documents = [], 0
    for rank, m in enumerate(replicas):
        segments = m.segments.copy()
        if not m.shared:
            ids, segments[:, 0] = np.unique(segments[:, 0], return_inverse=True)
            segments[:, 0] += documents
            documents += ids.size
        rows.append(np.insert(segments, 0, rank, axis=1))
    return Layout(np.concatenate(rows), len(replicas)).validate()


def over_grid(layouts: list[Layout | None], place: np.ndarray) -> Layout:
    """One layout over the ranks of a grid of stages x replicas.

    Args:
        layouts: by stage, the layout over its replicas; None where the stage has no micro-batch.
        place: int64 [stages, replicas], the number that each rank has in the layout.
    """
    rows, documents = [np.zeros((0, 4), dtype=np.int64)], 0
    for stage, layout in enumerate(layouts):
        if layout is None:
            continue
        segments = layout.segments.copy()
        segments[:, RANK] = place[stage, segments[:, RANK]]
        segments[:, DOCUMENT] += documents
        documents += int(layout.segments[:, DOCUMENT].max(initial=-1)) + 1
        rows.append(segments)
    segments = np.concatenate(rows)
    return Layout(segments[np.argsort(segments[:, RANK], kind="stable")], place.size)
