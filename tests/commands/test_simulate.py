# SPDX-License-Identifier: Apache-2.0
"""``ds_distca simulate``: its table, its JSON and its trace, and one line for every wrong input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from deepspeed_distca.cli import main
from deepspeed_distca.simulator.model import LLAMA_3_8B

TOKENS = 4096
LENGTHS = (np.random.default_rng(0).lognormal(6.5, 1.6, 3000).astype(int) + 1).tolist()


@pytest.fixture
def simulate(tmp_path: Path, capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Runs the command on documents; exit status, standard output and standard error."""

    def run(documents: object, *more: str, ranks: int = 8, tokens: int = TOKENS) -> tuple[int, str, str]:
        file = tmp_path / "documents.json"
        if documents is not None:
            file.write_text(documents if isinstance(documents, str) else json.dumps(documents))
        status = main(["simulate", str(file), "--ranks", str(ranks), "--tokens-per-rank", str(tokens), *more])
        return status, *capsys.readouterr()

    return run


def test_the_table_is_the_json(simulate) -> None:
    status, out, err = simulate(LENGTHS)
    assert (status, err) == (0, "")
    found = json.loads(simulate(LENGTHS, "--json")[1])
    names = [row["policy"] for row in found["policies"]]
    assert names == ["packed, plain", "dealt by work", "context parallel", "Ulysses", "this plugin", "ideal"]
    for row in found["policies"]:
        assert any(line.startswith(row["policy"]) and f"{row['seconds']:.3f}" in line for line in out.splitlines())
        assert row["seconds"] == pytest.approx(sum(row["parts"].values()))
        assert row["tokens_per_second_per_gpu"] == pytest.approx(TOKENS / row["seconds"])
        assert row["of_ideal"] == pytest.approx(found["policies"][-1]["seconds"] / row["seconds"])
        assert row["memory_gib"] > 0 and row["most_tokens"] >= TOKENS
    assert found["micro_batches"] == 4 and found["limits"] in out and "with the plugin a step is" in found["limits"]


def test_it_says_with_which_overlap(simulate, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    for more, overlap in (
        ((), "local_first"),
        (("--nodes", "2"), "ping_pong"),
        (("--nodes", "2", "--stages", "2", "--micro-batches", "2"), "ping_pong"),
    ):
        found = json.loads(simulate(LENGTHS, *more, "--json", "--html", str(report))[1])
        assert found["overlap"] == overlap
        assert f"\nthis plugin, {overlap} " in simulate(LENGTHS, *more)[1]
        assert f"<tr class=ours><td>this plugin, {overlap}</td>" in report.read_text()


def test_options_reach_the_step(simulate) -> None:
    def seconds(*more: str) -> dict[str, float]:
        return {row["policy"]: row["seconds"] for row in json.loads(simulate(LENGTHS, "--json", *more)[1])["policies"]}

    base = seconds()
    assert seconds("--checkpointing")["packed, plain"] > base["packed, plain"] > seconds("--liger")["packed, plain"]
    assert seconds("--zero", "0")["ideal"] > base["ideal"]
    assert seconds("--nodes", "4")["Ulysses"] > base["Ulysses"]
    assert seconds("--stages", "2")["ideal"] != base["ideal"]
    assert seconds("--context", str(4 * TOKENS)) != base


def test_the_trace_is_a_step_by_rank(simulate, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    found = json.loads(simulate(LENGTHS, "--micro-batches", "1", "--json", "--trace", str(trace))[1])
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    seconds = {row["policy"]: row["seconds"] for row in found["policies"]}
    searched = {"packed, plain": 0.0, "this plugin": 0.01}  # the search for a plan is not drawn
    for process, name in enumerate(("packed, plain", "this plugin")):
        own = [event for event in spans if event["pid"] == process]
        assert {event["tid"] for event in own} == set(range(8))
        end = max(event["ts"] + event["dur"] for event in own) / 1e6
        assert end <= seconds[name] * (1 + 1e-9) and end >= seconds[name] - searched[name] - 1e-9
        for rank in range(8):
            mine = sorted((event for event in own if event["tid"] == rank), key=lambda event: event["ts"])
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(mine))
            assert sum(event["name"] == "linear layers, forward" for event in mine) == 32


@pytest.mark.parametrize("more", [("--stages", "2", "--micro-batches", "2"), ("--context", str(4 * TOKENS))])
def test_reports_of_pipelines_and_long_contexts(simulate, tmp_path: Path, more: tuple[str, ...]) -> None:
    report = tmp_path / "report.html"
    assert simulate(LENGTHS, *more, "--html", str(report))[0] == 0
    assert re.findall(r'<figure id="(\w+)"', report.read_text()) == ["parts", "scale", "loads", "map", "timeline"]


@pytest.mark.parametrize(
    ("documents", "more", "words"),
    [
        (None, (), "No such file"),
        ("[1, 2", (), "not valid JSON"),
        ([0, 0], (), "no document has a token"),
        ([10, 20], (), "needs 32768"),
        (LENGTHS, ("--ranks", "1000000"), "allowed: 1 to 2048"),
        (LENGTHS, ("--nodes", "3"), "cannot be divided into --nodes 3"),
        (LENGTHS, ("--stages", "3"), "cannot be divided into --stages 3"),
        (LENGTHS, ("--ranks", "10", "--stages", "5"), "32 layers cannot be divided"),
        (LENGTHS, ("--stages", "2", "--zero", "3"), "ZeRO 0 or 1"),
        (LENGTHS, ("--stages", "2", "--trace", "t.json"), "--trace"),
        (LENGTHS, ("--context", "5000"), "--context 5000"),
        (LENGTHS, ("--context", str(16 * TOKENS)), "--context 65536"),
        (LENGTHS, ("--trace", "no/such/folder.json"), "No such file"),
        (LENGTHS, ("--model", "nowhere.json"), "nowhere.json"),
        (LENGTHS, ("--cost", "nowhere.json"), "nowhere.json"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_wrong_input_is_one_line(simulate, documents, more, words) -> None:
    status, out, err = simulate(documents, *more)
    assert (status, out) == (2, "") and err.count("\n") == 1 and words in err


@pytest.mark.parametrize("change", [{"num_attention_heads": None}, {"num_attention_heads": 0}, {"text_config": 3}])
def test_a_model_without_heads_is_one_line(simulate, tmp_path: Path, change: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_8B, **change}))
    status, _, err = simulate(LENGTHS, "--model", str(tmp_path / "config.json"))
    assert status == 2 and err.count("\n") == 1
