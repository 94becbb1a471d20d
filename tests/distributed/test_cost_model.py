# SPDX-License-Identifier: Apache-2.0
"""Ranks that would choose different cost models: rank 0's choice counts on all of them."""

from __future__ import annotations

import pytest

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler import CostModel, Heads, balance
from deepspeed_distca.scheduler.cost_model import PhaseCost
from deepspeed_distca.scheduler.profiles import Profile, Setting, file_name
from tests.distributed.cost_model_worker import cache_file
from tests.distributed.harness import run_ranks

HEADS = Heads(4, 2, 8, element_size=4)
CPU = Setting("cpu", "cpu", "reference", "fp32")
START = "tests.distributed.cost_model_worker:start"
LENGTHS = [[300], [60, 60, 60, 60, 60]]
# Pairs alone, and tasks alone: where the first moves work, the second moves it the other way.
COSTS = [
    CostModel(HEADS, PhaseCost(1000), PhaseCost(3000), 5, 10**9, 7),
    CostModel(HEADS, PhaseCost(1, 0, 0, 10**9), PhaseCost(1, 0, 0, 10**9)),
]


@pytest.fixture
def caches(tmp_path) -> list[str]:
    """A cache folder for each of two ranks, without a file."""
    return [str(tmp_path / f"cache{rank}") for rank in range(2)]


def store(cache: str, cost: CostModel):
    path = cache_file(cache, file_name(CPU, HEADS))
    Profile(CPU, cost).save(path)
    return path


@pytest.mark.quick
def test_different_caches_make_one_plan(caches) -> None:
    layout = Layout.from_lengths(LENGTHS)
    plans = [balance(layout, cost, phase="forward", granularity=16).rows.tolist() for cost in COSTS]
    assert plans[0] != plans[1]  # so a rank that used its own profile would disagree on the plan
    path, _ = (store(cache, cost) for cache, cost in zip(caches, COSTS, strict=True))
    results = run_ranks(START, 2, caches=caches, block={}, lengths=LENGTHS)
    assert [r["terms"] for r in results] == [list(COSTS[0].terms)] * 2
    assert results[0]["loads"] == results[1]["loads"] and results[0]["bytes_moved"] > 0
    assert f"cost model measured on this device ({path})" in results[0]["printed"]


def test_a_cache_on_one_rank_only(caches) -> None:
    store(caches[1], COSTS[1])
    results = run_ranks(START, 2, caches=caches, block={}, lengths=LENGTHS)
    assert [r["terms"] for r in results] == [list(CostModel.fitted(HEADS).terms)] * 2
    assert "by default" in results[0]["printed"]


def test_a_broken_file_is_warned_of_once(caches) -> None:
    paths = [store(cache, COSTS[0]) for cache in caches]
    for path in paths:
        path.write_text('{"format": 1, ')
    results = run_ranks(START, 2, caches=caches, block={})
    assert [r["terms"] for r in results] == [list(CostModel.fitted(HEADS).terms)] * 2
    assert str(paths[0]) in results[0]["logged"] and "by default" in results[0]["logged"]
    assert results[1]["logged"] == ""


def test_the_file_that_the_block_names_is_read_by_rank_0(caches, tmp_path) -> None:
    store(caches[0], COSTS[1])
    named = tmp_path / "named.json"
    Profile(Setting("another card", "sm90", "flash_attn_4", "bf16"), COSTS[0]).save(named)
    results = run_ranks(START, 2, caches=caches, block={"cost_model": str(named)}, lengths=LENGTHS)
    assert [r["terms"] for r in results] == [list(COSTS[0].terms)] * 2
    assert str(named) in results[0]["printed"] and "another card" in results[0]["printed"]


def test_a_named_file_that_cannot_be_used_is_an_error_on_every_rank(caches, tmp_path) -> None:
    missing = tmp_path / "größe.json"
    for result in run_ranks(START, 2, caches=caches, block={"cost_model": str(missing)}):
        for words in ("distca.cost_model", str(missing), "No such file"):
            assert words in result["error"], result
