# SPDX-License-Identifier: Apache-2.0
"""Attention kernels behind one interface: flash-attention 4, 3 and 2, torch's own, and a reference.

Adding a kernel:

1. Write a class with the methods of :class:`~.api.Kernel`, whose docstring is the contract, in a file of its own here.
   A library that takes packed rows with cu_seqlens needs only `missing`, `load`, `check`, `library_forward` and
   `library_backward` of :class:`~.packed.PackedKernel`: see flash_attention_2.py. One that takes ranges in place is
   written as flash_attention_4.py is. Finding and importing a library is in libraries.py.
2. Add its name, module and class to `_KERNELS` in selection.py, at its place by speed.
3. Tests: a stand-in for its library and its name in LIBRARIES in tests/attention_server/test_kernels_libraries.py say
   on a CPU how the library is called; its choice goes into test_kernels_selection.py. tests/gpu/test_kernels_gpu.py
   takes every registered kernel, as it is, and compares it with the reference on a GPU.

`ds_distca profile` then measures it for the cost model.
"""

from deepspeed_distca.attention_server.kernels.api import (
    AttentionShape,
    BackwardInputs,
    Gradients,
    Kernel,
    KernelError,
)
from deepspeed_distca.attention_server.kernels.selection import (
    KERNEL_NAMES,
    installed_kernels,
    make_kernel,
    select_kernel,
)

__all__ = [
    "KERNEL_NAMES",
    "AttentionShape",
    "BackwardInputs",
    "Gradients",
    "Kernel",
    "KernelError",
    "installed_kernels",
    "make_kernel",
    "select_kernel",
]
