# SPDX-License-Identifier: Apache-2.0
"""Two GPUs: one document of 128K tokens over two ranks of 64K, exact in fp32."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.timeout(200)
def test_document_of_two_ranks() -> None:
    results = run_ranks("tests.gpu.long_document_worker:check", 2, accelerator="cuda")
    for outcomes in results:
        assert set(outcomes) == {"contiguous", "head-tail", "budgets"}
        for placement, outcome in outcomes.items():
            print(placement, outcome)
            assert outcome["loss"] < 1e-5 and outcome["gradient"] < 1e-5, (placement, outcome)
