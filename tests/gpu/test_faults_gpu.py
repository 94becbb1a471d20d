# SPDX-License-Identifier: Apache-2.0
"""Two GPUs: a rank fails or is killed while the other waits on its device. See tests/distributed/test_faults.py."""

from __future__ import annotations

import re

import pytest
import torch

from tests.distributed.test_faults import MADE_UP, Case, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

#: To be within the test's own patience on GPUs, whose start takes longer.
LIMIT = 20.0
FAILED = f"rank 1 failed in forward of micro-batch 2, layer 2 of 2: {MADE_UP}"
CASES = {
    "raises": Case("raise", "layer", ("raises", "forward"), FAILED, lives_on=True),
    "raises, NCCL": Case(
        "raise", "layer", ("raises", "forward"), FAILED, lives_on=True, block={"advanced": {"exchange": "nccl"}}
    ),
    "raises in backward": Case(
        "raise",
        "attention backward",
        ("raises", "backward"),
        f"rank 1 failed in backward of micro-batch 2, layer 2 of 2: {MADE_UP}",
        lives_on=True,
    ),
    "is killed": Case("kill", "backward", ("is killed", "backward"), "rank 1 gives no sign of life", at_once=False),
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", CASES)
def test_the_other_rank_is_gone_in_time_and_says_why(name: str) -> None:
    case = CASES[name]
    outcome = run(case, "cuda")
    print(name, f"{outcome.seconds:.1f} s", outcome.codes, outcome.texts[0][-600:])
    assert outcome.codes[0] not in (None, 0) and outcome.seconds < LIMIT, outcome
    assert re.search(case.says, outcome.texts[0]), outcome
