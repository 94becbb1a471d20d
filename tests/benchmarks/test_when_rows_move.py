# SPDX-License-Identifier: Apache-2.0
"""The table in docs/cost_model.md is what the cost model says now."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.distributed.harness import ROOT, run_program


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith(("| 2048 |", "| 4096 |"))]
    return [line.replace(" %", "%").replace(" 0.0%", " 0%").strip("|").split("|")[:11] for line in lines]


def test_the_table_in_the_docs(tmp_path: Path) -> None:
    saved = tmp_path / "table.md"
    done = run_program([sys.executable, ROOT / "benchmarks" / "when_rows_move.py", "--save", saved])
    assert done.returncode == 0, done.stdout
    documented = rows((ROOT / "docs" / "cost_model.md").read_text(encoding="utf-8"))
    assert len(documented) == 10 and documented == rows(saved.read_text(encoding="utf-8"))
