# SPDX-License-Identifier: Apache-2.0
"""Small steps with and without the plugin, in turns, and what a layer whose rows move costs the host.

    torchrun --nproc_per_node 2 benchmarks/small_steps.py --widths 2048 4096 --tokens 4096 8192 16384 32768 \\
        --zero 1 --host --json results.json --save results.md

Models are as wide as Llama-3.2-1B (2048: 16 layers, feed-forward 8192, 32/8 heads of 64) and Llama-3-8B (4096: 4
layers, 14336, 32/8 heads of 128), vocabulary 32000, bf16, AdamW, Liger's kernels where they are installed. "plain" is
transformers' own flash attention under DeepSpeed, with transformers' flattening collator. "plugin" is the same with a
`distca` block and PackedSequenceCollator, "two lines" the same with a block alone: documents are then read from the
device, for which the host waits. Batches: "even", one document of all tokens on every rank; "short", sixteen on every
rank; "long|short", one on even ranks and sixteen on odd ones. All take turns, there and back, of `--chunk` steps in a
row, which are timed from a barrier to a barrier: 1 lets nothing of a step hide under the one before. Nor does
DeepSpeed by itself: its throughput timer waits for the device at every step, unless it is told not to, by
`--ds-config '{"timers": {"throughput": {"synchronized": false}}}'`. The ideal of "long|short" is the mean of plain's
"even" and "short". Milliseconds of a step are medians of the slowest rank. `--compile` adds both kinds after
`engine.compile()`, and how many graphs torch made for them on a batch, before its steps were timed + while they were.
All kinds are then without Liger's kernels: with them plain steps had gradients that were no numbers after
`engine.compile()` (torch 2.11, liger-kernel 0.8.5).

`--host` adds the host's time to queue a layer's core attention of "long|short" behind a busy device: by transformers'
function, by the plugin's with everything at home, and with rows moved as if they cost nothing. In brackets: what a
moved layer takes beyond plain. Ranks may share a GPU, and then no steps are timed. To try the script on CPU:
`--tokens 256 --widths 64 --attention sdpa`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from steps.ending import leave
from steps.measure import gather_floats, keep_busy
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import deepspeed_distca
from deepspeed_distca.attention_server.core_attention import core_attention
from deepspeed_distca.attention_server.exchange.choice import make_exchange
from deepspeed_distca.attention_server.exchange.process_group import exchange_group
from deepspeed_distca.attention_server.kernels import select_kernel
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.side_stream import SideStream
from deepspeed_distca.attention_server.statistics import DeviceTimer, TimedExchange, TimedKernel
from deepspeed_distca.attention_server.steps import LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.balance import balance
from deepspeed_distca.scheduler.cost_model import PHASES, CostModel
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import home_tasks

#: Layers, feed-forward width and head dimension of a width.
MODELS = {2048: (16, 8192, 64), 4096: (4, 14336, 128), 64: (2, 128, 16)}
VOCABULARY = 32000
MIXES = ("even", "short", "long|short")
KINDS = ("plain", "plugin", "two lines")
COMPILED = ("plain compiled", "plugin compiled")
#: Layers whose host time is taken at once: fewer launches than a device's queue holds.
LAYERS = 8


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[2048, 4096], choices=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768], help="of each rank")
    parser.add_argument("--layers", type=int, help="in place of the width's")
    parser.add_argument("--zero", type=int, nargs="+", default=[1])
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true", help="plain and plugin after engine.compile() too")
    parser.add_argument("--block", type=json.loads, default={}, help="JSON, more keys of the `distca` block")
    parser.add_argument("--ds-config", type=json.loads, default={}, help="JSON, more keys of the ds_config, for all")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS[1:]), choices=KINDS[1:], help="beside plain")
    parser.add_argument("--turns", type=int, default=3, help="measured, of each kind on each batch")
    parser.add_argument("--chunk", type=int, default=4, help="steps of a turn")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--attention", default="flash_attention_4", help="of plain; sdpa on CPU")
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="no further model is begun after that")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", type=Path, help="the tables in Markdown")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device, liger = begin(liger=not args.compile)
    if args.compile:
        torch._dynamo.config.recompile_limit *= 2  # of a function's graphs, and two models have the same functions
    results: dict[str, Any] = {"about": about(args, device, liger), "steps": [], "host": [], "failed": []}
    end = time.monotonic() + args.budget_seconds
    if args.host:
        results["host"] = [
            host_times(args.attention, width, tokens, device) for width in args.widths for tokens in args.tokens
        ]
        report(args, results)
    for zero in () if share_gpus() else args.zero:
        for width in args.widths:
            late = gather_floats([time.monotonic() - end], device)[0][0] > 0
            if not late:
                model_steps(args, width, zero, device, results)
    report(args, results)
    leave()


def begin(liger: bool = True) -> tuple[torch.device, bool]:
    """This process's device, in the process group; and whether models have Liger's kernels, which they are not given
    on CPU."""
    cuda = torch.cuda.is_available()
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if share_gpus():
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed takes it for the device
    deepspeed.init_distributed("nccl" if cuda and not share_gpus() else "gloo", timeout=timedelta(minutes=5))
    return device, use_liger() if cuda and liger else False


def share_gpus() -> bool:
    """Whether ranks share a GPU, which NCCL refuses."""
    return 0 < torch.cuda.device_count() < int(os.environ["WORLD_SIZE"])


def use_liger() -> bool:
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError:
        return False
    apply_liger_kernel_to_llama()
    return True


def about(args: argparse.Namespace, device: torch.device, liger: bool) -> dict[str, Any]:
    return {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "processor": processor(),
        "ranks": dist.get_world_size(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "liger": liger,
        **{k: v for k, v in vars(args).items() if k not in ("json", "save", "measure", "budget_seconds")},
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
    return names[0] if names else platform.processor()


def lengths(mix: str, tokens: int) -> list[int]:
    """Of this rank's documents."""
    long = mix == "even" or (mix == "long|short" and dist.get_rank() % 2 == 0)
    return [tokens] if long else [tokens // 16] * 16


def build(args: argparse.Namespace, kind: str, width: int, zero: int, device: torch.device) -> Any:
    layers, feed_forward, head_dim = MODELS[width]
    layers = args.layers or layers
    plugin = kind in ("plugin", "plugin compiled")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": device.type == "cuda"},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "steps_per_print": 10**9,
        **args.ds_config,
    }
    if plugin:
        config["distca"] = {"enabled": True, **args.block}
    heads = width // head_dim
    architecture = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    # On the device, where billions of random numbers take no time.
    with deepspeed.zero.Init(config_dict_or_path=config) if zero == 3 else device:
        model = LlamaForCausalLM._from_config(architecture, dtype=dtype, attn_implementation=args.attention)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.train()
    if kind in COMPILED:
        engine.compile()
    return engine


