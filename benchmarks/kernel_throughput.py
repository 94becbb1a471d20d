# SPDX-License-Identifier: Apache-2.0
"""TFLOP/s of the installed attention kernels by the shape of a batch of CA-tasks: what a cost model rests on.

    python benchmarks/kernel_throughput.py [--kernels flash_attn_4 torch_varlen] [--layout packed|scattered]

A shape is queries x keys x tasks: every task has that many queries against that many keys, causal and aligned
bottom-right. FLOPs are 4 x visible pairs x query heads x head dimension forward and 2.5 times that backward. Needs a
CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import numpy as np
import torch

from deepspeed_distca.attention_server.kernels import (
    AttentionShape,
    BackwardInputs,
    Gradients,
    Kernel,
    KernelError,
    installed_kernels,
    make_kernel,
)
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch

SHAPES = [
    (65536, 65536, 1),
    (32768, 65536, 1),
    (16384, 65536, 2),
    (4096, 65536, 4),
    (1024, 65536, 8),
    (512, 65536, 8),
    (256, 65536, 8),
    (128, 65536, 8),
    (8192, 8192, 8),
    (4096, 4096, 16),
    (512, 4096, 32),
    (128, 4096, 64),
    (333, 5001, 32),
    (128, 128, 512),
]


def make_tasks(queries: int, keys: int, count: int, scattered: bool) -> TaskBatch:
    """Equal tasks one behind the other, or with a gap of 64 rows and in reverse order."""
    gap = 64 if scattered else 0
    order = np.arange(count)[::-1] if scattered else np.arange(count)
    return TaskBatch(
        order * (queries + gap),
        np.full(count, queries),
        order * (keys + gap),
        np.full(count, keys),
        count * (queries + gap),
        count * (keys + gap),
    )


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median over the repeats, after warming up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(kernel: Kernel, tasks: TaskBatch, args: argparse.Namespace) -> dict[str, float]:
    """ms and TFLOP/s forward, backward by out, and backward by delta."""
    spec = AttentionSpec(args.head_dim**-0.5)

    def normal(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, args.head_dim, device="cuda", dtype=torch.bfloat16)

    q, dout = normal(tasks.q_rows, args.q_heads), normal(tasks.q_rows, args.q_heads)
    k, v = normal(tasks.k_rows, args.kv_heads), normal(tasks.k_rows, args.kv_heads)
    out, lse = torch.empty_like(q), torch.zeros(args.q_heads, tasks.q_rows, device="cuda")
    wide = kernel.grad_dtype(q.dtype)
    grads = Gradients(torch.empty_like(q), torch.empty_like(k, dtype=wide), torch.empty_like(v, dtype=wide))
    kernel.forward(q, k, v, tasks, spec, (out, lse))
    delta = (dout.float() * out.float()).sum(-1).t().contiguous()
    by_out, by_delta = (BackwardInputs(q, k, v, dout, lse, **x) for x in ({"out": out}, {"delta": delta}))
    calls = {
        "forward": lambda: kernel.forward(q, k, v, tasks, spec, (out, lse)),
        "backward": lambda: kernel.backward(by_out, tasks, spec, grads),
        "backward_delta": lambda: kernel.backward(by_delta, tasks, spec, grads),
    }
    flops = 4 * tasks.area * args.q_heads * args.head_dim
    result = {}
    for what, call in calls.items():
        ms = milliseconds(call, args.repeats)
        result[f"{what}_ms"] = ms
        result[f"{what}_tflops"] = flops * (1 if what == "forward" else 2.5) / ms / 1e9
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", help="default: all that are installed, without the reference")
    parser.add_argument("--layout", choices=("packed", "scattered"), default="packed")
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--max-rows", type=int, default=None, help="skip shapes with more key rows than this")
    parser.add_argument("--json", help="also write the numbers to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernel_throughput.py needs a CUDA device")

    results = []
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {args.q_heads}/{args.kv_heads} heads, ",
        end="",
    )
    print(f"head dimension {args.head_dim}, {args.layout}")
    for name in args.kernels or [x for x in installed_kernels() if x != "reference"]:
        kernel = make_kernel(name)
        try:
            heads, dims = (args.q_heads, args.kv_heads), (args.head_dim, args.head_dim)
            spec = AttentionSpec(args.head_dim**-0.5)
            kernel.check(AttentionShape(*heads, *dims, torch.bfloat16, torch.device("cuda")), spec)
            kernel.load()
        except KernelError as error:
            print(error)
            continue
        print(f"\n{name}, TFLOP/s\n\n| queries x keys x tasks | forward | backward by out | backward by delta |")
        print("|---|---|---|---|")
        for queries, keys, count in SHAPES:
            if args.max_rows is not None and keys * count > args.max_rows:
                continue
            try:
                numbers = measure(kernel, make_tasks(queries, keys, count, args.layout == "scattered"), args)
            except (KernelError, torch.cuda.OutOfMemoryError) as error:
                print(f"| {queries} x {keys} x {count} | {type(error).__name__} | | |")
                continue
            speeds = [numbers[f"{what}_tflops"] for what in ("forward", "backward", "backward_delta")]
            print(f"| {queries} x {keys} x {count} | " + " | ".join(f"{x:.0f}" for x in speeds) + " |", flush=True)
            results.append({"kernel": name, "queries": queries, "keys": keys, "tasks": count, **numbers})
    if args.json:
        setting = {x: getattr(args, x) for x in ("layout", "q_heads", "kv_heads", "head_dim", "repeats")}
        setting |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        with open(args.json, "w") as file:
            json.dump({"setting": setting, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
