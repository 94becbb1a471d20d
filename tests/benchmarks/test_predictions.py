# SPDX-License-Identifier: Apache-2.0
"""Predicted steps against every measured one in benchmarks/results: errors stay within bounds, and as published."""

from __future__ import annotations

import sys

import pytest

from tests.distributed.harness import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import predictions as benchmark

RESULTS = (benchmark.RESULTS / "predictions.md").read_text()
CHART = ROOT / "docs" / "images" / "predictions.svg"


@pytest.fixture(scope="module")
def rows() -> list[benchmark.Errors]:
    return benchmark.table()


def test_errors_are_within_bounds(rows: list[benchmark.Errors]) -> None:
    for row in rows:
        assert row.median <= benchmark.MEDIAN and row.worst <= benchmark.WORST, (row.run.name, row.median, row.worst)


def test_the_published_table_and_chart_are_what_the_script_makes(rows: list[benchmark.Errors]) -> None:
    assert benchmark.in_markdown(rows) in RESULTS, "run benchmarks/predictions.py with --save and --chart"
    assert str(benchmark.chart(rows)) == CHART.read_text()


def test_nothing_is_tuned_but_on_the_first_run(rows: list[benchmark.Errors]) -> None:
    first = rows[0]
    assert first.run.name == benchmark.FIRST
    assert abs(sum(first.plain) / len(first.plain)) < 0.005


def test_ulysses_is_predicted_as_well() -> None:
    sizes = sorted(map(abs, benchmark.ulysses()))
    assert len(sizes) == 78 and sizes[39] <= benchmark.MEDIAN and sizes[-1] <= benchmark.WORST
