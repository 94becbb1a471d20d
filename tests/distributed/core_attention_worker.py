# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of test_core_attention.py: random plans against dense attention of each document alone."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.core_attention import core_attention
from deepspeed_distca.attention_server.exchange.process_group import PeerToPeerExchange
from deepspeed_distca.attention_server.kernels import make_kernel
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.side_stream import SideStream
from deepspeed_distca.attention_server.steps import LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.relays import RelayRule
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import home_tasks
from deepspeed_distca.scheduler.topology import Topology
from tests.distributed.random_plans import random_layout, random_tasks, texts_of, visible


def dense(q, k, v, spec: AttentionSpec, seen: np.ndarray):
    """Softmax attention of one document [L, heads, dim] in float64, with an explicit mask of what each row sees, and
    the window beside."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    mask = torch.from_numpy(~seen)
    if spec.window is not None:
        i = torch.from_numpy(seen.sum(axis=1))  # positions in the text, from 1
        mask |= i[None, :] <= i[:, None] - spec.window
    scores = scores.masked_fill(mask, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), torch.logsumexp(scores, -1)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Error relative to the norm; values are of order 1, and a gradient that is exactly zero counts as that small."""
    floor = 0.01 * b.numel() ** 0.5
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(floor)) if b.numel() else 0.0


