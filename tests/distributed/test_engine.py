# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed engines over real process groups: the loss and every gradient are those of each document run alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_distca.scheduler.cost_model import PHASES, CostModel, PhaseCost
from deepspeed_distca.scheduler.profiles import Profile, Setting
from tests.distributed.harness import run_ranks, slowness

TOLERANCE = 1e-5
ENABLED = {"enabled": True, "advanced": {"granularity": 16}}
LAYERS = 2
CHECKPOINTING = ("reentrant", "non-reentrant", "deepspeed")


def segments(*lengths: int, first: int = 0) -> list[list[int]]:
    """Whole documents of one rank, numbered from `first`."""
    return [[first + i, 0, n] for i, n in enumerate(lengths)]


LAYOUTS = {
    "uneven": [segments(97), segments(*[7] * 13, first=1)],
    "ones": [segments(*[1] * 11), segments(*[1] * 5, 2, first=11)],
    "equal": [segments(32, 32), segments(32, 32, first=2)],
    "odd and prime": [segments(7, 1, 31, 13), segments(9, 8, 8, 12, first=4)],
    "nearly everything in one": [segments(150), segments(3, 1, first=1)],
    "longer than a rank": [[[0, 0, 61], [1, 0, 5]], [[0, 61, 60], [2, 0, 1]]],
    "head and tail": [[[0, 0, 20], [0, 100, 20]], [[0, 20, 80]]],
    "empty rank": [[], segments(40, 17)],
}


def check(results: list[list[dict]], cases: list[dict]) -> None:
    for outcomes in results:
        for case, outcome in zip(cases, outcomes, strict=True):
            error = abs(outcome["loss"] - outcome["expected"]) / max(outcome["expected"], 1e-6)
            assert error < TOLERANCE and outcome["gradient_error"] < TOLERANCE, (case, outcome)


def case(layouts: list, zero: int = 0, checkpointing: str = "off", seed: int = 0, **options) -> dict:
    return {
        "zero": zero,
        "accumulation": len(layouts),
        "checkpointing": checkpointing,
        "layouts": layouts,
        "seed": seed,
        "distca": {**ENABLED, **options},
        "model_options": {},
    }


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_exact_under_zero_accumulation_and_checkpointing(zero: int) -> None:
    layouts = [LAYOUTS[name] for name in ("uneven", "longer than a rank", "empty rank")]
    cases = [
        case(layouts[:accumulation], zero, checkpointing, seed=zero, keep_attention=keep)
        for accumulation, keep in ((1, True), (3, True), (3, False))
        for checkpointing in ("off", *CHECKPOINTING)
    ]
    results = run_ranks("tests.distributed.engine_worker:train_cases", 2, cases=cases)
    check(results, cases)
    assert all(outcome["bytes_moved"] > 0 for outcome in results[0])
    for outcomes in results:
        check_kept(cases, outcomes)


def check_kept(cases: list[dict], outcomes: list[dict]) -> None:
    """Recomputation computes and exchanges nothing, changes no bit, and leaves nothing behind."""
    by_case = {
        (c["accumulation"], c["distca"]["keep_attention"], c["checkpointing"]): outcome
        for c, outcome in zip(cases, outcomes, strict=True)
    }
    for (accumulation, keep, checkpointing), outcome in by_case.items():
        once = by_case[accumulation, keep, "off"]["counts"]
        assert once["attention"] == LAYERS * accumulation and once["exchanges"] > 0
        if checkpointing == "off" or keep:
            assert outcome["counts"] == once, (checkpointing, outcome["counts"], once)
        else:
            # Exchanges of the forward are repeated: more than none, fewer than all again.
            assert outcome["counts"]["attention"] == 2 * once["attention"]
            assert outcome["counts"]["kernels"] == 2 * once["kernels"]
            assert once["exchanges"] < outcome["counts"]["exchanges"] < 2 * once["exchanges"]
        waiting = LAYERS if keep and checkpointing != "off" else 0
        assert outcome["kept"] == {"waiting": [waiting] * accumulation, "left": 0}
        assert outcome["digest"] == by_case[accumulation, True, "off"]["digest"], (accumulation, keep, checkpointing)


