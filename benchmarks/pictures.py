# SPDX-License-Identifier: Apache-2.0
"""The pictures of the README and the docs, from results in this repository and from the planner:

    python benchmarks/pictures.py [FOLDER]

It writes into docs/images, or the folder:

- whole_model.svg: seconds of a step, measured by `whole_model.py`.
- loads.svg: attention of eight servers before and after, measured by `server_balance.py`.
- plan.svg: who attends which rows of the same batch, as the planner says.
- layer.svg: a layer on two ranks, as the cost model predicts it.
- tree.svg: the tasks of one tree among two servers, as the planner says.
- forest.svg: who attends which rows of the same batch, trees and plain documents.

A number in a picture is one of a result file, or of the planner with its defaults and the shipped cost model of an
H200; heads, width and lengths are those of the results. tests/benchmarks/test_pictures.py compares the files.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from steps.batches import Batch, mix, workload
from svg import RANKS, Drawing

from deepspeed_distca.defaults import GRANULARITY, MIN_GAIN, TOLERANCE
from deepspeed_distca.layout import DOCUMENT, PIECE_END, RANK, Layout
from deepspeed_distca.model_sizes import linear_flops
from deepspeed_distca.scheduler.cost_model import PHASES, UNITS_PER_SECOND, CostModel, Phase
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.profiles import Setting, choose
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import Q_END, Q_START, SERVER, TASK_DOCUMENT, Tasks, is_full, task_costs
from deepspeed_distca.scheduler.worth import PlanOptions, Worth

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 840

#: What the chart of steps calls the batches.
GROUPS = {
    "long|short": "one document of {k}K\nbeside 16 of {short}K",
    "pretrain": "{n} batches of\nPretrain lengths",
    "prolong": "{n} batches of\nProLong lengths",
    "even": "one document of {k}K\non every rank",
    "short": "16 documents of {short}K\non every rank",
}
NAMES = [("plain", "DeepSpeed"), ("plugin", "DeepSpeed + deepspeed_distca")]

#: The batch of loads.svg and plan.svg: the first one that is not made by hand and that rows move in.
BATCH, KIND = "prolong:shuffled #0", "A batch of ProLong lengths"
#: The sizes of Llama-3-8B, as everywhere in the results.
MODEL = SimpleNamespace(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
HEADS = Heads(32, 8, 128)
H200 = Setting("NVIDIA H200", "sm90", "flash_attn_4", "bf16")
TOKENS = 65536


def load(name: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


# Steps of a whole model.


def sums(steps: dict[str, list[dict[str, float]]]) -> dict[str, tuple[float, int]]:
    """By group, seconds of one pass over its batches (the median of each), and how many there are."""
    out: dict[str, tuple[float, int]] = {}
    for name, runs in steps.items():
        if runs:
            group = name.split("#")[0]
            seconds, count = out.get(group, (0.0, 0))
            out[group] = seconds + median(run["ms"] for run in runs) / 1e3, count + 1
    return out


def whole_model(plain: dict[str, Any], plugin: dict[str, Any]) -> Drawing:
    """Bars of seconds of a step; those of several batches are their mean."""
    before, after = sums(plain["steps"]), sums(plugin["steps"])
    groups = [group for group in GROUPS if group in before and group in after]
    about = plain["about"]
    k = about["tokens"] // 1024
    drawing = Drawing(WIDTH, 330, "Seconds of a training step with and without the plugin")
    drawing.text(24, 34, "Seconds of a training step", size=17, bold=True)
    where = (
        f"Llama-3-8B, ZeRO-{about['zero']}, {k}K tokens a GPU, {about['ranks']}x {about['device']}, {about['date']}"
    )
    drawing.text(WIDTH - 24, 34, where, colour="soft", anchor="end")
    drawing.key(24, 62, NAMES, 120)
    bottom, room = 270, (WIDTH - 48) / len(groups)
    tallest = max(before[group][0] / before[group][1] for group in groups)
    drawing.line(24, bottom, WIDTH - 24, bottom, "soft")
    for at, group in enumerate(groups):
        count = before[group][1]
        pair = before[group][0] / count, after[group][0] / count
        middle, tops = 24 + (at + 0.5) * room, []
        for side, seconds, (colour, _) in zip((-1, 1), pair, NAMES, strict=True):
            height = 140 * seconds / tallest
            drawing.rect(middle + 34 * side - 32, bottom - height, 64, height, colour, radius=2)
            drawing.text(middle + 34 * side, bottom - height - 7, f"{seconds:.1f} s", anchor="middle")
            tops.append(bottom - height)
        drawing.text(middle, min(tops) - 28, f"{pair[0] / pair[1]:.2f}x", size=19, anchor="middle", bold=True)
        for row, words in enumerate(GROUPS[group].format(n=count, k=k, short=k // 16).split("\n")):
            drawing.text(middle, bottom + 22 + 18 * row, words, anchor="middle")
    return drawing


# One batch on eight servers.


@dataclass(frozen=True)
class Plan:
    """A phase of a batch, planned."""

    worth: Worth
    tasks: Tasks
    compiler: RouteCompiler


def cost_model() -> CostModel:
    """The shipped one, whatever is in the user's cache."""
    return choose(H200, HEADS, folder=None).cost


