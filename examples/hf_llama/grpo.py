# SPDX-License-Identifier: Apache-2.0
"""The loss of GRPO on packed rollouts, as TRL has it (trl/trainer/grpo_trainer.py, `_compute_loss`, TRL 1.16).

TRL's own function takes padded rows and a trainer. Of a packed row only the weight of a token is another matter: TRL
divides by what a micro-batch has, and packed micro-batches have different numbers of sequences and tokens. Here every
token is weighed for the whole step, so that the gradient does not depend on which micro-batch or rank it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_distca import PackedSequenceCollator

LOSSES = ("dapo", "grpo", "dr_grpo")


class Rollout(NamedTuple):
    """A prompt, at least one token of it, and an answer that the policy gave."""

    prompt: list[int]
    answer: list[int]


def advantages(rewards: Sequence[float], group: int) -> list[float]:
    """Of answers, those to the same prompt one after another: how far a reward is above its group's mean, in its
    group's standard deviations."""
    by_group = torch.tensor(rewards, dtype=torch.float32).view(-1, group)
    mean, deviation = by_group.mean(dim=1, keepdim=True), by_group.std(dim=1, keepdim=True)
    return ((by_group - mean) / (deviation + 1e-4)).flatten().tolist()


def token_weights(loss: str, answers: Sequence[int], longest: int) -> list[float]:
    """What a token of each answer weighs: the losses of all tokens of the step times these, added up, are its loss.

    Args:
        loss: "dapo", the mean over tokens; "grpo", the mean over answers of each one's mean; "dr_grpo", the sum over
            tokens, divided by the answers and the longest there may be.
        answers: tokens of each answer of the step, of all ranks.
        longest: tokens that an answer may have.
    """
    weights = {
        "dapo": lambda _: 1 / sum(answers),
        "grpo": lambda tokens: 1 / (tokens * len(answers)),
        "dr_grpo": lambda _: 1 / (len(answers) * longest),
    }
    return [weights[loss](tokens) for tokens in answers]


class MicroBatch(NamedTuple):
    """A rank's rollouts as a packed row.

    Attributes:
        inputs: of the model; no labels, since the loss is ours.
        targets: the token after each position, -100 where no answer's token follows; int64 [tokens].
        advantages, weights: of the targets of answers, float32 [answers' tokens].
    """

    inputs: dict[str, Any]
    targets: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor


def micro_batch(
    rollouts: Sequence[Rollout], advantages: Sequence[float], weights: Sequence[float], device: torch.device
) -> MicroBatch:
    """Packs rollouts, each with its advantage and the weight of its tokens; none at all for a rank without any."""
    features = [{"input_ids": r.prompt + r.answer, "labels": [-100] * len(r.prompt) + r.answer} for r in rollouts]
    batch = PackedSequenceCollator()(features)
    inputs = {key: batch[key] for key in ("input_ids", "position_ids", "cu_seqlens", "layout")}
    counts = torch.tensor([len(r.answer) for r in rollouts], dtype=torch.int64)
    of_tokens = (
        torch.tensor(values, dtype=torch.float32).repeat_interleave(counts).to(device)
        for values in (advantages, weights)
    )
    inputs = {key: value.to(device) if torch.is_tensor(value) else value for key, value in inputs.items()}
    return MicroBatch(inputs, batch["shift_labels"][0].to(device), *of_tokens)


def log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of the tokens of answers, float32 [answers' tokens].

    Args:
        logits: of a row, [tokens, vocabulary]; of a row without tokens perhaps one more, which the plugin put there.
        targets: int64 [tokens].
    """
    answers = targets != -100
    chosen = logits[: len(targets)][answers].float()
    return chosen.log_softmax(dim=-1).gather(1, targets[answers][:, None])[:, 0]


def grpo_loss(
    new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor, clip: float = 0.2
) -> torch.Tensor:
    """The part of these tokens in the step's loss. All float32 [answers' tokens].

    Args:
        new, old: log-probabilities by the policy, and by the one that gave the answers.
        clip: how far their ratio may be from 1 to have a gradient towards the advantage.
    """
    ratio = torch.exp(new - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(gain * weights).sum()
