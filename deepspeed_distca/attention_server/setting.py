# SPDX-License-Identifier: Apache-2.0
"""What a stored cost model is looked up by, as torch names it."""

from __future__ import annotations

import torch

from deepspeed_distca.scheduler.profiles import Setting

#: Element types of profiles.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def setting_of(device: torch.device, dtype: torch.dtype, kernel: str | None) -> Setting:
    """What a profile for this device, type and kernel is looked up by."""
    short = {value: name for name, value in DTYPES.items()}
    name = short.get(dtype, str(dtype).removeprefix("torch."))
    if device.type != "cuda":
        return Setting(device.type, device.type, kernel, name)
    major, minor = torch.cuda.get_device_capability(device)
    return Setting(torch.cuda.get_device_name(device), f"sm{major}{minor}", kernel, name)
