# SPDX-License-Identifier: Apache-2.0
"""What comes in through the doors is exact or refused, on two ranks: see doors_worker."""

from __future__ import annotations

import pytest

from tests.distributed import doors_worker
from tests.distributed.harness import run_ranks
from tests.distributed.scenarios import check_exact, check_refused

#: Words of the error on rank 0 and on rank 1.
REFUSED = {
    "dynamic rope, a long document": ("29 tokens", "29 tokens"),
    "a model without position ids": ("MBartForCausalLM .*one document a row", "MBartForCausalLM .*one document a row"),
    "two documents in a row of one result": ("row 0 holds 3 documents", "row 0 holds 3 documents"),
    "ids out of range": ("rank 1 .*1000000", "1000000"),
    "negative num_targets": ("rank 1 .*-7", "-7"),
    "a batch that a hook refuses": ("rank 1 .*a hook refuses", "ValueError: a hook refuses"),
    "step_targets on one rank": (r"ranks \[1\] gave no step_targets", r"ranks \[1\] gave no step_targets"),
    "float cu_seqlens": ("rank 1 .*cu_seqlens must hold integers", "cu_seqlens must hold integers"),
}


pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_ranks("tests.distributed.doors_worker:run", 2)


@pytest.mark.parametrize("name", [name for name in doors_worker.SCENARIOS if name not in REFUSED])
def test_exact(found, name):
    check_exact(found, name)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(found, name):
    check_refused(found, name, REFUSED[name])
