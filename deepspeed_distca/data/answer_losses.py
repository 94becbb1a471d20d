# SPDX-License-Identifier: Apache-2.0
"""Losses of one's own on what a model gives for a row of :class:`~.prefixes.PrefixCollator`: log-probabilities of
targets, their sums by answer, and a loss weighted by text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_distca.data.from_layout import IGNORE_INDEX

#: Logits of which :func:`token_logps` has a copy of higher precision at a time.
_BLOCK = 2**26


def token_logps(logits: torch.Tensor, shift_labels: torch.Tensor, ignore_index: int = IGNORE_INDEX) -> torch.Tensor:
    """The log-probability of each position's target, 0 where it has none.

    Computed in fp32 (float64 of float64), some rows with a target at a time: neither forward nor backward has a copy
    of all logits in fp32.

    Args:
        logits: [1, tokens, vocabulary]. What lies behind `tokens` is left out: a model has one row more where the
            batch has none.
        shift_labels: int64 [1, tokens].

    Returns:
        fp32 [1, tokens].

    Raises:
        ValueError: other shapes.
    """
    if logits.ndim != 3 or shift_labels.ndim != 2 or {len(logits), len(shift_labels)} != {1}:
        raise ValueError(
            "logits must be [1, tokens, vocabulary] and shift_labels [1, tokens], got "
            f"{list(logits.shape)} and {list(shift_labels.shape)}"
        )
    if logits.shape[1] < shift_labels.shape[1]:
        raise ValueError(f"logits has {logits.shape[1]} rows for the {shift_labels.shape[1]} of shift_labels")
    targets = shift_labels[0].to(logits.device)
    return _TokenLogps.apply(logits[0, : len(targets)], targets, ignore_index)[None]


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.ignore_index = ignore_index
        precise = torch.promote_types(logits.dtype, torch.float32)
        logps = torch.zeros(len(targets), dtype=precise, device=logits.device)
        for rows in _blocks(logits, targets, ignore_index):
            values = logits[rows].to(logps.dtype)
            logps[rows] = values.gather(1, targets[rows, None])[:, 0] - values.logsumexp(1)
        return logps

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        found = torch.zeros_like(logits)
        for rows in _blocks(logits, targets, ctx.ignore_index):
            values = logits[rows].to(gradients[0].dtype).softmax(1).neg_()
            values.scatter_add_(1, targets[rows, None], torch.ones_like(values[:, :1]))
            found[rows] = values.mul_(gradients[0][rows, None]).to(found.dtype)
        return found, None, None


def _blocks(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> Sequence[torch.Tensor]:
    """Indices of rows that have a target."""
    return (targets != ignore_index).nonzero()[:, 0].split(max(1, _BLOCK // logits.shape[1]))


def answer_sums(values: torch.Tensor, answers: torch.Tensor, num_answers: int) -> torch.Tensor:
    """The sum of each answer's values: of those of :func:`token_logps`, the log-probability of the answer.

    Args:
        values: [1, tokens].
        answers: int64 [1, tokens], ``row_answers`` of a batch of :class:`PrefixCollator`; what has -1 is left out.
        num_answers: of the batch, answers and documents.

    Returns:
        [num_answers], of the dtype of values, 0 where an answer has no target.
    """
    sums = values.new_zeros(num_answers + 1)
    return sums.index_add(0, answers[0].to(values.device) + 1, values[0])[1:]


def weighted_loss(
    logits: torch.Tensor, batch: Mapping[str, Any], divisor: float, ignore_index: int = IGNORE_INDEX
) -> torch.Tensor:
    """The cross-entropy of a batch of :class:`PrefixCollator`: each target times its weight, summed up and divided.

    With the number of all targets of the texts, one by one (``batch["row_weights"].sum()``), as the divisor it is the
    mean that the same texts have where nothing is shared.

    Args:
        logits: [1, tokens, vocabulary].
        batch: its ``shift_labels`` and ``row_weights``.
        divisor: of the sum; of a step, what all its micro-batches and ranks have together.
    """
    logps = token_logps(logits, batch["shift_labels"], ignore_index)
    return -(logps * batch["row_weights"].to(logps)).sum() / divisor
