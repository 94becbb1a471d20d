# SPDX-License-Identifier: Apache-2.0
"""Times of an attention kernel over batches of CA-tasks, forward and backward apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deepspeed_distca.attention_server.kernels import BackwardInputs, Gradients, Kernel, KernelError
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.profiling.shapes import Limits, Shape, fitting_shapes, held_out_shapes
from deepspeed_distca.scheduler.cost_model import PHASES, Phase
from deepspeed_distca.scheduler.heads import Heads

# Elements that a buffer must stay below in flash-attention kernels.
_MAX_ELEMENTS = 2**31 - 1
_KEYS_PER_QUERY = 8  # key rows of a batch over its query rows, at most: tails of long documents
_LONGEST, _SMALLEST_LONGEST = 65536, 4096
_MOST_ROUNDS = 15
_FEWEST_ROUNDS = 3
# The device's share that the buffers may take, kernels' own work rows included.
_MEMORY_SHARE = 0.6
# Matrix products in front of every call.
_IN_FRONT = 2


class Stopwatch:
    """Seconds of a call: the device's on GPUs, the host's on CPU.

    On a GPU matrix products go first. They keep the device busy while the host launches the call, whose launches
    would be measured otherwise, and leave caches and clocks as a model's linear layers do.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._products = device, list[float]()  # seconds of each time that they ran
        size = 512 if device.type != "cuda" else 8192 if dtype.itemsize == 2 else 4096
        self._a, self._b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        self._product = torch.empty_like(self._a)
        if device.type != "cuda":
            for _ in range(3):
                start = time.perf_counter()
                self._multiply()
                self._products.append(time.perf_counter() - start)

    def _multiply(self) -> None:
        for _ in range(_IN_FRONT):
            torch.mm(self._a, self._b, out=self._product)

    @property
    def linear_rate(self) -> int:
        """Floating-point operations a second of the products."""
        typical = min(self._products) if self._device.type == "cpu" else statistics.median(self._products)
        return round(_IN_FRONT * 2 * len(self._a) ** 3 / typical)

    def start(self, call: Callable[[], object]) -> Callable[[], float]:
        """Runs it, on a GPU only launches it; what is returned waits and says the seconds.

        A device that is waited for after every call rests while the host launches the next one, and its clock can
        be higher afterwards than in training.
        """
        if self._device.type != "cuda":
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            return lambda: seconds
        first, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        first.record()
        self._multiply()
        begin.record()
        call()
        end.record()

        def read() -> float:
            end.synchronize()
            self._products.append(first.elapsed_time(begin) / 1e3)
            return begin.elapsed_time(end) / 1e3

        return read

    def __call__(self, call: Callable[[], object]) -> float:
        return self.start(call)()


class KernelBench:
    """One kernel with buffers for the largest batch; batches use the first rows of them."""

    def __init__(self, kernel: Kernel, heads: Heads, dtype: torch.dtype, device: torch.device, limits: Limits) -> None:
        self.kernel, self.heads, self.dtype, self.device = kernel, heads, dtype, device
        self.stopwatch = Stopwatch(device, dtype)
        value_dim = heads.value_dim or heads.head_dim

        def normal(rows: int, count: int, dim: int) -> torch.Tensor:
            return torch.randn(rows, count, dim, device=device, dtype=dtype)

        self._q = normal(limits.longest, heads.query, heads.head_dim)
        self._dout = normal(limits.longest, heads.query, value_dim)
        self._k = normal(limits.key_rows, heads.key_value, heads.head_dim)
        self._v = normal(limits.key_rows, heads.key_value, value_dim)
        wide = kernel.grad_dtype(dtype)
        self._dq = torch.empty_like(self._q)
        self._dk, self._dv = (torch.empty_like(x, dtype=wide) for x in (self._k, self._v))
        self._out = torch.empty_like(self._dout)
        self._lse = torch.empty(heads.query * limits.longest, device=device, dtype=torch.float32)

    def start(self, shape: Shape) -> dict[Phase, Callable[[], float]]:
        """One forward and one backward call, by phase; the seconds of each are read afterwards (Stopwatch.start)."""
        tasks, spec = shape.tasks, AttentionSpec(self.heads.head_dim**-0.5, shape.window)
        q, dout, dq, out = (x[: tasks.q_rows] for x in (self._q, self._dout, self._dq, self._out))
        k, v, dk, dv = (x[: tasks.k_rows] for x in (self._k, self._v, self._dk, self._dv))
        lse = self._lse[: self.heads.query * tasks.q_rows].view(self.heads.query, -1)
        forward = self.stopwatch.start(lambda: self.kernel.forward(q, k, v, tasks, spec, (out, lse)))
        inputs, grads = BackwardInputs(q, k, v, dout, lse, out), Gradients(dq, dk, dv)
        backward = self.stopwatch.start(lambda: self.kernel.backward(inputs, tasks, spec, grads))
        return {"forward": forward, "backward": backward}

    def seconds(self, shape: Shape) -> dict[Phase, float]:
        """Of one forward and one backward call, with the device waited for after both."""
        return {phase: read() for phase, read in self.start(shape).items()}


