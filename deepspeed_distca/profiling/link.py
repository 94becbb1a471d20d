# SPDX-License-Identifier: Apache-2.0
"""Times of the exchange between ranks, over sizes; and what the links between this machine's GPUs carry, measured by
processes of its own, one for each.

    python -m deepspeed_distca.profiling.link cuda

is what each of these runs, started by :func:`measure_links` under torchrun.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.exchange.process_group import PeerToPeerExchange, exchange_group
from deepspeed_distca.profiling.measure import Stopwatch

_KIB = 2**10
#: Bytes that are measured for the fit, and between them those that it is tried on.
SIZES = tuple(64 * _KIB * 4**i for i in range(7))
HELD_OUT = tuple(192 * _KIB * 8**i for i in range(4))
#: How often each is sent; the first two times more are not counted.
_REPEATS = 9
#: Of measure_links: the smallest tells the latency, the largest the rate.
_BYTES = {"cuda": (2**16, 2**28), "cpu": (2**16, 2**22)}
_TIMEOUT = datetime.timedelta(seconds=120)
_MARK = "links: "


def sizes_for(device: torch.device, quick: bool) -> tuple[list[int], list[int]]:
    """The sizes that are worth their time on this device: up to 256 MiB on GPUs, to 64 MiB through sockets."""
    most = 2**28 if device.type == "cuda" else 2**26
    if quick:
        most //= 4
    return [size for size in SIZES if size <= most], [size for size in HELD_OUT if size <= most]


def measure_link(
    exchange: PeerToPeerExchange, device: torch.device, sizes: Sequence[int], partners: Mapping[int, int]
) -> list[float]:
    """Seconds in which ranks send so many bytes to one rank and receive as many from another, all at once; the slowest
    rank's median. Collective.

    Args:
        exchange: over at least two ranks, all of which call this.
        sizes: bytes each way.
        partners: to whom each rank sends; whoever sends also receives.
    """
    group = exchange.group
    rank = dist.get_rank(group)
    sends = [partners[rank]] if rank in partners else []
    receives = [source for source, to in partners.items() if to == rank]
    stopwatch = Stopwatch(device, torch.bfloat16)
    buffers = [torch.zeros(max(sizes), dtype=torch.uint8, device=device) for _ in range(2)]

    def median(size: int) -> float:
        out, into = (buffer[:size] for buffer in buffers)
        sent, received = [(to, out) for to in sends], [(source, into) for source in receives]
        samples = []
        for _ in range(_REPEATS + 2):
            meet(group, device)
            samples.append(stopwatch(lambda: exchange.start(sent, received).wait()))
        return statistics.median(samples[2:])

    slowest = torch.tensor([median(size) for size in sizes], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.tolist()


def partners_of(machines: Sequence[str]) -> tuple[dict[int, int], dict[int, int]]:
    """For each rank, given by its machine, another one half of its machine's ranks further on, and one on another
    machine, half of all ranks further on or behind that. Ranks without such a one are left out.

    Every machine but one with a single rank has the former; the latter there are where machines have equally many.
    """
    ranks = range(len(machines))
    mates = {name: [r for r in ranks if machines[r] == name] for name in machines}
    within = {
        rank: own[(place + len(own) // 2) % len(own)]
        for own in mates.values()
        for place, rank in enumerate(own)
        if len(own) > 1
    }
    if len({len(own) for own in mates.values()}) > 1 or len(mates) < 2:
        return within, {}
    rows = list(mates.values())  # of machines, whose ranks of one place exchange
    half = len(rows) // 2
    between = {
        rank: rows[(row + half) % len(rows)][place] for row, own in enumerate(rows) for place, rank in enumerate(own)
    }
    return within, between


def meet(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Waits for all ranks of a group (None: the default one), and for this rank's GPU. Collective."""
    if device.type == "cuda":
        dist.barrier(group, device_ids=[device.index])
        torch.cuda.synchronize(device)
    else:
        dist.barrier(group)


def measure_links(processes: int, device: str = "cuda") -> tuple[float, float]:
    """What the links between this machine's GPUs carry: bytes a second, each way at once, and the seconds of a small
    transfer, of the slowest of several processes that all send to one and receive from another. Starts the processes
    and waits for them; some 20 s.

    Args:
        processes: two or more, with a GPU each unless `device` is "cpu".

    Raises:
        RuntimeError: it could not be measured; the message has the last line that they printed.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *launcher, "-m", __name__, device]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from error
    lines = done.stdout.splitlines()
    found = next((line for line in lines if line.startswith(_MARK)), None)
    if done.returncode or found is None:
        errors = [line for line in lines if "Error" in line] or lines[-1:] or [f"exit status {done.returncode}"]
        raise RuntimeError(errors[0].strip())
    rate, latency = json.loads(found.removeprefix(_MARK))
    return rate, latency


def main(device_type: str) -> None:
    """Of one process: measures, and prints on rank 0."""
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    world = dist.get_world_size()
    exchange = PeerToPeerExchange(exchange_group([list(range(world))], device, _TIMEOUT))
    sizes = _BYTES[device.type]
    small, large = measure_link(exchange, device, sizes, partners_of(["here"] * world)[0])
    if dist.get_rank() == 0:
        print(_MARK + json.dumps([sizes[1] / large, small]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
