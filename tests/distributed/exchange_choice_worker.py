# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of test_choice.py: what ranks agree on where peer copies cannot be had."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.exchange import choice
from deepspeed_distca.attention_server.exchange.peer_copy import opening
from deepspeed_distca.attention_server.exchange.process_group import PeerToPeerExchange
from deepspeed_distca.compat.torch import without_multicast

NO_MEMORY = "RuntimeError: CUDA driver error: out of memory"
NO_ACCESS = "RuntimeError: GPU 0 cannot access the memory of GPU 1"


def agree() -> dict:
    """What this rank learns of its own and others' problems, and which exchange it gets."""
    dist.init_process_group("gloo")
    rank, cpu, group = dist.get_rank(), torch.device("cpu"), dist.group.WORLD
    found = {
        "none": opening._agree(group, cpu, ""),
        "one": opening._agree(group, cpu, "no link" if rank == 1 else ""),
        "long": opening._agree(group, cpu, "ä" * 1000 if rank == 2 else ""),
        "all": opening._agree(group, cpu, f"problem {rank}"),
    }
    state: dict = {}
    opening._places(group, torch.device("cpu", rank), state)
    found["nodes"] = len({tuple(place[:2]) for place in state["places"]})
    found["devices"] = [place[2] for place in state["places"]]

    def gather(group, device, mine):
        return gathered(group, cpu, mine)

    gathered = choice.gather
    with mock.patch.object(choice, "gather", gather), mock.patch.object(opening, "gather", gather):
        for name, kind in (("asked", "peer_copy"), ("some", "peer_copy" if rank else "nccl"), ("nobody", None)):
            exchange = choice.make_exchange(kind, group, torch.device("cuda", rank), timeout=10, staging_mib=1)
            found[name] = type(exchange).__name__
        found["printed"] = {
            f"{kind} {problem}": _printed(kind, problem, group, rank)
            for kind in ("peer_copy", None)
            for problem in (NO_MEMORY, NO_ACCESS)
        }
    os.environ.pop("TORCH_SYMM_MEM_DISABLE_MULTICAST", None)
    with without_multicast():
        found["inside"] = os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"]
    found["outside"] = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    # Whatever was agreed, messages still travel.
    exchange, into = PeerToPeerExchange(group), torch.zeros(3)
    expected = exchange.expect([((rank - 1) % 3, into)], sends=True)
    expected.start([((rank + 1) % 3, torch.full((3,), float(rank)))]).wait()
    found["arrived"] = into.tolist()
    return found


def _printed(kind: str | None, problem: str, group: dist.ProcessGroup, rank: int) -> str:
    """What this rank prints where peer copies cannot be had because of this."""
    printed, cpu = io.StringIO(), torch.device("cpu")

    def unopened(*_) -> tuple[None, str]:
        return None, opening._agree(group, cpu, problem if rank == 1 else "")

    with mock.patch.object(choice, "open_peer_copies", unopened), contextlib.redirect_stdout(printed):
        exchange = choice.make_exchange(kind, group, torch.device("cuda", rank), timeout=10, staging_mib=1536)
    assert isinstance(exchange, PeerToPeerExchange)
    return printed.getvalue()
