# SPDX-License-Identifier: Apache-2.0
"""``ds_distca plan``: the plan of a layout, without a device. It imports neither torch nor what takes as long."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from deepspeed_distca.cli import UsageError
from deepspeed_distca.commands.shared import MAX_RANKS, integer_list, write_html
from deepspeed_distca.defaults import GRANULARITY, MIN_GAIN, TOLERANCE
from deepspeed_distca.given import shown
from deepspeed_distca.layout import Layout
from deepspeed_distca.model_sizes import linear_flops
from deepspeed_distca.scheduler.balance import balance
from deepspeed_distca.scheduler.cost_model import CostModel
from deepspeed_distca.scheduler.digest import digest
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.profiles import Profile, ProfileError
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.strict_json import loads
from deepspeed_distca.scheduler.traffic import homes_of
from deepspeed_distca.scheduler.worth import PlanOptions, Worth

_TABLE_ROWS = 64
_HEAD = ["server", "before ms", "after ms", "tasks", "moved in", "sent MiB", "received MiB"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument(
        "--layout",
        required=True,
        metavar="FILE",
        help='JSON {"ranks": [[{"document", "start", "length"}, ...], ...], '
        f'"heads": {{"query", "key_value", "head_dim"}}}}, in storage order, of up to {MAX_RANKS} ranks; - reads it '
        "from stdin",
    )
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"allowed excess over the mean load ({TOLERANCE})"
    )
    parser.add_argument(
        "--cost",
        metavar="model|area|FILE",
        default="model",
        help="what is balanced: time on an H200, query-key pairs, or time by a file of `ds_distca profile --save`",
    )
    parser.add_argument("--phase", choices=("forward", "backward"), default="forward")
    parser.add_argument("--window", type=int, help="keys a query sees, its own included (all)")
    parser.add_argument(
        "--granularity", type=int, default=GRANULARITY, help=f"cuts lie at multiples of it ({GRANULARITY})"
    )
    parser.add_argument("--max-received-rows", type=int, help="cap on query + key/value rows a server receives (none)")
    parser.add_argument(
        "--server-weights",
        type=integer_list,
        metavar="W,W,...",
        help="relative speeds of the servers, integers (equal)",
    )
    parser.add_argument(
        "--min-gain",
        type=float,
        default=MIN_GAIN,
        help=f"share of the phase that must be saved for training to move rows ({MIN_GAIN}, as on GPUs)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--html", metavar="FILE", help="write a report with figures, one file")


def run(arguments: argparse.Namespace) -> int:
    """Plans, prints and writes; the exit status."""
    layout, heads = _read_layout(arguments.layout)
    phase = arguments.phase
    if arguments.cost in ("model", "area"):
        cost = CostModel.area(heads) if arguments.cost == "area" else CostModel.fitted(heads)
    else:
        try:
            cost = Profile.load(Path(arguments.cost), heads).cost.for_heads(heads)
        except ProfileError as error:
            raise UsageError(f"--cost allows model, area or the file of a profile: {error}") from error
    try:
        start = time.perf_counter()
        tasks = balance(
            layout,
            cost,
            phase=phase,
            tolerance=arguments.tolerance,
            granularity=arguments.granularity,
            window=arguments.window,
            server_weights=arguments.server_weights,
            max_received_rows=arguments.max_received_rows,
        )
        milliseconds = (time.perf_counter() - start) * 1e3
        training = _in_training(arguments, layout, cost)
        flows = RouteCompiler(layout, tasks.rows).bytes_between(heads, phase)
    except (ValueError, OverflowError) as error:
        raise UsageError(str(error)) from error
    columns = ("document", "q_start", "q_end", "k_start", "k_end", "server")
    report = {
        "tasks": [
            dict(zip(columns, row, strict=True), home=home)
            for row, home in zip(tasks.rows.tolist(), homes_of(layout, tasks.rows), strict=True)
        ],
        "load_before": cost.seconds(tasks.loads_before).tolist(),
        "load_after": cost.seconds(tasks.loads).tolist(),
        "balance_before": tasks.balance_before,
        "balance_after": tasks.balance,
        "bytes": flows[0],
        "bytes_return": flows[1],
        "digest": f"{digest(layout, tasks, phase=phase, window=arguments.window):016x}",
        "milliseconds": milliseconds,
        "training": training,
    }
    # MiB of every server, there and back.
    sent, received = (sum(flow.sum(axis=axis) / 2**20 for flow in flows).tolist() for axis in (1, 0))
    rows = _rows(report, sent, received)
    if arguments.html:
        from deepspeed_distca.report.figures import Plan
        from deepspeed_distca.report.pages import plan_page

        plan = Plan.of(layout, tasks, cost, phase, arguments.window)
        write_html(arguments.html, plan_page(plan, phase, [_HEAD, *rows], sum(sent) / len(rows)))
    if arguments.json:
        print(json.dumps(report, default=lambda matrix: matrix.tolist()))
        return 0
    moved = f"mean {sum(sent) / len(rows):.2f} MiB, worst {max(*sent, *received, 0):.2f} MiB a rank"
    _print(report, rows, moved)
    return 0


def _in_training(arguments: argparse.Namespace, layout: Layout, cost: CostModel) -> dict[str, Any] | None:
    """What training would do with the layout, in one node: whether rows move, and the seconds of a layer's phase
    before and after. Its linear work is estimated from the heads. None where cost is no time."""
    if not 0 <= arguments.min_gain < float("inf"):
        raise UsageError(f"--min-gain was given {arguments.min_gain:g}; allowed: a number of at least 0")
    if arguments.cost == "area" or not len(layout.segments):
        return None
    heads = cost.heads
    sizes = SimpleNamespace(
        hidden_size=heads.query * heads.head_dim,
        num_attention_heads=heads.query,
        num_key_value_heads=heads.key_value,
        head_dim=heads.head_dim,
    )
    options = PlanOptions(
        arguments.tolerance,
        arguments.granularity,
        arguments.max_received_rows,
        None if arguments.server_weights is None else tuple(arguments.server_weights),
        arguments.min_gain,
        linear_flops(sizes),
    )
    worth = Worth(layout, arguments.window, arguments.phase, cost, options, early=True)
    tasks, compiler = worth.spread(RouteCompiler(layout, worth.home.rows))
    stays = np.array_equal(tasks.rows, worth.home.rows)
    return {"moves": not stays, "before": worth.whole, "after": worth.takes(compiler)}


def _read_layout(source: str) -> tuple[Layout, Heads]:
    """The layout and heads of a JSON file, or of stdin for "-"."""
    where = "stdin" if source == "-" else source
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        given = loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from error
    needed = {"ranks", "heads"}
    if not isinstance(given, dict):
        raise UsageError(f"{where}: expected a JSON object with the keys ranks and heads, got {type(given).__name__}")
    for problem, keys in (("missing", needed - set(given)), ("unknown", set(given) - needed)):
        if keys:
            names = ", ".join(map(shown, sorted(keys)))
            raise UsageError(f"{where}: {problem} keys {names}; expected ranks and heads")
    if not isinstance(given["ranks"], list):
        raise UsageError(f"{where}: ranks must be a list with a list of segments for each rank")
    if len(given["ranks"]) > MAX_RANKS:
        raise UsageError(f"{where}: {len(given['ranks'])} ranks are too many, allowed: {MAX_RANKS}")
    for rank, segments in enumerate(given["ranks"]):
        for index, segment in enumerate(segments if isinstance(segments, list) else ()):
            if not isinstance(segment, dict):
                raise UsageError(
                    f"{where}: rank {rank}, segment {index}: expected an object with the keys document, start and "
                    f"length, got {shown(segment)}"
                )
    try:
        return Layout.from_ranks(given["ranks"]).validate(), Heads.from_dict(given["heads"])
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{where}: {error}") from error


def _rows(report: dict[str, Any], sent: list[float], received: list[float]) -> list[list[str]]:
    """Cells of every server."""
    servers = len(report["load_after"])
    tasks, moved_in = [0] * servers, [0] * servers
    for task in report["tasks"]:
        tasks[task["server"]] += 1
        moved_in[task["server"]] += task["home"] != [task["server"]]
    return [
        [
            str(server),
            f"{report['load_before'][server] * 1e3:.3f}",
            f"{report['load_after'][server] * 1e3:.3f}",
            str(tasks[server]),
            str(moved_in[server]),
            f"{sent[server]:.2f}",
            f"{received[server]:.2f}",
        ]
        for server in range(servers)
    ]


def _print(report: dict[str, Any], rows: list[list[str]], moved: str) -> None:
    from rich.console import Console
    from rich.table import Table

    servers = len(rows)
    table = Table(title=f"{len(report['tasks'])} CA-tasks on {servers} servers")
    for name in _HEAD:
        table.add_column(name, justify="right")
    for row in rows[:_TABLE_ROWS]:
        table.add_row(*row)
    console = Console()
    console.print(table)
    if servers > _TABLE_ROWS:
        console.print(f"... and {servers - _TABLE_ROWS} more servers; --json has all of them")
    console.print(
        f"balance {report['balance_before']:.4f} -> {report['balance_after']:.4f}   planned in "
        f"{report['milliseconds']:.2f} ms   digest {report['digest']}",
        highlight=False,
    )
    console.print(f"sent and received, dispatch and return: {moved}", highlight=False)
    training = report["training"]
    if training is not None:
        does = (
            f"moves rows: {training['before'] * 1e3:.2f} -> {training['after'] * 1e3:.2f} ms"
            if training["moves"]
            else f"leaves rows at home, since moving them saves too little of {training['before'] * 1e3:.2f} ms"
        )
        console.print(f"training {does} a layer, its linear work with it", highlight=False)
