# SPDX-License-Identifier: Apache-2.0
"""Whole steps over GPUs, or over ranks that share one: each way of overlapping, each way of recomputing, and ranks
without tokens train as plain training does."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.gpu
#: A mean over thousands of targets hardly notices rounding: 2e-5 on an H200.
LOSS = 1e-4
#: Of bf16 kernels, in the gradient of a whole model: two of them that are right. 0.021 there.
ROUNDING = 0.04


@pytest.mark.timeout(500)
@pytest.mark.parametrize("world", [2, 3])
def test_as_plain_training(world: int) -> None:
    ranks = run_ranks("tests.gpu.training_worker:check", world, accelerator="cuda", threads=4, quiet=120)
    for rank, ways in enumerate(ranks):
        assert len(ways) == 11
        for way, found in ways.items():
            print(rank, way, found)
            assert found["moved"], way
            assert found["loss"] <= LOSS and found["gradient"][0] <= ROUNDING, (rank, way, found)
            # The first step is watched, and so it runs whole.
            assert found["in_two"] == (found["steps"] - 1 if way.startswith("ping_pong") else 0), (rank, way, found)
            assert found["kept"] == int(way.endswith("one layer kept")), (rank, way, found)
