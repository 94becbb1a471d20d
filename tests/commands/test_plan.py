# SPDX-License-Identifier: Apache-2.0
"""``ds_distca plan``: its numbers against counting, and one line for every wrong input."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from deepspeed_distca.attention_server.phase_planner import PhasePlanner
from deepspeed_distca.cli import main
from deepspeed_distca.defaults import GRANULARITY, MIN_GAIN, TOLERANCE
from deepspeed_distca.layout import Layout
from deepspeed_distca.model_sizes import linear_flops
from deepspeed_distca.scheduler import CostModel, Heads, balance
from deepspeed_distca.scheduler.digest import digest
from deepspeed_distca.scheduler.profiles import SHIPPED, Profile
from deepspeed_distca.scheduler.tasks import home_tasks
from deepspeed_distca.scheduler.worth import PlanOptions
from tests.scheduler.checks import check_tasks, documents_of, rows_sent

HEADS = {"query": 8, "key_value": 2, "head_dim": 64}
LAYOUT = Layout.from_ranks(
    [[(10, 0, 3000)], [(10, 3000, 1500), (7, 0, 1001)], [(4, 0, 300), (5, 0, 1), (6, 0, 777)], []]
)


def given(**changes) -> dict:
    return {"ranks": LAYOUT.to_ranks(), "heads": HEADS, **changes}


@pytest.fixture
def plan(tmp_path, capsys):
    """Runs the command on a layout and returns its exit status, standard output and standard error."""

    def run(layout, *arguments: str) -> tuple[int, str, str]:
        file = tmp_path / "layout.json"
        if isinstance(layout, bytes):
            file.write_bytes(layout)
        else:
            file.write_text(layout if isinstance(layout, str) else json.dumps(layout))
        status = main(["plan", "--layout", str(file), *arguments])
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("cost", ["model", "area"])
def test_json_says_what_the_plan_is(plan, cost, window):
    options = [] if window is None else ["--window", str(window)]
    status, out, err = plan(given(), "--json", "--tolerance", "0.02", "--cost", cost, *options)
    assert status == 0 and err == ""
    report = json.loads(out)
    assert list(report) == [
        "tasks",
        "load_before",
        "load_after",
        "balance_before",
        "balance_after",
        "bytes",
        "bytes_return",
        "digest",
        "milliseconds",
        "training",
    ]
    columns = ("document", "q_start", "q_end", "k_start", "k_end", "server")
    assert all(set(task) == {*columns, "home"} for task in report["tasks"])
    rows = np.array([[task[c] for c in columns] for task in report["tasks"]])
    check_tasks(LAYOUT, rows, window)
    homes = documents_of(LAYOUT)
    for task in report["tasks"]:
        assert task["home"] == sorted(set(homes[task["document"]][task["q_start"] : task["q_end"]].tolist()))
    q, kv = rows_sent(LAYOUT, rows)
    assert report["bytes"] == (q * 8 * 64 * 2 + kv * 2 * 128 * 2).tolist()
    assert report["bytes_return"] == (q.T * (8 * 64 * 2 + 8 * 4)).tolist()
    heads = Heads(**HEADS)
    model = CostModel.area(heads) if cost == "area" else CostModel.fitted(heads)
    expected = balance(LAYOUT, model, tolerance=0.02, window=window)
    assert report["load_after"] == (expected.loads / 1e15).tolist()
    assert report["load_before"] == (expected.loads_before / 1e15).tolist()
    assert report["balance_before"] == pytest.approx(max(report["load_before"]) / np.mean(report["load_before"]))
    assert report["balance_after"] == pytest.approx(max(report["load_after"]) / np.mean(report["load_after"]))
    assert report["balance_after"] < report["balance_before"]
    assert report["digest"] == f"{digest(LAYOUT, expected, window=window):016x}"
    assert 0 < report["milliseconds"] < 10000


def test_time_by_a_stored_profile(plan):
    file = next(SHIPPED.glob("*.json"))
    _, out, _ = plan(given(), "--json", "--cost", str(file))
    cost = Profile.load(file).cost.for_heads(Heads(**HEADS))
    expected = balance(LAYOUT, cost)
    assert json.loads(out)["load_after"] == cost.seconds(expected.loads).tolist()
    assert expected.loads.tolist() != balance(LAYOUT, CostModel.fitted(Heads(**HEADS))).loads.tolist()


def test_options_reach_the_planner(plan):
    _, out, _ = plan(given(), "--json", "--tolerance", "100")
    report = json.loads(out)
    assert all(task["home"] == [task["server"]] for task in report["tasks"])
    assert report["load_before"] == report["load_after"]
    # Rank 1 still needs the keys of the document's first part.
    assert np.array(report["bytes"])[0, 1] == 3000 * 512 and np.array(report["bytes"]).sum() == 3000 * 512
    _, out, _ = plan(given(), "--json", "--max-received-rows", "1")
    assert all(task["home"] == [task["server"]] for task in json.loads(out)["tasks"])
    _, out, _ = plan(given(), "--json", "--granularity", "512")
    moved = [task for task in json.loads(out)["tasks"] if task["home"] != [task["server"]]]
    length = {document: len(home) for document, home in documents_of(LAYOUT).items()}
    rows = [(task["q_end"] - task["q_start"], length[task["document"]]) for task in moved]
    assert rows and all(size >= 512 or size == whole for size, whole in rows)
    _, out, _ = plan(given(), "--json", "--server-weights", "1,1,1,0")
    assert json.loads(out)["load_after"][3] == 0
    _, out, _ = plan(given(), "--json", "--phase", "backward")
    backward = balance(LAYOUT, CostModel.fitted(Heads(**HEADS)), phase="backward")
    assert json.loads(out)["load_after"] == (backward.loads / 1e15).tolist()


def test_what_training_would_do(plan):
    long, short = 65536, 4096
    ranks = [[{"document": 0, "start": 0, "length": long}]]
    ranks.append([{"document": i, "start": 0, "length": short} for i in range(1, 17)])
    made, cost = Layout.from_ranks(ranks), CostModel.fitted(Heads(32, 8, 128))
    layout = {"ranks": ranks, "heads": {"query": 32, "key_value": 8, "head_dim": 128}}

    def training(*arguments: str) -> dict:
        return json.loads(plan(layout, "--json", *arguments)[1])["training"]

    # A layer of 8B width, whose feed-forward part is 4 and not 3.5 times as wide as its hidden state.
    flops = linear_flops(SimpleNamespace(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8))
    decisions = set()
    for phase in ("forward", "backward"):
        for gain in (0.0, MIN_GAIN, 0.2, 0.3, 0.5):
            options = PlanOptions(TOLERANCE, GRANULARITY, min_gain=gain, linear_flops=flops)
            planned = PhasePlanner(0, cost, options, early=True).plan(made, None, phase, 10**9)
            moves = not np.array_equal(planned.tasks.rows, home_tasks(made, None))
            found = training("--phase", phase, *([] if gain == MIN_GAIN else ["--min-gain", str(gain)]))
            assert (found["moves"], found["before"] > found["after"]) == (moves, moves), (phase, gain)
            decisions.add((moves, gain))
    assert {(True, MIN_GAIN), (False, 0.5)} <= decisions
    assert training("--cost", "area") is None
    assert "training moves rows: " in plan(layout)[1]
    assert "training leaves rows at home" in plan(layout, "--min-gain", "0.5")[1]


def test_the_same_digest_every_time(plan):
    digests = {json.loads(plan(given(), "--json")[1])["digest"] for _ in range(3)}
    assert len(digests) == 1


def test_table(plan):
    status, out, err = plan(given())
    assert status == 0 and err == ""
    assert "balance 2." in out and "digest" in out and "received MiB" in out


def test_table_of_many_servers_is_cut(plan):
    layout = {"ranks": [[{"document": r, "start": 0, "length": r + 1}] for r in range(100)], "heads": HEADS}
    _, out, _ = plan(layout)
    assert "36 more servers" in out


def test_reads_stdin(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(given()).encode())))
    assert main(["plan", "--layout", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"]


def test_very_many_ranks_take_seconds(plan):
    ranks = [[{"document": 0, "start": 0, "length": 200_000}]] + [[]] * 511
    status, out, _ = plan({"ranks": ranks, "heads": HEADS})
    assert status == 0 and "448 more servers" in out
    assert plan({"ranks": [[]] * 2048, "heads": HEADS})[0] == 0


def test_empty_ranks_and_nothing_to_do(plan):
    status, out, _ = plan({"ranks": [[], []], "heads": HEADS}, "--json")
    report = json.loads(out)
    assert status == 0
    assert (report["tasks"], report["balance_after"], report["load_after"]) == ([], 1.0, [0.0, 0.0])
    assert plan({"ranks": [[], []], "heads": HEADS})[0] == 0


SEGMENT = {"document": 0, "start": 0, "length": 5}


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        ("[" * 100000, "not valid JSON"),
        ('{"ranks": [], "ranks": [], "heads": {}}', "repeated"),
        ([], "JSON object"),
        ("3", "JSON object"),
        ({"heads": HEADS}, "missing keys 'ranks'"),
        ({"ranks": [[SEGMENT]]}, "missing keys 'heads'"),
        (given(rank=[]), "unknown keys 'rank'"),
        (given(ranks=[]), "at least one rank"),
        (given(ranks={}), "list"),
        (given(ranks=[{}]), "list of segments"),
        (given(ranks=[None]), "list of segments"),
        (given(ranks=[[[0, 0, 5]]]), "expected an object"),
        (given(ranks=[[{"document": 0, "start": 0}]]), "missing"),
        (given(ranks=[[{**SEGMENT, "end": 5}]]), "unknown"),
        (given(ranks=[[{**SEGMENT, "length": 0}]]), "length >= 1"),
        (given(ranks=[[{**SEGMENT, "length": -5}]]), "length >= 1"),
        (given(ranks=[[{**SEGMENT, "length": 5.0}]]), "integers"),
        (given(ranks=[[{**SEGMENT, "length": True}]]), "integers"),
        (given(ranks=[[{**SEGMENT, "length": None}]]), "integers"),
        (given(ranks=[[{**SEGMENT, "length": "5"}]]), "integers"),
        (given(ranks=[[{**SEGMENT, "length": float("nan")}]]), "integers"),
        (given(ranks=[[{**SEGMENT, "length": 2**70}]]), "large|long"),
        (given(ranks=[[{**SEGMENT, "length": 2**62}]]), "long"),
        (given(ranks=[[{**SEGMENT, "document": -1}]]), "document >= 0"),
        (given(ranks=[[{**SEGMENT, "start": 1}]]), "where 0 was expected"),
        (given(ranks=[[SEGMENT], [{**SEGMENT, "start": 6}]]), "where 5 was expected"),
        (given(ranks=[[SEGMENT], [{**SEGMENT, "start": 4}]]), "where 5 was expected"),
        (given(ranks=[[SEGMENT, SEGMENT]]), "where 5 was expected"),
        (given(ranks=[[]] * 10**5), "100000 ranks are too many"),
        ('{"ranks": [' + "[" * 900 + "]" * 900 + '], "heads": {}}', "expected an object"),
        ('{"ranks": [[' + '{"document": ' * 900 + "1" + "}" * 900 + ']], "heads": {}}', "missing"),
        (
            '{"ranks": [[{"document": 0, "document": 1, "start": 0, "length": 4}]], "heads": {}}',
            "'document' is repeated",
        ),
        ('{"ranks": [[{"document": 0, "start": 0, "length": ' + "9" * 5000 + '}]], "heads": {}}', "digits"),
        ('{"ranks": [[{"document": 0, "start": 0, "length": ' + "9" * 4000 + '}]], "heads": {}}', "too large"),
        (
            given(ranks=[[{**SEGMENT, "length": 2**62}], [{"document": 0, "start": 2**62, "length": 2**62}]]),
            "too long",
        ),
        (given(ranks=[[{**SEGMENT, "length": 10**10}]]), "too long"),
        (given(heads={**HEADS, "element_size": 10**18}), "element_size must be an integer >= 1 and <= 16"),
        (given(heads={**HEADS, "query": 2**40, "key_value": 1}), "query must be an integer"),
        (given(heads={"query": 2**20, "key_value": 2**20, "head_dim": 2**20}), "too long|too large"),
        (given(heads=[]), "mapping"),
        (given(heads={"query": 8, "key_value": 2}), "'head_dim' is missing"),
        (given(heads={**HEADS, "kv": 2}), "unknown key 'kv'"),
        (given(heads={**HEADS, "query": 7}), "multiple of key_value"),
        (given(heads={**HEADS, "query": 0}), "query must be an integer"),
        (given(heads={**HEADS, "head_dim": 64.0}), "head_dim must be an integer"),
        (given(heads={**HEADS, "head_dim": True}), "head_dim must be an integer"),
    ],
)
def test_one_line_for_a_wrong_layout(plan, layout, message):
    status, out, err = plan(layout, "--json")
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("ds_distca: error: ") and len(err) < 450
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tolerance", "nan"], "tolerance"),
        (["--tolerance", "-0.1"], "tolerance"),
        (["--tolerance", "inf"], "tolerance"),
        (["--tolerance", "1e300"], "tolerance"),
        (["--tolerance", "much"], "tolerance"),
        (["--granularity", "9" * 30], "granularity"),
        (["--window", "9" * 30], "window"),
        (["--window", "9" * 5000], "window"),
        (["--max-received-rows", "9" * 30], "max_received_rows"),
        (["--server-weights", "9" * 30 + ",1,1,1"], "server_weights"),
        (["--server-weights", "0,0,0,0"], "server_weights"),
        (["--granularity", "0"], "granularity"),
        (["--granularity", "1.5"], "granularity"),
        (["--window", "0"], "window"),
        (["--max-received-rows", "0"], "max_received_rows"),
        (["--server-weights", "1,2"], "server_weights"),
        (["--server-weights", "1,2,x,4"], "server-weights"),
        (["--phase", "sideways"], "phase"),
        (["--cost", "free"], "cost"),
        (["--min-gain", "-1"], "min-gain"),
        (["--min-gain", "nan"], "min-gain"),
        (["--surprise"], "--surprise"),
    ],
)
def test_one_line_for_a_wrong_option(plan, arguments, message):
    status, out, err = plan(given(), *arguments)
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and message in err


@pytest.mark.parametrize("arguments", [[], ["plan"], ["fly"], ["plan", "--layout"]])
def test_one_line_for_a_wrong_command(capsys, arguments):
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_that_is_not_there(tmp_path, capsys):
    for path in (tmp_path / "nothing.json", tmp_path):
        assert main(["plan", "--layout", str(path)]) == 2
        err = capsys.readouterr().err
        assert str(path) in err and err.count("\n") == 1


def test_as_a_module(tmp_path):
    file = tmp_path / "layout.json"
    file.write_text(json.dumps(given()))
    command = [sys.executable, "-m", "deepspeed_distca.cli", "plan", "--layout", str(file), "--json"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["balance_after"] < 1.2
    wrong = subprocess.run(
        [*command, "--tolerance", "nan"], capture_output=True, text=True, env=environment, check=False
    )
    assert wrong.returncode == 2 and wrong.stdout == ""
    assert wrong.stderr.splitlines()[-1].startswith("ds_distca: error: tolerance")


@pytest.mark.parametrize("command", [["plan", "--layout", "LAYOUT"], ["--help"]], ids=["plan", "help"])
def test_a_plan_is_shown_without_waiting_for_libraries(tmp_path, command):
    """torch, DeepSpeed and transformers take 9 s to import."""
    file = tmp_path / "layout.json"
    file.write_text(json.dumps(given()))
    arguments = [str(file) if a == "LAYOUT" else a for a in command]
    code = (
        f"import sys; sys.argv = ['/bin/ds_distca', *{arguments!r}]\n"
        "from deepspeed_distca.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
