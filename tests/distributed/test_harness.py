# SPDX-License-Identifier: Apache-2.0
"""A rank that fails, hangs or dies fails its test: otherwise every other test here would say nothing."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_ranks

WORKER = "tests.distributed.harness_worker"


@pytest.mark.quick
def test_ranks_know_their_place() -> None:
    assert run_ranks(f"{WORKER}:place", 3) == [[0, 3], [1, 3], [2, 3]]


@pytest.mark.quick
@pytest.mark.parametrize(("function", "codes"), [("fails", [0, 1]), ("dies", [0, -6]), ("missing", [1, 1])])
def test_a_failure_is_told(function: str, codes: list[int]) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(f"{WORKER}:{function}", 2)
    text = str(caught.value)
    assert f"exit codes {codes}" in text and "--- rank 1 ---" in text
    if function == "fails":
        assert "rank 0 was here" in text and "ValueError: no more" in text


@pytest.mark.quick
def test_a_rank_that_hangs_is_killed() -> None:
    run_ranks(f"{WORKER}:place", 1)  # whatever is only done once
    with pytest.raises(AssertionError, match=r"exit codes \[0, 'hangs'\]") as caught:
        run_ranks(f"{WORKER}:hangs", 2, quiet=3)
    assert "in hangs" in str(caught.value)  # where it is
