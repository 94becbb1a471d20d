# SPDX-License-Identifier: Apache-2.0
"""benchmarks/cells.py, and what docs/predict.md says of its results."""

from __future__ import annotations

import json
import statistics
import sys

import pytest

from tests.distributed.harness import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import cells as benchmark

ROWS = json.loads((ROOT / "benchmarks" / "results" / "cells.json").read_text(encoding="utf-8"))["rows"]
PAGE = (ROOT / "docs" / "predict.md").read_text(encoding="utf-8")
WORDS = " ".join(PAGE.split())
ABOUT = ("set-up", "model", "tokens", "documents", "context", "GPUs")


def of(kind: str, model: str, tokens: int) -> list[dict]:
    return [row for row in ROWS if (row["set-up"], row["model"], row["tokens"]) == (kind, model, tokens)]


def test_a_cell_is_what_the_script_makes() -> None:
    published = next(row for row in ROWS if row["documents"] == "prolong" and row["GPUs"] == 64)
    again = benchmark.row(*(published[key] for key in ABOUT))
    for key, value in published.items():
        assert again[key] == (pytest.approx(value, rel=0.02) if isinstance(value, float) else value), key


def test_the_pages_table_is_the_results() -> None:
    assert len(of("ZeRO-3", "8B", 65536)) == len(of("ZeRO-3", "34B", 65536)) == len(of("ZeRO-3", "34B", 32768)) == 24
    lines = pages_lines()
    assert len(lines) == 6 and all(line in PAGE for line in lines)


def pages_lines() -> list[str]:
    """Of the ranges, without "in two"."""
    head, *lines = benchmark.ranges(ROWS)
    left_out = head.index("placed, in two / ideal")
    return [
        f"| {' | '.join([f'{kind[8:]}, {tokens}', *rest[: left_out - 2], *rest[left_out - 1 :]])} |"
        for kind, tokens, *rest in lines
        if kind.startswith("ZeRO-3")
    ]


def test_what_the_page_says_of_cells() -> None:
    fitting = [row for row in ROWS if row["overlap"] == "ping_pong" and row["set-up"] == "ZeRO-3"]
    assert fitting == [*of("ZeRO-3", "8B", 65536), *of("ZeRO-3", "34B", 32768)]
    for row in fitting:
        assert max(row["in order"], row["placed"]) < min(row["plain"], row["WLB"])
    (above,) = [row for row in fitting if row["placed"] > 1.06 * row["ideal"]]
    assert [above[key] for key in ABOUT[1:]] == ["34B", 32768, "prolong", 524288, 512]
    in_order = [row for row in fitting if row["in order"] > 1.06 * row["ideal"]]
    assert all(row["documents"] == "prolong" and row["GPUs"] > 64 for row in in_order)
    most = max(row["in order"] / row["ideal"] for row in in_order)
    assert all(row["GiB: WLB"] < row["GiB: plugin"] for row in ROWS)

    large = of("ZeRO-3", "34B", 65536)
    assert {row["overlap"] for row in large} == {"local_first"} and all(row["placed"] < row["WLB"] for row in large)
    worst = min(large, key=lambda row: row["WLB"] / row["in order"])
    assert [worst[key] for key in ABOUT[3:]] == ["prolong", 131072, 512]
    in_two = [row["placed, in two"] / row["ideal"] for row in large]
    piped = [row for row in ROWS if row["set-up"] == "4D"]
    spans = {}
    for place in ("in order", "placed"):
        found = [row[place] / row["ideal"] for row in piped]
        far = [row for row, one in zip(piped, found, strict=True) if one > 1.06]
        assert all(row["documents"] == "prolong" and row["GPUs"] >= 256 for row in far)
        spans[place] = f"{min(found):.2f} to {max(found):.2f}", f"{statistics.median(found):.2f}", len(far)
    least = {name: min(row[name] / max(row["in order"], row["placed"]) for row in piped) for name in ("plain", "WLB")}
    (span, median, far), (placed_span, placed_median, placed_far) = spans.values()
    gib = [row["GiB: plugin"] for row in large]
    for sentence in (
        f"need {min(gib):.0f} to {max(gib):.0f} GiB",
        f"512 GPUs, at {above['placed'] / above['ideal']:.3f}",
        f"In order {len(in_order)} of {len(fitting)} cells are above 1.06, up to {most:.2f}",
        f"up to {max(row['in order'] / row['ideal'] for row in large):.2f} of the ideal",
        f"{worst['in order'] / worst['WLB'] - 1:.0%}".replace("%", " %") + " slower than WLB in the worst cell",
        f"it would be {min(in_two):.2f} to {max(in_two):.2f} of it",
        f"by {least['plain']:.2f} and {least['WLB']:.2f} times at least: {span} of the ideal in order, {median}",
        f"and {far} of {len(piped)} cells above 1.06, all of ProLong on 256 and 512 GPUs",
        f"Placed it is {placed_span}, {placed_median} at the median, with {placed_far} above",
    ):
        assert sentence in WORDS, sentence
