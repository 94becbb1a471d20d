# SPDX-License-Identifier: Apache-2.0
"""Ranks on GPUs: one each where there are enough, else all on those there are, as torch's symmetric memory allows."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.exchange.process_group import exchange_group


def start(seconds: float) -> tuple[int, int, torch.device, dist.ProcessGroup]:
    """This process's rank, the world's size, its GPU and the group in which it serves.

    NCCL wants a GPU for each rank; ranks that share one talk through gloo.

    Args:
        seconds: after which a collective fails.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=seconds)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    # Set on the machines where it matters; never touch multicast, whatever the environment.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if torch.cuda.device_count() < world:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        dist.init_process_group("gloo", timeout=timeout)
        group = dist.new_group(backend="gloo", timeout=timeout)
    else:
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
        group = exchange_group([list(range(world))], device, timeout)
    meet(group, device)
    return rank, world, device, group


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Waits until every rank is here and the device has done all that was queued. Collective over the group."""
    dist.all_reduce(torch.zeros((), device=device), group=group)
    torch.cuda.synchronize(device)
