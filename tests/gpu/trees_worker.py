# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of test_trees_gpu.py, or in its own process: core attention of trees in bf16, against every text
alone, in fp32 and by the same kernel."""

from __future__ import annotations

import os

import numpy as np
import torch

from deepspeed_distca.attention_server.core_attention import core_attention
from deepspeed_distca.attention_server.exchange.base import NoExchange
from deepspeed_distca.attention_server.exchange.choice import make_exchange
from deepspeed_distca.attention_server.kernels import Kernel, make_kernel, select_kernel
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.side_stream import SideStream
from deepspeed_distca.attention_server.steps import LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import home_tasks
from tests.distributed.random_plans import random_layout, random_tasks, visible
from tests.gpu import processes

Q_HEADS, KV_HEADS, DIM = 8, 2, 128
HEADS = Heads(Q_HEADS, KV_HEADS, DIM)
NAMES = ("out", "dq", "dk", "dv")


def check(seed: int, kernel: str) -> list[dict]:
    """Relative errors of out, dq, dk, dv on this rank for every case, and the plain kernel's own errors."""
    rank, world, device, group, moves = 0, 1, torch.device("cuda", 0), None, NoExchange()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        rank, world, device, group = processes.start(120)
        moves = make_exchange("peer_copy", group, device, timeout=60, staging_mib=256)
    chosen = select_kernel(
        kernel, device=device, dtype=torch.bfloat16, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM
    )
    rng = np.random.default_rng(seed)
    prompts = [[(900, None), *[(200, 0)] * 6], [(2047, None), (513, 0), (100, 1), (77, 1), (300, 0)]]
    answers = Layout.from_trees([[*prompts, 640], *[[300, 64]] * (world - 1)])
    cases = [("answers", answers, False, None), ("answers, moved", answers, True, None)]
    cases += [("window", answers, False, 256), ("window, moved", answers, True, 256)]
    cases += [(f"random {i}", random_layout(rng, world, 6, 700, trees=0.7), True, None) for i in range(4)]
    found = []
    for name, whole, moved, window in cases:
        plans, sizes, layout = [], [], whole.for_window(window)
        for phase in ("forward", "backward"):
            tasks = random_tasks(rng, layout, window) if moved else home_tasks(layout, window)
            compiler = RouteCompiler(layout, tasks)
            plans.append(RankPlan(compiler.rank(rank)))
            sizes += compiler.bytes_between(HEADS, phase)
        plan = LayerPlan.whole(*plans, moves.for_sizes(np.maximum.reduce(sizes)), SideStream())
        found.append({"case": name, **_case(whole, plan, window, chosen, rank, device, seed)})
    if group is not None:
        processes.meet(group, device)
    return found


def _case(
    layout: Layout,
    plan: LayerPlan,
    window: int | None,
    kernel: Kernel,
    rank: int,
    device: torch.device,
    seed: int,
) -> dict:
    generator = torch.Generator(device).manual_seed(seed)
    spec, reference = AttentionSpec(DIM**-0.5, window), make_kernel("reference")
    shapes = [(Q_HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (Q_HEADS, DIM)]  # q, k, v, dout
    lengths: dict[int, int] = {}
    for _, document, start, length in layout.segments.tolist():
        lengths[document] = max(lengths.get(document, 0), start + length)
    whole, alone = {}, {}
    for d, n in sorted(lengths.items()):
        whole[d] = [torch.randn(n, *s, generator=generator, device=device).bfloat16() for s in shapes]
        seen = visible(layout, d, n)
        alone[d] = [
            _texts(seen, [t.to(dtype) for t in whole[d]], spec, k)
            for dtype, k in ((torch.float32, reference), (torch.bfloat16, kernel))
        ]
    segments = layout.rank(rank)

    def pick(get) -> torch.Tensor:
        return torch.cat([get(d)[a : a + n] for d, a, n in segments] or [get(0)[:0]])

    got = _run(*(pick(lambda d, i=i: whole[d][i]) for i in range(4)), plan, spec, kernel)
    errors = {}
    for i, name in enumerate(NAMES):
        exact, plain = (pick(lambda d, i=i, j=j: alone[d][j][i]).double() for j in (0, 1))
        norm = exact.norm().clamp_min(0.01 * max(1, exact.numel()) ** 0.5)
        errors[name] = float((got[i].double() - exact).norm() / norm)
        errors[f"{name}_plain"] = float((plain - exact).norm() / norm)
        assert torch.isfinite(got[i]).all(), name
    return errors


def _texts(seen: np.ndarray, tensors: list[torch.Tensor], spec: AttentionSpec, kernel: Kernel) -> list[torch.Tensor]:
    """out, dq, dk, dv of a document, each of whose texts is run alone: each row's results by the first text that has
    it, and the sum of all texts' gradients."""
    q, k, v, dout = tensors
    found = [torch.zeros_like(dout), *(torch.zeros_like(t, dtype=torch.float32) for t in (q, k, v))]
    told = np.zeros(len(seen), dtype=bool)
    for last in range(len(seen)):
        if seen[last + 1 :, last].any():
            continue  # others go on from it
        rows = np.flatnonzero(seen[last])
        new = torch.from_numpy(~told[rows]).to(q.device)
        told[rows] = True
        index = torch.from_numpy(rows).to(q.device)
        layout = Layout.from_lengths([[len(rows)]])
        part = RankPlan(RouteCompiler(layout, home_tasks(layout, spec.window)).rank(0))
        given = [t[index] for t in tensors[:3]], dout[index] * new[:, None, None]
        out, *gradients = _run(*given[0], given[1], LayerPlan.whole(part, part), spec, kernel)
        found[0][index[new]] = out[new]
        for total, gradient in zip(found[1:], gradients, strict=True):
            total.index_add_(0, index, gradient.float())
    return [t.to(q.dtype) for t in found]


def _run(q, k, v, dout, plan: LayerPlan, spec: AttentionSpec, kernel: Kernel) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, _ = core_attention(*leaves, plan, spec, kernel)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]
