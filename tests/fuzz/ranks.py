# SPDX-License-Identifier: Apache-2.0
"""What ranks that try cases together must agree on: when to stop, and whether any of them found a case wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist


def until(first: int, count: int, seconds: float) -> Iterator[int]:
    """So many seeds, or as many as there is time for on every rank; the same on all."""
    end = time.monotonic() + seconds
    for seed in range(first, first + count):
        if any_rank(time.monotonic() > end):
            return
        yield seed


def any_rank(holds: bool) -> bool:
    """Whether it holds on any rank."""
    found = torch.tensor([holds], dtype=torch.int32)
    dist.all_reduce(found)
    return bool(found)


def agree(problem: str | None) -> None:
    """Every rank says what it found wrong, if anything.

    Raises:
        AssertionError: on every rank, if any found something: none is left waiting for another.
    """
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    assert not any(found), "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(found) if said)
