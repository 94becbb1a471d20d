# SPDX-License-Identifier: Apache-2.0
"""Steps of two versions of the package side by side, a step of each in turn, in one run on the same GPUs.

    git archive --prefix=old/ 7521899 deepspeed_distca | tar -x -C /tmp
    python benchmarks/two_versions.py --versions old=/tmp/old new=. --zero 1 --layers 4 --rounds 5 --json results.json

Every version is a torchrun of its own that imports the package from its folder; all stay alive, and each waits on its
host, with nothing on its GPUs, until it is its turn. So both see the same clocks and temperatures; who began in one
round is last in the next, since a card is faster after an easy batch. "plain" is run too unless --no-plain: the same
model without the package. The model is as wide as Llama-3-8B, with Liger's kernels where they are installed, and takes
what transformers' flattening collator makes of the documents: one of all tokens on even ranks beside sixteen on odd
ones, one on each (these two several times a round), and batches of arXiv 2510.18121's two length distributions, packed
in order and cut at the ranks' ends. Milliseconds of a batch are medians of the slowest rank, a ratio is the median of
those of steps beside each other, a mix adds up its batches; memory is each version's own peak.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from operator import truediv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
POLL = 0.0005


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", metavar="NAME=FOLDER", default=[], help="in the order of a turn")
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=65536, help="of each rank")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batches", type=int, default=5, help="of each length distribution")
    parser.add_argument("--seed", type=int, default=11, help="of their order")
    parser.add_argument("--rounds", type=int, default=5, help="measured, of each version over all batches")
    parser.add_argument("--attention", default="flash_attention_4")
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="stop after that long")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", type=Path, help="the table in Markdown")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.worker:
        work(args)
        return
    versions = dict(v.split("=", 1) for v in args.versions)
    if not args.no_plain:
        versions["plain"] = str(HERE)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        turns = Path(folder)
        (turns / "order").write_text(json.dumps(list(versions)))
        (turns / "lengths").write_text(json.dumps(lengths(args)))
        runs = []
        for number, (name, where) in enumerate(versions.items()):
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(args.ranks)]
            command += ["--master_port", str(29600 + number), __file__, *sys.argv[1:]]
            command += ["--worker", name, "--turns", folder]
            environment = {**os.environ, "PYTHONPATH": str(Path(where).resolve())}
            runs.append(subprocess.Popen(command, env=environment))
        codes = [run.wait() for run in runs]
        if any(codes):
            sys.exit(f"versions ended with {dict(zip(versions, codes, strict=True))}")
        results = {name: json.loads((turns / f"result-{name}").read_text()) for name in versions}
    text = table(results)
    print(f"\n{text}\n", flush=True)
    about = {**results[next(iter(versions))].pop("about"), **{k: v for k, v in vars(args).items() if k != "versions"}}
    about["versions"] = list(versions)
    if args.json:
        kept = {"about": about, "versions": results}
        args.json.write_text(json.dumps(kept, indent=1, default=lambda path: Path(path).name))
    if args.save:
        notes = (__doc__ or "").partition("results.json\n\n")[2].strip()
        args.save.write_text(
            f"{notes}\n\n{args.ranks} x {about['card']}, {about['date']}, torch {about['torch']}, DeepSpeed "
            f"{about['deepspeed']}; ZeRO-{args.zero}, {args.layers} layers, {args.tokens:,} tokens a rank, "
            f"checkpointing {args.checkpointing}, {args.rounds} rounds.\n\n{text}\n"
        )


def lengths(args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """By batch and rank, of documents."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from workloads.sampling import layouts

    tokens, ranks = args.tokens, range(args.ranks)
    short = [tokens // 16] * 16
    found = {"long|short": [short if r % 2 else [tokens] for r in ranks], "even": [[tokens] for r in ranks]}
    for name in ("prolong", "pretrain") if args.batches else ():
        made = layouts(
            name, context=131072, servers=args.ranks, tokens=tokens, batches=args.batches, shuffle=args.seed
        )
        for index, layout in enumerate(made):
            found[f"{name} {index + 1}"] = [[segment.length for segment in layout.rank(r)] for r in ranks]
    return found


class Turn:
    """Whose turn it is: a number that counts the turns of all versions, in a file; every rank reads it."""

    def __init__(self, folder: Path, name: str, ranks: int) -> None:
        order = json.loads((folder / "order").read_text())
        self._folder, self._ranks, self._of = folder, ranks, len(order)
        self._first, self._taken = order.index(name), 0
        self.place = self._first

    def wait(self, backwards: bool = False) -> None:
        self.place = self._of - 1 - self._first if backwards else self._first
        number = self._taken * self._of + self.place
        while number and not all((self._folder / f"{number - 1}-{rank}").exists() for rank in range(self._ranks)):
            time.sleep(POLL)

    def over(self, rank: int) -> None:
        (self._folder / f"{self._taken * self._of + self.place}-{rank}").touch()
        self._taken += 1

    @property
    def is_last(self) -> bool:
        return self.place == self._of - 1


def work(args: argparse.Namespace) -> None:
    import deepspeed
    import numpy as np
    import torch
    import torch.distributed as dist
    from transformers import DataCollatorWithFlattening

    if args.worker != "plain":
        import deepspeed_distca  # noqa: F401
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        try:
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama()
        except ImportError:
            pass
    else:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    turn = Turn(args.turns, args.worker, args.ranks)
    rank, end = int(os.environ["RANK"]), time.monotonic() + args.budget_seconds
    deepspeed.init_distributed("nccl" if cuda else "gloo")
    engine = build(args, device, deepspeed)
    draw = np.random.default_rng(rank)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batches = {}
    for name, ranks in json.loads((args.turns / "lengths").read_text()).items():
        batch = collate([{"input_ids": draw.integers(0, args.vocabulary, n).tolist()} for n in ranks[rank]])
        batches[name] = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}

    def step(batch: dict[str, Any]) -> tuple[float, float]:
        meet()
        start = time.perf_counter()
        loss = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        meet()
        seconds = torch.tensor([time.perf_counter() - start, 0.0, time.monotonic() - end], dtype=torch.float64)
        seconds[1] = float(loss.detach())
        both = [torch.empty(3, dtype=torch.float64, device=device) for _ in range(args.ranks)]
        dist.all_gather(both, seconds.to(device))
        gathered = torch.stack(both).cpu()
        if cuda:
            torch.cuda.synchronize()
        late.append(bool(gathered[0, 2] > 0))
        return float(gathered[:, 0].max()) * 1e3, float(gathered[:, 1].mean())

    def meet() -> None:
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()

    late: list[bool] = []
    turn.wait()
    for name in ("even", "long|short"):  # kernels are compiled, optimizer states made
        step(batches[name])
    turn.over(rank)
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in batches}
    alone = [name for name in batches if mix(name) == name]
    for count in range(args.rounds + 1):
        for name in [*batches, *alone * (args.batches // 3 if count else 0)]:
            turn.wait(backwards=bool(count % 2))
            skip = (args.turns / "stop").exists()
            if not skip:
                taken = step(batches[name])
                if count:
                    steps[name].append(taken)
                if rank == 0:
                    print(
                        f"{time.strftime('%T')} {args.worker} {name} {taken[0]:.1f} ms, loss {taken[1]:.5f}",
                        flush=True,
                    )
                if late[-1] and rank == 0 and turn.is_last:
                    (args.turns / "stop").touch()
            turn.over(rank)
    memory = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if cuda else [0, 0]
    most = torch.tensor(memory, dtype=torch.float64, device=device)
    turn.wait()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        about = {
            "card": torch.cuda.get_device_name() if cuda else "CPU",
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
        }
        result = {"steps": steps, "gib": [m / 2**30 for m in most.tolist()], "about": about}
        (args.turns / f"result-{args.worker}").write_text(json.dumps(result))
    dist.barrier()
    turn.over(rank)
    os._exit(0)


def build(args: argparse.Namespace, device: Any, deepspeed: Any) -> Any:
    from contextlib import nullcontext

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    if args.worker != "plain":
        config["distca"] = {"enabled": True}
    heads = max(1, args.hidden // 128)
    architecture = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config) if args.zero == 3 else nullcontext():
        model = LlamaForCausalLM._from_config(architecture, dtype=torch.bfloat16, attn_implementation=args.attention)
    if args.zero < 3:
        model.to(device)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.train()
    return engine


def mix(batch: str) -> str:
    """What a batch is one of: "prolong" of "prolong 3"."""
    return batch.split()[0]


def table(results: dict[str, Any]) -> str:
    names = list(results)
    first, *others = names
    lines = [f"| batch | {' | '.join(f'{n}, ms' for n in names)} | {' | '.join(f'{o} / {first}' for o in others)} |"]
    lines.append("| --- " * (2 * len(names)) + "|")
    mixes: dict[str, list[list[float]]] = {}
    for batch in results[first]["steps"]:
        taken = [[ms for ms, _ in results[n]["steps"][batch]] for n in names]
        if all(taken):
            ratios = [statistics.median(map(truediv, ms, taken[0])) for ms in taken[1:]]
            mixes.setdefault(mix(batch), []).append([*map(statistics.median, taken), *ratios])
    for name, rows in mixes.items():
        for index, row in enumerate(rows if len(rows) > 1 else []):
            lines.append(_line(f"{name} {index + 1}", row))
        lines.append(_line(f"**{name}**", _together(rows, len(names))))
    lines.append(_line("all together", _together([row for rows in mixes.values() for row in rows], len(names))))
    gib = "; ".join(f"{n} {a:.1f} GiB allocated, {r:.1f} reserved" for n in names for a, r in [results[n]["gib"]])
    losses = "; ".join(
        f"{n} {', '.join(f'{loss[0][1]:.5f}' for loss in list(results[n]['steps'].values())[:3] if loss)}"
        for n in names
    )
    counts = {len(steps) for steps in results[first]["steps"].values()}
    return "\n".join(
        [*lines, "", f"Steps a batch: {min(counts)} to {max(counts)}. Peak memory: {gib}.", f"First losses: {losses}."]
    )


def _together(rows: list[list[float]], versions: int) -> list[float]:
    """Milliseconds added up; ratios, of time of the first version."""
    sums = [sum(column) for column in zip(*rows, strict=True)]
    return sums[:versions] + [sum(r[0] * r[i] for r in rows) / sums[0] for i in range(versions, len(sums))]


def _line(name: str, row: list[float]) -> str:
    cells = [f"{x:.1f}" if x > 10 else f"{x:.4f}" for x in row]
    return f"| {name.replace('|', chr(92) + '|')} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
