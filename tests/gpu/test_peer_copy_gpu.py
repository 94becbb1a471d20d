# SPDX-License-Identifier: Apache-2.0
"""Exchange by peer copies is exact over two, four and eight ranks, and what it costs beside computation.

Ranks share GPUs where there are fewer of them: the driver's copies, waits and writes are the same, on one device.
"""

from __future__ import annotations

import pytest
import torch

from deepspeed_distca.attention_server.kernels import installed_kernels
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.gpu

worlds = pytest.mark.parametrize("world", [2, 4, 8])


@pytest.mark.timeout(160)
@worlds
@pytest.mark.parametrize("staging_mib", [2, 64])
def test_random_messages(world: int, staging_mib: int) -> None:
    # Ranks that share a GPU take turns on it, some milliseconds each, and every chunk takes a turn of both its ends.
    shared = torch.cuda.device_count() < world
    results = run_ranks(
        "tests.gpu.peer_copy_worker:check",
        world,
        accelerator="cuda",
        staging_mib=staging_mib,
        iterations=30 if shared else 200,
        largest=50_000 if shared else 3_000_000,
    )
    print(results)
    assert all(result["wrong"] == 0 and result["mib"] > (0.1 if shared else 1) for result in results)


@pytest.mark.timeout(210)
@worlds
@pytest.mark.parametrize("staging_mib", [3, 128])
def test_core_attention(world: int, staging_mib: int) -> None:
    kernel = next(k for k in ("flash_attn_4", "torch_varlen") if k in installed_kernels())
    results = run_ranks(
        "tests.gpu.core_attention_worker:check",
        world,
        accelerator="cuda",
        kernel=kernel,
        exchange="peer_copy",
        staging_mib=staging_mib,
    )
    for rank, cases in enumerate(results):
        for case in cases:
            print(rank, case)
            for name in ("out", "dq", "dk", "dv"):
                assert case[name] <= 1e-2, case
                assert case[name] <= 1.5 * case[f"{name}_plain"] + 1e-4, case


@pytest.mark.timeout(110)
@pytest.mark.parametrize("world", [2, 4])
def test_bench(world: int) -> None:
    """Prints bandwidth and the slow-down of matrix products; holds peer copies to nothing but being no hindrance."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    result = run_ranks("tests.gpu.peer_copy_worker:bench", world, accelerator="cuda")[0]
    for name, value in result.items():
        print(f"{name}: {value}")
    assert result["peer_copy"]["slow-down of the products"] < 0.5
