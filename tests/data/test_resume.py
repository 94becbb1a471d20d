# SPDX-License-Identifier: Apache-2.0
"""A resumed run has the weights of one that was not interrupted, bit by bit, wherever it was saved."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_ranks

#: Loader, ZeRO stage, and the micro-batches, of 3 in a step, after which it is saved.
CASES = [("regrouped", 0, [3, 4, 8]), ("accumulation", 1, [4]), ("workers", 3, [4])]


@pytest.fixture(scope="module")
def runs() -> list[list[dict]]:
    return run_ranks("tests.data.resume_worker:resumed", 2, cases=CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-zero{CASES[i][1]}")
def test_weights_after_a_resume_are_those_of_a_run_that_was_not_interrupted(runs, index: int) -> None:
    """A checkpoint has no gradients of the micro-batches of an unfinished step: the step is trained again as a whole.
    Saved after 3, 4 and 8 micro-batches a run goes on behind 3, 3 and 6 of them."""
    save = CASES[index][2]
    for rank in runs:
        plain, saved, resumed = (rank[index][key] for key in ("plain", "saved", "resumed"))
        weights, count = plain
        assert saved == plain
        assert [after for after, _ in resumed] == [weights] * len(save)
        assert [micro_batches for _, micro_batches in resumed] == [count - done // 3 * 3 for done in save]
        assert count >= 9
    assert runs[0][index]["plain"] == runs[1][index]["plain"]
