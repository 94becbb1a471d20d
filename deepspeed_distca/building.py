# SPDX-License-Identifier: Apache-2.0
"""Builds a rank's attention server, for engines with and without pipeline stages: groups, exchange, agreement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_distca.attention_server.coordination.agreement import Agreement, agreement_group, fingerprint
from deepspeed_distca.attention_server.coordination.watch import Watch
from deepspeed_distca.attention_server.exchange.choice import ExchangeKind, make_exchange
from deepspeed_distca.attention_server.exchange.process_group import exchange_group
from deepspeed_distca.attention_server.server import AttentionServer
from deepspeed_distca.config import DistCAConfig, DistCAConfigError
from deepspeed_distca.scheduler.cost_model import CostModel
from deepspeed_distca.scheduler.worth import PlanOptions


@dataclass(frozen=True)
class Sharing:
    """Which ranks share attention.

    Attributes:
        groups: global ranks of every group of servers.
        agreeing: global ranks of every group of ranks that tell each other their micro-batches: whole groups of
            servers.
        server: this rank's place among its servers.
        replicas: over how many ranks the engine averages gradients.
        shards: consecutive ranks that hold one replica of the model among them (tensor parallelism).
    """

    groups: list[list[int]]
    agreeing: list[list[int]]
    server: int
    replicas: int
    shards: int = 1

    @classmethod
    def of_replicas(cls, said: Sequence[Sequence[int]], servers: int | None) -> Sharing:
        """Consecutive replicas of the model share attention.

        Args:
            said: by rank, the ranks of its data-parallel group.
            servers: how many share, a divisor of the replicas' number; None: all.

        Raises:
            DistCAConfigError: data-parallel groups that are not as DeepSpeed's tensor parallelism makes them.
        """
        of_shard = [list(ranks) for ranks in sorted({tuple(ranks) for ranks in said})]
        mine, world = said[dist.get_rank()], len(said)
        shards, servers = world // len(mine), servers or len(mine)
        if of_shard != [list(range(shard, world, shards)) for shard in range(shards)]:
            raise DistCAConfigError(
                f"the data-parallel groups of the engine's mpu are {of_shard}; allowed: groups of equal size whose "
                f"ranks are {shards} apart, as DeepSpeed's tensor parallelism makes them"
            )
        groups = [ranks[i : i + servers] for ranks in of_shard for i in range(0, len(ranks), servers)]
        replica = list(mine).index(dist.get_rank())
        return cls(groups, [list(range(world))], replica % servers, len(mine), shards)

    @property
    def servers(self) -> int:
        """How many share."""
        return len(self.groups[0])

    @property
    def own(self) -> list[int]:
        """The global ranks of this rank's group of servers."""
        return next(group for group in self.groups if dist.get_rank() in group)


@dataclass(frozen=True)
class Built:
    """A rank's server and what it lives on.

    Attributes:
        server: plans and computes.
        everyone: agreement of all ranks, each for itself.
        exchange: the name of the exchange in use.
        groups: the process groups, for as long as the server lives.
    """

    server: AttentionServer
    everyone: Agreement
    exchange: str
    groups: list[dist.ProcessGroup]


def build_server(
    engine: DeepSpeedEngine,
    config: DistCAConfig,
    sharing: Sharing,
    watch: Watch,
    *,
    cost: CostModel,
    options: PlanOptions,
    windows: Sequence[int | None],
    common: Sequence[Any],
    exchange: ExchangeKind | None,
) -> Built:
    """Collective over all ranks.

    Args:
        windows: of each attention layer of this rank.
        common: what plans depend on beside the block, the same on all ranks: compared with every micro-batch.
        exchange: which one is wanted; None: chosen.
    """
    timeout, device = timedelta(seconds=config.timeout_seconds), engine.device
    world = [list(range(dist.get_world_size()))]
    # First of all: what follows is said and done on groups with a time limit.
    everyone = agreement_group(world, timeout)
    watch.cover(everyone)
    exchanging = exchange_group(sharing.groups, device, timeout)
    agreeing = everyone if sharing.agreeing == world else agreement_group(sharing.agreeing, timeout)
    if agreeing is not everyone:
        watch.cover(agreeing)
    if device.type == "cuda":
        # Sets the communicator up while all ranks are here: later calls may involve only some of them.
        dist.barrier(exchanging, device_ids=[device.index])
        watch.cover_device(exchanging.abort)
    else:
        watch.cover(exchanging)
    moves = make_exchange(
        exchange,
        exchanging,
        device,
        timeout=config.timeout_seconds,
        staging_mib=config.advanced.staging_mib,
        watch=watch,
    )
    print_of_all = fingerprint(*common)
    server = AttentionServer(
        agreement=Agreement(agreeing, sharing.servers, print_of_all, watch, sharing.shards),
        exchange=moves,
        server=sharing.server,
        cost=cost,
        options=options,
        windows=windows,
        kernel=config.kernel,
        local_first=config.overlap != "none",
        accumulation_steps=engine.gradient_accumulation_steps,
        ranks=sharing.replicas,
        step=lambda: engine.global_steps,
        several_groups=sharing.servers != sharing.replicas,
        watch=watch,
    )
    return Built(server, Agreement(everyone, 1, print_of_all, watch), moves.name, [everyone, exchanging, agreeing])


def describe_nodes(options: PlanOptions, cost: CostModel) -> str:
    """ " on 2 nodes of 50 GB/s a rank", or nothing where there is one."""
    if options.nodes is None:
        return ""
    return f" on {options.nodes.size} nodes of {cost.nic_bytes_per_second / 1e9:g} GB/s a rank"


def attention_dtype(engine: DeepSpeedEngine) -> torch.dtype:
    """Of q, k and v."""
    if engine.torch_autocast_enabled():
        return engine.torch_autocast_dtype()
    return next(engine.module.parameters()).dtype