@dataclass(frozen=True)
class Measured:
    """Seconds of every shape in each phase, over so many rounds, and the rate of matrix products beside them, in
    floating-point operations a second."""

    shapes: tuple[Shape, ...]
    seconds: dict[Phase, list[float]]
    rounds: int
    linear_rate: int


def measure(bench: KernelBench, shapes: Sequence[Shape], budget: float) -> Measured:
    """Times every shape once a round, so that clocks that drift are shared by all; rounds until the budget is spent.

    Args:
        budget: seconds, the first round included, which compiles kernels and is not counted. At least a few rounds
            are measured whatever they take.

    Raises:
        KernelError: the kernel cannot compute such attention, or the device's memory is too small.
    """
    start = time.perf_counter()
    samples: dict[Phase, list[list[float]]] = {phase: [[] for _ in shapes] for phase in PHASES}
    rounds = 0
    try:
        for shape in shapes:
            bench.seconds(shape)
        while rounds < _MOST_ROUNDS:
            before = time.perf_counter()
            for index, reads in enumerate([bench.start(shape) for shape in shapes]):
                for phase, read in reads.items():
                    samples[phase][index].append(read())
            rounds += 1
            now = time.perf_counter()
            if rounds >= _FEWEST_ROUNDS and now - start + (now - before) > budget:
                break
    except torch.cuda.OutOfMemoryError as error:
        raise KernelError(
            f"{bench.kernel.name}: the device ran out of memory; free it, or measure shorter documents (--tokens)"
        ) from error
    # Other processes take a CPU's time and never give any: there the shortest time is the call's own.
    typical = min if bench.device.type == "cpu" else statistics.median
    seconds = {phase: [typical(x) for x in samples[phase]] for phase in PHASES}
    return Measured(tuple(shapes), seconds, rounds, bench.stopwatch.linear_rate)


def limits_for(
    kernel: Kernel,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    windows: Sequence[int | None],
    budget: float,
    quick: bool,
) -> Limits:
    """How large batches may be so that a few rounds fit the budget and the buffers the device: documents of 64K keys
    on a GPU that is fast enough, shorter ones by halves elsewhere.

    Raises:
        KernelError: the kernel cannot compute such attention.
    """
    if device.type == "cuda":
        longest, shortest, least, trial = 16384 if quick else _LONGEST, 128, _SMALLEST_LONGEST, 16384
    else:
        longest, shortest, least, trial = 512 if quick else 4096, 16, 256, 256
    while longest > least and not _fits(limits_of(longest, shortest, heads), heads, dtype, device):
        longest //= 2
    small = limits_of(min(trial, longest), shortest, heads)
    bench, tried = KernelBench(kernel, heads, dtype, device, small), fitting_shapes(small)[1]
    bench.seconds(tried)  # compiles
    per_pair = sum(bench.seconds(tried).values()) / tried.features[0]
    while longest > least:
        limits = limits_of(longest, shortest, heads)
        shapes = [s for w in windows for s in (*fitting_shapes(limits, w), *held_out_shapes(limits, w))]
        round_seconds = per_pair * sum(float(shape.features[0]) for shape in shapes)
        if round_seconds * (_FEWEST_ROUNDS + 1) <= budget:
            break
        longest //= 2
    return limits_of(longest, shortest, heads)


def limits_of(longest: int, shortest: int, heads: Heads) -> Limits:
    """Limits for documents of that length: as many key rows as a buffer may have, up to some multiple of it."""
    widest = max(heads.head_dim, heads.value_dim or heads.head_dim)
    longest = min(longest, _MAX_ELEMENTS // (heads.query * widest))
    key_rows = min(_KEYS_PER_QUERY * longest, _MAX_ELEMENTS // (heads.key_value * widest))
    return Limits(longest, shortest, max(longest, key_rows))


def _fits(limits: Limits, heads: Heads, dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    widest, size = max(heads.head_dim, heads.value_dim or heads.head_dim), dtype.itemsize
    # q, out, dout, dq, contiguous copies of two, and fp32 work rows; k, v, dk, dv with fp32 work rows, and dk, dv of
    # every query head in kernels that sum them over the group afterwards.
    of_queries = limits.longest * heads.query * widest * (6 * size + 4)
    of_keys = limits.key_rows * widest * (heads.key_value * (6 * size + 8) + 2 * heads.query * size)
    free, _ = torch.cuda.mem_get_info(device)
    return of_queries + of_keys <= _MEMORY_SHARE * free
