# SPDX-License-Identifier: Apache-2.0
"""Measuring a GPU's speed leaves no memory behind and takes no random number."""

from __future__ import annotations

import pytest
import torch

from deepspeed_distca.profiling.speeds import device_speed

pytestmark = pytest.mark.gpu


def test_nothing_is_left_behind() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.mm(*(torch.ones(8, 8, device=device, dtype=torch.bfloat16) for _ in range(2)))  # cuBLAS's own workspace
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    state = torch.cuda.get_rng_state(device)
    speed = device_speed(device)
    print(f"{speed:.1f} products a second")
    assert speed > 1
    assert torch.cuda.memory_allocated(device) == before and torch.cuda.memory_reserved(device) == reserved
    assert torch.equal(torch.cuda.get_rng_state(device), state)