def plan_of(layout: Layout, phase: Phase) -> Plan:
    """As the plugin plans it by default on GPUs."""
    options = PlanOptions(TOLERANCE, GRANULARITY, min_gain=MIN_GAIN, linear_flops=linear_flops(MODEL))
    worth = Worth(layout, None, phase, cost_model(), options, early=True)
    return Plan(worth, *worth.spread(RouteCompiler(layout, worth.home.rows)))


def batch_of(name: str, servers: int, tokens: int, context: int) -> Batch:
    """The batch that server_balance.py calls so."""
    kind, _, number = name.partition(" #")
    source, *options = kind.split(":")
    spec = ":".join([source, str(int(number) + 1), *options])
    return workload(spec, servers, tokens, context)[int(number)]


def loads(result: dict[str, Any]) -> Drawing:
    """Milliseconds of attention of every server, before and after, in both phases."""
    row = next(row for row in result["rows"] if row["batch"] == BATCH)
    servers, k = result["args"]["servers"], result["args"]["tokens"] // 1024
    drawing = Drawing(WIDTH, 366, "Attention of eight servers before and after balance")
    drawing.text(24, 34, f"Milliseconds of attention in a layer, on each of {servers} ranks", size=17, bold=True)
    about = f"{KIND}, {k}K tokens a rank; kernels of every rank measured on one {result['card']}, {result['date']}"
    drawing.text(24, 56, about, colour="soft")
    drawing.key(24, 84, [("plain", "every rank its own documents"), ("plugin", "as the plugin plans it")], 230)
    drawing.line(458, 80, 482, 80, "ink", dashed=True)
    drawing.text(488, 84, "mean before")
    bottom, room = 304, (WIDTH - 48 - 32) / 2
    for at, (phase, times) in enumerate(row["phases"].items()):
        left = 24 + at * (room + 32)
        pair = times["before_ms"], times["planned_ms"]
        scale, step = 166 / max(pair[0]), room / servers
        for server in range(servers):
            for side, (colour, _) in enumerate(NAMES):
                height = pair[side][server] * scale
                x = left + server * step + 3 + side * (step / 2 - 2)
                drawing.rect(x, bottom - height, step / 2 - 4, height, colour, radius=1)
            drawing.text(left + (server + 0.5) * step, bottom + 18, f"rank {server}", anchor="middle", size=11)
        drawing.line(left, bottom, left + room, bottom, "soft")
        level = bottom - mean(pair[0]) * scale
        drawing.line(left, level, left + room, level, "ink", dashed=True)
        most = " → ".join(f"{max(ms):.0f}" for ms in pair)
        share = " → ".join(f"{max(ms) / mean(ms):.2f}x" for ms in pair)
        drawing.text(left, 116, phase.capitalize(), bold=True)
        drawing.text(left, bottom + 44, f"busiest rank {most} ms, {share} the mean")
    return drawing


