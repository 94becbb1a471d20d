# SPDX-License-Identifier: Apache-2.0
"""A rank that differs, fails, ends, stops or hangs: the others are gone in time, and say which rank it was and why.

Every row of the table in docs/reliability.md is one case here, on ranks of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import connection
from pathlib import Path

import pytest

from tests.distributed.harness import QUIET, ROOT, forking, free_port, slowness, while_at_work

#: The time limit, what is allowed beyond it, and what "at once" may take; more on a machine that has other work.
SECONDS, AFTER, AT_ONCE = 5.0, 5.0, 6.0
BEGIN, END = "<!-- table of faults: made by tests/distributed/test_faults.py -->", "<!-- end of the table -->"
PAGE = ROOT / "docs" / "reliability.md"


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        fault, place: see the worker.
        words: what happens, and where, for the table.
        says: what every other rank says, as a pattern.
        at_once: not after the time limit alone.
        own_block: what that rank's block says beside or instead; empty: it has none.
        pipeline: a pipeline of two stages.
        left_first: the other ranks have left a micro-batch before, and all went on.
        lives_on: the rank's script catches what is raised and goes on with something else.
        rank: whose fault it is; rank 0 holds the store here.
    """

    fault: str
    place: str
    words: tuple[str, str]
    says: str
    zero: int = 1
    at_once: bool = True
    lives_on: bool = False
    rank: int = 1
    world: int = 2
    block: dict = field(default_factory=dict)
    own_block: dict | None = None
    pipeline: bool = False
    left_first: bool = False

    def seconds(self, slower: float) -> float:
        """The time limit: where it plays no part, one that would be noticed if it did."""
        return slower * (60.0 if self.at_once else SECONDS)