@pytest.mark.quick
def test_exact_for_any_lengths() -> None:
    cases = [
        case([layout], seed=i, overlap=overlap)
        for i, layout in enumerate(LAYOUTS.values())
        for overlap in ("none", "local_first")
    ]
    results = run_ranks("tests.distributed.engine_worker:train_cases", 2, cases=cases)
    check(results, cases)
    balanced = [o["bytes_moved"] for c, o in zip(cases, results[0], strict=True) if c["layouts"] == [LAYOUTS["equal"]]]
    assert balanced == [0, 0]  # nothing to balance: nothing moved
    for outcome in (o for outcomes in results for o in outcomes):
        # Waiting is measured where there is something to wait for, and nowhere else.
        assert (outcome["exposed_seconds"] > 0) == (outcome["bytes_moved"] > 0), outcome


def test_rows_stay_at_home_unless_balance_saves_enough() -> None:
    """So little work is never worth a transfer; a document that continues on the other rank is exchanged anyway."""
    advanced = {"granularity": 16, "min_gain": 0.02}
    cases = [case([LAYOUTS[name]], advanced=advanced) for name in ("uneven", "longer than a rank", "empty rank")]
    results = run_ranks("tests.distributed.engine_worker:train_cases", 2, cases=cases)
    check(results, cases)
    uneven, longer, empty = results[0]
    assert uneven["bytes_moved"] == empty["bytes_moved"] == 0 < longer["bytes_moved"]


@pytest.mark.parametrize("world", [3, 4])
def test_exact_over_more_ranks(world: int) -> None:
    spanning = [[[0, r * 23, 23], [r + 1, 0, r + 1]] for r in range(world)]
    lonely = [segments(200), *[[] for _ in range(world - 2)], segments(5, first=1)]
    mixed = [segments(101), segments(*[9] * 11, first=1)]
    mixed += [segments(13, 1, first=20 + 2 * r) for r in range(world - 2)]
    cases = [
        case([spanning, lonely, mixed], zero, checkpointing, seed=world)
        for zero, checkpointing in ((0, "off"), (3, "non-reentrant"), (2, "reentrant"))
    ]
    # As if two ranks made a node.
    cases.append(case([spanning, lonely, mixed], 1, seed=world, advanced={"granularity": 16, "node_size": 2}))
    check(run_ranks("tests.distributed.engine_worker:train_cases", world, cases=cases), cases)


def test_a_pool(tmp_path: Path) -> None:
    """Two ranks hold the documents, a third one is never given any. With equal attention it has a third of it. In two
    nano-batches it begins while the others have linear work, and has so much more."""
    # As if a device took so long that neither host nor links count.
    area = CostModel.area()
    slow = {phase: PhaseCost(10**6 * area.phase(phase).pair) for phase in PHASES}
    Profile(Setting("any", "any", "any", "bf16"), replace(area, **slow)).save(tmp_path / "costs.json")
    lengths = [[[211, 189], [400], []], [[400], [50] * 8, []]]
    options = (
        dict(zero=0, checkpointing="off"),
        dict(zero=1, checkpointing="non-reentrant"),
        dict(zero=3, checkpointing="off"),
    )
    cases = [
        dict(lengths=lengths, cost_model=str(tmp_path / "costs.json"), overlap=overlap, **o)
        for overlap in ("local_first", "ping_pong")
        for o in options
    ]
    results = run_ranks("tests.distributed.engine_worker:pools", 3, cases=cases)
    check(results, cases)
    for case, outcome in zip(cases, results[0], strict=True):
        pool = outcome["computed"][2]
        assert outcome["planned"] == pytest.approx(outcome["computed"], abs=0.01), (case, outcome)
        # 2 x 800 tokens with as much linear work as 120 pairs each, twice that in backward, where a pair is 2.44 times
        # the work, and 210,721 pairs: (3 * 1,600 * 120 + 3.44 * 210,721) / 3 / 3.44 / 210,721.
        assert pool == pytest.approx(1 / 3 if case["overlap"] == "local_first" else 0.598, abs=0.02), (case, outcome)


@pytest.mark.quick
def test_groups_of_servers() -> None:
    # Two groups of two servers: attention is shared within a group, the loss is weighted over all four ranks.
    rows = [[80], [5] * 4, [33, 1], [2, 3]]
    results = run_ranks("tests.distributed.engine_worker:train_grouped", 4, lengths=rows, servers=2)
    for outcome in results:
        assert abs(outcome["loss"] - outcome["expected"]) < TOLERANCE * outcome["expected"], outcome
        assert outcome["gradient_error"] < TOLERANCE, outcome


def test_fifty_steps_with_and_without_the_plugin() -> None:
    for curve in run_ranks("tests.distributed.engine_worker:loss_curves", 2, steps=50):
        differences = [abs(a - b) / b for a, b in zip(curve["plugin"], curve["plain"], strict=True)]
        assert max(differences) < 1e-4, differences
        assert curve["plain"][-1] < 0.8 * curve["plain"][0]


