# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's AutoTP over two ranks beside data parallelism over two: with the plugin training is that of one dense
process, and rows move between the data-parallel ranks of each shard."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.harness import run_ranks

WORKER = "tests.distributed.tensor_parallel_worker"
TOLERANCE = 1e-5
UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
#: In one process each, in which DeepSpeed keeps its groups: how the model is sharded, and trained.
CASES: dict[str, dict[str, Any]] = {
    "zero 0": {},
    "zero 1": {"zero": 1},
    "zero 2, accumulation": {"zero": 2, "accumulation": 2},
    "zero 3": {"zero": 3},
    "zero 1, reentrant checkpoints": {"zero": 1, "checkpointing": "reentrant", "accumulation": 2},
    "zero 2, non-reentrant checkpoints": {"zero": 2, "checkpointing": "non-reentrant"},
    "DeepSpeed's checkpoints": {"checkpointing": "deepspeed"},
    "two nano-batches": {"zero": 1, "distca": {"overlap": "ping_pong", "advanced": {"granularity": 8}}},
    "embeddings sharded over the vocabulary": {"zero": 1, "model_options": {"tie_word_embeddings": True}},
    "head sharded over the vocabulary": {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}},
    "DeepSpeed's preset": {"zero": 1, "tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}},
    "heads that cannot be divided equally": {"zero": 1, "model_options": UNEVEN},
    "tp_model_init": {"zero": 1, "recorded": True},  # last: DeepSpeed keeps it for the process
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict]]:
    results = run_ranks(f"{WORKER}:train_cases", 4, cases=list(CASES.values()))
    return [dict(zip(CASES, outcomes, strict=True)) for outcomes in results]


@pytest.mark.parametrize("name", CASES)
def test_exact_over_three_steps(found, name) -> None:
    for rank, outcomes in enumerate(found):
        outcome = outcomes[name]
        assert max(outcome["loss"], outcome["gradients"], outcome["parameters"]) < TOLERANCE, outcome
        assert len(outcome["moved"]) == 3 and all(outcome["moved"]), outcome
        # Attention is sharded, and shared among the ranks that have the same shard.
        heads = ([4, 2], [2, 1]) if CASES[name].get("model_options") == UNEVEN else ([2, 1], [2, 1])
        assert outcome["rows"] == [8 * n for n in heads[rank % 2]]  # of q and of k
        assert outcome["data_parallel"] == [rank % 2, rank % 2 + 2]


def test_equal_to_tensor_parallelism_without_the_plugin(found) -> None:
    names = ["zero 1", "zero 2, accumulation"]
    plain = run_ranks(f"{WORKER}:train_cases", 4, cases=[{**CASES[n], "distca": None} for n in names])
    for ours, theirs in zip(found, plain, strict=True):
        for name, outcome in zip(names, theirs, strict=True):
            assert outcome["gradients"] < TOLERANCE and outcome["moved"] == [0, 0, 0]
            assert outcome["losses"] == pytest.approx(ours[name]["losses"], rel=TOLERANCE)


def test_groups_of_servers() -> None:
    """Two groups of two replicas of two ranks: attention moves within a group, and the loss is weighted over all."""
    case = {"distca": {"servers": 2, "advanced": {"granularity": 8}}, "lengths": [[90, 3], [9] * 4, [5], [70, 8, 1]]}
    for rank, (outcome,) in enumerate(run_ranks(f"{WORKER}:train_cases", 8, cases=[case])):
        assert max(outcome["loss"], outcome["gradients"], outcome["parameters"]) < TOLERANCE, outcome
        assert all(outcome["moved"]) and outcome["data_parallel"] == list(range(rank % 2, 8, 2)), outcome


@pytest.mark.quick
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_of_a_replica_with_different_batches(tied) -> None:
    """An error on every rank, and the next micro-batch is right. DeepSpeed compares arguments in the first forward."""
    found = run_ranks(f"{WORKER}:bad_batches", 4, tied=tied)
    neighbours = "ranks [0, 1] hold one replica of the model among them (tensor parallelism), but were given different"
    own = {"first": ("Data inconsistency within the TP group",) * 2}
    others = {
        "first": "rank 0 cannot use its micro-batch: Data inconsistency within the TP group",
        "tokens": f"AgreementError: {neighbours} tokens",
        "documents": f"AgreementError: {neighbours} documents",
        "unusable": "rank 1 cannot use its micro-batch: input_ids",
        "targets": f"AgreementError: {neighbours} targets of the step",
    }
    own["unusable"] = (others["unusable"], "1000000")
    for rank, outcome in enumerate(found):
        for name, words in others.items():
            expected = own[name][rank] if name in own and rank < 2 else words
            assert expected in outcome[name][0], (rank, name, outcome[name])
            assert outcome[name][1] < TOLERANCE, (rank, name, outcome[name])
    # DeepSpeed has seen what the user gave, twice on the rank whose first forward it refused, and no plan of ours.
    names = found[0]["argument names"]
    assert [outcome["compared"] for outcome in found] == [[], [names] * 2, [], [names]]


@pytest.mark.quick
def test_plans_that_come_with_batches() -> None:
    for rank, outcome in enumerate(run_ranks(f"{WORKER}:planned_ahead", 4)):
        assert max(outcome["loss"], outcome["gradients"]) < TOLERANCE and outcome["moved"] > 0, outcome
        assert len(outcome["compared"]) == rank % 2 and all("planned" in names for names in outcome["compared"])


@pytest.mark.quick
def test_refused_on_every_rank() -> None:
    for outcome in run_ranks(f"{WORKER}:refused", 4):
        assert "2 tensor-parallel ranks share 1 key/value heads" in outcome["heads"]
        assert "groups of the engine's mpu are [[0, 1], [2, 3]]; allowed: groups" in outcome["mpu"], outcome
