# SPDX-License-Identifier: Apache-2.0
"""benchmarks/pack_step.py, and what docs/data.md says of its results; its measurement on two CPU ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.harness import ROOT, run_program

sys.path.append(str(ROOT / "benchmarks"))
import pack_step as benchmark

RESULTS = (ROOT / "benchmarks" / "results" / "pack_step.md").read_text(encoding="utf-8")
DOCS = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("cap", benchmark.CAPS)
@pytest.mark.parametrize("ranks", benchmark.RANKS)
def test_the_tables_are_what_the_script_says(ranks: int, cap: int) -> None:
    for mix in benchmark.MIXES:
        row = benchmark.row(mix, ranks, cap)
        line = f"| {' | '.join(benchmark.shown(row))} |"
        assert line in RESULTS
        assert ranks != 8 or line.replace(" | 8 | ", " | ", 1) in DOCS
        assert row["fullest"] <= 1 and row["batches"] <= row["lpt_batches"]
        # What the page says of the table.
        assert row["plugin_s"] <= 1.003 * row["lpt_s"]
        assert row["plugin_s"] <= (1.035 if ranks == 64 else 1.008) * row["lpt_end_s"]
        assert row["ideal_s"] >= 0.9 * row["plugin_s"] or mix == "answers, few" or ranks != 8


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_lpt_keeps_the_cap_and_loses_nothing(ranks: int) -> None:
    for mix in benchmark.MIXES:
        lengths = benchmark.lengths_of(mix, ranks, 4096)
        work = benchmark.Predictor.of(ranks).work(lengths)
        for step in (benchmark.lpt(lengths, work, 4096, ranks), benchmark.lpt_of_ranks(lengths, work, 4096, ranks)):
            assert sorted(i for batch in step for rank in batch for i in rank) == list(range(len(lengths)))
            assert {len(batch) for batch in step} == {ranks} and benchmark.fullest(step, lengths) <= 4096
        at_end = [sum(work[i] for batch in step for i in batch[rank]) for rank in range(ranks)]
        assert max(at_end) <= sum(work) / ranks + work.max()


@pytest.mark.slow
def test_it_measures(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("raw.json", "table.md")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [ROOT / "benchmarks" / "pack_step.py", "--measure", "--tokens", "512", "--width", "64", "--turns", "1"]
    command += ["--mixes", "ProLong", "one long", "--zero", "1", "3"]
    done = run_program([*command, "--json", files["raw.json"], "--save", files["table.md"]])
    assert done.returncode == 0, done.stdout[-6000:]
    rows = json.loads(files["raw.json"].read_text())["steps"]
    assert [(row["mix"], row["zero"]) for row in rows] == [(m, z) for z in (1, 3) for m in ("ProLong", "one long")]
    for row in rows:
        assert row["moved"] and row["fullest"]["plugin"] <= 512 and min(row["seconds"].values()) > 0
        assert {np.shape(turns) for turns in row["turns"].values()} == {(1, 2)}
    table = files["table.md"].read_text()
    assert all(f"| {row['mix']}, moved | {row['zero']} |" in table for row in rows)