def plan(batch: Batch, tasks: Tasks, about: str) -> Drawing:
    """Two maps of a batch's query rows. A row is as high as it has keys to attend, so that areas are work."""
    layout = batch.layout
    tokens, longest = int(layout.tokens.max()), int(layout.pieces[:, PIECE_END].max())
    drawing = Drawing(WIDTH, 442, "Which rank attends which rows of a batch, before and after balance")
    drawing.text(24, 34, "Who attends which rows", size=17, bold=True)
    drawing.text(24, 56, about, colour="soft")
    drawing.text(
        24, 76, "A triangle is a document: its rows from left to right, each as high as it has keys.", colour="soft"
    )
    gap, left, high = 8, 24, 104
    block = (WIDTH - 2 * left - gap * (layout.num_ranks - 1)) / layout.num_ranks
    for base, busiest, words, attended in (
        (232, tasks.balance_before, "Without the plugin: every rank attends what it stores", None),
        (402, tasks.balance, "With the plugin: the same rows, coloured by the rank that attends them", tasks.rows),
    ):
        drawing.text(left, base - high - 16, words, bold=True)
        drawing.text(WIDTH - left, base - high - 16, f"busiest rank {busiest:.2f}x the mean", anchor="end")
        for rank in range(layout.num_ranks):
            x = left + rank * (block + gap)
            drawing.line(x, base + 0.5, x + block, base + 0.5, "soft")
            drawing.key(x + block / 2 - 29, base + 22, [(RANKS[rank], f"rank {rank}")], 0)
        for low, end, rank, row, server in parts_of(layout, attended):
            x, width = left + rank * (block + gap) + row * block / tokens, (end - low) * block / tokens
            first, last = (base - n * high / longest for n in (low, end))
            drawing.shape([(x, base), (x, first), (x + width, last), (x + width, base)], RANKS[server])
            if width > 8 and base - last > 26:
                middle = x + width * (0.5 if low else 0.64)
                drawing.text(middle, base - 6, str(server), colour="#ffffff", size=11, anchor="middle", bold=True)
    return drawing


def parts_of(layout: Layout, tasks: np.ndarray | None) -> list[tuple[int, int, int, int, int]]:
    """Parts of documents as they are stored: first and last position, rank, row there, and the server that attends
    them, which is the rank itself without tasks."""
    found = []
    for rank in range(layout.num_ranks):
        row = 0
        for _, document, start, length in layout.segments[layout.segments[:, RANK] == rank].tolist():
            parts = [(start, start + length, rank)]
            if tasks is not None:
                mine = tasks[tasks[:, TASK_DOCUMENT] == document][:, [Q_START, Q_END, SERVER]].tolist()
                cut = [(max(low, start), min(high, start + length), server) for low, high, server in sorted(mine)]
                parts = [part for part in cut if part[0] < part[1]]
            found += [(low, high, rank, row + low - start, server) for low, high, server in parts]
            row += length
    return found


# A layer on two ranks.


@dataclass(frozen=True)
class Span:
    """Something a rank does; seconds from the start of the phase."""

    rank: int
    kind: str
    start: float
    end: float
    size: int = 0  # bytes on a link


#: Colours and words of the kinds of spans; "out" and "back" are of the links, the others of the GPU.
KINDS = {
    "linear": ("plain", "linear layers"),
    "own": ("plugin", "attention of its own rows"),
    "other": ("other", "attention of the other's rows"),
    "out": ("moving", "rows under way"),
    "back": ("moving", ""),
}