MADE_UP = "ValueError: a made-up fault"
CASES = [
    Case("block", "hello", ("no block", "the hello"), r"absent or disabled on ranks \[1\]", own_block={}),
    Case(
        "block",
        "hello",
        ("another option", "the hello"),
        r"`distca.keep_attention` is left out on ranks \[0\] and false on ranks \[1\]",
        own_block={"keep_attention": False},
    ),
    Case(
        "block",
        "hello",
        ("an option that does not exist", "the hello"),
        r"rank 1 cannot go on: DistCAConfigError: `distca.shards` is not an option",
        own_block={"shards": 1},
    ),
    Case(
        "absent",
        "hello",
        ("has not imported the plugin", "the hello"),
        r"ranks \[1\] said nothing within .* s",
        at_once=False,
    ),
    Case("raise", "attach", ("raises, and ends", "attach"), f"rank 1 failed in attach: {MADE_UP}"),
    Case("kill", "attach", ("is killed", "attach"), "rank 1 gives no sign of life"),
    Case(
        "raise",
        "embedding",
        ("raises, and its script goes on", "forward, before attention"),
        f"rank 1 failed in forward of micro-batch 2, before its first attention layer: {MADE_UP}",
        lives_on=True,
    ),
    Case(
        "raise",
        "layer",
        ("raises, and its script goes on", "forward"),
        f"rank 1 failed in forward of micro-batch 2, layer 2 of 2: {MADE_UP}",
        lives_on=True,
        zero=3,
        world=3,
    ),
    Case(
        "raise",
        "layer",
        ("raises, and ends", "forward"),
        f"rank 0 failed in forward of micro-batch 2, layer 2 of 2: {MADE_UP}",
        rank=0,
    ),
    Case(
        "raise",
        "between",
        ("raises, and ends", "between forward and backward"),
        f"rank 1 ended between forward and backward of micro-batch 2: {MADE_UP}",
        zero=2,
    ),
    Case(
        "raise",
        "attention backward",
        ("raises, and its script goes on", "backward of core attention"),
        f"rank 1 failed in backward of micro-batch 2, layer 2 of 2: {MADE_UP}",
        lives_on=True,
        zero=2,
    ),
    Case(
        "raise",
        "attention backward",
        ("raises, and its script goes on", "backward of two nano-batches"),
        f"rank 1 failed in backward of micro-batch 2, layer 2 of 2: {MADE_UP}",
        lives_on=True,
        block={"overlap": "ping_pong"},
    ),
    Case(
        "raise",
        "backward",
        ("raises, and its script goes on", "backward"),
        f"rank 1 failed in backward of micro-batch 2, layer 1 of 2: {MADE_UP}",
        lives_on=True,
        zero=0,
    ),
    Case(
        "raise",
        "step",
        ("raises, and its script goes on", "the optimizer's step"),
        f"rank 1 failed in optimizer step of micro-batch 2: {MADE_UP}",
        lives_on=True,
    ),
    Case(
        "raise",
        "layer",
        ("raises, and its script goes on", "a stage of a pipeline"),
        f"rank 1 failed in the pipeline's schedule of micro-batch 2: {MADE_UP}",
        lives_on=True,
        zero=0,
        pipeline=True,
    ),
    Case(
        "kill",
        "layer",
        ("is killed", "a stage of a pipeline"),
        "rank 1 gives no sign of life",
        zero=0,
        pipeline=True,
    ),
    Case(
        "raise",
        "data",
        ("raises, and ends", "reading data"),
        f"rank 1 ended outside of forward, backward and step, after micro-batch 1: {MADE_UP}",
    ),
    Case(
        "exit",
        "between",
        ("calls `sys.exit(0)`", "between forward and backward"),
        r"rank 1 has left .* between forward and backward of micro-batch 2",
    ),
    Case("end", "data", ("ends a micro-batch early", "reading data"), r"rank 1 has left .* after 1 micro-batches"),
    Case("interrupt", "layer", ("is interrupted (SIGINT)", "forward"), "rank 1 ended in forward.*KeyboardInterrupt"),
    Case(
        "interrupt",
        "backward",
        ("is interrupted, and its script goes on", "backward"),
        "rank 1 failed in backward of micro-batch 2, layer 1 of 2: KeyboardInterrupt",
        lives_on=True,
        zero=0,
    ),
    Case(
        "interrupt",
        "layer",
        ("is interrupted, and its script goes on", "a stage of a pipeline"),
        "rank 1 failed in the pipeline's schedule of micro-batch 2: KeyboardInterrupt",
        lives_on=True,
        zero=0,
        pipeline=True,
    ),
    Case("kill", "layer", ("is killed", "forward"), "rank 1 gives no sign of life", zero=3, world=3),
    Case(
        "kill",
        "backward",
        ("is killed, and was rank 0, which held the store", "backward"),
        "the store of torch.distributed.* rank 0 or the launcher",
        rank=0,
    ),
    Case("kill", "step", ("is killed", "the optimizer's step"), "rank 1 gives no sign of life"),
    Case("stop", "layer", ("is stopped (SIGSTOP)", "forward"), "rank 1 gives no sign of life", at_once=False),
    Case("stop", "step", ("is stopped", "the optimizer's step"), "rank 1 gives no sign of life", at_once=False),
    Case(
        "stop",
        "backward",
        ("is stopped, and is rank 0, which holds the store", "backward"),
        "the store of torch.distributed",
        rank=0,
        at_once=False,
    ),
    Case(
        "hang",
        "between",
        ("hangs, alive", "between forward and backward"),
        "rank 1 is between forward and backward of micro-batch 2",
        at_once=False,
    ),
    Case(
        "hang",
        "step",
        ("hangs, alive", "the optimizer's step"),
        "rank 0 has waited for .*: rank 1 is in optimizer step of micro-batch 2",
        at_once=False,
    ),
]


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        seconds: from the fault until the last of the other ranks was gone.
        slower: how many times slower than alone processes were, about.
        codes: of the other ranks; None: still there.
        texts: what they said.
        own: what the rank said whose fault it is.
    """

    seconds: float
    slower: float
    codes: list[int | None]
    texts: list[str]
    own: str


def run(case: Case, accelerator: str = "cpu") -> Outcome:
    """Runs a case until the other ranks have ended or do nothing any more.

    Args:
        accelerator: "cpu" or "cuda", DeepSpeed's name for the device.
    """
    context = forking() if accelerator == "cpu" else multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes, port, slower = [], free_port(), slowness()
        for rank in range(case.world):
            environment = {**os.environ, **_environment(rank, case.world, port), "DS_ACCELERATOR": accelerator}
            environment.pop("LOCAL_SIZE", None)
            arguments = (_with_limit(case, slower), folder, environment)
            processes.append(context.Process(target=_rank, args=arguments))
        begun = time.time()
        try:
            for process in processes:
                process.start()
            others = [process for rank, process in enumerate(processes) if rank != case.rank]

            def gone() -> bool:
                connection.wait([process.sentinel for process in others if process.exitcode is None], 1.0)
                return all(process.exitcode is not None for process in others)

            # Those that are in time may do nothing until then.
            quiet = QUIET if case.at_once else QUIET + round(case.seconds(slower))
            while_at_work([process.pid for process in others], gone, quiet)
            ended = time.time()
            codes = [process.exitcode for process in others]
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        logs = [Path(folder, f"log{rank}") for rank in range(case.world)]
        texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
        own = texts.pop(case.rank)
        return Outcome(ended - _begin(folder, begun), max(slower, slowness()), codes, texts, own)


def _with_limit(case: Case, slower: float) -> dict:
    return {**asdict(case), "seconds": case.seconds(slower)}


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"},
    }


def _rank(*arguments) -> None:
    from tests.distributed.faults_worker import rank_main

    rank_main(*arguments)


def _begin(folder: str, default: float) -> float:
    """When the fault was."""
    path = Path(folder, "time")
    text = path.read_text() if path.exists() else ""
    return float(text) if text else default


def _case(case: Case) -> object:
    """A quick run has one fault of each kind, in forward."""
    quick = case.place in ("layer", "between") and case.zero == 1 and not case.block
    return pytest.param(case, marks=pytest.mark.quick if quick else ())


@pytest.mark.parametrize("case", [_case(case) for case in CASES], ids=lambda case: f"{case.words[0]}: {case.words[1]}")
def test_the_others_are_gone_in_time_and_say_why(case: Case) -> None:
    _check(case)


def test_ranks_that_left_a_micro_batch_are_reached_by_a_later_alarm() -> None:
    _check(next(replace(case, left_first=True) for case in CASES if (case.fault, case.place) == ("raise", "step")))


def _check(case: Case) -> None:
    outcome = run(case)
    report = f"after {outcome.seconds:.1f} s, exit codes {outcome.codes}\n" + "\n---\n".join(
        text[-3000:] for text in (*outcome.texts, outcome.own)
    )
    limit = AT_ONCE if case.at_once else SECONDS + AFTER
    assert outcome.seconds <= limit * outcome.slower, report
    assert all(code not in (None, 0) for code in outcome.codes), report
    for text in outcome.texts:
        assert re.search(case.says, text), report
        assert "Fatal Python error" not in text and "terminate called" not in text, report


@pytest.mark.ranks
def test_a_script_that_python_itself_ends(tmp_path) -> None:
    """The same as above, with interpreters of their own: what is called at exit, and that threads end well."""
    case = next(case for case in CASES if (case.fault, case.place) == ("raise", "between"))
    processes, port = [], free_port()
    for rank in range(2):
        command = [
            sys.executable,
            "-m",
            "tests.distributed.faults_worker",
            json.dumps(_with_limit(case, slowness())),
            str(tmp_path),
        ]
        environment = {**os.environ, **_environment(rank, 2, port), "OMP_NUM_THREADS": "1"}
        environment["TORCHDYNAMO_DISABLE"] = "1"  # as harness.run_program has it
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
    try:
        texts = [process.communicate()[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1], texts
    assert re.search(case.says, texts[0]) and "ValueError: a made-up fault" in texts[1], texts
    assert not any(word in text for text in texts for word in ("Fatal Python error", "terminate called"))


def table(cases: list[Case]) -> str:
    """The table of docs/reliability.md."""
    rows = [
        "| a rank | where | ZeRO | the others stop | and say |",
        "|---|---|---|---|---|",
        *(
            f"| {case.words[0]} | {case.words[1]} | {case.zero} | "
            f"{'at once' if case.at_once else 'after `timeout_seconds`'} | {_plain(case.says)} |"
            for case in cases
        ),
    ]
    return "\n".join([BEGIN, "", *rows, "", END])


def _plain(pattern: str) -> str:
    return re.sub(r"\\(.)", r"\1", pattern).replace(".*", " ... ").replace("  ", " ")


def test_the_page_says_what_was_found() -> None:
    text = PAGE.read_text()
    found = text[text.index(BEGIN) : text.index(END) + len(END)]
    assert found == table(CASES), f"docs/reliability.md needs this table:\n{table(CASES)}"
