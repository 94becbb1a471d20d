# SPDX-License-Identifier: Apache-2.0
"""What the ``distca`` block says about planning, with the defaults of the device and the size of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepspeed_distca.config import BLOCK, DistCAConfig, DistCAConfigError
from deepspeed_distca.defaults import MIN_GAIN
from deepspeed_distca.model_sizes import linear_flops
from deepspeed_distca.scheduler.shares import MAX_WEIGHT
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.scheduler.worth import PlanOptions

if TYPE_CHECKING:  # who predicts does without
    import torch


def plan_options(
    config: DistCAConfig,
    device: torch.device,
    model: Any,
    weights: tuple[int, ...] | None = None,
    servers: Mapping[int, str] | None = None,
    shards: int = 1,
) -> PlanOptions:
    """Options of planning, the same on every rank but for the weights and the topology.

    Args:
        model: the decoder's HuggingFace configuration.
        weights: of this rank's servers.
        servers: by rank, the machine of each.
        shards: ranks among which a layer's linear work is divided (tensor parallelism).
    """
    advanced = config.advanced
    min_gain = advanced.min_gain
    if min_gain is None:
        min_gain = MIN_GAIN if device.type == "cuda" else 0.0
    return PlanOptions(
        advanced.tolerance,
        advanced.granularity,
        advanced.max_received_rows,
        weights,
        min_gain,
        linear_flops(model) // shards,
        _topology(advanced.node_size, servers or {}),
    )


def _topology(node_size: int | None, servers: Mapping[int, str]) -> Topology:
    return Topology.of(servers.values()) if node_size is None else Topology.of_size(node_size, list(servers))


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
            f"`{BLOCK}.advanced.server_weights` was given {given}; allowed: one whole number of 0 to {MAX_WEIGHT} "
            f"for each of the {ranks} data-parallel ranks, not all 0 among the {servers} ranks that share their work"
        )
    return tuple(groups[rank // servers]) if servers > 1 else None
