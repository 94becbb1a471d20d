# SPDX-License-Identifier: Apache-2.0
"""Two GPUs: settings of DeepSpeed that need one go with the plugin, in bf16, with rows moving.

Nothing here is exact to 1e-5, not even without the plugin: see compatibility_worker.py for what is compared. The block
must be no further from plain training under the setting than twice what the kernels' rounding does without it, plus
half of what the setting does to plain training. Equal inputs are quantized equally, so most of the setting's noise is
common to both; if each had its own, they would be 1.4 times that far apart. Where plain training fails under the
setting, the test says so as an expected failure.

DeepSpeed builds its operators for these at their first use: by nvcc and ninja, which must be on the path, for the
architectures of TORCH_CUDA_ARCH_LIST, where that is set. It reads "9.0", not "9.0a" (0.19.8).
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

from tests.distributed.harness import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(CUDA_HOME is None, reason="DeepSpeed builds operators for these with CUDA's compiler"),
]
#: A mean over thousands of targets hardly notices what happens to any of them.
LOSS = 2e-3
#: Of bf16 kernels, in the gradient of a whole model: two of them that are right.
ROUNDING = 0.05


def check(name: str) -> None:
    ranks = run_ranks("tests.gpu.compatibility_worker:check", 2, accelerator="cuda", threads=4, quiet=120, name=name)
    for rank, outcome in enumerate(ranks):
        print(name, rank, outcome)
    for outcome in ranks:
        errors = outcome["errors"]
        assert "plain" not in errors and "plugin" not in errors, errors
        if "plain with it" in errors:
            pytest.xfail(f"plain training fails under {name}: {errors['plain with it']}; the plugin: {errors}")
        assert not errors, errors
        assert outcome["moved"], "no rows moved"
        used = outcome["used"]
        assert used["plain with it"] and used["plugin with it"], f"{name} was not at work: {used}"
        assert not used["plain"] and not used["plugin"], used
        rounding, noise, error = (outcome["distances"][what] for what in ("rounding", "noise", "error"))
        assert error["loss"] <= LOSS and rounding["loss"] <= LOSS, outcome
        for what in ("first gradient", "gradient", "update"):
            assert rounding[what][0] <= ROUNDING, (what, outcome)
            assert noise[what][0] < 0.5, f"{what}: the setting leaves nothing to compare: {outcome}"
            assert error[what][0] <= 2 * rounding[what][0] + noise[what][0] / 2, (what, outcome)


@pytest.mark.timeout(300)
def test_quantized_weights() -> None:
    check("qwZ")


@pytest.mark.timeout(300)
def test_quantized_gradients() -> None:
    check("qgZ")
