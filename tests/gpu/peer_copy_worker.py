# SPDX-License-Identifier: Apache-2.0
"""Runs on every GPU of test_peer_copy_gpu.py: messages by peer copies are what was sent, and what they cost a kernel
that runs beside them, against NCCL."""

from __future__ import annotations

import faulthandler
import os
import random
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.exchange.base import Exchange
from deepspeed_distca.attention_server.exchange.choice import make_exchange
from deepspeed_distca.attention_server.exchange.peer_copy.copies import PeerCopyExchange
from tests.gpu.processes import meet, start

_DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


def peer_copies(group: dist.ProcessGroup, device: torch.device, mib: int) -> PeerCopyExchange:
    before = time.perf_counter()
    exchange = make_exchange("peer_copy", group, device, timeout=30, staging_mib=mib)
    say(f"opened {type(exchange).__name__} with {mib} MiB in {time.perf_counter() - before:.2f} s")
    assert isinstance(exchange, PeerCopyExchange), "fell back to NCCL; rank 0's line above says why"
    return exchange


def say(text: str) -> None:
    print(f"rank {os.environ['RANK']}: {text}", flush=True)


def finish(what: str, exchange: Exchange, device: torch.device, seconds: float = 20.0) -> None:
    """Waits for the device; where it does not come to an end, tells how far the chunks got and fails."""
    event = torch.cuda.Event()
    event.record()
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            slots, rank = exchange._slots, exchange._rank
            with torch.cuda.stream(torch.cuda.Stream(device)):
                flags = exchange._keep[1][: exchange._header].view(torch.int32).to("cpu", non_blocking=False)
            step = 64 // 4
            arrived = {
                peer: (int(flags[2 * peer * step]), int(flags[(2 * peer + 1) * step]))
                for peer in range(len(exchange._memory))
            }
            say(
                f"{what} is stuck on rank {rank}. By peer (packed for us, pulled from us): {arrived}; queued here: "
                f"packed {dict(slots._packed)}, to be pulled {dict(slots._pulled)}"
            )
            exchange.release()
            raise AssertionError(f"{what} was not over after {seconds} s")
        time.sleep(0.0002)


