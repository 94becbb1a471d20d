# SPDX-License-Identifier: Apache-2.0
"""Targets stay inside their documents, wherever the batch put them, and are counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from deepspeed_distca.data.from_layout import IGNORE_INDEX
from deepspeed_distca.data.integers import on_host
from deepspeed_distca.huggingface.contract import Contract
from deepspeed_distca.huggingface.front_door.values import (
    MAX_TARGETS,
    BatchError,
    Here,
    Limits,
    check_labels,
    whole_number,
)
from deepspeed_distca.layout import LENGTH, START


def with_targets(
    arguments: dict[str, Any],
    here: Here,
    contract: Contract,
    limits: Limits,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The arguments with targets that stay inside their documents."""
    if contract.whole_rows or contract.targets is None:
        return arguments
    made = dict(arguments)
    for key in ("labels", "shift_labels"):
        check_labels(key, arguments.get(key), here.shape, limits.labels)
        if arguments.get(key) is not None:
            made[key] = arguments[key].long()  # losses take no int32
    labels, shifted = made.get("labels"), made.get("shift_labels")
    start, length = here.segments[:, START], here.segments[:, LENGTH]
    first = here.starts[start == 0]
    # Behind a document's last token may be padding that belongs to it.
    last, real = here.ends[start + length == here.whole] - 1, here.real
    if not real.all():
        last = np.union1d(last, np.flatnonzero(real[:-1] & ~real[1:]))
    if shifted is not None:
        made["shift_labels"] = shifted = _left_out(
            shifted, last, real, say, "a target behind its document's last token belongs to another document"
        )
    if labels is None or contract.targets == "same":
        if labels is not None and shifted is not None and not limits.labels_are_tokens:
            _check_first_classes(labels, first, contract)
        if labels is not None and shifted is not None and not contract.takes_shift_labels and limits.labels_are_tokens:
            # A language model that does not shift: each position's target is what shift_labels says it is.
            made["labels"] = labels = made.pop("shift_labels")
        if labels is not None:
            made["labels"] = _left_out(labels, np.zeros(0, np.int64), real, say, "padding has no targets")
        return made
    if shifted is not None and contract.takes_shift_labels:
        return made
    if here.continues:
        raise BatchError(
            "a document continues on other ranks, so its targets do as well, which labels cannot say"
            + (
                ": give shift_labels, the target of each position, beside labels"
                if contract.takes_shift_labels
                else ", and this model's loss takes no shift_labels; give each rank whole documents"
            )
        )
    if shifted is not None:
        # The model shifts by itself whatever it is given: put targets where it looks for them.
        labels = torch.full_like(shifted, IGNORE_INDEX)
        labels[:, 1:] = shifted[:, :-1]
        del made["shift_labels"]
    made["labels"] = _left_out(
        labels, first, real, say, "a label at a document's first token would be the target of another document"
    )
    return made


def _check_first_classes(labels: torch.Tensor, first: np.ndarray, contract: Contract) -> None:
    """Of a batch that has shift_labels, too. Raises BatchError where no document's first token has a class: whoever
    shifts labels, as PackedSequenceCollator does, leaves that one out. Waits for a device."""
    where = torch.from_numpy(first).to(labels.device)
    if first.size and bool((labels.reshape(-1)[where] == IGNORE_INDEX).all()):
        raise BatchError(
            f"labels of {contract.name} are classes of the tokens themselves, but this batch was made for targets "
            "that are the next tokens: it has shift_labels, and no document's first token has a label, as "
            "PackedSequenceCollator makes batches. Give labels of all tokens; where first tokens really have none, "
            "leave shift_labels out"
        )


def _left_out(
    labels: torch.Tensor, rows: np.ndarray, real: np.ndarray, say: Callable[[str], None], why: str
) -> torch.Tensor:
    """Labels with none at these rows, nor on padding; a copy where something changes."""
    if not real.all():
        rows = np.union1d(rows, np.flatnonzero(~real))
    where = torch.from_numpy(rows)
    if on_host(labels):
        dropped = int((labels.reshape(-1)[where] != IGNORE_INDEX).sum())
        if not dropped:
            return labels
        # The first label of a row is no target in any case.
        if ((rows % labels.shape[1] != 0) & (labels.reshape(-1)[where] != IGNORE_INDEX).numpy()).any():
            say(f"{dropped} labels of a micro-batch are left out: {why}, and padding has no targets")
    return labels.reshape(-1).index_fill(0, where.to(labels.device), IGNORE_INDEX).view_as(labels)


def count_targets(arguments: Mapping[str, Any], said: Any, tokens: int, contract: Contract) -> int:
    """Target tokens; on a device they are counted only where the batch does not say how many there are."""
    if said is not None:
        said = whole_number("num_targets", said, tokens)
    labels = arguments.get("shift_labels")
    if labels is None or (arguments.get("labels") is not None and contract.targets == "same"):
        labels = arguments.get("labels")
        if labels is not None and contract.targets == "next":
            labels = labels[..., 1:]
    if labels is None:
        return said or 0
    if said is not None and not on_host(labels):
        return said
    counted = int((labels != IGNORE_INDEX).sum())
    if said is not None and said != counted:
        raise BatchError(
            f"num_targets was given {said}, but the labels have {counted} targets inside documents; leave num_targets "
            "out, or use PackedSequenceCollator, which counts them"
        )
    return counted


def read_step_targets(said: Any, targets: int) -> int | None:
    if said is None:
        return None
    said = whole_number("step_targets", said, MAX_TARGETS)
    if said < targets:
        raise BatchError(
            f"step_targets was given {said}, but this micro-batch alone has {targets} targets; it is their number "
            "over all micro-batches of the step (AccumulationLoader counts them)"
        )
    return said
