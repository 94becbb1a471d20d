# SPDX-License-Identifier: Apache-2.0
"""What `ds_distca advise` predicts of steps beside what was measured, for all results of whole steps in this folder.

    python benchmarks/predictions.py [--save FILE]

Every batch of those runs is made anew and predicted by the shipped cost model of an H200, as `ds_distca advise` does.
Plain is DeepSpeed without the plugin. An error is predicted over measured, less one: the median and the worst of a
run's batches. Nothing was fitted to these runs but one number, what a step takes beside attention and matrix products
(`advise.OTHER`), by the first of them. Left out: batches that were placed anew, runs without the plugin's default
options, and one whose kernels were compiled in its steps. Runs of whole_model.py and two_versions.py have Liger's
kernels, whose element-wise work is less: their steps are shorter than predicted, with and without the plugin.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from steps import batches
from workloads.sampling import layouts

from deepspeed_distca.advise import LLAMA_3_8B, Model, predict, training_options
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.profiles import Setting, choose

RESULTS = Path(__file__).parent / "results"
FIRST = "step_time_2xh200_64k.json"
H200 = Setting("NVIDIA H200", "sm90", "flash_attn_4", "bf16")
SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
#: Below it a step is the host's, of which is not known how long it takes.
LEAST_TOKENS = 16384


class Measured(NamedTuple):
    """A batch, and milliseconds of its steps; None where it was not run."""

    layout: Layout
    plain: float | None
    plugin: float | None


class Run(NamedTuple):
    """One file of results."""

    name: str
    what: str
    config: dict[str, Any]
    checkpointing: bool
    measured: list[Measured]


def step_times() -> Iterator[Run]:
    files = sorted(RESULTS.glob("step_time_*.json"), key=lambda file: (file.name != FIRST, file.name))
    for file in files:
        found = json.loads(file.read_text())
        args, world = found["args"], found["world"]
        if args.get("cold"):
            continue
        made = {name: batches.mix(name, world, args["tokens"]) for name in args["mixes"]}
        for spec in args["workloads"]:
            if ":step=" not in spec:
                of_spec = batches.workload(spec, world, args["tokens"], args["context"])
                made |= {batch.name: batch for batch in of_spec}
        measured = [
            Measured(made[name].layout, _ms(kinds, "plain"), _ms(kinds, "distca local_first"))
            for name, kinds in found["batches"].items()
            if name in made and not made[name].whole
        ]
        config = {**LLAMA_3_8B, "num_hidden_layers": args["layers"], "vocab_size": args["vocabulary"]}
        what = f"{world} GPUs, {args['tokens'] // 1024}K tokens, {args['layers']} layers, ZeRO-{args['zero']}"
        yield Run(file.name, what, config, args["checkpointing"], measured)


def _ms(kinds: dict[str, Any], kind: str) -> float | None:
    return kinds[kind]["ms"] if kind in kinds else None


def whole_model() -> Run:
    both = [json.loads((RESULTS / f"whole_model_2xh200_{kind}.json").read_text()) for kind in ("plain", "plugin")]
    about = both[0]["about"]
    made = drawn(about["tokens"], about["ranks"], about["batches"], about["seed"], "{}#{}", first=0)
    times = [{name: statistics.median(s["ms"] for s in run["steps"][name]) for name in run["steps"]} for run in both]
    measured = [Measured(layout, times[0].get(name), times[1].get(name)) for name, layout in made.items()]
    return Run("whole_model_2xh200_*.json", "2 GPUs, Llama-3-8B, ZeRO-3, checkpointing", LLAMA_3_8B, True, measured)


def two_versions() -> Iterator[Run]:
    for file in sorted(RESULTS.glob("two_versions_*.json")):
        found = json.loads(file.read_text())
        about, steps = found["about"], found["versions"]["new"]["steps"]
        made = drawn(about["tokens"], about["ranks"], about["batches"], about["seed"], "{} {}", first=1)
        measured = [
            Measured(made[name], None, statistics.median(ms for ms, _ in taken)) for name, taken in steps.items()
        ]
        config = {**LLAMA_3_8B, "num_hidden_layers": about["layers"], "vocab_size": about["vocabulary"]}
        what = f"2 GPUs, 64K tokens, {about['layers']} layers, ZeRO-{about['zero']}"
        yield Run(
            file.name, what + ", checkpointing" * about["checkpointing"], config, about["checkpointing"], measured
        )


def drawn(tokens: int, ranks: int, count: int, seed: int, name: str, first: int) -> dict[str, Layout]:
    """Batches as whole_model.py and two_versions.py make them."""
    made = {mix: batches.mix(mix, ranks, tokens).layout for mix in ("long|short", "even", "short")}
    for kind in ("prolong", "pretrain"):
        found = layouts(kind, context=131072, servers=ranks, tokens=tokens, batches=count, shuffle=seed)
        for number, layout in enumerate(found, start=first):
            lengths = [[segment.length for segment in layout.rank(r)] for r in range(ranks)]
            made[name.format(kind, number)] = Layout.from_lengths(lengths)
    return made


def small_steps() -> Iterator[Run]:
    for file in ("small_steps_2xh200.json", "small_steps_2xh200_8_layers.json"):
        found = json.loads((RESULTS / file).read_text())
        for width, config, layers in ((2048, SMALL, 16), (4096, LLAMA_3_8B, 4)):
            rows = [r for r in found["steps"] if r["width"] == width and r["tokens"] >= LEAST_TOKENS]
            layers = found["about"]["layers"] or layers
            measured = [
                Measured(_small(row["mix"], row["tokens"]), row["ms"]["plain"], row["ms"]["plugin"]) for row in rows
            ]
            what = f"2 GPUs, {width} wide, {layers} layers, 16K tokens or more, ZeRO-1"
            if rows:
                yield Run(file, what, {**config, "num_hidden_layers": layers, "vocab_size": 32000}, False, measured)


def _small(mix: str, tokens: int) -> Layout:
    long, short = [tokens], [tokens // 16] * 16
    return Layout.from_lengths({"even": [long, long], "short": [short, short]}.get(mix, [long, short]))


def row(run: Run) -> list[str] | None:
    """One line of the table; None where the plugin was not run as it is by default."""
    model, options = Model.of(run.config), training_options(run.config)
    cost = choose(H200, model.heads, folder=None).cost
    plain, plugin, speed_up = [], [], []
    for batch in run.measured:
        p = predict(batch.layout, model, cost, options, checkpointing=run.checkpointing)
        plain += [] if batch.plain is None else [p.plain * 1e3 / batch.plain - 1]
        plugin += [] if batch.plugin is None else [p.plugin * 1e3 / batch.plugin - 1]
        if batch.plain is not None and batch.plugin is not None:
            speed_up.append(p.plain / p.plugin * batch.plugin / batch.plain - 1)
    if not plugin:
        return None
    return [run.name, run.what, str(len(run.measured)), *map(_errors, (plain, plugin, speed_up))]


def _errors(found: list[float]) -> str:
    return f"{statistics.median(found):+.1%}, {max(found, key=abs):+.1%}" if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="the report in Markdown")
    args = parser.parse_args()
    head = ["results", "what", "batches", "plain: median, worst", "plugin: median, worst", "speed-up: median, worst"]
    rows = [row(run) for run in (*step_times(), whole_model(), *two_versions(), *small_steps())]
    table = "\n".join(
        f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *(r for r in rows if r is not None))
    )
    print(table)
    if args.save:
        notes = (__doc__ or "").partition("[--save FILE]")[2].strip()
        args.save.write_text(f"{notes}\n\n{datetime.date.today().isoformat()}:\n\n{table}\n")


if __name__ == "__main__":
    main()
