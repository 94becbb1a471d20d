# SPDX-License-Identifier: Apache-2.0
"""`"server_weights": "measured"` over two CPU ranks: all have the same weights, and training is as exact as ever."""

from __future__ import annotations

import re

import pytest

from tests.distributed.harness import run_ranks

WORKER = "tests.distributed.server_weights_worker:run"
TOLERANCE = 1e-5
LENGTHS = [[150], [30, 40, 20, 60]]


def test_measured_weights_are_everyones_and_training_is_exact() -> None:
    results = run_ranks(WORKER, 2, timeout=90, lengths=LENGTHS, fabricated=[500.0, 300.0], pinned=[1000, 600])
    for failure, reason in (
        ("full", "OutOfMemoryError: CUDA out of memory."),
        ("cublas", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
    ):
        for rank, result in enumerate(results):
            assert "devices of ranks [1] could not be measured" in result[failure]["said"]
            assert result[failure]["said"].endswith(f"On this rank: {reason}") == (rank == 1)
            assert result[failure]["counts"] == [1, 2, 2]  # all ranks anew, then none
    different = '`distca.server_weights` is "measured" on ranks [0] and [1, 2] on ranks [1]'
    assert all(different in result["different"] for result in results)
    ranks = [result["steps"] for result in results]
    for name in ranks[0]:
        first, second = (rank[name] for rank in ranks)
        assert first["weights"] == second["weights"] and first["loads"] == second["loads"], name
        for outcome in (first, second):
            assert abs(outcome["loss"] - outcome["expected"]) < TOLERANCE * outcome["expected"], (name, outcome)
            assert outcome["loss"] == pytest.approx(ranks[0]["plain"]["loss"], rel=TOLERANCE)
            assert outcome["gradient_error"] < TOLERANCE, (name, outcome)

    plain, measured, again, fabricated, pinned = ranks[0].values()
    assert plain["weights"] is None and plain["printed"] == [] == pinned["printed"]
    assert max(measured["weights"]) == 1000
    assert again["weights"] == measured["weights"] and again["digest"] == measured["digest"]
    assert re.search(r"measured speeds (1\.0000, 0\.\d+|0\.\d+, 1\.0000|1\.0000, 1\.0000) of", measured["printed"][0])
    assert [len(rank["measured"]["printed"]) for rank in ranks] == [1, 0]

    # The slower device gets less, and the line names the list that does the same again, bit by bit.
    assert fabricated["weights"] == [1000, 600] and '"server_weights": [1000, 600]' in fabricated["printed"][0]
    assert pinned["digest"] == fabricated["digest"] != plain["digest"] and fabricated["bytes_moved"] > 0
    assert fabricated["loads"] == pinned["loads"]
    slower = fabricated["loads"][1] * 600 / (fabricated["loads"][0] * 1000)  # predicted seconds are by speed
    assert slower < 0.7 < 0.9 < plain["loads"][1] / plain["loads"][0]