def check(staging_mib: int, iterations: int, largest: int, seed: int = 0) -> dict:
    """Random messages of up to `largest` elements in one and two rounds, with and without naming destinations early,
    beside computation, the staging memory divided anew now and then."""
    # It ends by itself, with every thread's stack, when the time is up.
    faulthandler.dump_traceback_later(140, exit=True)
    rank, world, device, group = start(60)
    exchange = peer_copies(group, device, staging_mib)
    rng = random.Random(seed)  # the same on every rank
    busy = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    moved, spent = 0, time.perf_counter()
    for iteration in range(iterations):
        most = rng.choice([300, largest // 20, largest])
        if rng.random() < 0.3:
            sizes = [[rng.choice([0, 1, 10**6, 10**8]) for _ in range(world)] for _ in range(world)]
            exchange = exchange.for_sizes(np.array(sizes))
        plan = []
        for _ in range(rng.randint(0, 3 * world)):
            sender, receiver = rng.sample(range(world), 2)
            plan.append((sender, receiver, rng.randint(0, most), rng.choice(_DTYPES), rng.randint(0, 250)))
        plan2 = []
        if rng.random() < 0.4:  # a rank sends on to another what it has received
            for i, (_, over, *_) in enumerate(plan):
                if rng.random() < 0.5:
                    plan2.append((i, over, rng.choice([r for r in range(world) if r != over])))
        early = not plan2 and rng.random() < 0.5

        def data(i: int, plan=plan, iteration=iteration) -> torch.Tensor:
            """What message i holds, computed on the device and never the same twice."""
            _, _, size, dtype, salt = plan[i]
            return ((torch.arange(size, device=device) * (1 + i) + salt + 7 * iteration) % 251).to(dtype)

        for _ in range(rng.randint(0, 3)):
            busy = torch.tanh(busy @ busy)
        mine = [i for i, message in enumerate(plan) if message[1] == rank]
        into = {i: torch.full((plan[i][2],), 9, device=device, dtype=plan[i][3]) for i in mine}
        receives = [(plan[i][0], into[i]) for i in mine]
        out = [i for i, message in enumerate(plan) if message[0] == rank]
        expected = None
        if early:
            expected = exchange.expect(receives, sends=any(plan[i][2] for i in out))
            for _ in range(rng.randint(0, 3)):
                busy = torch.tanh(busy @ busy)
        sends = [(plan[i][1], data(i)) for i in out]
        second = {
            i: torch.full((plan[i][2],), 8, device=device, dtype=plan[i][3]) for i, _, last in plan2 if last == rank
        }
        then = (
            [(last, into[i]) for i, over, last in plan2 if over == rank],
            [(over, second[i]) for i, over, last in plan2 if last == rank],
        )
        pending = expected.start(sends) if early else exchange.start(sends, receives, then if plan2 else None)
        for _ in range(rng.randint(0, 3)):
            busy = torch.tanh(busy @ busy)
        pending.wait()
        for _, tensor in sends:
            tensor.fill_(5)  # too late to matter
        for i, tensor in [*into.items(), *second.items()]:
            wrong += (tensor != data(i)).sum()
            moved += tensor.numel() * tensor.element_size()
        del sends, receives, into, second, then
        if iteration % 25 == 24 or iteration in (0, 1, 2):
            finish(f"iteration {iteration}", exchange, device)
            assert int(wrong) == 0, f"{int(wrong)} elements differ by iteration {iteration}: {plan}, {plan2}"
    finish("the last iteration", exchange, device)
    result = {"wrong": int(wrong), "mib": moved / 2**20, "seconds": time.perf_counter() - spent}
    say(str(result))
    meet(group, device)
    faulthandler.cancel_dump_traceback_later()
    return result


def bench(mib: int = 128, repeats: int = 7) -> dict:
    """Every rank sends so many MiB, divided among the others: time alone, and beside matrix products that need every
    multiprocessor."""
    faulthandler.dump_traceback_later(80, exit=True)
    rank, world, device, group = start(60)
    kinds: dict[str, Exchange] = {
        "nccl": make_exchange("nccl", group, device, timeout=30, staging_mib=1),
        "peer_copy": peer_copies(group, device, 256),
    }
    peers = [(rank + i) % world for i in range(1, world)]
    rows = (mib << 20) // (world - 1) // 2
    sources = {p: torch.randn(rows, device=device).bfloat16() for p in peers}
    targets = {p: torch.empty(rows, device=device, dtype=torch.bfloat16) for p in peers}
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)

    def products() -> None:
        for _ in range(4):
            torch.mm(a, b, out=c)

    def transfer(exchange: Exchange):
        return exchange.start([(p, sources[p]) for p in peers], [(p, targets[p]) for p in sorted(peers)])

    def measured(exchange: Exchange | None, compute: bool) -> tuple[float, float]:
        """Milliseconds until the products are over, and until all is."""
        meet(group, device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda._sleep(1_000_000)  # the host queues everything meanwhile
        marks[0].record()
        pending = None if exchange is None else transfer(exchange)
        if compute:
            products()
        marks[1].record()
        if pending is not None:
            pending.wait()
        marks[2].record()
        torch.cuda.synchronize()
        return marks[0].elapsed_time(marks[1]), marks[0].elapsed_time(marks[2])

    def median(exchange: Exchange | None, compute: bool) -> tuple[float, float]:
        samples = [measured(exchange, compute) for _ in range(repeats + 2)][2:]
        both = torch.tensor([statistics.median(s) for s in zip(*samples, strict=True)], device=device)
        dist.all_reduce(both, dist.ReduceOp.MAX)  # the slowest rank
        return tuple(both.tolist())

    alone, _ = median(None, True)
    result: dict = {"products alone, ms": alone, "MiB sent by each rank": mib}
    for name, exchange in kinds.items():
        _, transfer_ms = median(exchange, False)
        beside, total = median(exchange, True)
        result[name] = {
            "transfer alone, ms": transfer_ms,
            "GiB/s each way": mib / 1024 / (transfer_ms / 1e3),
            "products beside it, ms": beside,
            "both, ms": total,
            "slow-down of the products": beside / alone - 1,
        }
        if rank == 0:
            say(f"{name}: {result[name]}")
        for p in peers:
            theirs = targets[p].clone()
            assert torch.isfinite(theirs).all() and bool(theirs.any()), (name, p)
            targets[p].zero_()
    meet(group, device)
    faulthandler.cancel_dump_traceback_later()
    return result
