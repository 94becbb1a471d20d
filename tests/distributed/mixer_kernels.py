# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for causal-conv1d and flash-linear-attention, which need a GPU: the same names and arguments, document by
document in torch. transformers takes them where they can be imported before its models are."""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from torch.nn import functional


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    """x [batch, channels, tokens], weight [channels, width], seq_idx int32 [batch, tokens]: a document for each run of
    one number."""
    rows = []
    for row, numbers in zip(x, [None] * len(x) if seq_idx is None else seq_idx, strict=True):
        parts = [row] if numbers is None else row.split(numbers.unique_consecutive(return_counts=True)[1].tolist(), 1)
        padded = [functional.pad(part, (weight.shape[1] - 1, 0)) for part in parts]
        rows.append(torch.cat([functional.conv1d(p, weight[:, None], bias, groups=len(weight)) for p in padded], 1))
    out = torch.stack(rows)
    return out if activation is None else getattr(functional, activation)(out)


def chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    """q, k [batch, tokens, key heads, d], v [batch, tokens, heads, dv], g and beta [batch, tokens, heads]; cu_seqlens
    [documents + 1] of a batch of one row."""
    assert not output_final_state
    if cu_seqlens is not None and len(q) != 1:
        raise ValueError(f"the batch size is expected to be 1 rather than {len(q)} when using cu_seqlens")
    if use_qk_l2norm_in_kernel:
        q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q * q.shape[-1] ** -0.5, k))
    begins = {0} if cu_seqlens is None else set(cu_seqlens.tolist())
    steps = []
    for i in range(q.shape[1]):
        if i in begins:
            state = q.new_zeros(len(q), v.shape[2], q.shape[-1], v.shape[-1])
        state = state * g[:, i, :, None, None].exp()
        change = (v[:, i] - (state * k[:, i, ..., None]).sum(-2)) * beta[:, i, :, None]
        state = state + k[:, i, ..., None] * change[..., None, :]
        steps.append((state * q[:, i, ..., None]).sum(-2))
    return torch.stack(steps, 1), None


def install() -> None:
    """Makes them importable in this process, whose models are not imported yet."""
    assert not any(name.startswith("transformers.models.lfm2.modeling") for name in sys.modules)
    for name, kernel in (("causal_conv1d", causal_conv1d_fn), ("fla", chunk_gated_delta_rule)):
        module = ModuleType(name)
        setattr(module, kernel.__name__, kernel)
        sys.modules[name] = module
