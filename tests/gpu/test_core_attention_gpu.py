# SPDX-License-Identifier: Apache-2.0
"""Two GPUs, and four: core attention in bf16 is as close to fp32 as the plain kernel on whole documents."""

from __future__ import annotations

import pytest
import torch

from deepspeed_distca.attention_server.kernels import installed_kernels
from tests.distributed.harness import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kernel", ["flash_attn_4", "torch_varlen"])
def test_bf16_over_gpus(kernel: str, world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    if kernel not in installed_kernels():
        pytest.skip(f"{kernel} is not installed")
    results = run_ranks("tests.gpu.core_attention_worker:check", world, accelerator="cuda", kernel=kernel)
    # With two ranks there is nobody to relay through.
    assert any(case["relayed"] for case in results[0]) == (world > 2)
    for rank, cases in enumerate(results):
        for case in cases:
            print(rank, case)
            for name in ("out", "dq", "dk", "dv"):
                assert case[name] <= 1e-2, case
                assert case[name] <= 1.5 * case[f"{name}_plain"] + 1e-4, case
