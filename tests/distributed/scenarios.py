# SPDX-License-Identifier: Apache-2.0
"""Scenarios that end in an error of loss and gradients, or in words of a refusal: on a rank, and over all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

EXACT = 1e-5


def outcomes(scenarios: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Every scenario's outcome by its name: the largest relative error of loss and gradients, or an error's words."""
    deepspeed.init_distributed()
    found = {}
    for name, scenario in scenarios.items():
        try:
            found[name] = scenario()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return found


def compared(gradients: Sequence[torch.Tensor | None], references: list[torch.Tensor]) -> float:
    """The largest relative error of a gradient; none is zeros."""
    largest, error = max(float(g.norm()) for g in references), 0.0
    for gradient, reference in zip(gradients, references, strict=True):
        found = torch.zeros_like(reference) if gradient is None else gradient
        error = max(error, float((found - reference).norm()) / max(float(reference.norm()), 1e-3 * largest))
    return error


def check_exact(found: list[dict[str, Any]], name: str) -> None:
    """Of the outcomes of all ranks."""
    for rank, outcomes in enumerate(found):
        outcome = outcomes[name]
        assert isinstance(outcome, float) and outcome <= EXACT, f"rank {rank}: {outcome}"


def check_refused(found: list[dict[str, Any]], name: str, words: tuple[str, str]) -> None:
    """By errors with these words, of each rank."""
    for outcomes, said in zip(found, words, strict=True):
        outcome = outcomes[name]
        assert isinstance(outcome, str) and re.search(said, outcome, re.DOTALL), outcome