def model_steps(
    args: argparse.Namespace, width: int, zero: int, device: torch.device, results: dict[str, Any]
) -> None:
    """Collective: all batches of one model, appended to the results as they come."""
    compiled = COMPILED if args.compile else ()
    engines = {kind: build(args, kind, width, zero, device) for kind in (*KINDS[:2], *compiled)}
    engines["two lines"] = engines["plugin"]
    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    packed = deepspeed_distca.PackedSequenceCollator()
    kinds = ["plain", *args.kinds, *compiled]
    draw = np.random.default_rng(dist.get_rank())
    for tokens in args.tokens:
        for mix in MIXES:
            rows = [{"input_ids": draw.integers(0, VOCABULARY, n).tolist()} for n in lengths(mix, tokens)]
            batches = {
                kind: on_device((packed if kind in ("plugin", "plugin compiled") else flatten)(rows), device)
                for kind in kinds
            }
            keep_busy(device)  # a card is fast after the pause between two batches
            made = {kind: [0, 0] for kind in (*kinds, *compiled)}
            for kind in list(kinds):  # steps that are not timed
                before = graphs()
                if kind not in COMPILED:
                    steps(engines[kind], batches[kind], 1, device)
                elif error := compiling(engines[kind], batches[kind], device):
                    kinds.remove(kind)
                    results["failed"].append({"kind": kind, "tokens": tokens, "mix": mix, "error": error})
                made[kind][0] += graphs() - before
            taken: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
            for turn in range(args.turns):
                for kind in kinds[:: 1 if turn % 2 else -1]:
                    before = graphs()
                    seconds = steps(engines[kind], batches[kind], args.chunk, device)
                    made[kind][1] += graphs() - before
                    taken[kind].append(gather_floats([seconds / args.chunk], device))
            stats = engines["plugin"].distca.stats
            row = {
                "width": width,
                "zero": zero,
                "tokens": tokens,
                "mix": mix,
                "balance": [stats.balance_before, stats.balance_after],
                "planning_ms": stats.planning_ms,
                "bytes_moved": stats.bytes_moved,
                "graphs": {kind: made[kind] for kind in compiled},
                "turns": {kind: [[s * 1e3 for (s,) in ranks] for ranks in turns] for kind, turns in taken.items()},
            }
            row["ms"] = {kind: statistics.median(map(max, turns)) for kind, turns in row["turns"].items()}
            results["steps"].append(row)
            if dist.get_rank() == 0:
                print(
                    f"{time.strftime('%T')} width {width} ZeRO-{zero} {tokens} {mix}: {row['ms']} {stats}", flush=True
                )
                save(args, results)  # a run may be cut off
    del engines["two lines"]
    for engine in engines.values():
        engine.destroy()
    engines.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compiling(engine: Any, batch: dict[str, Any], device: torch.device) -> str | None:
    """Collective: the steps in which torch compiles for a batch, for which it has another graph in the second. What it
    cannot compile, or gets wrong, ends this kind alone: the error of this rank, or that another one has one."""
    error, skipped = None, engine.skipped_steps
    try:
        steps(engine, batch, 3, device)
        if engine.skipped_steps > skipped:
            error = f"gradients were not finite in {engine.skipped_steps - skipped} of 3 steps"
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {str(raised)[:500]}"
    failed = gather_floats([float(error is not None)], device)
    return error or ("another rank failed" if sum(f for (f,) in failed) else None)


