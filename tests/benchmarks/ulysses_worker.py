# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: the benchmark's Ulysses attention against its plain one, on the same rows."""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist

from tests.distributed.harness import ROOT


def errors(lengths: list[list[int]], q_heads: int, kv_heads: int, head_dim: int) -> dict[str, float]:
    """Relative errors of out and of the gradients of q, k and v on this rank; fp32."""
    deepspeed.init_distributed("gloo")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from steps.batches import Batch
    from steps.variants import PlainAttention, UlyssesAttention

    from deepspeed_distca.layout import Layout

    rank = dist.get_rank()
    batch = Batch("some", "some", Layout.from_lengths(lengths))
    generator = torch.Generator().manual_seed(rank)
    tokens = sum(lengths[rank])
    shapes = [(1, heads, tokens, head_dim) for heads in (q_heads, kv_heads, kv_heads)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    dout = torch.randn((1, tokens, q_heads, head_dim), generator=generator)
    found = []
    for attention in (PlainAttention(), UlyssesAttention()):
        attention.use(batch, rank)
        leaves = [v.clone().requires_grad_() for v in values]
        out, _ = attention(None, *leaves, None, scaling=0.3)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
        assert attention.timer.seconds[0] > 0
    names = ("out", "dq", "dk", "dv")
    return {n: float((a - b).norm() / b.norm()) for n, b, a in zip(names, *found, strict=True)}
