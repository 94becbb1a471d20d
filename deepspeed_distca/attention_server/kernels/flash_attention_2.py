# SPDX-License-Identifier: Apache-2.0
"""flash-attention 2 (the distribution `flash-attn`), on packed rows."""

from __future__ import annotations

from functools import cached_property
from types import ModuleType

import torch

from deepspeed_distca.attention_server.kernels.api import AttentionShape, BackwardInputs, Gradients
from deepspeed_distca.attention_server.kernels.libraries import (
    check_flash,
    distribution_version,
    load_module,
    mask_arguments,
    missing_distribution,
)
from deepspeed_distca.attention_server.kernels.packed import PackedCall, PackedKernel
from deepspeed_distca.attention_server.task_batch import AttentionSpec

DISTRIBUTION = "flash-attn"
# From here on the low-level functions take window_size_left and window_size_right, and return four values.
MIN_VERSION = (2, 7)


class FlashAttention2Kernel(PackedKernel):
    """The low-level varlen functions of flash-attention 2."""

    name = "flash_attn_2"

    def missing(self) -> str | None:
        version = distribution_version(DISTRIBUTION)
        if version is None:
            return missing_distribution(DISTRIBUTION, "pip install flash-attn --no-build-isolation")
        parts = version.split(".")[:2]
        if not all(part.isdigit() for part in parts) or tuple(map(int, parts)) < MIN_VERSION:
            return f"{DISTRIBUTION} {version} is installed and 2.7 or later is needed (upgrade it)"
        return None

    def load(self) -> None:
        _ = self._library

    def check(self, shape: AttentionShape, spec: AttentionSpec) -> None:
        check_flash(self.name, shape, spec, capabilities=(8, 9, 10, 11, 12))

    def library_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: PackedCall, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, _, _ = self._library._flash_attn_varlen_forward(q, k, v, **self._arguments(call, spec))
        return out, lse

    def library_backward(self, inputs: BackwardInputs, call: PackedCall, spec: AttentionSpec) -> Gradients:
        grads = Gradients(*(torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v)))
        self._library._flash_attn_varlen_backward(
            inputs.dout,
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.out,
            inputs.lse,
            grads.dq,
            grads.dk,
            grads.dv,
            **self._arguments(call, spec),
            deterministic=False,
        )
        return grads

    @cached_property
    def _library(self) -> ModuleType:
        return load_module(self.name, "flash_attn.flash_attn_interface")

    @staticmethod
    def _arguments(call: PackedCall, spec: AttentionSpec) -> dict:
        causal, left, right = mask_arguments(spec, call.causal)
        return {
            "cu_seqlens_q": call.q.cu_seqlens,
            "cu_seqlens_k": call.k.cu_seqlens,
            # At least 2: told that every sequence has one query, the library swaps heads and switches causal off.
            "max_seqlen_q": max(2, call.q.max_seqlen),
            "max_seqlen_k": call.k.max_seqlen,
            "dropout_p": 0.0,
            "softmax_scale": spec.scale,
            "causal": causal,
            "window_size_left": left,
            "window_size_right": right,
            "softcap": spec.softcap or 0.0,
            "alibi_slopes": None,
        }
