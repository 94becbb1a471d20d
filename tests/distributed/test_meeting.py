# SPDX-License-Identifier: Apache-2.0
"""Engines that get the plugin, lose it and get it again, and what ranks can go on after."""

from __future__ import annotations

import pytest

from deepspeed_distca.attention_server.coordination.hello import differences, ranks_in_words
from tests.distributed.harness import run_ranks, slowness

pytestmark = pytest.mark.quick

MADE_UP = "ValueError: a made-up fault"


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks("tests.distributed.meeting_worker:run", 2)


def test_the_plugin_is_attached_anew_after_detach(ranks) -> None:
    for found in (rank["anew"] for rank in ranks):
        assert not found["without a block"] and found["again"] and found["moved"] == [True, True]
        assert (
            "DistCAConfigError: the engine has the plugin already; call engine.distca.detach()"
            in (found["other options"])
        )
        assert found["wrapped"] == [["backward", "step"], []] and found["out of use"] == 1


def test_ranks_go_on_after_a_micro_batch_that_one_left_before_its_plan(ranks) -> None:
    first, second = (rank["left"] for rank in ranks)
    assert second["said"] == MADE_UP
    assert f"rank 1 failed in forward of micro-batch 2, before its first attention layer: {MADE_UP}" in first["said"]
    assert first["seconds"] < 6 * slowness() and len(first["after it"]) == len(second["after it"]) == 2


def test_an_engine_of_which_a_rank_failed_later_is_refused_until_it_is_attached_anew(ranks) -> None:
    first, second = (rank["refused"] for rank in ranks)
    why = f"rank 1 failed in forward of micro-batch 1, layer 1 of 2: {MADE_UP}"
    assert second["said"][0] == MADE_UP and first["said"][0] == f"RankFailedError: {why}"
    for rank in (first, second):
        assert rank["said"][1].startswith(f"RankFailedError: {why}. This engine runs no further")
        assert rank["after it"] > 0


def test_the_same_tokens_on_all_ranks_are_warned_of_once(ranks) -> None:
    assert [rank["same tokens"] for rank in ranks] == [[0, 1], [0, 0]]


def test_what_one_rank_meets_while_the_plugin_is_attached_is_raised_by_all(ranks) -> None:
    assert ranks[0]["kernel"] == "AgreementError: rank 1 cannot be tried out: no memory"
    assert ranks[1]["kernel"] == "OutOfMemoryError: no memory"


def test_differences_are_named_one_by_one() -> None:
    said = {0: {"a": 1, "b": None}, 1: {"a": 1, "b": "x"}, 2: {"a": [2], "b": None}}
    assert differences(said) == [
        "a is 1 on ranks [0, 1] and [2] on ranks [2]; all ranks need the same",
        'b is left out on ranks [0, 2] and "x" on ranks [1]; all ranks need the same',
    ]
    assert ranks_in_words(range(100)).endswith("14, 15, ...] (100 of them)")
