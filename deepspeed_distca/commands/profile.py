# SPDX-License-Identifier: Apache-2.0
"""``ds_distca profile``: a cost model of this device, measured, printed and stored."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from deepspeed_distca.attention_server.coordination.hello import machine
from deepspeed_distca.attention_server.exchange.choice import make_exchange
from deepspeed_distca.attention_server.exchange.process_group import PeerToPeerExchange, exchange_group
from deepspeed_distca.attention_server.kernels import Kernel, KernelError
from deepspeed_distca.attention_server.kernels.libraries import distribution_version
from deepspeed_distca.attention_server.setting import DTYPES, setting_of
from deepspeed_distca.cli import UsageError
from deepspeed_distca.commands.shared import integer_list, positive_int
from deepspeed_distca.cost_choice import choose_kernel
from deepspeed_distca.profiling.link import measure_link, partners_of, sizes_for
from deepspeed_distca.profiling.measure import KernelBench, Measured, limits_for, limits_of, measure
from deepspeed_distca.profiling.moving import Moves, measure_moving
from deepspeed_distca.profiling.result import LINKS, Link, Links, Result, build
from deepspeed_distca.profiling.shapes import Limits, fitting_shapes, held_out_shapes, smallest_shape
from deepspeed_distca.scheduler.cost_model import PHASES
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.profiles import cache_folder, file_name

_DISTRIBUTIONS = {"flash_attn_4": "flash-attn-4", "flash_attn_3": "flash_attn_3", "flash_attn_2": "flash-attn"}
_TIMEOUT = datetime.timedelta(seconds=120)
_QUICK_BUDGET = 5.0
_STAGING_MIB = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("--heads", type=int, default=32, help="query heads (32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="key/value heads (8)")
    parser.add_argument("--head-dim", type=int, default=128, help="elements of a query and key head (128)")
    parser.add_argument("--value-dim", type=int, help="elements of a value head (as --head-dim)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--kernel", help="name of an attention kernel (the best that is installed and fits)")
    parser.add_argument(
        "--windows",
        type=partial(integer_list, low=1),
        metavar="W,W,...",
        help="windows to measure beside full causal attention (none)",
    )
    parser.add_argument("--device", help="cuda, cuda:1, cpu (a GPU where there is one)")
    parser.add_argument("--budget-seconds", type=_positive, help="time for measuring the kernel (30; --quick: 5)")
    parser.add_argument("--tokens", type=positive_int, help="the longest document measured (as the budget allows)")
    parser.add_argument("--quick", action="store_true", help="shorter documents, less exact")
    parser.add_argument("--save", metavar="FILE", help="store it there in place of the user's cache")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and stores. Under a launcher all ranks measure the exchange, rank 0 alone the kernel.

    Raises:
        UsageError: options, a device or a kernel that cannot be used.
    """
    heads = _heads(arguments)
    windows: list[int | None] = [None, *sorted({*(arguments.windows or ())})]
    ranks, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    device = _device(arguments.device, ranks, local_rank)
    dtype = DTYPES[arguments.dtype]
    budget = arguments.budget_seconds or (_QUICK_BUDGET if arguments.quick else 30.0)
    if arguments.save is not None and Path(arguments.save).is_dir():
        raise UsageError(f"--save was given {arguments.save!r}, a folder; give the name of a file")
    kernel = _kernel(arguments.kernel, heads, dtype, device, windows)
    shortest = 128 if device.type == "cuda" else 16
    if arguments.tokens and arguments.tokens < shortest:
        raise UsageError(f"--tokens was given {arguments.tokens}; allowed on {device.type}: {shortest} or more")
    links: Links = {}
    moves = None
    if ranks > 1:
        links, moves = _measure_exchange(device, kernel, heads, dtype, arguments.quick)
        if int(os.environ["RANK"]) != 0:
            return 0
    torch.manual_seed(0)
    try:
        if arguments.tokens:
            limits = limits_of(arguments.tokens, shortest, heads)
        else:
            limits = limits_for(kernel, heads, dtype, device, windows, budget, arguments.quick)
        result = _profile_kernel(kernel, heads, dtype, device, limits, windows, budget, links, moves)
    except ValueError as error:  # KernelError among them
        raise UsageError(str(error)) from error

    console = Console(width=None if sys.stdout.isatty() else 140)
    print_result(result, console)
    name = _cached_as(result) if arguments.save is None else Path(arguments.save)
    try:
        result.profile.save(name)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror or error}; name another file with --save") from error
    console.print(f"stored in {name}", highlight=False, soft_wrap=True)
    return 0


