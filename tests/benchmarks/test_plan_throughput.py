# SPDX-License-Identifier: Apache-2.0
"""benchmarks/plan_throughput.py, as it is run, with tiny sizes on CPU; and its parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from deepspeed_distca.attention_server.task_batch import TaskBatch
from tests.distributed.harness import ROOT, run_program
from tests.scheduler.checks import tile

TINY = ["--servers", "2", "--tokens", "1024", "--q-heads", "4", "--kv-heads", "1", "--head-dim", "32"]


@pytest.fixture
def benchmark_module(monkeypatch):
    """The script's functions; it imports its neighbours as scripts do."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_throughput

    return plan_throughput


def test_servers_batches_are_measured_against_documents_of_their_area(tmp_path: Path) -> None:
    raw, saved = tmp_path / "raw.json", tmp_path / "report.md"
    command = [sys.executable, "benchmarks/plan_throughput.py", *TINY, "--mixes", "half|short", "short", "--repeats"]
    command += ["1", "--workloads", "pretrain:1:shuffled:whole", "--json", str(raw), "--save", str(saved)]
    done = run_program(command)
    assert done.returncode == 0, done.stdout[-6000:]
    found = json.loads(raw.read_text())
    assert found["kernel"] == "reference" and found["notes"] == ["Of 3 batches no row moves in 1 forward, 1 backward."]
    kinds = {(row["group"], row["phase"]) for row in found["rows"]}
    assert kinds == {(group, phase) for group in ("half|short", "pretrain:shuffled:whole")
                     for phase in ("forward", "backward")}  # fmt: skip
    for row in found["rows"]:
        fused, whole = row["workspace"], row["whole"]
        assert min(fused["ms"], whole["ms"], fused["predicted_ms"]) > 0
        assert fused["tasks"] == whole["tasks"] and whole["area"] == pytest.approx(fused["area"], rel=0.02)
    report = saved.read_text()
    assert report.startswith("**CPU, 20") and "| half\\|short | forward |" in report and "| all | backward |" in report
    assert "| half\\|short | forward |" in done.stdout


def test_whole_documents_have_the_nearest_area(benchmark_module) -> None:
    q_len, k_len = np.array([1, 128, 7, 5000]), np.array([1, 65536, 9, 5000])
    start = np.cumsum(q_len) - q_len, np.cumsum(k_len) - k_len
    tasks = TaskBatch(start[0], q_len, start[1], k_len, int(q_len.sum()), int(k_len.sum()))
    whole = benchmark_module.whole_documents(tasks)
    assert tile(whole.q_start, whole.q_len, whole.q_rows) and tile(whole.k_start, whole.k_len, whole.k_rows)
    assert (whole.q_len == whole.k_len).all()
    assert whole.q_len[0] == 1 and whole.q_len[3] == 5000
    for q, k, n in zip(q_len, k_len, whole.q_len, strict=True):
        area = q * (2 * k - q + 1) // 2
        assert abs(n * (n + 1) // 2 - area) <= min(abs(m * (m + 1) // 2 - area) for m in (n - 1, n + 1))