def check(seed: int, cases: int, dtype: str = "float32") -> dict[str, float]:
    """The largest relative error of out, lse, dq, dk, dv over the cases, on this rank; and as "…_ratio" the largest
    quotient of that error and the error that the same kernel makes in the same dtype on each document alone. And as
    "relayed" how many runs of keys reached some server by way of another, as "carried" in how many plans this rank had
    keys for others alone, as "trees" how many layouts had any; their ratios are apart, as "…_tree_ratio"."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange = PeerToPeerExchange(dist.group.WORLD)
    kernel = make_kernel("reference")
    names = ("out", "lse", "dq", "dk", "dv")
    ratios = (f"{name}_{kind}" for name in names for kind in ("ratio", "tree_ratio"))
    worst = dict.fromkeys((*names, *ratios, "relayed", "carried", "trees"), 0.0)
    for case in range(cases):
        rng = np.random.default_rng((seed, case))
        spec = AttentionSpec(
            scale=float(rng.uniform(0.1, 0.5)),
            window=None if rng.random() < 0.6 else int(rng.integers(1, 40)),
            softcap=None if rng.random() < 0.7 else 5.0,
        )
        trees = 0.0 if case % 2 else 0.6
        counts = dict(documents=int(rng.integers(1, 7)), longest=int(rng.integers(1, 80)))
        layout = random_layout(rng, world, **counts, trees=trees)
        worst["trees"] += layout.has_trees
        q_heads, kv_heads = [(4, 2), (2, 2), (3, 1)][int(rng.integers(3))]
        dim, v_dim = [(8, 8), (16, 8)][int(rng.integers(2))]
        plans = []
        for _ in range(2):  # forward and backward follow different plans
            layer = layout.for_window(spec.window)
            tasks = random_tasks(rng, layer, spec.window, stay=float(rng.choice([0.0, 0.5, 0.9])))
            rule = RelayRule(1, int(rng.integers(0, 3)), int(rng.choice([1, 8, 4096])))
            nodes = Topology.of(rng.integers(0, 2, world).tolist()) if rng.random() < 0.5 else None
            compiler = RouteCompiler(layer, tasks, nodes, rule)
            worst["relayed"] += len(compiler.relayed())
            alone = RouteCompiler(layer, tasks, nodes, rule._replace(carried_rows=2**40))
            worst["carried"] += compiler.rank(rank).work_kv_rows > alone.rank(rank).work_kv_rows
            plans.append(RankPlan(compiler.rank(rank)))
        exchange.early = bool(rng.random() < 0.5)
        plan = LayerPlan.whole(*plans, exchange, SideStream() if rng.random() < 0.5 else None)
        compare(layout, plan, spec, kernel, rank, (q_heads, kv_heads, dim, v_dim), rng, worst, getattr(torch, dtype))
    dist.barrier()
    return worst


def compare(layout: Layout, plan, spec, kernel, rank, shape, rng, worst, dtype, attend=core_attention) -> None:
    """Runs one case on this rank and enters its errors among the worst, by the names of :func:`check`."""
    q_heads, kv_heads, dim, v_dim = shape
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
    lengths = {}
    for _, document, start, length in layout.segments.tolist():
        lengths[document] = max(lengths.get(document, 0), start + length)
    make = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    whole = {}
    for document in sorted(lengths):
        n = lengths[document]
        tensors = [make(n, q_heads, dim), make(n, kv_heads, dim), make(n, kv_heads, v_dim)]
        grads = [make(n, q_heads, v_dim), make(q_heads, n)]
        leaves = [t.double().requires_grad_() for t in tensors]
        out, lse = dense(*leaves, spec, visible(layout, document, n))
        use_lse = document % 2 == 0  # lse's gradient is used in some documents only
        loss = (out * grads[0].double()).sum() + ((lse * grads[1].double()).sum() if use_lse else 0.0)
        expected = torch.autograd.grad(loss, leaves)
        plain = _texts_alone(tensors, grads, use_lse, spec, kernel, visible(layout, document, n))
        whole[document] = (tensors, grads, out, lse, expected, use_lse, plain)

    segments = layout.rank(rank)
    rows = lambda pick: torch.cat([pick(d)[a : a + n] for d, a, n in segments])  # noqa: E731
    empty = [(0, q_heads, dim), (0, kv_heads, dim), (0, kv_heads, v_dim)]
    q, k, v = (
        (rows(lambda d, i=i: whole[d][0][i]) if segments else torch.zeros(empty[i], dtype=dtype)).requires_grad_()
        for i in range(3)
    )
    out, lse = attend(q, k, v, plan, spec, kernel)
    use_lse = any(entry[5] for entry in whole.values())
    dout = rows(lambda d: whole[d][1][0]) if segments else torch.zeros_like(out)
    dlse = torch.zeros_like(lse)
    row = 0
    for d, a, n in segments:
        if whole[d][5]:
            dlse[:, row : row + n] = whole[d][1][1][:, a : a + n]
        row += n
    loss = (out * dout).sum() + ((lse * dlse).sum() if use_lse else 0.0)
    loss.backward()
    if segments:
        expected = {
            "out": rows(lambda d: whole[d][2]),
            "lse": rows(lambda d: whole[d][3].t()).t(),
            **{name: rows(lambda d, i=i: whole[d][4][i]) for i, name in enumerate(("dq", "dk", "dv"))},
        }
        got = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
        for name, value in got.items():
            assert torch.isfinite(value).all(), name
            error = relative(value, expected[name])
            worst[name] = max(worst[name], error)
            alone = rows(lambda d, name=name: whole[d][6][name].t() if name == "lse" else whole[d][6][name])
            alone = alone.t() if name == "lse" else alone
            # Below one rounding of the dtype there is nothing to compare.
            floor = torch.finfo(dtype).eps / 4
            ratio = f"{name}_tree_ratio" if layout.has_trees else f"{name}_ratio"
            worst[ratio] = max(worst[ratio], error / max(relative(alone, expected[name]), floor))


def _texts_alone(tensors, grads, use_lse: bool, spec: AttentionSpec, kernel, seen) -> dict[str, torch.Tensor]:
    """:func:`_alone` of every text of a tree, from its root to where nothing goes on: results of each row by the first
    text that has it, and the sum of all texts' gradients. A document that is no tree is one text."""
    rows = texts_of(seen)
    if len(rows) <= 1:
        return _alone(tensors, grads, use_lse, spec, kernel)
    found = {
        name: torch.zeros_like(t, dtype=torch.float64) for name, t in zip(("dq", "dk", "dv"), tensors, strict=True)
    }
    found |= {"out": torch.zeros_like(grads[0]), "lse": torch.zeros_like(grads[1], dtype=torch.float32)}
    told: set[int] = set()
    for text in map(torch.from_numpy, rows):
        new = torch.tensor([i not in told for i in text.tolist()])
        told.update(text.tolist())
        one = grads[0][text] * new[:, None, None], grads[1][:, text] * new
        alone = _alone([t[text] for t in tensors], one, use_lse, spec, kernel)
        for name in ("dq", "dk", "dv"):
            found[name].index_add_(0, text, alone[name].double())
        found["out"][text[new]] = alone["out"][new]
        found["lse"][:, text[new]] = alone["lse"][:, new]
    return {name: x.to(tensors[0].dtype) if name[0] == "d" else x for name, x in found.items()}


def _alone(tensors, grads, use_lse: bool, spec: AttentionSpec, kernel) -> dict[str, torch.Tensor]:
    """The kernel on one whole document in its own dtype, without a server: what any run of it costs in accuracy."""
    layout = Layout.from_lengths([[len(tensors[0])]])
    part = RankPlan(RouteCompiler(layout, home_tasks(layout, spec.window)).rank(0))
    leaves = [t.clone().requires_grad_() for t in tensors]
    out, lse = core_attention(*leaves, LayerPlan.whole(part, part), spec, kernel)
    loss = (out * grads[0]).sum() + ((lse * grads[1]).sum() if use_lse else 0.0)
    dq, dk, dv = torch.autograd.grad(loss, leaves)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
