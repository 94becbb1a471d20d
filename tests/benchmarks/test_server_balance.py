# SPDX-License-Identifier: Apache-2.0
"""benchmarks/server_balance.py with tiny sizes on CPU: every server is measured, and shares are of what is to gain."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import ROOT

TINY = ["--servers", "3", "--tokens", "512", "--q-heads", "4", "--kv-heads", "1", "--head-dim", "32", "--repeats", "1"]


@pytest.fixture
def benchmark_module(monkeypatch):
    """The script's functions; it imports its neighbours as scripts do."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import server_balance

    return server_balance


def test_every_server_is_measured(benchmark_module, monkeypatch, tmp_path: Path) -> None:
    raw, saved = tmp_path / "raw.json", tmp_path / "report.md"
    chosen = ["--mixes", "long|short", "short", "--workloads", "--json", str(raw), "--save", str(saved)]
    monkeypatch.setattr(sys, "argv", ["server_balance.py", *TINY, *chosen])
    benchmark_module.main()
    rows = {row["batch"]: row["phases"] for row in json.loads(raw.read_text())["rows"]}
    assert list(rows) == ["long|short", "short"]
    for phases in rows.values():
        for phase in phases.values():
            assert all(len(numbers) == 3 for numbers in phase.values())
            assert min(phase["before_ms"] + phase["planned_ms"]) > 0
    moved, unmoved = rows["long|short"]["backward"], rows["short"]["backward"]
    assert max(moved["before_loads"]) > 1.1 * max(moved["planned_loads"]) and sum(moved["sent"]) > 0
    assert unmoved["before_loads"] == unmoved["planned_loads"] and sum(unmoved["sent"]) == 0
    report = saved.read_text()
    assert report.startswith("**One CPU, 20") and "| all (2) |" in report and "| long\\|short |" in report


def test_shares_are_of_what_is_to_gain(benchmark_module) -> None:
    def row(before: list[float], planned: list[float]):
        phase = benchmark_module.Phase(before, planned, [3, 1], [2, 2], [2**20, 3 * 2**20])
        return benchmark_module.Row("name", "group", {"forward": phase, "backward": phase})

    one, other, even = row([30.0, 10.0], [22.0, 21.0]), row([20.0, 10.0], [15.0, 15.0]), row([10.0, 10.0], [11.0, 9.0])
    assert one.slowest("before_ms") == 60 and one.even == 40
    cells = benchmark_module._cells([one, other, even])
    # 16 of 20 ms, 10 of 10, and none to gain where 2 are lost: 24 of 30 together.
    assert cells[3:5] == ["90.0%", "80.0%"]
    assert cells[5] == "1.500" and cells[7] == "1.000" and cells[9] == "1.100" and cells[10:] == ["4", "6"]
