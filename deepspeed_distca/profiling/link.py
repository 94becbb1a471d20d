# SPDX-License-Identifier: Apache-2.0
"""Times of the exchange between ranks, over sizes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.exchange.base import Messages
from deepspeed_distca.attention_server.exchange.process_group import PeerToPeerExchange
from deepspeed_distca.profiling.measure import Stopwatch

_KIB = 2**10
#: Bytes that are measured for the fit, and between them those that it is tried on.
SIZES = tuple(64 * _KIB * 4**i for i in range(7))
HELD_OUT = tuple(192 * _KIB * 8**i for i in range(4))


def sizes_for(device: torch.device, quick: bool) -> tuple[list[int], list[int]]:
    """The sizes that are worth their time on this device: up to 256 MiB on GPUs, to 64 MiB through sockets."""
    most = 2**28 if device.type == "cuda" else 2**26
    if quick:
        most //= 4
    return [size for size in SIZES if size <= most], [size for size in HELD_OUT if size <= most]


def measure_link(
    exchange: PeerToPeerExchange, device: torch.device, sizes: Sequence[int], repeats: int = 9
) -> list[float]:
    """Seconds in which every rank sends so many bytes to one rank and receives as many from another, at once; the
    slowest rank's median. Partners are half the group apart: on other nodes where there are several. Collective.

    Args:
        exchange: over at least two ranks, all of which call this.
        sizes: bytes each way.
    """
    group = exchange.group
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    to, source = (rank + world // 2) % world, (rank - world // 2) % world
    stopwatch = Stopwatch(device, torch.bfloat16)
    buffers = [torch.zeros(max(sizes), dtype=torch.uint8, device=device) for _ in range(2)]
    medians = []
    for size in sizes:
        out, into = (buffer[:size] for buffer in buffers)
        transfer = partial(_transfer, exchange, [(to, out)], [(source, into)])
        samples = []
        for _ in range(repeats + 2):
            meet(group, device)
            samples.append(stopwatch(transfer))
        medians.append(statistics.median(samples[2:]))
    slowest = torch.tensor(medians, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.tolist()


def _transfer(exchange: PeerToPeerExchange, sends: Messages, receives: Messages) -> None:
    exchange.start(sends, receives).wait()


def meet(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Waits for all ranks of a group (None: the default one), and for this rank's GPU. Collective."""
    if device.type == "cuda":
        dist.barrier(group, device_ids=[device.index])
        torch.cuda.synchronize(device)
    else:
        dist.barrier(group)
