# SPDX-License-Identifier: Apache-2.0
"""Trees on a GPU in bf16, at home and moved: as close to fp32 as the plain kernel is on every text alone."""

from __future__ import annotations

import pytest
import torch

from deepspeed_distca.attention_server.kernels import installed_kernels
from tests.distributed.harness import run_ranks
from tests.gpu.trees_worker import NAMES, check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kernel", ["flash_attn_4", "torch_varlen"])
def test_trees_in_bf16(kernel: str, world: int) -> None:
    if kernel not in installed_kernels():
        pytest.skip(f"{kernel} is not installed")
    if world == 1:
        results = [check(0, kernel)]
    else:
        results = run_ranks("tests.gpu.trees_worker:check", world, accelerator="cuda", kernel=kernel, seed=0)
    for rank, cases in enumerate(results):
        for case in cases:
            print(rank, case)
            for name in NAMES:
                assert case[name] <= 1e-2, case
                assert case[name] <= 1.4 * case[f"{name}_plain"] + 1e-4, case
