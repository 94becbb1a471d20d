# SPDX-License-Identifier: Apache-2.0
"""Documents longer than a rank, through the global loader: loss and all gradients are those of one process."""

from __future__ import annotations

import pytest

from deepspeed_distca.config import DistCAConfigError, parse_config
from deepspeed_distca.plan_options import weights_of_servers
from tests.distributed.harness import run_ranks

TOLERANCE = 1e-5


def case(
    lengths: list[int], budgets: list[int], placement: str, *, zero: int = 0, accumulation: int = 1, **more
) -> dict:
    block = {"advanced": {"granularity": 8, **more}}
    return {
        "lengths": lengths,
        "budgets": budgets,
        "accumulation": accumulation,
        "zero": zero,
        "distca": block,
        "loader": {"placement": placement, "fill": "whole"},
        "seed": len(lengths) + accumulation,
    }


def run(cases: list[dict], world: int) -> list[list[dict]]:
    """Results [rank][case], checked against the reference."""
    results = run_ranks("tests.distributed.global_loader_worker:train_cases", world, cases=cases)
    for outcomes in results:
        for given, outcome in zip(cases, outcomes, strict=True):
            assert outcome["loss_error"] < TOLERANCE and outcome["gradient_error"] < TOLERANCE, (given, outcome)
            assert outcome["micro_batches"] == given["accumulation"] and outcome["parameters"] > 15
    for index, given in enumerate(cases):
        assert sum(outcomes[index]["tokens"] for outcomes in results) == sum(given["lengths"])
    return results


def test_a_document_of_eight_budgets_over_eight_ranks() -> None:
    alone, budgets = [256], [32] * 8
    mixed = [150, 7, 1, 40, 21, 64, 2, 13, 90, 5, 33, 1]  # 427 tokens: two micro-batches, the second one not full
    cases = [
        case(alone, budgets, "contiguous"),
        case(alone, budgets, "head_tail", zero=1),
        case(alone, budgets, "free", zero=3),
        case(mixed, budgets, "contiguous", accumulation=2),
        case(mixed, budgets, "head_tail", zero=2, accumulation=2),
        case(mixed, budgets, "free", zero=3, accumulation=3),  # the third micro-batch is empty
    ]
    results = run(cases, 8)
    for outcomes in results:
        contiguous, head_tail, free = outcomes[:3]
        assert contiguous["tokens"] == head_tail["tokens"] == free["tokens"] == 32
        assert contiguous["pieces"] == 1
        assert contiguous["balance_before"] > head_tail["balance_before"] + 0.2
        assert contiguous["bytes_moved"] > 0 and free["bytes_moved"] <= contiguous["bytes_moved"]
    assert max(outcomes[1]["pieces"] for outcomes in results) == 2  # a head and a tail


def test_a_rank_without_tokens_is_an_attention_server() -> None:
    budgets = [32, 32, 32, 0]
    mixed = [70, 5, 1, 30, 45, 17, 3]
    cases = [
        *(case([96], budgets, placement) for placement in ("contiguous", "head_tail", "free")),
        case(mixed, budgets, "free", zero=2, accumulation=2),
        case(mixed, [64, 16, 16, 0], "head_tail", zero=3, accumulation=2),
        case(mixed, [48] * 4, "free", server_weights=[0, 1, 2, 1]),
    ]
    results = run(cases, 4)
    server = results[3]
    assert [outcome["tokens"] for outcome in server[:4]] == [0] * 4
    for outcomes in zip(*results, strict=True):
        assert outcomes[0]["bytes_moved"] > 0
    for index in range(4):  # it does its share, as far as so short documents can be cut
        seconds = [outcomes[index]["predicted_seconds"] for outcomes in results]
        assert seconds[3] > 0.5 * sum(seconds) / 4, seconds


@pytest.mark.quick
def test_regrouped_steps_are_exact() -> None:
    lengths = [48, 4, 4, 48, 40, 30, 48, *[4] * 28, 2, 48]
    cases = [
        case(lengths, [48, 48], placement, zero=zero, accumulation=4)
        for placement, zero in (("free", 3), ("whole", 1))
    ]
    assert all(outcome["regrouped"] for outcomes in run(cases, 2) for outcome in outcomes)


def test_trainer_takes_the_loader_and_resumes_with_it() -> None:
    for losses in run_ranks("tests.distributed.global_loader_worker:trainer_and_engine", 2):
        assert len(losses["engine"]) == len(losses["trainer"]) == 6
        assert max(abs(a - b) for a, b in zip(losses["engine"], losses["trainer"], strict=True)) < 1e-5
        assert losses["resumed"] == losses["trainer"][3:]


def test_server_weights_of_groups() -> None:
    def weights(given: list[int], servers: int, rank: int) -> tuple[int, ...] | None:
        return weights_of_servers(
            parse_config({"advanced": {"server_weights": given}}).advanced.server_weights, 4, servers, rank
        )

    assert weights_of_servers(None, 4, 2, 0) is None
    assert [weights([1, 2, 0, 3], 2, rank) for rank in range(4)] == [(1, 2), (1, 2), (0, 3), (0, 3)]
    assert weights([1, 2, 0, 3], 4, 1) == (1, 2, 0, 3) and weights([1, 2, 1, 3], 1, 1) is None
    for given, servers in (([1], 4), ([1] * 5, 4), ([-1, 2, 1, 1], 4), ([0, 0, 1, 1], 2), ([10**6 + 1, 1, 1, 1], 4)):
        with pytest.raises(DistCAConfigError, match="`distca.advanced.server_weights` was given.*each of the 4"):
            weights(given, servers, 0)
    with pytest.raises(DistCAConfigError, match="server_weights"):
        parse_config({"advanced": {"server_weights": [1.5, 2]}})


@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (2, {"num_workers": 1}), (4, {"node_size": 2})])
def test_a_loader_that_plans_ahead_leaves_nothing_to_plan(ranks: int, options: dict) -> None:
    for rank in run_ranks("tests.distributed.global_loader_worker:planned_ahead", ranks, **options):
        assert rank["ahead"] == rank["asked for"] and len(rank["ahead"]) > 4 and rank["bytes moved"] > 0
