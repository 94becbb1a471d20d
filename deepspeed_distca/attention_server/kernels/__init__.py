# SPDX-License-Identifier: Apache-2.0
"""Attention kernels behind one interface: flash-attention 4, 3 and 2, torch's own, and a reference."""

from deepspeed_distca.attention_server.kernels.api import BackwardInputs, Gradients, Kernel, KernelError
from deepspeed_distca.attention_server.kernels.selection import (
    KERNEL_NAMES,
    installed_kernels,
    make_kernel,
    select_kernel,
)

__all__ = [
    "KERNEL_NAMES",
    "BackwardInputs",
    "Gradients",
    "Kernel",
    "KernelError",
    "installed_kernels",
    "make_kernel",
    "select_kernel",
]
