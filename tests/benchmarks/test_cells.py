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
    """Of the ranges, without "all kept"."""
    head, *lines = benchmark.ranges(ROWS)
    left_out = head.index("placed, all kept / ideal")
    return [
        f"| {' | '.join([f'{kind[8:]}, {tokens}', *rest[: left_out - 2], *rest[left_out - 1 :]])} |"
        for kind, tokens, *rest in lines
        if kind.startswith("ZeRO-3")
    ]


def test_what_the_page_says_of_cells() -> None:
    users, large = [row for row in ROWS if row["set-up"] == "ZeRO-3"], of("ZeRO-3", "34B", 65536)
    for row in users:
        assert max(row["in order"], row["placed"]) < min(row["plain"], row["WLB"])
    fitting = [row for row in users if row not in large]
    assert {row["kept"] for row in fitting} == {"32 of 32", "48 of 48"}
    above = [row for row in fitting if row["placed"] > 1.06 * row["ideal"]]
    assert [[row[key] for key in ABOUT[1:]] for row in above] == [
        [model, tokens, "prolong", 524288, 512] for model, tokens in (("8B", 65536), ("34B", 32768))
    ]
    in_order = [row for row in fitting if row["in order"] > 1.06 * row["ideal"]]
    assert all(row["documents"] == "prolong" and row["GPUs"] > 64 for row in in_order)
    most = max(row["in order"] / row["ideal"] for row in in_order)
    assert sum(row["GiB: WLB"] >= row["GiB: plugin"] for row in ROWS) == 1

    kept = sorted({int(row["kept"].split()[0]) for row in large})
    all_kept = [row["placed, all kept"] / row["ideal"] for row in large]
    piped = [row for row in ROWS if row["set-up"] == "4D"]
    spans = {}
    for place in ("in order", "placed"):
        found = [row[place] / row["ideal"] for row in piped]
        far = [row for row, one in zip(piped, found, strict=True) if one > 1.06]
        assert all(row["documents"] == "prolong" and row["GPUs"] >= 256 for row in far)
        spans[place] = f"{min(found):.2f} to {max(found):.2f}", f"{statistics.median(found):.2f}", len(far)
    least = {name: min(row[name] / max(row["in order"], row["placed"]) for row in piped) for name in ("plain", "WLB")}
    (span, median, far), (placed_span, placed_median, placed_far) = spans.values()
    for sentence in (
        f"the attention](how_to.md#give-memory-back) of {kept[0]} to {kept[-1]} of its 48 layers",
        "512 GPUs, " + " and ".join(f"{row['model']} at {row['placed'] / row['ideal']:.3f}" for row in above),
        f"In order {len(in_order)} of {len(fitting)} cells are above 1.06, up to {most:.2f}",
        f"takes up to {max(row['in order'] / row['ideal'] for row in large):.2f} of the ideal",
        f"it would be {min(all_kept):.2f} to {max(all_kept):.2f} of it",
        f"by {least['plain']:.2f} and {least['WLB']:.2f} times at least: {span} of the ideal in order, {median}",
        f"and {far} of {len(piped)} cells above 1.06, all of ProLong on 256 and 512 GPUs",
        f"Placed it is {placed_span}, {placed_median} at the median, with {placed_far} above",
    ):
        assert sentence in WORDS, sentence