def spans_of(planned: Plan, layout: Layout, phase: Phase, *, moved: bool) -> list[Span]:
    """What every rank does in a phase of a layer, by the model of :func:`~.worth.phase_seconds`: linear layers, then
    attention at home until rows have come, theirs, and the rest at home; results leave at once.

    Args:
        moved: as planned; otherwise with every row at home.
    """
    cost = cost_model()
    compiler = planned.compiler if moved else RouteCompiler(layout, planned.worth.home.rows)
    at_home, away = (
        (load / UNITS_PER_SECOND).tolist() for load in compiler.loads(lambda rows: task_costs(rows, cost, phase))
    )
    out, back = compiler.bytes_between(HEADS, phase)
    linear = planned.worth.whole - planned.worth.before
    spans = [Span(rank, "linear", 0.0, linear) for rank in range(layout.num_ranks)]
    for rank in range(layout.num_ranks):
        there = linear
        for sizes, sender in ((out[:, rank], s) for s in range(layout.num_ranks)):
            if sizes[sender]:
                took = linear + float(cost.transfer_seconds(sizes[sender]))
                spans.append(Span(sender, "out", linear, took, int(sizes[sender])))
                there = max(there, took)
        if not away[rank]:
            spans.append(Span(rank, "own", linear, linear + at_home[rank]))
            continue
        first = min(at_home[rank], there - linear)
        ready = there + away[rank]
        spans += [Span(rank, "own", linear, linear + first), Span(rank, "other", there, ready)]
        if at_home[rank] > first:
            spans.append(Span(rank, "own", ready, ready + at_home[rank] - first))
        for receiver in np.flatnonzero(back[rank]).tolist():
            took = ready + float(cost.transfer_seconds(back[rank, receiver]))
            spans.append(Span(rank, "back", ready, took, int(back[rank, receiver])))
    return spans


def layer(layout: Layout, about: str) -> Drawing:
    """Both phases of a layer on two ranks, without the plugin and with it."""
    plans = {phase: plan_of(layout, phase) for phase in PHASES}
    rows = [
        (phase, moved, spans_of(plans[phase], layout, phase, moved=moved))
        for phase in PHASES
        for moved in (False, True)
    ]
    longest = max(span.end for *_, spans in rows for span in spans)
    drawing = Drawing(WIDTH, 542, "A layer on two ranks with and without the plugin, predicted")
    drawing.text(24, 34, "A layer on two ranks, as the cost model predicts it", size=17, bold=True)
    drawing.text(24, 56, about, colour="soft")
    x = 24.0
    for colour, words in KINDS.values():
        if words:
            drawing.key(x, 84, [(colour, words)], 0)
            x += 44 + 6.7 * len(words)
    left, y, lane = 96, 118.0, 33
    scale = (WIDTH - left - 90) / longest
    for phase, moved, spans in rows:
        end = max(span.end for span in spans)
        below = y + 12 + lane * layout.num_ranks
        drawing.text(24, y, f"{phase.capitalize()}, {'with the plugin' if moved else 'DeepSpeed alone'}", bold=True)
        for span in spans:
            x, top, width = left + span.start * scale, y + 12 + lane * span.rank, (span.end - span.start) * scale
            if span.size:
                drawing.rect(x, top + 19, width, 6, KINDS[span.kind][0])
                words = f"{span.size / 2**20:.0f} MiB {span.kind}"
                side = ("start", x + width + 5) if span.kind == "out" else ("end", x - 5)
                drawing.text(side[1], top + 27, words, colour="soft", size=11, anchor=side[0])
            else:
                drawing.rect(x, top, width, 16, KINDS[span.kind][0])
        for rank in range(layout.num_ranks):
            top = y + 12 + lane * rank
            drawing.text(24, top + 13, f"rank {rank}")
            last = max(span.end for span in spans if span.rank == rank)
            if end - last > 0.05 * end:
                drawing.text(left + last * scale + 8, top + 13, f"waits {(end - last) * 1e3:.0f} ms", colour="soft")
        drawing.line(left + end * scale, y + 8, left + end * scale, below - 8, "ink", dashed=True)
        drawing.text(left + end * scale + 7, y + 25, f"{end * 1e3:.0f} ms", bold=True)
        y = below + (20 if not moved else 32)
    drawing.text(24, y - 6, "Predicted, not measured. Not drawn: the host, which is ahead.", colour="soft")
    return drawing


# Trees on two ranks.


class Tile(NamedTuple):
    """A task as it is drawn above the rows of its queries.

    Attributes:
        rank, row: where its first query is stored.
        queries: how many there are.
        low: how many tokens of their text come before its first key.
        first, last: how many tokens come before the key behind the last one that its first and its last query see.
        server: what computes it.
    """

    rank: int
    row: int
    queries: int
    low: int
    first: int
    last: int
    server: int