def graphs() -> int:
    """That torch has made by now."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}


def steps(engine: Any, batch: dict[str, Any], count: int, device: torch.device) -> float:
    """Seconds of optimizer steps in a row. Collective."""
    meet(device)
    start = time.perf_counter()
    for _ in range(count):
        loss = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def meet(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_times(attention: str, width: int, tokens: int, device: torch.device) -> dict[str, Any]:
    """Collective: milliseconds that the host takes for a layer's core attention, by phase and kind, of the rank that
    takes longest beyond plain where rows move."""
    runs, messages, exchange = host_runs(attention, width, tokens, device)
    for run in runs.values():
        run()
        run()
    turns = [{kind: run() for kind, run in runs.items()} for _ in range(7)]
    mine = {kind: [statistics.median(turn[kind][i] for turn in turns) for i in range(2)] for kind in runs}
    everyone = gather_floats([ms for kind in runs for ms in mine[kind]], device)
    ms = {}
    for i, phase in enumerate(PHASES):
        by_kind = [dict(zip(runs, rank[i::2], strict=True)) for rank in everyone]
        ms[phase] = max(by_kind, key=lambda rank: rank["moved"] - rank["plain"])
    return {"width": width, "tokens": tokens, "exchange": exchange, "ms": ms, "messages": messages}


def host_runs(
    attention: str, width: int, tokens: int, device: torch.device
) -> tuple[dict[str, Callable[[], list[float]]], dict[str, int], str]:
    """Collective: what queues core attention of LAYERS layers, forward and backward, and returns milliseconds a layer
    of both, by kind: "plain" (transformers' function), "home" (ours, nothing moves), "moved"; the messages of a moved
    layer by phase, and the exchange's name."""
    _, _, dim = MODELS[width]
    query = width // dim
    heads = Heads(query, max(1, query // 4), dim)
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernel = select_kernel(
        None, device=device, dtype=dtype, q_heads=query, kv_heads=heads.key_value, head_dim=heads.head_dim
    )
    if share_gpus():
        group = dist.new_group(backend="gloo")
    else:
        group = exchange_group([list(range(world))], device, timedelta(minutes=1))
    timer = DeviceTimer()
    exchange = TimedExchange(make_exchange(None, group, device, timeout=60, staging_mib=256), timer)
    layout = Layout.from_lengths([[tokens // 16] * 16 if r % 2 else [tokens] for r in range(world)])
    at_home = RouteCompiler(layout, home_tasks(layout))
    cost = CostModel.fitted(heads)
    moved = [RouteCompiler(layout, balance(layout, cost, phase=phase, tolerance=0.05).rows) for phase in PHASES]
    plans = [
        LayerPlan.whole(*[RankPlan(compiler.rank(rank)) for compiler in compilers], exchange, SideStream())
        for compilers in ((at_home, at_home), moved)
    ]
    q, k, v = (
        torch.randn(tokens, h, dim, device=device, dtype=dtype, requires_grad=True)
        for h in (query, heads.key_value, heads.key_value)
    )
    dout, spec, timed = torch.randn_like(q), AttentionSpec(dim**-0.5), TimedKernel(kernel, timer)
    plain = plain_attention(attention, [s.length for s in layout.rank(rank)], dim, device)

    def run(attend: Callable[[], torch.Tensor]) -> list[float]:
        taken, outs = [], []
        calls = (
            lambda: outs.extend(attend() for _ in range(LAYERS)),
            lambda: torch.autograd.grad(outs, [q, k, v], [dout] * LAYERS),
        )
        for call in calls:
            meet(device)
            if device.type == "cuda":
                torch.cuda._sleep(int(1e8))  # the host is ahead of the device for all that is queued
            start = time.perf_counter()
            call()
            taken.append((time.perf_counter() - start) / LAYERS * 1e3)
        timer.reset()
        return taken

    runs = {
        "plain": lambda: run(lambda: plain(q, k, v)),
        "home": lambda: run(lambda: core_attention(q, k, v, plans[0], spec, timed)[0]),
        "moved": lambda: run(lambda: core_attention(q, k, v, plans[1], spec, timed)[0]),
    }
    messages = {phase: int(m.messages(phase).max()) for phase, m in zip(PHASES, moved, strict=True)}
    return runs, messages, exchange.name


def plain_attention(
    name: str, lengths: list[int], dim: int, device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """transformers' attention function of that name for rows of packed documents, [rows, heads, head_dim]."""
    attend = ALL_ATTENTION_FUNCTIONS[name]
    module = torch.nn.Module()
    module.config = LlamaConfig(attn_implementation=name)
    module.is_causal, module.layer_idx, module.num_key_value_groups = True, 0, 4
    described: dict[str, Any] = {"is_causal": True}
    if "flash" in name:
        starts = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
        described |= {f"cu_seq_lens_{x}": starts for x in "qk"} | {f"max_length_{x}": max(lengths) for x in "qk"}

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = (t[None].transpose(1, 2) for t in (q, k, v))
        return attend(module, *rows, None, dropout=0.0, scaling=dim**-0.5, **described)[0][0]

    return attention


def tables(results: dict[str, Any]) -> str:
    about = results["about"]
    lines = [
        f"{about['ranks']} x {about['card']}, {about['processor']}; {about['date']}, torch {about['torch']}, "
        f"DeepSpeed {about['deepspeed']}, layers {about['layers'] or 'as above'}, "
        f"checkpointing {about['checkpointing']}, compile {about['compile']}, "
        f"Liger {about['liger']}, turns of {about['chunk']} steps, block {json.dumps(about['block'])}, "
        f"ds_config {json.dumps(about['ds_config'])}."
    ]
    compiled = list(COMPILED) if about["compile"] else []
    kinds = [*about["kinds"], *compiled]
    than = dict.fromkeys(kinds, "plain") | {COMPILED[1]: COMPILED[0]}
    if results["steps"]:
        columns = ["width", "ZeRO", "tokens", "batch", "plain, ms"]
        columns += [column for kind in kinds for column in (f"{kind}, ms", f"of {than[kind]}")] + ["ideal"]
        columns += [f"graphs: {', '.join(compiled)}"] if compiled else []
        lines += ["", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    plain = {(row["width"], row["zero"], row["tokens"], row["mix"]): row["ms"]["plain"] for row in results["steps"]}
    for row in results["steps"]:
        key, ms = (row["width"], row["zero"], row["tokens"]), row["ms"]
        share = ""
        if row["mix"] == "long|short" and (*key, "short") in plain and about["ranks"] > 1:
            ideal = (plain[(*key, "even")] + plain[(*key, "short")]) / 2
            share = f"{(ms['plain'] - ms[kinds[0]]) / (ms['plain'] - ideal):.0%} of {ms['plain'] / ideal:.2f}x"
        mix = row["mix"].replace("|", "\\|") + (", moved" if row["bytes_moved"] else "")
        cells = [*key[:2], f"{key[2]:,}", mix, f"{ms['plain']:.1f}"]
        for kind in kinds:
            both = kind in ms and than[kind] in ms
            cells.append(f"{ms[kind]:.1f}" if kind in ms else "failed")
            cells.append(f"{ms[kind] / ms[than[kind]]:.3f}" if both else "")
        cells += [share]
        if compiled:
            cells.append(", ".join(f"{first}+{later}" for first, later in map(row["graphs"].get, compiled)))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [f"{f['kind']} failed at {f['tokens']} tokens, {f['mix']}: {f['error']}" for f in results["failed"]]
    if results["host"]:
        lines += ["", "| width | tokens | host, ms a layer: forward plain, at home, moved | backward | messages |"]
        lines += ["| --- | --- | --- | --- | --- |"]
    for row in results["host"]:
        cells = [
            f"{', '.join(f'{x:.3f}' for x in ms.values())} (+{ms['moved'] - ms['plain']:.3f})"
            for ms in row["ms"].values()
        ]
        messages = ", ".join(map(str, row["messages"].values()))
        lines.append(f"| {row['width']} | {row['tokens']:,} | {' | '.join(cells)} | {messages} |")
    return "\n".join(lines)


def save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    if args.json:
        args.json.write_text(json.dumps(results, indent=1, default=str))


def report(args: argparse.Namespace, results: dict[str, Any]) -> None:
    if dist.get_rank():
        return
    print(f"\n{tables(results)}\n", flush=True)
    save(args, results)
    if args.save:
        text = (__doc__ or "").partition("results.md\n\n")[2].partition("To try the script")[0].strip()
        args.save.write_text(f"{text}\n\n{tables(results)}\n")


if __name__ == "__main__":
    main()