def _profile_kernel(
    kernel: Kernel,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    limits: Limits,
    windows: list[int | None],
    budget: float,
    links: Links,
    moves: Moves | None,
) -> Result:
    fitting = [shape for window in windows for shape in fitting_shapes(limits, window)]
    unseen = [shape for window in windows for shape in held_out_shapes(limits, window)]
    print(
        f"measuring {len(fitting) + len(unseen)} batches of up to {limits.longest} queries and {limits.key_rows} keys",
        file=sys.stderr,
        flush=True,
    )
    bench = KernelBench(kernel, heads, dtype, device, limits)
    everything = measure(bench, [*fitting, *unseen, smallest_shape(limits)], budget)

    def part(which: slice) -> Measured:
        seconds = {phase: everything.seconds[phase][which] for phase in PHASES}
        return Measured(everything.shapes[which], seconds, everything.rounds, everything.linear_rate)

    n = len(fitting)
    smallest = {phase: everything.seconds[phase][-1] for phase in PHASES}
    return build(
        setting_of(device, dtype, kernel.name), heads, part(slice(n)), part(slice(n, -1)), smallest, links, moves,
        _about(kernel, windows),
    )  # fmt: skip


def _measure_exchange(
    device: torch.device, kernel: Kernel, heads: Heads, dtype: torch.dtype, quick: bool
) -> tuple[Links, Moves]:
    """Collective over all processes that the launcher started; the process group is gone afterwards."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        world = dist.get_world_size()
        group = exchange_group([list(range(world))], device, _TIMEOUT)
        plain = PeerToPeerExchange(group)
        sizes, unseen = sizes_for(device, quick)
        machines: list[str] = [""] * world
        dist.all_gather_object(machines, machine())
        links: Links = {}
        for kind, partners in zip(LINKS, partners_of(machines), strict=True):
            if partners:
                seconds = measure_link(plain, device, [*sizes, *unseen], partners)
                links[kind] = Link(len(partners), sizes, seconds[: len(sizes)], unseen, seconds[len(sizes) :])
        # As in training.
        exchange = make_exchange(None, group, device, timeout=_TIMEOUT.total_seconds(), staging_mib=_STAGING_MIB)
        return links, measure_moving(exchange, kernel, heads, device, dtype, rounds=5 if quick else 15)
    finally:
        dist.destroy_process_group()


def print_result(result: Result, console: Console) -> None:
    """The calls that the model was not fitted to, the errors, and the terms."""
    setting, cost = result.profile.setting, result.profile.cost
    heads = cost.heads
    console.print(
        f"{setting.device}, {setting.kernel}, {setting.dtype}, {heads.query}/{heads.key_value} heads of "
        f"{heads.head_dim}",
        highlight=False,
    )
    table = Table(title="calls that the model was not fitted to: measured and predicted ms")
    table.add_column("queries x keys x tasks")
    for phase in PHASES:
        for name in (phase, "predicted", "error"):
            table.add_column(name, justify="right", no_wrap=True)
    for i, shape in enumerate(result.unseen.shapes):
        cells = []
        for phase in PHASES:
            measured, predicted = result.unseen.seconds[phase][i], result.predicted[phase][i]
            cells += [f"{measured * 1e3:.3f}", f"{predicted * 1e3:.3f}", f"{predicted / measured - 1:+.1%}"]
        table.add_row(shape.name, *cells)
    console.print(table)

    table = Table(title="the model")
    table.add_column("phase")
    for name in ("1M pairs", "query row", "key row", "task"):
        table.add_column(f"{name}, us", justify="right")
    for name in ("held out: median", "worst", "fitted: median", "worst"):
        table.add_column(name, justify="right")
    for phase in PHASES:
        terms, unseen, fitted = cost.phase(phase), result.held_out[phase], result.fitted[phase]
        table.add_row(
            phase,
            f"{terms.pair / 1e3:.2f}",
            f"{terms.query_row / 1e9:.5f}",
            f"{terms.key_row / 1e9:.5f}",
            f"{terms.task / 1e9:.3f}",
            *(f"{error:.1%}" for error in (unseen.median, unseen.worst, fitted.median, fitted.worst)),
        )
    console.print(table)
    console.print(f"smallest call {cost.launch / 1e9:.1f} us", highlight=False)
    console.print(f"linear layers {cost.linear_rate / 1e12:.4g} TFLOP/s", highlight=False)
    for kind, (rate, latency) in LINKS.items():
        link = f"{getattr(cost, rate) / 2**30:.1f} GiB/s each way, latency {getattr(cost, latency) / 1e9:.1f} us"
        about = result.profile.about[f"exchange {kind}"]
        console.print(f"exchange {kind} {link}: {about}", highlight=False, soft_wrap=True)
    table = Table(title="what moving rows costs beside the transfers")
    for name in ("phase", "layer, us", "message, us"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase in PHASES:
        moving = cost.moving(phase)
        table.add_row(phase, f"{moving.layer / 1e9:.0f}", f"{moving.message / 1e9:.1f}")
    console.print(table)
    console.print(f"moving rows: {result.profile.about['moving rows']}", highlight=False, soft_wrap=True)


def _about(kernel: Kernel, windows: list[int | None]) -> Mapping[str, Any]:
    about: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "torch": str(torch.__version__),
        "command": "ds_distca profile",
    }
    distribution = _DISTRIBUTIONS.get(kernel.name)
    if distribution is not None:
        about[distribution] = distribution_version(distribution)
    if len(windows) > 1:
        about["windows"] = [window for window in windows if window is not None]
    return about


def _cached_as(result: Result) -> Path:
    folder = cache_folder()
    if folder is None:
        raise UsageError("there is no home folder to store the profile in; name a file with --save")
    return folder / file_name(result.profile.setting, result.profile.cost.heads)


def _heads(arguments: argparse.Namespace) -> Heads:
    size = DTYPES[arguments.dtype].itemsize
    try:
        return Heads(arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.value_dim, size)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _device(name: str | None, ranks: int, local_rank: int) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UsageError(f"--device was given {name!r}; allowed: cuda, cuda:1, ..., cpu") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or not torch.cuda.is_available():
        raise UsageError(f"--device was given {name!r}, which this machine does not have; allowed: cuda, cpu")
    if device.index is not None and ranks > 1:
        raise UsageError(f"--device was given {name!r}, one GPU for all {ranks} ranks; give cuda: each takes its own")
    if device.index is None:
        device = torch.device("cuda", local_rank)
    if device.index >= torch.cuda.device_count():
        raise UsageError(f"--device {device}: there are {torch.cuda.device_count()} devices")
    torch.cuda.set_device(device)
    return device


def _kernel(
    name: str | None, heads: Heads, dtype: torch.dtype, device: torch.device, windows: list[int | None]
) -> Kernel:
    """The kernel that an engine would select, with every window."""
    try:
        kernel = choose_kernel(name, heads, device, dtype, windows[0])
        for window in windows[1:]:
            kernel = choose_kernel(kernel.name, heads, device, dtype, window)
    except KernelError as error:
        raise UsageError(str(error)) from error
    return kernel
