# SPDX-License-Identifier: Apache-2.0
"""What the links between this machine's GPUs carry: measured by processes of its own, one for each.

    python -m deepspeed_distca.profiling.links cuda

is what each of them runs, started by :func:`measure_links` under torchrun.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.exchange.process_group import PeerToPeerExchange, exchange_group
from deepspeed_distca.profiling.link import measure_link, partners_of

#: The smallest tells the latency, the largest the rate: bytes each way.
_BYTES = {"cuda": (2**16, 2**28), "cpu": (2**16, 2**22)}
_TIMEOUT = datetime.timedelta(seconds=120)
_MARK = "links: "


class Links(NamedTuple):
    """Of the slowest of several processes that all send to one and receive from another.

    Attributes:
        bytes_per_second: each way at once.
        latency: seconds of a small transfer.
    """

    bytes_per_second: float
    latency: float


def measure_links(processes: int, device: str = "cuda") -> Links:
    """Starts the processes and waits for them; some 20 s.

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
    return Links(**json.loads(found.removeprefix(_MARK)))


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
        print(_MARK + json.dumps(Links(sizes[1] / large, small)._asdict()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
