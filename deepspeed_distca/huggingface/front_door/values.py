# SPDX-License-Identifier: Apache-2.0
"""Single values of a batch: types, shapes and ranges of ids, labels and counts; and its documents on this rank."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepspeed_distca.data.from_layout import IGNORE_INDEX
from deepspeed_distca.data.integers import on_host
from deepspeed_distca.given import integer
from deepspeed_distca.layout import LENGTH

#: Counts travel as int64 and are added up over ranks.
MAX_TARGETS = 1 << 48


@dataclass(frozen=True)
class Limits:
    """What a model's embeddings have room for; None: not known, not checked.

    Attributes:
        token_ids: ids must be below it.
        labels: so must labels.
        labels_are_tokens: whether labels are token ids; otherwise they are classes.
        stand_in: the id of an ordinary token; the one for padding may be embedded as zeros.
    """

    token_ids: int | None = None
    labels: int | None = None
    labels_are_tokens: bool = True
    stand_in: int = 0


UNLIMITED = Limits()


@dataclass(frozen=True)
class Here:
    """The documents of a batch on this rank.

    Attributes:
        segments: the rows of ``Layout.segments`` of this rank, int64 [segments, 4].
        whole: how long their documents are as a whole, wherever they are stored; int64 [segments].
        real: which tokens are no padding, bool [rows * tokens].
        shape: of the batch, [rows, tokens].
    """

    segments: np.ndarray
    whole: np.ndarray
    real: np.ndarray
    shape: tuple[int, int]

    @property
    def ends(self) -> np.ndarray:
        """Behind the last token of each segment, int64 [segments]."""
        return np.cumsum(self.segments[:, LENGTH])

    @property
    def starts(self) -> np.ndarray:
        """The first token of each segment, int64 [segments]."""
        return self.ends - self.segments[:, LENGTH]

    @property
    def continues(self) -> bool:
        """Whether a document has rows that are not in its segment here."""
        return bool((self.whole != self.segments[:, LENGTH]).any())


class BatchError(ValueError):
    """A batch whose tokens, labels or counts cannot be used; the message says what was given and what is allowed."""


def tokens_of(arguments: Mapping[str, Any]) -> Any:
    """The token ids, or the embeddings given for them."""
    ids = arguments.get("input_ids")
    return arguments.get("inputs_embeds") if ids is None else ids


def shape_of(arguments: Mapping[str, Any]) -> tuple[int, int]:
    ids, name = tokens_of(arguments), "inputs_embeds" if arguments.get("input_ids") is None else "input_ids"
    if ids is None:
        raise BatchError("neither input_ids nor inputs_embeds was given")
    if not torch.is_tensor(ids):
        raise BatchError(f"{name} must be a tensor, got {type(ids).__name__}")
    dims = 2 if name == "input_ids" else 3
    if ids.ndim != dims:
        raise BatchError(
            f"{name} has shape {list(ids.shape)}; allowed: [batch, tokens{', hidden' if dims == 3 else ''}]"
        )
    return int(ids.shape[0]), int(ids.shape[1])


def check_ids(ids: torch.Tensor | None, limit: int | None) -> None:
    if ids is None:
        return
    if ids.dtype not in (torch.int64, torch.int32):
        raise BatchError(f"input_ids are {ids.dtype}; allowed: torch.int64 or torch.int32")
    if not on_host(ids) or not ids.numel():
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if limit is not None and (low < 0 or high >= limit):
        bad = low if low < 0 else high
        row, token = (int(v) for v in (ids == bad).nonzero()[0])
        raise BatchError(
            f"input_ids holds {bad} at token {token} of row {row}; the model has room for ids 0 to {limit - 1}: does "
            "the tokenizer belong to it?"
        )


def check_labels(name: str, labels: Any, shape: tuple[int, int], limit: int | None) -> None:
    if labels is None:
        return
    if not torch.is_tensor(labels) or labels.dtype not in (torch.int64, torch.int32):
        kind = labels.dtype if torch.is_tensor(labels) else type(labels).__name__
        raise BatchError(f"{name} are {kind}; allowed: a tensor of torch.int64 or torch.int32")
    if labels.shape != shape:
        raise BatchError(f"{name} have shape {list(labels.shape)}, the tokens {list(shape)}; they must agree")
    if not on_host(labels) or limit is None:
        return
    values = labels.numpy()
    wrong = (values >= limit) | ((values < 0) & (values != IGNORE_INDEX))
    if wrong.any():
        row, token = (int(v[0]) for v in wrong.nonzero())
        raise BatchError(
            f"{name} hold {int(values[row, token])} at token {token} of row {row}; allowed: 0 to {limit - 1}, and "
            f"{IGNORE_INDEX} where there is no target"
        )


def whole_number(name: str, value: Any, most: int) -> int:
    if torch.is_tensor(value) and value.ndim == 0 and not value.dtype.is_floating_point:
        value = value.item()
    try:
        return integer(name, value, 0, most)
    except ValueError as error:
        raise BatchError(str(error)) from None


def check_items(value: Any) -> None:
    """Of num_items_in_batch, by which a model's loss is divided. A number on a device is not read.

    Raises:
        BatchError: it is no number above 0.
    """
    shown, number = repr(value), value
    if torch.is_tensor(value):
        shown = f"a tensor of {value.dtype}, shape {list(value.shape)}"
        if value.numel() == 1 and not value.dtype.is_complex and value.dtype != torch.bool:
            if not on_host(value):
                return
            number = value.item()
            shown = repr(number)
    if not isinstance(number, (int, float, np.number)) or isinstance(number, bool):
        number = 0
    if not 0 < number < float("inf"):
        raise BatchError(
            f"num_items_in_batch was given {shown}; allowed: the number of targets by which the loss is divided, "
            "above 0. Leave it out, and the plugin counts the targets of all ranks"
        )


def digest_of(ids: Any) -> int:
    """Of token ids on the host; 0 for any others."""
    if not torch.is_tensor(ids) or not on_host(ids) or ids.numel() < 2:
        return 0
    raw = ids.contiguous().view(-1).numpy().data.cast("B")
    return (zlib.crc32(raw) << 31 | zlib.adler32(raw) >> 1) + 1
