# SPDX-License-Identifier: Apache-2.0
"""The pictures in docs/images are what benchmarks/pictures.py draws now, and show what results and planner say."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from deepspeed_distca.scheduler.cost_model import PHASES
from tests.distributed.harness import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import pictures

IMAGES = ROOT / "docs" / "images"


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return {name: str(drawing) for name, drawing in pictures.pictures().items()}


def texts(picture: str) -> list[str]:
    return [node.text for node in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_the_files_are_what_the_script_draws(drawn: dict[str, str]) -> None:
    others = {"predictions.svg"}  # by predictions.py
    assert {*drawn, *others} == {path.name for path in IMAGES.glob("*.svg")}
    for name, picture in drawn.items():
        there = (IMAGES / name).read_text(encoding="utf-8")
        assert texts(there) == texts(picture), f"{name}: run python benchmarks/pictures.py"
        assert there == picture, f"{name}: run python benchmarks/pictures.py"


def test_the_chart_has_the_readmes_speed_ups(drawn: dict[str, str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    above = readme[: readme.index("## Requirements")]
    told = set(re.findall(r"\d\.\d\dx", above))
    assert len(told) >= 3 and told <= set(texts(drawn["whole_model.svg"]))


def test_the_map_has_every_row_once_with_the_rank_that_attends_it() -> None:
    args = pictures.load("server_balance_8_h200.json")["args"]
    layout = pictures.batch_of(pictures.BATCH, args["servers"], args["tokens"], args["context"]).layout
    tasks = pictures.plan_of(layout, "forward").tasks
    for attended in (None, tasks.rows):
        parts = pictures.parts_of(layout, attended)
        for rank in range(layout.num_ranks):
            mine = sorted((row, row + end - low) for low, end, home, row, _ in parts if home == rank)
            assert [begin for begin, _ in mine] == [0, *(end for _, end in mine[:-1])]
            assert mine[-1][1] == layout.tokens[rank]
    # These documents lie on one rank each, so that parts are the tasks.
    low, end, _, _, server = np.array(parts, dtype=np.int64).T
    loads = np.zeros(layout.num_ranks, dtype=np.int64)
    np.add.at(loads, server, pictures.cost_model().cost(low, end, np.zeros_like(low)))
    assert loads.tolist() == tasks.loads.tolist()


def test_the_map_of_trees_has_every_key_of_every_row_once() -> None:
    layout = pictures.forest_layout()
    planned = pictures.plan_of(layout, "forward")
    rows = planned.tasks.rows
    assert {server for document, *_, server in rows.tolist() if document == 0} == {0, 1}  # the tree of tree.svg
    for attended in (planned.worth.home.rows, rows):
        seen = [np.zeros(tokens, dtype=np.int64) for tokens in layout.tokens.tolist()]
        tiles = pictures.tiles_of(layout, attended)
        for tile in sorted(tiles, key=lambda tile: tile.low):  # each stands on what lies below it
            mine = seen[tile.rank][tile.row : tile.row + tile.queries]
            assert (mine == tile.low).all()
            mine[:] = np.linspace(tile.first, tile.last, tile.queries)
        for rank, reached in enumerate(seen):
            assert reached.tolist() == (layout.position_ids(rank) + 1).tolist()


@pytest.mark.parametrize("phase", PHASES)
def test_map_and_bars_are_of_one_batch(phase: str) -> None:
    result = pictures.load("server_balance_8_h200.json")
    args = result["args"]
    layout = pictures.batch_of(pictures.BATCH, args["servers"], args["tokens"], args["context"]).layout
    row = next(row for row in result["rows"] if row["batch"] == pictures.BATCH)
    assert pictures.plan_of(layout, phase).worth.home.loads.tolist() == row["phases"][phase]["before_loads"]


@pytest.mark.parametrize("phase", PHASES)
def test_the_layer_takes_as_long_as_the_planner_predicts(phase: str) -> None:
    layout = pictures.mix("long|short", 2, pictures.TOKENS).layout
    planned = pictures.plan_of(layout, phase)
    assert planned.compiler.moves_rows
    ends = [
        max(span.end for span in pictures.spans_of(planned, layout, phase, moved=moved)) for moved in (False, True)
    ]
    linear = planned.worth.whole - planned.worth.before
    assert ends == pytest.approx([planned.worth.whole, linear + planned.worth.seconds(planned.compiler)], rel=1e-9)
    for rank in range(2):
        mine = [s for s in pictures.spans_of(planned, layout, phase, moved=True) if s.rank == rank and not s.size]
        mine.sort(key=lambda span: span.start)
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(mine))