def forest_layout() -> Layout:
    """Two ranks of equal tokens, with trees and plain documents on both."""
    k = 1024
    answers = [(16 * k, None), *[(2 * k, 0)] * 4]
    deeper = [(4 * k, None), (4 * k, 0), *[(k, 1)] * 3, (4 * k, 0), *[(k, 5)] * 3]
    return Layout.from_trees([[answers, 8 * k], [deeper, 8 * k, 4 * k, 2 * k]])


def tiles_of(layout: Layout, tasks: np.ndarray) -> list[Tile]:
    """Of ``Tasks.rows`` of a layout of whole documents and no window."""
    places = {
        s[DOCUMENT]: (s[RANK], row) for s, row in zip(layout.segments.tolist(), layout.rows.tolist(), strict=True)
    }
    positions = [layout.position_ids(rank) for rank in range(layout.num_ranks)]
    found = []
    for task, full in zip(tasks.tolist(), is_full(tasks).tolist(), strict=True):
        document, q_start, q_end, k_start, k_end, server = task
        rank, first = places[document]
        low = int(positions[rank][first + k_start])
        last = low + k_end - k_start
        begin = last if full else last - (q_end - q_start) + 1
        found.append(Tile(rank, first + q_start, q_end - q_start, low, begin, last, server))
    return found


def forest(layout: Layout, planned: Plan, about: str) -> Drawing:
    """Two maps of the rows of a batch with trees, each as high as its text has tokens up to it."""
    tokens, longest = int(layout.tokens.max()), max(int(layout.position_ids(r).max()) for r in range(layout.num_ranks))
    drawing = Drawing(WIDTH, 494, "Which rank attends which rows of a batch with trees, before and after balance")
    drawing.text(24, 34, "Who attends which rows of trees", size=17, bold=True)
    drawing.text(24, 56, about, colour="soft")
    words = "Rows from left to right, each as high as it has keys. Branches stand on the tile of what they go on from."
    drawing.text(24, 76, words, colour="soft")
    left, gap, high = 24, 20, 122
    block = (WIDTH - 2 * left - gap * (layout.num_ranks - 1)) / layout.num_ranks
    tasks = planned.tasks
    for base, busiest, words, rows in (
        (256, tasks.balance_before, "Every rank attends what it stores", planned.worth.home.rows),
        (450, tasks.balance, "As planned: the same rows, coloured by the rank that attends them", tasks.rows),
    ):
        drawing.text(left, base - high - 20, words, bold=True)
        drawing.text(WIDTH - left, base - high - 20, f"busiest rank {busiest:.2f}x the mean", anchor="end")
        for rank in range(layout.num_ranks):
            x = left + rank * (block + gap)
            drawing.line(x, base + 0.5, x + block, base + 0.5, "soft")
            drawing.key(x + block / 2 - 29, base + 22, [(RANKS[rank], f"rank {rank}")], 0)
        for tile in tiles_of(layout, rows):
            x = left + tile.rank * (block + gap) + tile.row * block / tokens
            to = x + tile.queries * block / tokens
            low, first, last = (base - n * high / longest for n in (tile.low, tile.first, tile.last))
            near, far, under = x + 0.5, to - 0.5, low - 1 * (tile.low > 0)  # the card shows between tasks
            drawing.shape([(near, under), (near, first), (far, last), (far, under)], RANKS[tile.server])
            if to - x > 14 and low - last > 26:
                middle = x + (to - x) * (0.5 if tile.first == tile.last else 0.64)
                drawing.text(middle, low - 6, str(tile.server), colour="#ffffff", size=11, anchor="middle", bold=True)
    return drawing


