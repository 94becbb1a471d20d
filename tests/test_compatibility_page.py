# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md: every row of its tables with a column for tests names one that exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.distributed.harness import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
OUTCOMES = ("exact", "refused by name", "not applicable: ")


def rows() -> Iterator[tuple[str, str, str]]:
    """What, outcome and test of every row."""
    inside = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[-1] == "test":
            assert cells == ["what", "outcome", "test"], cells
            inside = True
        elif inside and not set(line) <= set("|- "):
            assert len(cells) == 3, f"not three cells: {line}"
            yield cells[0], cells[1], cells[2]


ROWS = list(rows())


def test_there_are_rows():
    assert len(ROWS) > 40 and len({what for what, *_ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("what", "outcome", "test"), ROWS, ids=[what for what, *_ in ROWS])
def test_every_row_has_a_test(what: str, outcome: str, test: str):
    assert outcome.startswith(OUTCOMES), f"{what}: {outcome!r}; allowed: {OUTCOMES}"
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", test)
    assert named and re.sub(r"`[^`]+`|[ ,]", "", test) == "", f"{what}: {test!r} is no list of tests"
    for file, name in named:
        path = ROOT / file
        assert path.is_file(), f"{what}: no {file}"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tests = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert any(found.startswith("test_") for found in tests), f"{what}: {file} has no tests"
        assert not name or name in tests, f"{what}: {file} has no {name}"
