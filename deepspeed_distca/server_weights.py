# SPDX-License-Identifier: Apache-2.0
"""The speeds of the data-parallel ranks' devices: given in the block, or measured when the engine is built."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from deepspeed_distca.config import BLOCK, DistCAConfig, DistCAConfigError
from deepspeed_distca.profiling.speeds import EQUAL_WITHIN, UnmeasuredError, speeds_of_ranks, weights_of
from deepspeed_distca.scheduler.shares import MAX_WEIGHT


def agreed_weights(
    config: DistCAConfig,
    device: torch.device,
    groups: Sequence[Sequence[int]],
    servers: int,
    everyone: dist.ProcessGroup | None = None,
) -> list[int] | None:
    """A weight for each data-parallel rank, the same on all ranks; None where none were asked for. Collective over
    all ranks where weights are to be measured by several servers. Rank 0 prints them then.

    Args:
        config: the same on all ranks.
        device: this rank's.
        groups: the global ranks of every data-parallel group. Ranks with the same place share a weight, that of the
            slowest of their devices: they work on the same tokens.
        servers: how many ranks share their work; a single one needs no weights: nothing is measured, and "measured"
            gives None.
        everyone: a group of all ranks for CPU tensors; None: the default one.

    Raises:
        DistCAConfigError: on every rank, if a device could not be measured.
    """
    if config.server_weights != "measured":
        return config.server_weights
    if servers == 1:
        return None
    try:
        of_ranks = speeds_of_ranks(device, everyone)
    except UnmeasuredError as error:
        raise DistCAConfigError(
            f'`{BLOCK}.server_weights` is "measured", but the devices of ranks {error.ranks} could not be measured, '
            "which takes 400 MiB of a GPU's memory and what cuBLAS needs; give the weights as a list of whole numbers"
            + (f". On this rank: {error.reason}" if error.reason else "")
        ) from error
    speeds = [min(of_ranks[rank] for rank in same) for same in zip(*groups, strict=True)]
    weights = weights_of(speeds)
    if dist.get_rank() == 0:
        print(f"distca: {_in_words(speeds, weights)}", flush=True)
    return weights


def weights_of_servers(given: Sequence[int] | None, ranks: int, servers: int, rank: int) -> tuple[int, ...] | None:
    """The weights of the servers of a rank's group; None where there are none, or a single server.

    Args:
        given: for each data-parallel rank.
        ranks: how many of them there are.
        servers: how many of them share their work, a divisor of their number.
        rank: this one's place among them.

    Raises:
        DistCAConfigError: weights of a wrong number or out of range, or all 0 in some group.
    """
    if given is None:
        return None
    groups = [given[i : i + servers] for i in range(0, len(given), servers)]
    if len(given) != ranks or not all(0 <= w <= MAX_WEIGHT for w in given) or not all(any(group) for group in groups):
        raise DistCAConfigError(
            f"`{BLOCK}.server_weights` was given {given}; allowed: one whole number of 0 to {MAX_WEIGHT} for each of "
            f"the {ranks} data-parallel ranks, not all 0 among the {servers} ranks that share their work"
        )
    return tuple(groups[rank // servers]) if servers > 1 else None


def _in_words(speeds: Sequence[float], weights: Sequence[int]) -> str:
    """What was measured, and which block repeats it."""
    fastest = max(speeds)
    found = ", ".join(f"{speed / fastest:.4f}" for speed in speeds)
    text = f"measured speeds {found} of the fastest device ({fastest:.1f} matrix products a second)"
    if len(set(weights)) == 1:
        text += f": equal within {EQUAL_WITHIN:.1%}"
    return f'{text}; "server_weights": {list(weights)} repeats this run with the same plans'
