# SPDX-License-Identifier: Apache-2.0
"""How fast the ranks' devices are against each other, measured on all of them at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from deepspeed_distca.profiling.link import meet

#: Rows, columns and inner size of the products: a decoder's feed-forward part (400 MiB in bf16), and a small one.
GPU_SHAPE, CPU_SHAPE = (8192, 14336, 4096), (256, 256, 256)
#: Seconds of products, and those of them that do not count: a GPU's clock takes a while to settle at its power limit.
GPU_SECONDS, GPU_SETTLING = 3.0, 1.0
CPU_SECONDS, CPU_SETTLING = 0.3, 0.1
#: Products between two looks at the time.
_AT_ONCE = 16

#: Speeds that differ by no more than this share count as equal.
EQUAL_WITHIN = 0.005
#: The fastest device's weight.
_FASTEST = 1000

#: What was measured, by default process group. Only lists of which every rank has all, so that all keep one or none.
_KEPT: MutableMapping[dist.ProcessGroup, list[float]] = WeakKeyDictionary()


class UnmeasuredError(RuntimeError):
    """Devices that could not be measured.

    Attributes:
        ranks: theirs, the same on every rank.
        reason: what was raised on this rank; empty on the others.
    """

    def __init__(self, ranks: list[int], reason: str) -> None:
        super().__init__(f"ranks {ranks} could not be measured; this rank: {reason or 'measured'}")
        self.ranks, self.reason = ranks, reason


def speeds_of_ranks(device: torch.device, everyone: dist.ProcessGroup | None = None) -> list[float]:
    """Matrix products a second on the device of every rank of the default process group, the same list on all of
    them. All are measured at once, and kept for all engines of the group; where some could not be measured, the next
    call measures all of them anew. Collective.

    Args:
        device: this rank's.
        everyone: a group of the same ranks for CPU tensors, to speak over; None: the default one, which communicates
            on `device`.

    Raises:
        UnmeasuredError: on every rank, if some device has no memory left, or its products fail otherwise.
    """
    group = dist.group.WORLD
    if group in _KEPT:
        return _KEPT[group]
    on = device if everyone is None else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    meet(everyone, on)
    speed, reason = _speed_or_reason(device)
    mine = torch.tensor([speed], dtype=torch.float64, device=on)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine, group=everyone)
    speeds = torch.cat(gathered).tolist()
    unmeasured = [rank for rank, speed in enumerate(speeds) if speed <= 0]
    if unmeasured:
        raise UnmeasuredError(unmeasured, reason)
    _KEPT[group] = speeds
    return speeds


def _speed_or_reason(device: torch.device) -> tuple[float, str]:
    """The speed, or 0 and what was raised. As text: an error that is kept keeps the matrices."""
    try:
        return device_speed(device), ""
    except RuntimeError as error:  # of the allocator, of cuBLAS (no room for its workspace), or of the driver
        return 0.0, f"{type(error).__name__}: {' '.join(str(error).split())}"


def weights_of(speeds: Sequence[float]) -> list[int]:
    """Whole weights of 1 to 1000 in proportion to speeds; all 1000 where speeds are equal within 0.5 %.

    Args:
        speeds: above 0, in any unit.
    """
    fastest = max(speeds)
    if fastest <= (1 + EQUAL_WITHIN) * min(speeds):
        return [_FASTEST] * len(speeds)
    return [max(1, round(_FASTEST * speed / fastest)) for speed in speeds]


def device_speed(device: torch.device) -> float:
    """Matrix products a second: bf16 on a GPU for about 3 s, fp32 on a CPU for about 0.3 s. The matrices' memory is
    given back; cuBLAS's workspace stays, which it takes for a process's first product. No random state is touched.

    Raises:
        torch.cuda.OutOfMemoryError: the device's memory is too small for the matrices.
        RuntimeError: another error of CUDA or cuBLAS, which has no room for its workspace, say.
    """
    speed = _speed(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the allocator would keep the matrices' memory
    return speed


@torch.no_grad()
def _speed(device: torch.device) -> float:
    on_gpu = device.type == "cuda"
    rows, columns, inner = GPU_SHAPE if on_gpu else CPU_SHAPE
    dtype = torch.bfloat16 if on_gpu else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    # Random values: what a product draws of a GPU's power depends on them.
    a = torch.randn(rows, inner, generator=generator, dtype=dtype, device=device)
    b = torch.randn(inner, columns, generator=generator, dtype=dtype, device=device)
    out = torch.empty(rows, columns, dtype=dtype, device=device)

    def products() -> None:
        for _ in range(_AT_ONCE):
            torch.mm(a, b, out=out)

    products()  # libraries are loaded
    if not on_gpu:
        return settled_rate(_on_cpu(products), CPU_SETTLING)
    return settled_rate(_on_gpu(products), GPU_SETTLING)


def settled_rate(times: Sequence[float], settling: float) -> float:
    """Products a second once the device has settled; of the last interval alone where that takes all of the time.

    Args:
        times: seconds when the device was through with so many products, then as many again and so on; the first is
            the start. At least two.
        settling: seconds after the start that do not count.
    """
    last = len(times) - 1
    first = next((i for i, seconds in enumerate(times[:-1]) if seconds - times[0] >= settling), last - 1)
    return _AT_ONCE * (last - first) / (times[last] - times[first])


def _on_cpu(products: Callable[[], None]) -> list[float]:
    times = [time.perf_counter()]
    while times[-1] - times[0] < CPU_SECONDS:
        products()
        times.append(time.perf_counter())
    return times


def _on_gpu(products: Callable[[], None]) -> list[float]:
    """By events, read while the device is at the products after them: its queue is never empty."""
    events: list[torch.cuda.Event] = []
    times = [0.0]
    while times[-1] < GPU_SECONDS:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)
        products()
        if len(events) > 2:
            done = events[len(times)]
            done.synchronize()
            times.append(events[0].elapsed_time(done) / 1e3)
    torch.cuda.synchronize()
    return times
