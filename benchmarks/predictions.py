# SPDX-License-Identifier: Apache-2.0
"""What `ds_distca advise` predicts of steps beside what was measured, for all results of whole steps in this folder.

    python benchmarks/predictions.py [--save FILE] [--chart FILE]

Every batch of those runs is made anew and predicted by the shipped cost model of an H200, as `ds_distca advise` does.
Plain is DeepSpeed without the plugin. An error is predicted over measured, less one: the median and the worst of a
run's batches. Nothing was fitted to these runs but one number (`simulator.step.OTHER`), by plain's steps of the first
of them. Left out: batches that were placed anew, runs without the plugin's default options, and one whose kernels were
compiled in its steps. A batch's time is the median of its steps, the lower one of the middle two.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from steps import batches
from svg import Drawing
from workloads.sampling import document_lengths, layouts

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler import profiles
from deepspeed_distca.simulator.model import LLAMA_3_8B, Model, training_options
from deepspeed_distca.simulator.pipeline import one_forward_one_backward, same_phase
from deepspeed_distca.simulator.policies import lengths_of, shared
from deepspeed_distca.simulator.step import Training, plain, predict, seconds

RESULTS = Path(__file__).parent / "results"
FIRST = "step_time_2xh200_64k.json"
H200 = profiles.Setting("NVIDIA H200", "sm90", "flash_attn_4", "bf16")
SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
#: Below it a step is the host's, of which is not known how long it takes.
LEAST_TOKENS = 16384


PAIR = ("plain", "grid")
#: What the errors of a run's steps are held to: their median and the worst of them.
MEDIAN, WORST = 0.05, 0.10


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
    zero: int
    checkpointing: bool
    liger: bool
    measured: list[Measured]


def step_times() -> Iterator[Run]:
    files = sorted(RESULTS.glob("step_time_*.json"), key=lambda file: (file.name != FIRST, file.name))
    for file in files:
        found = json.loads(file.read_text())
        args, world = found["args"], found["world"]
        if args.get("cold"):
            continue
        made = _made(args, world)
        measured = [
            Measured(made[name].layout, _ms(kinds, "plain"), _ms(kinds, "distca local_first"))
            for name, kinds in found["batches"].items()
            if name in made and not made[name].whole
        ]
        config = {**LLAMA_3_8B, "num_hidden_layers": args["layers"], "vocab_size": args["vocabulary"]}
        what = f"{world} GPUs, {args['tokens'] // 1024}K tokens, {args['layers']} layers, ZeRO-{args['zero']}"
        yield Run(file.name, what, config, args["zero"], args["checkpointing"], False, measured)


def _made(args: dict[str, Any], world: int) -> dict[str, batches.Batch]:
    """Batches of step_time.py by name, but for those placed anew."""
    made = {name: batches.mix(name, world, args["tokens"]) for name in args["mixes"]}
    for spec in args["workloads"]:
        if ":step=" not in spec:
            made |= {batch.name: batch for batch in batches.workload(spec, world, args["tokens"], args["context"])}
    return made


def ulysses() -> list[float]:
    """Errors of DeepSpeed-Ulysses' steps, as `ds_distca simulate` predicts them, of all runs that have some."""
    errors = []
    for file in sorted(RESULTS.glob("step_time_*.json")):
        found = json.loads(file.read_text())
        args, world = found["args"], found["world"]
        config = {**LLAMA_3_8B, "num_hidden_layers": args["layers"], "vocab_size": args["vocabulary"]}
        model = Model.of(config)
        cost = profiles.choose(H200, model.heads, folder=None).cost
        training = Training(model, cost, training_options(config), args["checkpointing"], False, args["zero"])
        made = _made(args, world)
        for name, kinds in found["batches"].items():
            if name in made and "ulysses" in kinds:
                layout = made[name].layout
                loads = shared(training, [lengths_of(layout)[0]], world, ulysses=True)
                taken = seconds(training, loads, layout.tokens.max()) + training.end(world)
                errors.append(taken * 1e3 / _ms(kinds, "ulysses") - 1)
    return errors


def _ms(kinds: dict[str, Any], kind: str) -> float | None:
    """The median of a kind's steps; of an even number the lower one of the middle two, since what disturbs a step (a
    kernel that is compiled, a machine that others use) makes it longer."""
    if kind not in kinds:
        return None
    return statistics.median_low(max(ms for ms, *_ in ranks) for ranks in zip(*kinds[kind]["steps"], strict=True))