@pytest.mark.quick
def test_bad_input_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks("tests.distributed.engine_worker:bad_input", 2)
    assert "position_ids of shape [3, 1, 8]" in first["error"]
    assert "rank 0 cannot use its micro-batch" in second["error"] and "[3, 1, 8]" in second["error"]
    for outcome in (first, second):
        assert outcome["afterwards"] > 0  # and the next micro-batch works


def test_a_rank_that_stops_is_an_error_within_the_time_limit() -> None:
    stays, stops = run_ranks("tests.distributed.engine_worker:missing_rank", 2, quiet=120, seconds=5 * slowness())
    assert "same number of training micro-batches" in stays["error"] and stops["error"] == ""


def test_a_rank_waits_for_others_at_its_first_attention_only() -> None:
    # It would hang if rank 0 waited before its first layer.
    assert run_ranks("tests.distributed.engine_worker:late_rank", 2) == [True, True]


def test_other_options_on_one_rank_are_refused() -> None:
    for outcome in run_ranks("tests.distributed.engine_worker:different_options", 2):
        assert "`distca.advanced.tolerance` is 0.1 on ranks [0] and 0.2 on ranks [1]" in outcome["error"]


@pytest.mark.quick
def test_another_plan_on_one_rank_is_an_error_on_all() -> None:
    for outcome in run_ranks("tests.distributed.engine_worker:different_plans", 2):
        assert "the ranks disagree on the plan of a micro-batch" in outcome["error"]


@pytest.mark.parametrize("overlap", ["local_first", "ping_pong"])
def test_backwards_that_come_to_other_layers_are_an_error_on_all(overlap: str) -> None:
    # Rank 0 would wait for rank 1 in the first layer's backward, for ever.
    function = "tests.distributed.engine_worker:different_inputs"
    for outcome in run_ranks(function, 2, required=False, overlap=overlap):
        assert "ranks [0] need gradients of what comes into their first attention layer" in outcome["error"]
        assert "enable_input_require_grads()" in outcome["error"]
    for outcome in run_ranks(function, 2, required=True, overlap=overlap):
        assert outcome["error"] == ""


@pytest.mark.parametrize("skips", [[[0, 1, 2], [0, 1, 2]], [[], [0, 1, 2]]], ids=["all", "one"])
def test_a_forward_without_any_attention_is_an_error_on_all_and_training_goes_on(skips: list[list[int]]) -> None:
    # Its loss would be a sum over targets: what it is divided by is known with the plan.
    for rank, outcome in enumerate(run_ranks("tests.distributed.engine_worker:left_out_layers", 2, skips=skips)):
        (error,) = outcome["errors"]
        assert "went through none of its 3 attention layers in this forward" in error
        assert skips[rank] or "rank 1 failed in forward of micro-batch 3" in error
        assert len(outcome["losses"]) == 3 and outcome["moved"]


@pytest.mark.parametrize("block", [{}, {"overlap": "ping_pong"}], ids=["whole", "in two"])
def test_ranks_that_leave_out_different_numbers_of_layers_are_an_error_on_all(block: dict) -> None:
    # What rank 0 exchanges in its last layer would meet what rank 1 exchanges in backward.
    function = "tests.distributed.engine_worker:left_out_layers"
    for skips in ([[], [2]], [[1], [0, 1]]):
        for outcome in run_ranks(function, 2, skips=skips, **block):
            assert outcome["seconds"] < 10 * slowness(), outcome  # not after `timeout_seconds`
            assert len(outcome["losses"]) == 2
            assert "went through" in outcome["errors"][0] and "attention layers of 3, but rank" in outcome["errors"][0]
    for outcome in run_ranks(function, 2, skips=[[0], [0]], **block):
        assert len(outcome["losses"]) == 4 and outcome["moved"]


@pytest.mark.quick
def test_block_decides_and_hooks_come_off() -> None:
    for outcome in run_ranks("tests.distributed.engine_worker:on_and_off", 2):
        assert outcome == {
            "absent": False,
            "disabled": False,
            "enabled": True,
            "detached_implementation": "sdpa",
            "hooks_left": 0,
            "uninstalled": True,
            "installed_again": True,
        }


@pytest.mark.quick
def test_evaluation_and_generation_are_the_models_own() -> None:
    for outcome in run_ranks("tests.distributed.engine_worker:evaluation", 2):
        assert outcome["generated_same"]
        assert outcome["padded_error"] < 1e-6 and outcome["packed_error"] < 1e-5
