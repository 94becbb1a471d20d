# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of test_ping_pong.py: two nano-batches against documents run alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed_distca
from deepspeed_distca.attention_server.exchange.process_group import PeerToPeerExchange
from deepspeed_distca.attention_server.kernels import make_kernel
from deepspeed_distca.attention_server.nano_batches import NanoPair
from deepspeed_distca.attention_server.parts import crossings, row_cuts, two_parts
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.side_stream import SideStream
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.attention_server.steps import LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.huggingface.kept_attention import KeptAttention
from deepspeed_distca.huggingface.turns import Turns
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.relays import RelayRule
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.topology import Topology
from tests.distributed import model_families, models_worker
from tests.distributed.core_attention_worker import compare
from tests.distributed.engine_worker import (
    counting,
    documents_of,
    ds_config,
    enable_checkpointing,
    kept,
    reference,
    tiny_llama,
)
from tests.distributed.operation_order import recorded
from tests.distributed.random_plans import random_layout, random_tasks


def check_plans(seed: int, cases: int, dtype: str = "float32") -> dict[str, float]:
    """Random plans in two nano-batches with random cuts, every second one with its layer recomputed in backward: see
    ``core_attention_worker.check``. And how many layouts had a document whose first half needs keys of another's
    second half, as "crossing", and how many of them were recomputed, as "again"."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange = PeerToPeerExchange(dist.group.WORLD)
    kernel = make_kernel("reference")
    names = ("out", "lse", "dq", "dk", "dv")
    worst = dict.fromkeys(
        (*names, *(f"{name}_ratio" for name in names), "relayed", "carried", "crossing", "again", "shared"), 0.0
    )
    for case in range(cases):
        rng = np.random.default_rng((seed, case))
        spec = AttentionSpec(
            scale=float(rng.uniform(0.1, 0.5)),
            window=None if rng.random() < 0.6 else int(rng.integers(1, 40)),
            softcap=None if rng.random() < 0.7 else 5.0,
        )
        layout = random_layout(rng, world, documents=int(rng.integers(1, 7)), longest=int(rng.integers(1, 80)))
        cuts = row_cuts(layout, granularity=int(rng.choice([1, 8])))
        if rng.random() < 0.7:
            cuts = np.array([int(rng.integers(0, n + 1)) for n in layout.tokens], dtype=np.int64)
        crossed, again = crossings(layout, cuts), bool(case % 2)
        worst["crossing"] += crossed[0]
        worst["again"] += crossed[0] and again
        plans = []
        for _ in range(2):  # forward and backward follow different plans
            tasks = random_tasks(rng, layout, spec.window, stay=float(rng.choice([0.0, 0.5, 0.9, 1.0])))
            rule = RelayRule(1, int(rng.integers(0, 3)), int(rng.choice([1, 8, 4096])))
            nodes = Topology.of(rng.integers(0, 2, world).tolist()) if rng.random() < 0.5 else None
            compiler = RouteCompiler(layout, tasks, nodes, rule)
            worst["relayed"] += len(compiler.relayed())
            alone = RouteCompiler(layout, tasks, nodes, rule._replace(carried_rows=2**40))
            worst["carried"] += compiler.rank(rank).work_kv_rows > alone.rank(rank).work_kv_rows
            plans.append(RankPlan(compiler.rank(rank)))
        divided = [
            two_parts(plan.routes, cuts, spec.window, backward=backward, crossed=crossed)
            for plan, backward in zip(plans, (False, True), strict=True)
        ]
        worst["shared"] += len(divided[1].parts[0].shared)
        ping_pong = StepPlan({spec.window: LayerPlan(*divided, exchange, None)}, lambda *_: kernel)
        shape = *[(4, 2), (2, 2), (3, 1)][int(rng.integers(3))], *[(8, 8), (16, 8)][int(rng.integers(2))]
        plan = LayerPlan.whole(*plans, exchange, SideStream())

        def attend(q, k, v, plan, spec, kernel, ping_pong=ping_pong, again=again):
            return in_two(q, k, v, ping_pong, spec, again=again)

        compare(layout, plan, spec, kernel, rank, shape, rng, worst, getattr(torch, dtype), attend)
    dist.barrier()
    return worst


def in_two(q, k, v, ping_pong: StepPlan, spec: AttentionSpec, *, again: bool = False):
    """Core attention of a rank's rows by two nano-batches, as two halves of a model would ask for it; in a checkpoint
    whose recomputation computes it again, or without."""
    turns = Turns(q.device)
    pair = NanoPair(ping_pong, turns.hand_over)
    kept, layer = KeptAttention(lambda: 0), nn.Module()

    def attend(nano: int, *given: torch.Tensor):
        if not again:
            return pair.plans[nano].attend(*given, spec)
        recomputed = lambda *rows: kept.attend(layer, pair.plans[nano], *(2 * x for x in rows), spec)  # noqa: E731
        return checkpoint(recomputed, *(x / 2 for x in given), use_reentrant=False)

    def half(nano: int):
        cut = ping_pong.rows[0]
        rows = slice(0, cut) if nano == 0 else slice(cut, None)
        real = len(q[rows])
        given = [t[rows] if real else torch.cat([t[:0], t.new_zeros((1, *t.shape[1:]))]) for t in (q, k, v)]
        out, lse = attend(nano, *given)
        return tuple(pair.close(nano, [out[:real], lse[:, :real]]))

    (out_0, lse_0), (out_1, lse_1) = turns.run(lambda: half(0), lambda: half(1))
    return torch.cat([out_0, out_1]), torch.cat([lse_0, lse_1], dim=1)


def train_cases(cases: list[dict]) -> list[dict]:
    """Each case: a step of a tiny Llama in two nano-batches against its documents run alone; see ``train_once``."""
    deepspeed.init_distributed("gloo")
    return [train_once(**case) for case in cases]


def train_once(
    layouts: list,
    *,
    zero: int = 1,
    checkpointing: bool | str = False,
    seed: int = 0,
    frozen: str = "",
    model: dict | None = None,
    servers: int | None = None,
    block: dict | None = None,
    unable: Sequence[int] = (),
    compiled: int | None = None,
    room: int | None = None,
) -> dict:
    """Loss and gradients of the second step over the layouts (one per micro-batch). The first step, with a learning
    rate of 0, begins with the forward that runs whole.

    Args:
        frozen: parameters whose name contains it are not trained.
        model: options of the model's configuration.
        servers: of a group, if not all ranks.
        block: further options of the plugin's.
        checkpointing: whether, or how ("reentrant", "deepspeed").
        unable: ranks that find that they cannot run two nano-batches.
        compiled: engine.compile() comes after so many forwards.
        room: there is memory to keep the attention of so many layers.
    """
    rng = np.random.default_rng(seed)
    layouts = [Layout.from_ranks(ranks).validate() for ranks in layouts]
    batches = [documents_of(layout, rng) for layout in layouts]
    options = model or {}
    expected_loss, expected = reference(tiny_llama(seed, **options), batches)
    engine = engine_of(zero, len(layouts), checkpointing, seed, frozen, options, servers=servers, **(block or {}))
    if dist.get_rank() in unable:
        engine.distca._overlap.ping_pong.problem = "there is none"
    if room is not None:
        engine.distca._kept_layers.affordable = lambda tokens: room + dist.get_rank()
    parts = [rank_batch(d, layout, servers) for d, layout in zip(batches, layouts, strict=True)]
    step_targets = sum(part["num_targets"] for part in parts)
    losses, splits, gradients = [], [], {}
    for step in range(2):
        for index, part in enumerate(parts):
            if len(splits) == compiled:
                engine.compile(backend="eager")
            output = engine(**part, step_targets=step_targets)
            splits.append(split(engine))
            if step:
                losses.append(output.loss.detach())
            with counting() as counts:
                engine.backward(output.loss)
            if step and index == len(parts) - 1:
                trained = {n for n, p in engine.module.named_parameters() if p.requires_grad}
                expected = {n: g for n, g in expected.items() if n in trained}
                gradients = full_gradients(engine, trained)
            engine.step()
    total = torch.stack(losses).mean()
    dist.all_reduce(total)
    error, parameter = models_worker.worst_error(expected, gradients)
    return {
        "loss": float(total) / dist.get_world_size(),
        "expected": expected_loss,
        "gradient_error": error,
        "parameter": parameter,
        "splits": splits,
        "again": counts["attention"],  # in the last backward, attention of a nano-batch's layer
        "left": sum(kept()) if room is not None else 0,
        "logits": list(output.logits.shape),
    }


def split(engine) -> bool:
    """Whether the last training forward was in two nano-batches."""
    ping_pong = engine.distca._overlap.ping_pong
    return ping_pong is not None and ping_pong.split


def rank_batch(documents: dict[int, list[int]], layout: Layout, servers: int | None) -> dict:
    """This rank's batch; with groups of servers each rank describes its own documents."""
    rank = dist.get_rank()
    batch = batch_from_layout(documents, layout, rank)
    if servers:
        batch["layout"] = Layout.from_lengths([[s.length for s in layout.rank(rank)]])
    return batch