def whole_model() -> Run:
    both = [json.loads((RESULTS / f"whole_model_2xh200_{kind}.json").read_text()) for kind in ("plain", "plugin")]
    about = both[0]["about"]
    made = drawn(about["tokens"], about["ranks"], about["batches"], about["seed"], "{}#{}", first=0)
    times = [{name: statistics.median(s["ms"] for s in run["steps"][name]) for name in run["steps"]} for run in both]
    measured = [Measured(layout, times[0].get(name), times[1].get(name)) for name, layout in made.items()]
    return Run(
        "whole_model_2xh200_*.json",
        "2 GPUs, Llama-3-8B, ZeRO-3, checkpointing, Liger",
        LLAMA_3_8B,
        3,
        True,
        True,
        measured,
    )


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
        again, zero = about["checkpointing"], about["zero"]
        yield Run(file.name, what + ", checkpointing" * again + ", Liger", config, zero, again, True, measured)


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
    for width, config, layers in ((2048, SMALL, 16), (4096, LLAMA_3_8B, 8)):
        file = f"small_steps_2xh200_{layers}_layers.json"
        rows = [r for r in json.loads((RESULTS / file).read_text())["steps"] if r["tokens"] >= LEAST_TOKENS]
        measured = [
            Measured(_small(row["mix"], row["tokens"]), row["ms"]["plain"], row["ms"]["plugin"]) for row in rows
        ]
        what = f"2 GPUs, {width} wide, {layers} layers, 16K tokens or more, ZeRO-1, Liger"
        made = {**config, "num_hidden_layers": layers, "vocab_size": 32000}
        yield Run(file, what, made, 1, False, True, measured)


