# SPDX-License-Identifier: Apache-2.0
"""Finding and loading the libraries behind the kernels, and the conditions that all flash-attention kernels share."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

import torch

from deepspeed_distca.attention_server.kernels.api import AttentionShape, KernelError, check_shape
from deepspeed_distca.attention_server.task_batch import AttentionSpec


def distribution_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None. Module names tell nothing: flash-attention 2 wheels carry a
    stale folder with the module name of flash-attention 4."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_distribution(distribution: str, remedy: str) -> str | None:
    """Why the library cannot be used, or None."""
    if distribution_version(distribution) is None:
        return f"the distribution {distribution!r} is not installed ({remedy})"
    return None


def load_module(kernel: str, module: str) -> ModuleType:
    """Import a library's module; whatever its import raises becomes a KernelError that says whose library it is."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken binary wheel raises ImportError, OSError, RuntimeError, AttributeError, ...
        raise KernelError(
            f"{kernel}: {module} is installed but does not import ({type(error).__name__}: {error}); "
            "reinstall it for this torch and CUDA, or choose another kernel"
        ) from error


def check_flash(
    name: str,
    shape: AttentionShape,
    spec: AttentionSpec,
    *,
    capabilities: tuple[int, ...],
    softcap: bool = True,
    max_head_dim: int = 256,
) -> None:
    """Conditions of every flash-attention kernel.

    Args:
        capabilities: major compute capabilities that the library is built for.
        softcap: whether the library caps scores.
    """
    check_shape(name, shape, spec)
    device, dtype, head_dim, v_head_dim = shape.device, shape.dtype, shape.head_dim, shape.v_head_dim
    if device.type != "cuda":
        raise KernelError(f"{name}: device {device}; it runs on CUDA. Use the kernel 'reference' on this device")
    if dtype not in (torch.float16, torch.bfloat16):
        raise KernelError(
            f"{name}: dtype {dtype}; flash-attention takes torch.float16 or torch.bfloat16. "
            "Train in bf16, or use the kernel 'reference'"
        )
    if max(head_dim, v_head_dim) > max_head_dim:
        raise KernelError(
            f"{name}: head dimensions ({head_dim}, {v_head_dim}); at most {max_head_dim} is supported here. "
            "Use another kernel, 'reference' takes any"
        )
    if spec.softcap is not None and not softcap:
        raise KernelError(
            f"{name}: softcap {spec.softcap}; this kernel has none. Use 'flash_attn_4', 'flash_attn_2' or 'reference'"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in capabilities:
        raise KernelError(
            f"{name}: compute capability {capability[0]}.{capability[1]}; it is used on "
            f"{', '.join(f'{major}.x' for major in capabilities)}. Use another kernel"
        )


def mask_arguments(spec: AttentionSpec, causal: bool) -> tuple[bool, int, int]:
    """(causal, left, right) as flash-attention takes them: whether there is a causal mask and no window, and the keys
    that a query sees to the left and right of its own; -1 is no limit."""
    if not causal:
        return False, -1, -1
    return (True, -1, 0) if spec.window is None else (False, spec.window - 1, 0)


def out_from_delta(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """A stand-in for the forward's output, for libraries whose backward wants `out` only to form rowsum(dout * out).

    Any multiple of dout serves: out' = dout * delta / ||dout||^2 has rowsum(dout * out') = delta. Where a row of dout
    is zero, so is out': exact for delta = rowsum(dout * out), but the part of delta that comes from a gradient of the
    lse is lost in such rows.

    Args:
        dout: [T, Hq, Dv].
        delta: [Hq, T].

    Returns:
        [T, Hq, Dv] in dout's dtype.
    """
    wide = dout.float()
    # Scaled to a largest entry of 1 first: squares of small bf16 gradients underflow in fp32.
    largest = wide.abs().amax(-1, keepdim=True)
    unit = wide / torch.where(largest > 0, largest, 1)
    norm = unit.square().sum(-1, keepdim=True)
    ratio = delta.float().t().unsqueeze(-1) / torch.where(largest > 0, largest * norm, 1)
    return (unit * ratio).to(dout.dtype)
