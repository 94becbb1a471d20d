# SPDX-License-Identifier: Apache-2.0
"""Which exchange a group of servers uses, agreed by all of them: peer copies only where every rank can.

Where some rank cannot, sends and receives over the process group are used, with one line that says why if peer copies
were asked for, or if there was too little memory for them.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.coordination.watch import Watch
from deepspeed_distca.attention_server.exchange.base import Exchange
from deepspeed_distca.attention_server.exchange.peer_copy.opening import gather, open_peer_copies
from deepspeed_distca.attention_server.exchange.process_group import PeerToPeerExchange

ExchangeKind = Literal["nccl", "peer_copy"]
#: What is used where nothing is asked for.
AUTOMATIC: ExchangeKind = "peer_copy"


def make_exchange(
    kind: ExchangeKind | None,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    timeout: float,
    staging_mib: int,
    watch: Watch | None = None,
) -> Exchange:
    """The exchange over a group. Collective over it.

    Args:
        kind: what was asked for; None: chosen here.
        device: this rank's.
        timeout: seconds after which peer copies that are not over end the process.
        staging_mib: staging memory of peer copies on each rank, in MiB.
        watch: tells which rank is to blame when an exchange fails; after an alarm it lets this rank's device go on.

    Raises:
        ValueError: peer copies on a device that has none.
    """
    if device.type != "cuda":
        if kind == "peer_copy":
            raise ValueError(
                f'`exchange` was given "peer_copy", which copies between GPUs, but this rank is on {device.type}; '
                "leave the key out"
            )
        return PeerToPeerExchange(group, watch)
    if dist.get_world_size(group) == 1:
        return PeerToPeerExchange(group, watch)
    # Ranks that were told otherwise must not leave the others waiting.
    wanted = torch.tensor([(kind or AUTOMATIC) == "peer_copy"], dtype=torch.uint8)
    votes = [bool(row[0]) for row in gather(group, device, wanted)]
    if not any(votes):
        return PeerToPeerExchange(group, watch)
    exchange, problem = None, "not all ranks were told to use them"
    if all(votes):
        exchange, problem = open_peer_copies(group, device, staging_mib << 20, timeout)
    if exchange is not None:
        if watch is not None:
            watch.cover_device(exchange.release)
        return exchange
    too_large = "out of memory" in problem  # so say the caching allocator and the driver
    if dist.get_rank(group) == 0 and (kind is not None or too_large):
        remedy = f" (a `staging_mib` below {staging_mib} may fit)" if too_large else ""
        print(f"distca: no exchange by peer copies: {problem}{remedy}; NCCL's sends and receives are used", flush=True)
    return PeerToPeerExchange(group, watch)
