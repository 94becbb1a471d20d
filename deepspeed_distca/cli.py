# SPDX-License-Identifier: Apache-2.0
"""The command ``ds_distca``; also ``python -m deepspeed_distca.cli``.

Exit status 0: done. 1: `doctor` found what will not work. 2: the command line or its input is wrong, which one line on
stderr explains.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from deepspeed_distca.defaults import GRANULARITY, MIN_GAIN, TOLERANCE

_MESSAGE_LENGTH = 400
_TABLE_ROWS = 64

#: Ranks of a layout that `plan` reads: its matrices of bytes have an entry for every two of them.
_MAX_RANKS = 2048


class UsageError(Exception):
    """The command line or its input is wrong; the message says what was given and what is allowed."""


class Command(NamedTuple):
    """A subcommand: its arguments, and what runs it and returns the exit status.

    `run` imports what it needs itself, so that a command does not pay for, or fail by, what others need.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, or `argv` in its place, and returns the exit status."""
    parser = _Parser(prog="ds_distca", description="Tools for core attention disaggregation.")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher `deepspeed`
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        command.add_arguments(subparsers.add_parser(name, help=command.help, description=command.help))
    try:
        arguments = parser.parse_args(argv)
        return COMMANDS[arguments.command].run(arguments)
    except UsageError as error:
        message = " ".join(str(error).split())
        if len(message) > _MESSAGE_LENGTH:
            message = message[: _MESSAGE_LENGTH - 4] + " ..."
        print(f"ds_distca: error: {message}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print the usage as well; one line says what is wrong, --help says the rest.
        raise UsageError(f"{message} (see {self.prog} --help)")


# -- plan -------------------------------------------------------------------------------------------------------------


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layout",
        required=True,
        metavar="FILE",
        help='JSON {"ranks": [[{"document", "start", "length"}, ...], ...], '
        f'"heads": {{"query", "key_value", "head_dim"}}}}, in storage order, of up to {_MAX_RANKS} ranks; - reads it '
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
    parser.add_argument("--min-shard-tokens", type=int, help="query rows below which nothing is cut (a granule)")
    parser.add_argument("--max-received-rows", type=int, help="cap on query + key/value rows a server receives (none)")
    parser.add_argument("--server-weights", metavar="W,W,...", help="relative speeds of the servers, integers (equal)")
    parser.add_argument(
        "--min-gain",
        type=float,
        default=MIN_GAIN,
        help=f"share of the phase that must be saved for training to move rows ({MIN_GAIN}, as on GPUs)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--html", metavar="FILE", help="write a report with figures, one file")


def _plan(arguments: argparse.Namespace) -> int:
    from deepspeed_distca.scheduler.balance import balance
    from deepspeed_distca.scheduler.cost_model import CostModel
    from deepspeed_distca.scheduler.digest import digest
    from deepspeed_distca.scheduler.profiles import Profile, ProfileError
    from deepspeed_distca.scheduler.traffic import homes_of, traffic

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
            min_shard_tokens=arguments.min_shard_tokens,
            granularity=arguments.granularity,
            window=arguments.window,
            server_weights=_weights(arguments.server_weights),
            max_received_rows=arguments.max_received_rows,
        )
        milliseconds = (time.perf_counter() - start) * 1e3
        training = _in_training(arguments, layout, cost)
        moved = traffic(layout, tasks)
        flows = moved.dispatch_bytes(heads, phase), moved.return_bytes(heads, phase)
    except (ValueError, OverflowError) as error:
        raise UsageError(str(error)) from error
    columns = ("document", "q_start", "q_end", "k_start", "server")
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
        "digest": digest(layout, tasks, phase=phase, window=arguments.window).hex,
        "milliseconds": milliseconds,
        "training": training,
    }
    if arguments.html:
        from deepspeed_distca.report.figures import Plan
        from deepspeed_distca.report.pages import plan_page

        sent = sum(flow.sum() for flow in flows) / 2**20 / layout.num_ranks
        plan = Plan.of(layout, tasks, cost, phase, arguments.window)
        _write_html(arguments.html, plan_page(plan, phase, [_PLAN_HEAD, *_plan_rows(report)], sent))
    if arguments.json:
        print(json.dumps(report, default=lambda matrix: matrix.tolist()))
    else:
        _print_plan(report)
    return 0


def _in_training(arguments: argparse.Namespace, layout: Any, cost: Any) -> dict[str, Any] | None:
    """What training would do with the layout, in one node: whether rows move, and the seconds of a layer's phase
    before and after. Its linear work is estimated from the heads. None where cost is no time."""
    from types import SimpleNamespace

    import numpy as np

    from deepspeed_distca.plan_options import linear_flops
    from deepspeed_distca.scheduler.routes import RouteCompiler
    from deepspeed_distca.scheduler.worth import PlanOptions, Worth

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
    weights = _weights(arguments.server_weights)
    options = PlanOptions(
        arguments.tolerance,
        arguments.granularity,
        arguments.max_received_rows,
        None if weights is None else tuple(weights),
        arguments.min_gain,
        linear_flops(sizes),
    )
    worth = Worth(layout, arguments.window, arguments.phase, cost, options, early=True)
    tasks, compiler = worth.spread(RouteCompiler(layout, worth.home.rows))
    stays = np.array_equal(tasks.rows, worth.home.rows)
    return {"moves": not stays, "before": worth.whole, "after": worth.takes(compiler)}


def _read_layout(source: str) -> tuple[Any, Any]:
    """The layout and heads of a JSON file, or of stdin for "-"."""
    from deepspeed_distca.given import shown
    from deepspeed_distca.layout import Layout
    from deepspeed_distca.scheduler.heads import Heads
    from deepspeed_distca.scheduler.strict_json import loads

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
    if len(given["ranks"]) > _MAX_RANKS:
        raise UsageError(f"{where}: {len(given['ranks'])} ranks are too many, allowed: {_MAX_RANKS}")
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


def _weights(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--server-weights must be integers with commas between them, got {text[:80]!r}") from error


_PLAN_HEAD = ["server", "before ms", "after ms", "tasks", "moved in", "sent MiB", "received MiB"]


def _plan_rows(report: dict[str, Any]) -> list[list[str]]:
    """Cells of every server."""
    servers = len(report["load_after"])
    tasks, moved_in = [0] * servers, [0] * servers
    for task in report["tasks"]:
        tasks[task["server"]] += 1
        moved_in[task["server"]] += task["home"] != [task["server"]]
    sent, received = _plan_flows(report)
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


def _plan_flows(report: dict[str, Any]) -> list[list[float]]:
    """MiB that every server sends and receives, there and back."""
    flows = report["bytes"], report["bytes_return"]
    return [sum(flow.sum(axis=axis) / 2**20 for flow in flows).tolist() for axis in (1, 0)]


def _write_html(file: str, page: Any) -> None:
    try:
        page.save(Path(file))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from error


def _print_plan(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = _plan_rows(report)
    servers = len(rows)
    sent, received = _plan_flows(report)
    table = Table(title=f"{len(report['tasks'])} CA-tasks on {servers} servers")
    for name in _PLAN_HEAD:
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
    console.print(
        f"sent and received, dispatch and return: mean {sum(sent) / servers:.2f} MiB, "
        f"worst {max(*sent, *received, 0):.2f} MiB a rank",
        highlight=False,
    )
    training = report["training"]
    if training is not None:
        does = (
            f"moves rows: {training['before'] * 1e3:.2f} -> {training['after'] * 1e3:.2f} ms"
            if training["moves"]
            else f"leaves rows at home, since moving them saves too little of {training['before'] * 1e3:.2f} ms"
        )
        console.print(f"training {does} a layer, its linear work with it", highlight=False)


# -- advise -----------------------------------------------------------------------------------------------------------


def _advise_arguments(parser: argparse.ArgumentParser) -> None:
    _documents_arguments(parser, micro_batches=20)
    parser.add_argument("--node-size", type=_positive_int, help="GPUs of a node, of several (all are in one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--html", metavar="FILE", help="write a report with figures, one file")


def _documents_arguments(parser: argparse.ArgumentParser, micro_batches: int) -> None:
    """Of what predicts steps: documents, model, GPUs."""
    parser.add_argument(
        "documents",
        metavar="DOCUMENTS",
        help="a JSON list of lengths; JSON lines, a Parquet file or a folder of datasets.save_to_disk with a column "
        "of lengths or of token lists",
    )
    parser.add_argument("--ranks", type=_positive_int, required=True, help="GPUs that share attention")
    parser.add_argument("--tokens-per-rank", type=_positive_int, required=True, help="of a micro-batch")
    parser.add_argument("--column", help="of the documents (length where there is one, else input_ids)")
    parser.add_argument("--model", metavar="FILE", help="a model's config.json (Llama-3-8B's sizes)")
    parser.add_argument("--cost", metavar="FILE", help="of `ds_distca profile --save` (an H200's shipped one)")
    parser.add_argument("--checkpointing", action="store_true", help="activations are computed a second time")
    parser.add_argument("--liger", action="store_true", help="the model has Liger's kernels (transformers' own)")
    parser.add_argument("--zero", choices=("0", "1", "2", "3"), default="1", help="stage of ZeRO (1)")
    parser.add_argument(
        "--micro-batches",
        type=_positive_int,
        default=micro_batches,
        help=f"the most that are drawn ({micro_batches})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of their order (0)")


def _advise(arguments: argparse.Namespace) -> int:
    from deepspeed_distca.advise import advise

    with _one_line(arguments):
        lengths, training, source = _read_documents(arguments, arguments.node_size)
        advice = advise(
            lengths,
            training,
            ranks=arguments.ranks,
            tokens=arguments.tokens_per_rank,
            count=arguments.micro_batches,
            seed=arguments.seed,
        )
    if arguments.html:
        from deepspeed_distca.report.pages import advise_page
        from deepspeed_distca.simulator.documents import micro_batches

        (first,) = micro_batches(lengths, arguments.ranks, arguments.tokens_per_rank, 1, arguments.seed)
        _write_html(arguments.html, advise_page(advice, training, first))
    if arguments.json:
        print(json.dumps(advice.to_dict()))
        return 0
    print(f"model: {training.model.name}; cost model {source}")
    print(advice)
    return 0


# -- simulate ---------------------------------------------------------------------------------------------------------


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    _documents_arguments(parser, micro_batches=4)
    parser.add_argument("--context", type=_positive_int, help="tokens in which documents end (a rank's)")
    parser.add_argument("--nodes", type=_positive_int, help="over which the ranks are (of 8 ranks each)")
    parser.add_argument("--stages", type=_positive_int, default=1, help="of a pipeline (1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--trace", metavar="FILE", help="write a step by rank, for ui.perfetto.dev")
    parser.add_argument("--html", metavar="FILE", help="write a report with figures, one file; 8 to 512 ranks as well")


def _simulate(arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    from deepspeed_distca.simulator.simulate import over_scale, simulate, write_trace

    with _one_line(arguments):
        lengths, training, source = _read_documents(arguments, None)
        nodes = arguments.nodes or -(-arguments.ranks // 8)
        if arguments.nodes and arguments.ranks % nodes:
            raise UsageError(f"--ranks {arguments.ranks} cannot be divided into --nodes {nodes}; give a divisor")
        training = replace(training, stages=arguments.stages)
        layout = {
            "tokens": arguments.tokens_per_rank,
            "node_size": arguments.ranks // nodes if arguments.nodes else 8,
            "context": arguments.context,
            "count": arguments.micro_batches,
            "seed": arguments.seed,
        }
        found = simulate(lengths, training, ranks=arguments.ranks, **layout)
        if arguments.trace:
            write_trace(found, Path(arguments.trace))
    if arguments.html:
        from deepspeed_distca.report.pages import simulate_page

        _write_html(arguments.html, simulate_page(found, over_scale(lengths, training, **layout)))
    if arguments.json:
        print(json.dumps(found.to_dict()))
        return 0
    print(f"model: {training.model.name}; cost model {source}")
    print(found)
    return 0


# -- what both need ---------------------------------------------------------------------------------------------------


@contextmanager
def _one_line(arguments: argparse.Namespace) -> Iterator[None]:
    """What is wrong with documents, a model or a layout of ranks is an error of the command line."""
    from deepspeed_distca.scheduler.profiles import ProfileError

    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename or arguments.documents}: {error.strerror or error}") from error
    except (ValueError, TypeError, OverflowError, ProfileError) as error:
        raise UsageError(str(error)) from error


def _read_documents(arguments: argparse.Namespace, node_size: int | None) -> tuple[Any, Any, str]:
    """Lengths of the documents, what is trained, and where its cost model is from."""
    from deepspeed_distca.advise import read_config, training_options
    from deepspeed_distca.data.lengths import read_lengths
    from deepspeed_distca.scheduler.profiles import Setting, choose
    from deepspeed_distca.simulator.model import LLAMA_3_8B, Model
    from deepspeed_distca.simulator.step import Training

    if arguments.ranks > _MAX_RANKS:
        raise UsageError(f"--ranks was given {arguments.ranks}; allowed: 1 to {_MAX_RANKS}")
    config = LLAMA_3_8B if arguments.model is None else read_config(Path(arguments.model))
    model = Model.of(config)
    choice = choose(Setting("NVIDIA H200", "sm90", "flash_attn_4", "bf16"), model.heads, arguments.cost, folder=None)
    training = Training(
        model,
        choice.cost,
        training_options(config, arguments.ranks, node_size),
        arguments.checkpointing,
        arguments.liger,
        int(arguments.zero),
    )
    return read_lengths(Path(arguments.documents), arguments.column), training, choice.source


# -- doctor -----------------------------------------------------------------------------------------------------------


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", type=Path, help="a ds_config.json, which is checked")
    parser.add_argument(
        "--model", metavar="FILE", type=Path, help="a model's config.json, of which a small copy is tried"
    )
    parser.add_argument("--tokens-per-rank", type=_positive_int, help="of a micro-batch: tells the memory it takes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _doctor(arguments: argparse.Namespace) -> int:
    from deepspeed_distca.doctor import BadInputError, examine, report

    try:
        found = examine(arguments.config, arguments.model, arguments.tokens_per_rank)
    except BadInputError as error:
        raise UsageError(str(error)) from error
    print(report(found, arguments.json))
    return int(any(finding.verdict == "bad" for finding in found))


# -- profile ----------------------------------------------------------------------------------------------------------


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=32, help="query heads (32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="key/value heads (8)")
    parser.add_argument("--head-dim", type=int, default=128, help="elements of a query and key head (128)")
    parser.add_argument("--value-dim", type=int, help="elements of a value head (as --head-dim)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--kernel", help="name of an attention kernel (the best that is installed and fits)")
    parser.add_argument("--windows", metavar="W,W,...", help="windows to measure beside full causal attention (none)")
    parser.add_argument("--device", help="cuda, cuda:1, cpu (a GPU where there is one)")
    parser.add_argument("--budget-seconds", type=_positive, help="time for measuring the kernel (30; --quick: 5)")
    parser.add_argument("--tokens", type=_positive_int, help="the longest document measured (as the budget allows)")
    parser.add_argument("--quick", action="store_true", help="shorter documents, less exact")
    parser.add_argument("--save", metavar="FILE", help="store it there in place of the user's cache")


def _profile(arguments: argparse.Namespace) -> int:
    from deepspeed_distca.profiling.command import ProfileUsageError, profile

    try:
        return profile(arguments)
    except ProfileUsageError as error:
        raise UsageError(str(error)) from error


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return value


COMMANDS: dict[str, Command] = {
    "plan": Command("Balance the core attention of a layout.", _plan_arguments, _plan),
    "advise": Command(
        "Predict from the lengths of documents what the plugin would gain, by what training plans with.",
        _advise_arguments,
        _advise,
    ),
    "simulate": Command(
        "Predict a training step of any number of GPUs by every way to share attention, side by side.",
        _simulate_arguments,
        _simulate,
    ),
    "doctor": Command(
        "Look at versions, the attention kernel, a DeepSpeed config and a model: can the plugin run here?",
        _doctor_arguments,
        _doctor,
    ),
    "profile": Command(
        "Measure the attention kernel of this device, and under torchrun the exchange between ranks, for the cost "
        "model of training.",
        _profile_arguments,
        _profile,
    ),
}

if __name__ == "__main__":
    sys.exit(main())
