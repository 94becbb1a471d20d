# SPDX-License-Identifier: Apache-2.0
"""The flash-attention 2 that PyTorch itself carries: always installed, slower than the libraries.

`torch.nn.attention.varlen.varlen_attn` wraps these operators. They are called directly, because its lse has no
gradient, its backward cannot be called on its own, and it refuses grouped-query attention before torch 2.12; the
operators underneath take fewer key/value heads, and give dk and dv summed over the group, in every version.
"""

from __future__ import annotations

import torch

from deepspeed_distca.attention_server.kernels.api import AttentionShape, BackwardInputs, Gradients
from deepspeed_distca.attention_server.kernels.libraries import check_flash, mask_arguments
from deepspeed_distca.attention_server.kernels.packed import PackedCall, PackedKernel
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.compat import CompatError, check
from deepspeed_distca.compat.torch import flash_attention_backward, flash_attention_forward


class TorchVarlenKernel(PackedKernel):
    """PyTorch's flash-attention operators on packed rows."""

    name = "torch_varlen"

    def missing(self) -> str | None:
        if not torch.backends.cuda.is_built():
            return "this PyTorch is built without CUDA (install a CUDA build)"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this PyTorch is built without flash-attention (install a build that has it)"
        try:
            check("torch_varlen")
        except CompatError as error:
            return str(error)
        return None

    def load(self) -> None:
        """Nothing to import: the operators come with torch."""

    def check(self, shape: AttentionShape, spec: AttentionSpec) -> None:
        check_flash(self.name, shape, spec, capabilities=(8, 9, 10, 11, 12), softcap=False)

    def library_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: PackedCall, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        causal, left, right = mask_arguments(spec, call.causal)
        out, lse, _, _, _ = flash_attention_forward(
            q,
            k,
            v,
            call.q.cu_seqlens,
            call.k.cu_seqlens,
            _max_q(call),
            call.k.max_seqlen,
            0.0,
            causal,
            False,
            scale=spec.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

    def library_backward(self, inputs: BackwardInputs, call: PackedCall, spec: AttentionSpec) -> Gradients:
        causal, left, right = mask_arguments(spec, call.causal)
        # No dropout, so the random state is never read.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=inputs.q.device)
        unused = torch.empty(0, device=inputs.q.device)
        dq, dk, dv = flash_attention_backward(
            inputs.dout,
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.out,
            inputs.lse,
            call.q.cu_seqlens,
            call.k.cu_seqlens,
            _max_q(call),
            call.k.max_seqlen,
            0.0,
            causal,
            rng_state,
            unused,
            scale=spec.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return Gradients(dq, dk, dv)


def _max_q(call: PackedCall) -> int:
    """At least 2: told that every sequence has one query, flash-attention 2 swaps heads and switches causal off."""
    return max(2, call.q.max_seqlen)