def full_gradients(engine, names: set[str]) -> dict[str, torch.Tensor]:
    """Averaged gradients of these parameters, before the optimizer's step."""
    chosen = {n: p for n, p in engine.module.named_parameters() if n in names}
    if engine.zero_optimization_stage() == 0:
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in chosen.items()}
    return {n: safe_get_full_grad(p).clone() for n, p in chosen.items()}


def engine_of(
    zero: int,
    accumulation: int = 1,
    checkpointing: bool | str = False,
    seed: int = 0,
    frozen: str = "",
    options=None,
    **block,
):
    """An engine of a tiny Llama in two nano-batches that learns nothing; ZeRO-3 frees parameters after every use."""
    llama = tiny_llama(seed, **(options or {}))
    for name, parameter in llama.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    enable_checkpointing(llama, {False: "off", True: "non-reentrant"}.get(checkpointing, checkpointing))
    config = ds_config(zero, accumulation, {"advanced": {"granularity": 8}, "overlap": "ping_pong", **block}, lr=0.0)
    if zero == 3:
        config["zero_optimization"] |= dict.fromkeys(
            ("stage3_param_persistence_threshold", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"), 0
        )
    config["distca"] = {key: value for key, value in config["distca"].items() if value is not None}
    engine, *_ = deepspeed.initialize(model=llama, config=config)
    engine.train()
    return engine


def families(names: list[str], zero: int = 0, checkpointing: bool = False) -> list[dict]:
    """Many small decoders: errors of the second step, in two nano-batches, against documents run alone."""
    deepspeed.init_distributed("gloo")
    results = []
    for seed, name in enumerate(names):
        try:
            results.append(_family(name, seed, zero, checkpointing))
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            # The other rank meets the same; the test names all families that fail, not the first.
            results.append({"name": name, "error": f"{type(error).__name__}: {error}"})
    return results


def _family(name: str, seed: int, zero: int, checkpointing: bool) -> dict:
    model = model_families.build(*model_families.EXACT[name], seed)
    layout = Layout.from_ranks(models_worker.LAYOUT).validate()
    documents = documents_of(layout, np.random.default_rng(seed))
    expected_loss, expected = reference(copy.deepcopy(model), [documents])
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = ds_config(zero, 1, {**models_worker.DISTCA, "overlap": "ping_pong"}, lr=0.0)
    if zero == 3:  # parameters are freed after their use, and modules of experts are looked into
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "leaf_module": {"classes": []}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.train()
    batch = batch_from_layout(documents, layout, dist.get_rank())
    for _ in range(2):
        loss = engine(**batch).loss
        engine.backward(loss)
        given = full_gradients(engine, set(expected))
        engine.step()
    error, parameter = models_worker.worst_error(expected, given)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {
        "name": name,
        "split": engine.distca._overlap.ping_pong.split,
        "loss_error": abs(float(total) / dist.get_world_size() - expected_loss),
        "gradient_error": error,
        "parameter": parameter,
    }


def refusals() -> dict:
    """What is refused, in which words; and what is left after detach()."""
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    batch = packed_batch([[100], [20, 30, 50]][rank])
    found = {}

    engine = engine_of(1, checkpointing="reentrant")
    found["reentrant"] = _refused(engine, batch)

    engine = engine_of(1, checkpointing="deepspeed")
    found["deepspeed"] = _refused(engine, batch)

    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
    rope |= {"original_max_position_embeddings": 64, "factor": 2.0}
    try:
        engine_of(1, options={"rope_parameters": rope})
    except ValueError as error:
        found["longrope"] = str(error)
    try:
        model = model_families.build(*model_families.EXACT["Mixtral"])
        deepspeed.initialize(model=model, config=ds_config(3, 1, {"overlap": "ping_pong"}))
    except ValueError as error:
        found["leaf"] = str(error)

    engine = engine_of(1)
    bad = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "position_ids": torch.zeros(3, 1, 8, dtype=torch.int64)}
    found["bad first input"] = _refused(engine, bad if rank == 0 else batch)
    found["splits afterwards"] = []
    for _ in range(2):
        engine.backward(engine(**batch).loss)
        engine.step()
        found["splits afterwards"].append(engine.distca._overlap.ping_pong.split)

    plain = deepspeed.initialize(model=tiny_llama(), config=ds_config(3, 1, None))[0]
    engine = engine_of(3)
    for _ in range(2):
        engine.backward(engine(**batch).loss)
        engine.step()
    engine.eval()
    plain.eval()
    tokens = torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = plain(input_ids=tokens, use_cache=False).logits
        found["evaluation_error"] = float((engine(input_ids=tokens).logits - expected).abs().max())
        generated = [e.module.generate(tokens, max_new_tokens=4, do_sample=False) for e in (engine, plain)]
        found["generated_same"] = bool(torch.equal(*generated))
    assert "forward" in engine.module.model.__dict__
    engine.distca.detach()
    found["restored"] = "forward" not in engine.module.model.__dict__
    hooks = lambda e: sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in e.module.modules())  # noqa: E731
    found["hooks_left"] = hooks(engine) - hooks(plain)
    return found