def tree(layout: Layout, tasks: Tasks, about: str) -> Drawing:
    """Queries and keys of the first document, a prompt with answers, as a matrix of its tasks."""
    branches = [(start, length) for document, start, length, _ in layout.branches.tolist() if document == 0]
    rows = tasks.rows[tasks.rows[:, TASK_DOCUMENT] == 0]
    left, top, side = 104, 122, 384
    scale = side / sum(branches[-1])
    drawing = Drawing(WIDTH, top + side + 24, "The tasks of a prompt and its answers among two servers")
    drawing.text(24, 34, "A prompt and its answers: the tasks of one tree", size=17, bold=True)
    drawing.text(24, 56, about, colour="soft")
    drawing.key(24, 84, [(RANKS[rank], f"computed by rank {rank}") for rank in range(layout.num_ranks)], 180)
    names = ["prompt", *(f"answer {n}" for n in range(len(branches) - 1))]
    for name, (start, length) in zip(names, branches, strict=True):
        middle = (start + length / 2) * scale
        drawing.text(left - 8, top + middle + 4, name, anchor="end")
        drawing.text(left + middle, top - 8, name.split()[-1], anchor="middle")
        for edge in (start, start + length):
            drawing.line(left, top + edge * scale, left + side, top + edge * scale)
            drawing.line(left + edge * scale, top, left + edge * scale, top + side)
    for (_, q_start, q_end, k_start, k_end, server), full in zip(rows.tolist(), is_full(rows).tolist(), strict=True):
        low, end = top + q_start * scale, top + q_end * scale
        near, far = left + k_start * scale, left + k_end * scale
        if full:
            drawing.shape([(near, low + 0.5), (far, low + 0.5), (far, end - 0.5), (near, end - 0.5)], RANKS[server])
            words, middle, y = "full", (near + far) / 2, (low + end) / 2 + 4
        else:
            begin = far - (end - low)
            drawing.shape([(near, low), (begin, low), (far, end - 0.5), (near, end - 0.5)], RANKS[server])
            words, middle, y = "causal", near + (far - near) * 0.36, low + (end - low) * 0.72
        if end - low > 40:
            drawing.text(middle, y, words, colour="#ffffff", anchor="middle", bold=True)
    x, y = left + side + 28, top + 14
    for name, *lines in (
        ("", "Rows are queries, columns are keys."),
        ("causal", "Every branch within itself."),
        ("full", "All answers against the prompt:", "every query sees every key."),
        ("empty", "Answers do not see each other."),
        ("", "A row of an answer has two tasks.", "Their results are merged by lse."),
    ):
        for words in filter(None, (name, *lines)):
            drawing.text(x, y, words, bold=words == name)
            y += 19
        y += 16
    return drawing


def pictures() -> dict[str, Drawing]:
    """By file name."""
    plain, plugin = (load(f"whole_model_2xh200_{name}.json") for name in ("plain", "plugin"))
    balance = load("server_balance_8_h200.json")
    servers, tokens = balance["args"]["servers"], balance["args"]["tokens"]
    batch = batch_of(BATCH, servers, tokens, balance["args"]["context"])
    two = mix("long|short", 2, TOKENS).layout
    documents = len(np.unique(batch.layout.segments[:, DOCUMENT]))
    trees = forest_layout()
    planned, (prompt, answer) = plan_of(trees, "forward"), (trees.branches[:2, 2] // 1024).tolist()
    return {
        "whole_model.svg": whole_model(plain, plugin),
        "loads.svg": loads(balance),
        "plan.svg": plan(
            batch,
            plan_of(batch.layout, "forward").tasks,
            f"{KIND}: {documents} documents on {servers} ranks of {tokens // 1024}K tokens, forward of a layer",
        ),
        "layer.svg": layer(
            two,
            f"Rank 0 has one document of {TOKENS // 1024}K tokens, rank 1 has {len(two.rank(1))} of "
            f"{two.rank(1)[0].length // 1024}K; Llama-3-8B's width on H200s",
        ),
        "tree.svg": tree(
            trees,
            planned.tasks,
            f"A prompt of {prompt}K tokens with answers of {answer}K, stored on rank 0; from the plan of a forward",
        ),
        "forest.svg": forest(
            trees,
            planned,
            f"Two ranks of {trees.tokens[0] // 1024}K tokens with trees and plain documents, forward of a layer",
        ),
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    for name, drawing in pictures().items():
        drawing.save(folder / name)


if __name__ == "__main__":
    main()
