# SPDX-License-Identifier: Apache-2.0
"""flash-attention 3 (the distribution `flash_attn_3`, Hopper), on packed rows.

Its varlen kernels take starts and lengths as flash-attention 4 does, but nothing of that was tried here, so ranges
are packed first: the one way of calling it that its own tests cover.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

from deepspeed_distca.attention_server.kernels.api import AttentionShape, BackwardInputs, Gradients
from deepspeed_distca.attention_server.kernels.libraries import (
    check_flash,
    load_module,
    mask_arguments,
    missing_distribution,
)
from deepspeed_distca.attention_server.kernels.packed import PackedCall, PackedKernel
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.compat.torch import undecorated

DISTRIBUTION = "flash_attn_3"


class FlashAttention3Kernel(PackedKernel):
    """The low-level functions of flash-attention 3. It has no PyPI release and its versions differ in argument names,
    so names are looked up in the signatures."""

    name = "flash_attn_3"

    def missing(self) -> str | None:
        return missing_distribution(
            DISTRIBUTION, "build it from the folder hopper/ of https://github.com/Dao-AILab/flash-attention"
        )

    def load(self) -> None:
        _ = self._library

    def check(self, shape: AttentionShape, spec: AttentionSpec) -> None:
        check_flash(self.name, shape, spec, capabilities=(9,))

    def library_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: PackedCall, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = {"q": q, "k": k, "v": v}
        out, lse, *_ = self._call("_flash_attn_forward", tensors, call, spec)
        return out, lse

    def library_backward(self, inputs: BackwardInputs, call: PackedCall, spec: AttentionSpec) -> Gradients:
        grads = Gradients(*(torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v)))
        tensors = {
            "dout": inputs.dout,
            "q": inputs.q,
            "k": inputs.k,
            "v": inputs.v,
            "out": inputs.out,
            "softmax_lse": inputs.lse,
            "dq": grads.dq,
            "dk": grads.dk,
            "dv": grads.dv,
        }
        self._call("_flash_attn_backward", tensors, call, spec)
        return grads

    @cached_property
    def _library(self) -> ModuleType:
        return load_module(self.name, "flash_attn_interface")

    @cached_property
    def _parameters(self) -> dict[str, Mapping[str, inspect.Parameter]]:
        """Of the library's functions, by name."""
        functions = {name: getattr(self._library, name) for name in ("_flash_attn_forward", "_flash_attn_backward")}
        return {name: inspect.signature(undecorated(f)).parameters for name, f in functions.items()}

    def _call(
        self, name: str, tensors: Mapping[str, torch.Tensor | None], call: PackedCall, spec: AttentionSpec
    ) -> tuple:
        return getattr(self._library, name)(**_arguments(self._parameters[name], tensors, call, spec))


def _arguments(
    known: Mapping[str, inspect.Parameter],
    tensors: Mapping[str, torch.Tensor | None],
    call: PackedCall,
    spec: AttentionSpec,
) -> dict[str, Any]:
    causal, left, right = mask_arguments(spec, call.causal)
    arguments: dict[str, Any] = {
        **tensors,
        "cu_seqlens_q": call.q.cu_seqlens,
        "cu_seqlens_k": call.k.cu_seqlens,
        "max_seqlen_q": call.q.max_seqlen,
        "max_seqlen_k": call.k.max_seqlen,
        "softmax_scale": spec.scale,
        "is_causal" if "is_causal" in known else "causal": causal,
        "softcap": spec.softcap or 0.0,
    }
    if "window_size" in known:
        arguments["window_size"] = (left, right)
    else:
        arguments |= {"window_size_left": left, "window_size_right": right}
    # Arguments that plain attention has no use for, in versions that give them no default.
    needed = {name for name, parameter in known.items() if parameter.default is inspect.Parameter.empty}
    return dict.fromkeys(needed) | arguments