def _small(mix: str, tokens: int) -> Layout:
    long, short = [tokens], [tokens // 16] * 16
    return Layout.from_lengths({"even": [long, long], "short": [short, short]}.get(mix, [long, short]))


class Errors(NamedTuple):
    """Of a run's batches: predicted over measured, less one."""

    run: Run
    plain: list[float]
    plugin: list[float]
    speed_up: list[float]

    @property
    def steps(self) -> list[float]:
        """Of all steps."""
        return [*self.plain, *self.plugin]

    @property
    def median(self) -> float:
        """Of the sizes of all steps' errors."""
        return statistics.median(map(abs, self.steps))

    @property
    def worst(self) -> float:
        return max(map(abs, self.steps))

    def cells(self) -> list[str]:
        """Of the table."""
        told = (f"{statistics.median(e):+.1%}, {max(e, key=abs):+.1%}" if e else "" for e in self[1:])
        return [self.run.name, self.run.what, str(len(self.run.measured)), *told]


def errors(run: Run) -> Errors | None:
    """None where the plugin was not run as it is by default."""
    model = Model.of(run.config)
    cost = profiles.choose(H200, model.heads, folder=None).cost
    training = Training(model, cost, training_options(run.config), run.checkpointing, run.liger, run.zero)
    found = Errors(run, [], [], [])
    for batch in run.measured:
        p, end = predict(training, batch.layout), training.end(batch.layout.num_ranks)
        without, with_it = p.plain + end, p.plugin + end
        if batch.plain is not None:
            found.plain.append(without * 1e3 / batch.plain - 1)
        if batch.plugin is not None:
            found.plugin.append(with_it * 1e3 / batch.plugin - 1)
        if batch.plain is not None and batch.plugin is not None:
            found.speed_up.append(without / with_it * batch.plugin / batch.plain - 1)
    return found if found.plugin else None


def pipeline() -> Errors:
    """Steps over two stages; plain keeps attention under checkpointing, as the benchmark's did."""
    found = json.loads((RESULTS / "pipeline_2xh200_four_streams.json").read_text())
    args, rows, stages = found["args"], found["rows"], found["args"]["stages"]
    config = {**LLAMA_3_8B, "num_hidden_layers": args["layers"], "vocab_size": 8192}
    run = Run("pipeline_2xh200_four_streams.json", "2 stages, 4 layers, checkpointing", config, 1, True, False, [])
    model, tokens = Model.of(config), args["tokens"]
    cost = profiles.choose(H200, model.heads, folder=None).cost
    training = Training(model, cost, training_options(config, stages), True, stages=stages)
    made = Errors(run, [], [], [])
    for seed in args["seeds"]:
        lengths = document_lengths("pretrain", 131072, shuffle=seed)
        size = args["micro_batches"] * tokens
        ends = np.union1d(np.minimum(np.cumsum(lengths), size), np.arange(0, size + 1, tokens))
        cuts = np.searchsorted(ends, np.arange(0, size + 1, tokens))
        batches = [Layout.from_lengths([np.diff(ends[a : b + 1])]) for a, b in pairwise(cuts)]
        loads = []
        for batch in batches:
            again, once = plain(training, batch), plain(replace(training, checkpointing=False), batch)
            kept = {key: replace(load, attention=once[key].attention) for key, load in again.items()}
            loads.append((kept, tokens))
        run.measured.append(
            Measured(batches[0], *(statistics.median(rows[f"seed {seed} {k}"]["ms"][1:]) for k in PAIR))
        )
        end = training.end(stages)
        predicted = one_forward_one_backward(training, loads) + end, same_phase(training, batches)[0] + end
        by_plain, by_plugin = (p * 1e3 / ms - 1 for p, ms in zip(predicted, run.measured[-1][1:], strict=True))
        made.plain.append(by_plain)
        made.plugin.append(by_plugin)
        made.speed_up.append((1 + by_plain) / (1 + by_plugin) - 1)
    return made


def table() -> list[Errors]:
    """Of all runs."""
    runs = (*step_times(), whole_model(), *two_versions(), *small_steps())
    return [*(found for run in runs if (found := errors(run)) is not None), pipeline()]


def in_markdown(rows: list[Errors]) -> str:
    head = ["results", "what", "batches", "plain: median, worst", "plugin: median, worst", "speed-up: median, worst"]
    lines = [head, ["---"] * len(head), *(row.cells() for row in rows)]
    every = [abs(error) for row in rows for error in row.steps]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    within = sum(error <= 0.05 for error in every) / len(every)
    others = ulysses()
    return (
        f"{text}\n\nAll {len(every)} steps together: the median of the errors' sizes is "
        f"{statistics.median(every):.1%}, {within:.0%} of them are within 5 %. No run's median is above "
        f"{MEDIAN:.0%}, no step's error above {WORST:.0%}.\n\nOf {len(others)} steps of DeepSpeed-Ulysses: median "
        f"{statistics.median(others):+.1%}, worst {max(others, key=abs):+.1%}."
    )


def chart(rows: list[Errors]) -> Drawing:
    """Every step's error, a line for each run."""
    top, left, right, line, edge = 60, 330, 20, 22, 0.12
    width, height = 900, top + line * len(rows) + 40
    drawing = Drawing(width, height, "Predicted over measured seconds of steps, less one, of every run")
    scale = (width - left - right) / (2 * edge)

    def x(error: float) -> float:
        return left + (edge + min(max(error, -edge), edge)) * scale

    drawing.text(16, 26, "Predicted over measured seconds of a step, less one", bold=True)
    drawing.key(left, 46, [("plain", "plain"), ("plugin", "plugin")], 90)
    low, bottom = top - 4, top + line * len(rows)
    for percent in (-10, -5, 0, 5, 10):
        at = x(percent / 100)
        drawing.line(at, low, at, bottom, "soft" if not percent else "rule", dashed=bool(percent))
        drawing.text(at, bottom + 18, f"{percent:+d} %" if percent else "0", colour="soft", size=12, anchor="middle")
    for number, row in enumerate(rows):
        y = top + line * number
        drawing.text(16, y + 13, row.run.what.replace(" tokens", ""), size=11)
        for shift, kind, found in ((0, "plain", row.plain), (9, "plugin", row.plugin)):
            for error in found:
                drawing.rect(x(error) - 1.5, y + shift, 3, 8, kind)
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="the report in Markdown")
    parser.add_argument("--chart", type=Path, help="the errors in SVG")
    args = parser.parse_args()
    rows = table()
    text = in_markdown(rows)
    print(text)
    if args.save:
        notes = (__doc__ or "").partition("[--chart FILE]")[2].strip()
        args.save.write_text(f"{notes}\n\n{datetime.date.today().isoformat()}:\n\n{text}\n")
    if args.chart:
        chart(rows).save(args.chart)


if __name__ == "__main__":
    main()
