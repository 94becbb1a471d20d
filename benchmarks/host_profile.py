# SPDX-License-Identifier: Apache-2.0
"""What a layer whose rows move takes of the host, by function, in real steps.

    torchrun --nproc_per_node 2 benchmarks/host_profile.py --width 2048 --tokens 8192 --save results.md

The model and the batch "long|short" are those of small_steps.py, of which this has the options that are not named
here; ZeRO-1, Liger's kernels where they are installed. Rows move, whatever that saves (`min_gain` 0). Profiled are
forward as a whole and, of backward, the plugin's own part, which runs in a thread of autograd's. Functions of the
package that are called at least once a layer are listed, those that take longest first: calls, milliseconds with what
they call and their own, and the longest of what they call beside the package. All are per layer, of the rank that
takes longer. In forward the first layer waits for the plan: `core_attention` is what a layer takes without that.
A profiler makes calls slower, many short ones most. So steps are given with and without it, and beside it the host's
time of a layer as small_steps.py measures it, without any.
To try the script on CPU: `--tokens 256 --width 64 --attention sdpa`.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import small_steps
import torch
import torch.distributed as dist
from steps.ending import leave

import deepspeed_distca
from deepspeed_distca.attention_server.core_attention import _CoreAttention
from deepspeed_distca.scheduler.cost_model import PHASES

PACKAGE = str(Path(deepspeed_distca.__file__).parent)
#: Lines of a table, and what is listed of a function's calls.
ROWS, CALLS = 32, 4
STEPS = 8
MIX = "long|short"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048, choices=list(small_steps.MODELS))
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--layers", type=int, help="in place of the width's")
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--block", type=json.loads, default={}, help="JSON, more keys of the `distca` block")
    parser.add_argument("--attention", default="flash_attention_4", help="of plain; sdpa on CPU")
    parser.add_argument("--save", type=Path, help="the tables in Markdown")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device, liger = small_steps.begin()
    args.checkpointing, args.ds_config = False, {}
    args.block = {**args.block, "advanced": {"min_gain": 0.0, **args.block.get("advanced", {})}}
    alone = small_steps.host_times(args.attention, args.width, args.tokens, device)
    engine = small_steps.build(args, "plugin", args.width, args.zero, device)
    batch = batch_of(args.tokens, device)
    small_steps.steps(engine, batch, 3, device)
    without = steps(engine, batch, device)
    # As planned: reading what was measured would have a step timed that is profiled.
    assert engine.distca.server.planned.bytes_moved, "no rows moved: give more tokens"
    forward, backward = cProfile.Profile(), cProfile.Profile()
    # In Python 3.12 a profiler sees every thread, and every start of it makes all code anew: once a step. Before, it
    # sees the thread in which it was started.
    started = (engine, "backward") if sys.version_info >= (3, 12) else (_CoreAttention, "backward")
    with profiled(engine, "forward", forward), profiled(*started, backward):
        under = steps(engine, batch, device)
    layers = args.layers or small_steps.MODELS[args.width][0]
    text = report(args, device, liger, alone, (without, under), (forward, backward), layers)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    if dist.get_rank() == 0:
        slowest = max(texts, key=lambda text: text[0])
        print(f"\n{slowest[1]}\n", flush=True)
        if args.save:
            args.save.write_text(f"{slowest[1]}\n")
    leave()


def batch_of(tokens: int, device: torch.device) -> dict[str, Any]:
    draw = np.random.default_rng(dist.get_rank())
    rows = [
        {"input_ids": draw.integers(0, small_steps.VOCABULARY, n).tolist()} for n in small_steps.lengths(MIX, tokens)
    ]
    return small_steps.on_device(deepspeed_distca.PackedSequenceCollator()(rows), device)


def steps(engine: Any, batch: dict[str, Any], device: torch.device) -> float:
    """Collective: the median of STEPS steps' milliseconds on this rank."""
    return statistics.median(small_steps.steps(engine, batch, 1, device) * 1e3 for _ in range(STEPS))


def profiled(owner: Any, name: str, profile: cProfile.Profile) -> Any:
    """A context in which a method, or a class's static one, is profiled while it runs."""
    own = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        profile.enable()
        try:
            return own(*args, **kwargs)
        finally:
            profile.disable()

    return mock.patch.object(owner, name, staticmethod(call) if isinstance(owner, type) else call)


def report(
    args: argparse.Namespace,
    device: torch.device,
    liger: bool,
    alone: dict[str, Any],
    step_ms: tuple[float, float],
    profiles: tuple[cProfile.Profile, cProfile.Profile],
    layers: int,
) -> tuple[float, str]:
    """Milliseconds of a layer in both phases, and the text."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    lines = [
        f"{dist.get_world_size()} x {card}, {small_steps.processor()}; torch {torch.__version__}, width {args.width}, "
        f"{layers} layers, {args.tokens:,} tokens, ZeRO-{args.zero}, Liger {liger}, block {json.dumps(args.block)}, "
        f"exchange {alone['exchange']}; rank {dist.get_rank()}.",
        "",
        f"A step {step_ms[0]:.1f} ms, profiled {step_ms[1]:.1f}. Host behind a busy device, no profiler, ms a layer:",
        "",
        "| phase | plain | at home | moved |",
        "| --- | --- | --- | --- |",
        *(f"| {phase} | {' | '.join(f'{x:.3f}' for x in ms.values())} |" for phase, ms in alone["ms"].items()),
    ]
    whole = 0.0
    for phase, profile in zip(PHASES, profiles, strict=True):
        longest, rows = table(profile, layers)
        whole += longest
        lines += [
            "",
            f"| {phase} | calls | ms | own ms | of which it calls |",
            "| --- | --- | --- | --- | --- |",
            *rows,
        ]
    return whole, "\n".join(lines)


def table(profile: cProfile.Profile, layers: int) -> tuple[float, list[str]]:
    """Milliseconds of the function that takes longest, and the table's lines; both of a layer."""
    entries: dict[tuple[str, int, str], Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    each = 1e3 / (layers * STEPS)
    listed = {f: e for f, e in entries.items() if f[0].startswith(PACKAGE) and e[1] >= layers * STEPS}
    calls: dict[Any, list[tuple[float, str]]] = {f: [] for f in listed}
    for f, e in entries.items():
        for caller, times in e[4].items():
            if caller in calls and not f[0].startswith(PACKAGE):
                calls[caller].append((times[3] * each, name(f)))
    rows = []
    for f, e in sorted(listed.items(), key=lambda item: -item[1][3])[:ROWS]:
        called = ", ".join(f"{what} {ms:.3f}" for ms, what in sorted(calls[f], reverse=True)[:CALLS])
        rows.append(f"| {name(f)} | {e[1] / layers / STEPS:.1f} | {e[3] * each:.3f} | {e[2] * each:.3f} | {called} |")
    return max((e[3] for e in listed.values()), default=0.0) * each, rows


def name(function: tuple[str, int, str]) -> str:
    """As the table has it: the file within the package, or a builtin's own words."""
    file, _, called = function
    if file == "~":
        return called.strip("<>").removeprefix("built-in method ").removeprefix("method ").split(" of ")[0].strip("'")
    path = Path(file)
    where = path.relative_to(PACKAGE).with_suffix("") if file.startswith(PACKAGE) else path.stem
    return f"{where}: {called}"


if __name__ == "__main__":
    main()