def _refused(engine, batch: dict) -> str:
    try:
        engine(**batch)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "not refused"


def packed_batch(lengths: list[int], seed: int = 0) -> dict:
    rng = np.random.default_rng((seed, *lengths))
    return deepspeed_distca.PackedSequenceCollator()([{"input_ids": rng.integers(0, 97, size=n)} for n in lengths])


def outputs() -> dict:
    """A batch of three rows through a model of experts that returns all it can, whole and in two nano-batches: the
    largest difference of each of its outputs."""
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(1, 97, (3, 40), generator=generator)
    # Rank 0 has rows of one document, rank 1 of many; no position ids on rank 0.
    batch = {"input_ids": ids, "labels": ids}
    if rank == 1:
        batch["position_ids"] = torch.arange(40).remainder(8).expand(3, 40)
    model = model_families.build(*model_families.EXACT["OLMoE"], seed=3)
    block = {"advanced": {"granularity": 4, "tolerance": 0.0}, "overlap": "ping_pong"}
    engine = deepspeed.initialize(model=model, config=ds_config(1, 1, block, lr=0.0))[0]
    engine.train()
    found, split = [], []
    for _ in range(2):
        output = engine(**batch, output_hidden_states=True, output_router_logits=True)
        split.append(engine.distca._overlap.ping_pong.split)
        engine.backward(output.loss)
        engine.step()
        found.append(output)
    errors = {}
    for key, whole in found[0].items():
        pairs = zip(whole, found[1][key], strict=True) if isinstance(whole, tuple) else [(whole, found[1][key])]
        errors[key] = max(float((a - b).detach().abs().max()) if a.shape == b.shape else 1e9 for a, b in pairs)
    return {"split": split, "errors": errors}


