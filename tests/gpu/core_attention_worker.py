# SPDX-License-Identifier: Apache-2.0
"""Runs on every GPU of test_core_attention_gpu.py: core attention over GPUs in bf16, against fp32 and against the
same kernel on whole documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from deepspeed_distca.attention_server.core_attention import core_attention
from deepspeed_distca.attention_server.exchange.choice import make_exchange
from deepspeed_distca.attention_server.exchange.peer_copy.copies import PeerCopyExchange
from deepspeed_distca.attention_server.kernels import Kernel, make_kernel, select_kernel
from deepspeed_distca.attention_server.parts import crossings, row_cuts, two_parts
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.side_stream import SideStream
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.attention_server.steps import LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.layout import Layout, Segment
from deepspeed_distca.scheduler.balance import balance
from deepspeed_distca.scheduler.cost_model import CostModel
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.relays import RelayRule
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import home_tasks
from deepspeed_distca.scheduler.topology import Topology
from tests.distributed.ping_pong_worker import in_two
from tests.distributed.random_plans import random_layout, random_tasks
from tests.gpu import processes

Q_HEADS, KV_HEADS, DIM = 8, 2, 128


def check(seed: int = 0, kernel: str | None = None, exchange: str = "nccl", staging_mib: int = 256) -> list[dict]:
    """Relative errors of out, dq, dk, dv on this rank for every case, and the plain kernel's own errors."""
    rank, world, device, group = processes.start(120)
    moves = make_exchange(exchange, group, device, timeout=60, staging_mib=staging_mib)
    assert isinstance(moves, PeerCopyExchange) == (exchange == "peer_copy"), "the line above says why"
    chosen = select_kernel(
        kernel, device=device, dtype=torch.bfloat16, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM
    )
    rng = np.random.default_rng(seed)
    long_short = Layout.from_lengths([[8192], *[[1024] * 8] * (world - 1)])
    two = [[Segment(0, 0, 1500), Segment(1, 0, 333)], [Segment(0, 1500, 2600), Segment(2, 0, 1), Segment(3, 0, 7)]]
    spanning = Layout.from_ranks([*two, *[[]] * (world - 2)])
    cases = [
        ("balanced", long_short, None, None),
        ("spanning", spanning, None, None),
        ("window", long_short, 512, None),
    ]
    cases += [(f"random {i}", random_layout(rng, world, 6, 700), None, rng) for i in range(4)]
    side = SideStream()
    results = []
    for name, layout, window, random in cases:
        spec = AttentionSpec(DIM**-0.5, window)
        plans, relayed, sizes = [], 0, []
        for phase in ("forward", "backward"):
            if random is None:
                tasks = balance(layout, CostModel.area(Heads(Q_HEADS, KV_HEADS, DIM)), phase=phase, window=window).rows
            else:
                tasks = random_tasks(random, layout, window)
            nodes = None if random is None else Topology.of_size(2, world)
            compiler = RouteCompiler(layout, tasks, nodes, RelayRule(1, 0, carried_rows=64))
            relayed += len(compiler.relayed())
            plans.append(RankPlan(compiler.rank(rank)))
            sizes += compiler.bytes_between(Heads(Q_HEADS, KV_HEADS, DIM), phase)
        moves = moves.for_sizes(np.maximum.reduce(sizes))
        cuts = row_cuts(layout, 128)
        crossed = crossings(layout, cuts)
        halves = [
            two_parts(plan.routes, cuts, window, backward=backward, crossed=crossed)
            for plan, backward in zip(plans, (False, True), strict=True)
        ]
        in_turns = StepPlan({window: LayerPlan(*halves, moves, side)}, lambda *_: chosen)
        ways: dict[str, Callable] = {
            overlap: partial(core_attention, plan=LayerPlan.whole(*plans, moves, beside), spec=spec, kernel=chosen)
            for overlap, beside in (("none", None), ("local_first", side))
        }
        ways |= {
            f"ping_pong{', recomputed' * again}": partial(in_two, ping_pong=in_turns, spec=spec, again=again)
            for again in (False, True)
        }
        alone = _alone(layout, spec, chosen, device, seed)
        for overlap, attend in ways.items():
            errors = _errors(layout, attend, alone, rank)
            results.append({"case": f"{name}, {overlap}", "kernel": chosen.name, "relayed": relayed, **errors})
    processes.meet(group, device)
    if chosen.name != "flash_attn_4":
        return results  # the library's work buffers are made in C++
    # Other streams than this one hold next to nothing: tasks beside those at home use this one's memory.
    own = torch.cuda.current_stream(device).cuda_stream
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == device.index]
    others = sum(s["total_size"] for s in segments if s["stream"] != own)
    assert others <= 8 << 20, f"{others >> 20} MiB are held for other streams"
    return results


#: By document: q, k, v and dout; and out, dq, dk and dv of the reference kernel in fp32 and of the kernel under test.
Alone = dict[int, tuple[list[torch.Tensor], list[list[torch.Tensor]]]]


def _alone(layout: Layout, spec: AttentionSpec, kernel: Kernel, device: torch.device, seed: int) -> Alone:
    """Every document alone, of random numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    lengths: dict[int, int] = {}
    for _, document, start, length in layout.segments.tolist():
        lengths[document] = max(lengths.get(document, 0), start + length)
    shapes = [(Q_HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (Q_HEADS, DIM)]
    found: Alone = {}
    for d, n in sorted(lengths.items()):
        tensors = [torch.randn(n, *s, generator=generator, device=device).bfloat16() for s in shapes]
        layout_d = Layout.from_lengths([[n]])
        part = RankPlan(RouteCompiler(layout_d, home_tasks(layout_d, spec.window)).rank(0))
        local = LayerPlan.whole(part, part)
        results = [
            _run([t.to(dtype) for t in tensors], partial(core_attention, plan=local, spec=spec, kernel=k))
            for dtype, k in ((torch.float32, make_kernel("reference")), (torch.bfloat16, kernel))
        ]
        found[d] = tensors, results
    return found


def _errors(layout: Layout, attend: Callable, alone: Alone, rank: int) -> dict[str, float]:
    """Of this rank's rows, by `attend` and by the kernel alone."""
    segments = layout.rank(rank)

    def pick(get: Callable[[int], torch.Tensor]) -> torch.Tensor:
        return torch.cat([get(d)[a : a + n] for d, a, n in segments] or [get(0)[:0]])

    got = _run([pick(lambda d, i=i: alone[d][0][i]) for i in range(4)], attend)
    errors = {}
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        exact, plain = (pick(lambda d, i=i, j=j: alone[d][1][j][i]).double() for j in (0, 1))
        norm = exact.norm().clamp_min(0.01 * max(1, exact.numel()) ** 0.5)
        errors[name] = float((got[i].double() - exact).norm() / norm)
        errors[f"{name}_plain"] = float((plain - exact).norm() / norm)
        assert torch.isfinite(got[i]).all(), name
    return errors


def _run(tensors: list[torch.Tensor], attend: Callable) -> list[torch.Tensor]:
    *given, dout = tensors
    leaves = [t.clone().requires_grad_() for t in given]
    out, _ = attend(*leaves)
    out.backward(dout)
    return [out.detach(), *(t.grad for t in leaves)]
