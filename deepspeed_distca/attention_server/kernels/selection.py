# SPDX-License-Identifier: Apache-2.0
"""Which attention kernel a model uses: the fastest one that is installed and fits, or the one that was named."""

from __future__ import annotations

import importlib
import logging

import torch

from deepspeed_distca.attention_server.kernels.api import AttentionShape, Kernel, KernelError
from deepspeed_distca.attention_server.task_batch import AttentionSpec

logger = logging.getLogger(__name__)

# Fastest first. Modules are imported only when their kernel is considered, libraries only when it is chosen.
_KERNELS = {
    "flash_attn_4": ("flash_attention_4", "FlashAttention4Kernel"),
    "flash_attn_3": ("flash_attention_3", "FlashAttention3Kernel"),
    "flash_attn_2": ("flash_attention_2", "FlashAttention2Kernel"),
    "torch_varlen": ("torch_varlen", "TorchVarlenKernel"),
    "reference": ("reference", "ReferenceKernel"),
}
KERNEL_NAMES = tuple(_KERNELS)


def make_kernel(name: str) -> Kernel:
    """The kernel of that name, unchecked: it may not be installed."""
    if name not in _KERNELS:
        raise KernelError(f"unknown attention kernel {name!r}; the names are {', '.join(KERNEL_NAMES)}")
    module, cls = _KERNELS[name]
    return getattr(importlib.import_module(f"{__package__}.{module}"), cls)()


def installed_kernels() -> list[str]:
    """Names of the kernels whose library is installed, fastest first. Whether one fits is `Kernel.check`'s word."""
    return [name for name in KERNEL_NAMES if make_kernel(name).missing() is None]


def select_kernel(
    name: str | None,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    spec: AttentionSpec | None = None,
) -> Kernel:
    """The kernel for a model's attention.

    Args:
        name: one of KERNEL_NAMES, or None for the first of them that is installed, loads and fits.
        device, dtype: where and in which type q, k and v are.
        v_head_dim: head dimension of v, where it is not that of q and k.
        spec: scale, window and softcap; None asks for plain full causal attention. A model whose layers differ
            calls this once per kind of layer.

    Raises:
        KernelError: the named kernel is unknown, not installed or does not fit.
    """
    device = torch.device(device)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    spec = AttentionSpec(scale=head_dim**-0.5) if spec is None else spec
    shape = AttentionShape(q_heads, kv_heads, head_dim, v_head_dim, dtype, device)
    if name is not None:
        kernel = make_kernel(name)
        reason = kernel.missing()
        if reason is not None:
            raise KernelError(f"attention kernel {name!r} was asked for, but {reason}")
        kernel.check(shape, spec)
        kernel.load()
        return kernel

    passed_over: list[str] = []
    for candidate in KERNEL_NAMES:
        kernel = make_kernel(candidate)
        reason = kernel.missing() or _unfit(kernel, shape, spec)
        if reason is None:
            logger.info("attention kernel: %s (%s)", candidate, "; ".join(passed_over) or "first choice")
            if candidate == "reference" and device.type == "cuda":
                logger.warning(
                    "no fused attention kernel fits %s on %s, so the slow reference kernel computes attention (%s)",
                    dtype,
                    device,
                    "; ".join(passed_over),
                )
            return kernel
        passed_over.append(f"not {candidate}: {reason}")
    raise KernelError(f"no attention kernel fits: {'; '.join(passed_over)}")


def _unfit(kernel: Kernel, shape: AttentionShape, spec: AttentionSpec) -> str | None:
    try:
        kernel.check(shape, spec)
        kernel.load()
    except KernelError as error:
        return str(error)
    return None