def autocast() -> dict:
    """Losses under DeepSpeed's autocast to bf16."""
    deepspeed.init_distributed("gloo")
    batch = packed_batch([[100], [20, 30, 50]][dist.get_rank()])
    found = {}
    for overlap_name in ("none", "ping_pong"):
        block = {"advanced": {"granularity": 8}, "overlap": overlap_name}
        more = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        engine = deepspeed.initialize(model=tiny_llama(), config=ds_config(1, 1, block, lr=0.0, **more))[0]
        engine.train()
        for _ in range(2):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        found[overlap_name] = float(loss.detach())
    return {**found, "split": engine.distca._overlap.ping_pong.split}


def operations(
    layouts: list, zero: int, checkpointing: bool, node_size: int | None, keep_attention: bool
) -> list[dict]:
    """The communication of a step in two nano-batches, in the order in which this rank issues it, as JSON."""
    deepspeed.init_distributed("gloo")
    advanced = {"granularity": 8, "node_size": node_size}
    block = {"advanced": advanced, "keep_attention": keep_attention}
    engine = engine_of(zero, len(layouts), checkpointing, options={"num_hidden_layers": 3}, **block)
    rng = np.random.default_rng(0)
    layouts = [Layout.from_ranks(ranks).validate() for ranks in layouts]
    batches = [batch_from_layout(documents_of(layout, rng), layout, dist.get_rank()) for layout in layouts]
    for step in range(2):
        with recorded() if step else nullcontext() as recorder:
            for batch in batches:
                engine.backward(engine(**batch).loss)
                engine.step()
    return [asdict(operation) for operation in recorder.operations]
