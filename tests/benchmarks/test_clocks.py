# SPDX-License-Identifier: Apache-2.0
"""Clocks of a run: samples are read, a cut line left out, and counted in the steps that they lie in."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

from tests.distributed.harness import ROOT, run_program


def test_samples_count_for_the_steps_they_lie_in(tmp_path: Path) -> None:
    start = 1795881000.0
    lines = []
    for i in range(40):  # a sample every 100 ms; the card clocks up after two seconds
        when = datetime.fromtimestamp(start + 0.1 * i).strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
        lines += [f"{when}, {gpu}, {1500 + 300 * (i >= 20) + gpu}, {690 - 200 * (i >= 20):.2f}" for gpu in (0, 1)]
    (tmp_path / "clocks.csv").write_text("\n".join([*lines, "2026/11/28 15:5"]))
    rows = {
        "plain": {"ms": 900.0, "when": [[start + 2.05, start + 2.95], [start + 3.05, start + 3.95]]},
        "distca": {"ms": 850.0, "when": [[start + 0.05, start + 1.0]]},
        "none": {"ms": 800.0, "when": [[start + 60, start + 61]]},
    }
    (tmp_path / "raw.json").write_text(json.dumps({"batches": {"long|short": rows}}))
    command = [sys.executable, str(ROOT / "benchmarks" / "clocks.py"), "raw.json", "clocks.csv"]
    printed = run_program(command, tmp_path).stdout
    assert printed.splitlines()[2:] == [
        "| long\\|short | plain | 900.0 | 1800, 490 | 1801, 490 |",
        "| long\\|short | distca | 850.0 | 1500, 690 | 1501, 690 |",
        "| long\\|short | none | 800.0 | nan, nan | nan, nan |",
    ]
