# SPDX-License-Identifier: Apache-2.0
"""Sets peer copies up: staging memory that all ranks of a node can read, tried out before it is used.

The memory comes from torch's symmetric memory, which is not public: whatever it lacks or refuses on any rank, there is
no exchange on all of them, with a reason.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.exchange.peer_copy.copies import PeerCopyExchange, header_bytes
from deepspeed_distca.attention_server.exchange.peer_copy.streams import CudaStreams, DriverError
from deepspeed_distca.compat import check
from deepspeed_distca.compat.torch import share_memory, shareable_memory

#: By this torch lets ranks that share a GPU share memory; tests do, where there are more ranks than GPUs.
_ONE_DEVICE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_MESSAGE_BYTES = 256
_TRIAL_SECONDS = 30.0


def open_peer_copies(
    group: dist.ProcessGroup, device: torch.device, size: int, timeout: float
) -> tuple[PeerCopyExchange | None, str]:
    """The exchange, or why there is none; the same on every rank. Collective over the group.

    Args:
        device: this rank's.
        size: bytes of staging memory on each rank.
        timeout: seconds after which an exchange that is not over ends the process.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    state: dict = {}

    def look() -> None:
        state["streams"] = CudaStreams(device)
        check("peer_copy")

    def neighbours() -> None:
        places = state["places"]
        if len({tuple(place[:2]) for place in places}) > 1:
            raise RuntimeError("the ranks are on several nodes")
        indices = [place[2] for place in places]
        if len(set(indices)) < world and os.environ.get(_ONE_DEVICE) != "1":
            raise RuntimeError("several ranks call their GPU by the same number (CUDA_VISIBLE_DEVICES differs)")
        for peer in indices:
            if peer != device.index and not torch.cuda.can_device_access_peer(device.index, peer):
                raise RuntimeError(f"GPU {device.index} cannot access the memory of GPU {peer}")

    def allocate() -> None:
        memory = shareable_memory(size, device)
        memory[: header_bytes(world)].zero_()
        torch.cuda.synchronize(device)
        state["memory"] = memory

    def meet() -> None:
        state["handle"], state["views"] = share_memory(state["memory"], group)
        if state["views"][rank].data_ptr() != state["memory"].data_ptr():
            raise RuntimeError("this rank's own memory has two addresses")

    def make() -> None:
        # The addresses are good as long as these live.
        keep = (state["handle"], state["memory"], state["views"])
        state["exchange"] = PeerCopyExchange(
            state["streams"],
            rank,
            [view.data_ptr() for view in state["views"]],
            size,
            timeout=timeout,
            keep=keep,
        )

    def trial() -> None:
        # Over before the exchange itself would end the process.
        _try_out(state["exchange"], rank, world, device, min(_TRIAL_SECONDS, timeout / 2))

    for step in (look, lambda: _places(group, device, state), neighbours, allocate, meet, make, trial):
        problem = _agree(group, device, _problem(step))
        if problem:
            return None, problem
    return state["exchange"], ""


def _problem(step: Callable[[], None]) -> str:
    try:
        step()
    except (RuntimeError, ValueError, TypeError, ImportError, AttributeError, OSError, DriverError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _agree(group: dist.ProcessGroup, device: torch.device, problem: str) -> str:
    """The first rank's problem, on every rank; empty where nobody has one. Collective."""
    text = problem.encode(errors="replace")[:_MESSAGE_BYTES]
    mine = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    for rank, row in enumerate(gather(group, device, mine)):
        said = bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
        if said:
            return f"rank {rank}: {said}"
    return ""


def _places(group: dist.ProcessGroup, device: torch.device, state: dict) -> None:
    """Every rank's node, as two numbers, and the number of its device."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    node = hashlib.blake2b(name.encode(), digest_size=14).digest()
    halves = [int.from_bytes(node[:7], "big"), int.from_bytes(node[7:], "big")]
    mine = torch.tensor([*halves, device.index], dtype=torch.int64)
    state["places"] = [row.tolist() for row in gather(group, device, mine)]


def _try_out(exchange: PeerCopyExchange, rank: int, world: int, device: torch.device, seconds: float) -> None:
    """A few bytes from every rank to every other, there and back in a second exchange."""
    peers = [peer for peer in range(world) if peer != rank]
    sends = [(p, torch.full((1000,), 100 * rank + p, dtype=torch.int32, device=device)) for p in peers]
    for _ in range(2):
        receives = [(p, torch.zeros(1000, dtype=torch.int32, device=device)) for p in peers]
        exchange.start(sends, receives).wait()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        end = time.monotonic() + seconds
        while not event.query():
            if time.monotonic() > end:
                exchange.release()
                raise RuntimeError(f"a trial was not over after {seconds:g} s")
            time.sleep(0.001)
        for peer, tensor in receives:
            if not bool((tensor == 100 * peer + rank).all()):
                raise RuntimeError(f"what rank {peer} sent in a trial arrived changed")


def gather(group: dist.ProcessGroup, device: torch.device, mine: torch.Tensor) -> list[torch.Tensor]:
    """A small tensor of every rank, on the host. Collective."""
    mine = mine.to(device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [row.cpu() for row in rows]
