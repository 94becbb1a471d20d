# SPDX-License-Identifier: Apache-2.0
"""Policies and pipelines of the simulator: against counting, and what was measured."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest

from deepspeed_distca.huggingface.kept_layers import _MARGIN
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import PHASES, CostModel, Phase
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.scheduler.worth import IN_TWO, PLAIN_HOST, Worth, seconds_in_two
from deepspeed_distca.simulator import policies
from deepspeed_distca.simulator.documents import micro_batches
from deepspeed_distca.simulator.model import LLAMA_3_8B, Model, training_options
from deepspeed_distca.simulator.pipeline import one_forward_one_backward, same_phase
from deepspeed_distca.simulator.policies import IDEAL, OURS, PARTS, PLACED, PLAIN, outcomes, shared
from deepspeed_distca.simulator.step import FREE, MEMORY, Load, Training, plain, planner, plugin, seconds

TOKENS, RANKS = 16384, 16
MODEL = Model.of(LLAMA_3_8B)
GIB = 2**30


def training(nodes: int = 2, **more) -> Training:
    options = replace(training_options(LLAMA_3_8B), topology=Topology.of_size(RANKS // nodes, RANKS))
    return Training(MODEL, CostModel.fitted(MODEL.heads), options, **more)


def batches(count: int = 2, ranks: int = RANKS, context: int | None = None) -> list[Layout]:
    lengths = np.random.default_rng(1).lognormal(7.5, 1.6, 6000).astype(np.int64) + 1
    return list(micro_batches(lengths, ranks, TOKENS, count, 0, context))


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv[0] = 'ds_distca'; import deepspeed_distca.simulator.simulate; "
        "print({'torch', 'deepspeed', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("context", [TOKENS // 2, TOKENS, 4 * TOKENS])
def test_contexts_are_cut_and_laid_out(context: int) -> None:
    for layout in batches(context=context):
        layout.validate()
        assert layout.tokens.tolist() == [TOKENS] * RANKS
        lengths, first = policies.lengths_of(layout)
        ends = set(np.cumsum(lengths).tolist())
        assert set(range(context, RANKS * TOKENS + 1, context)) <= ends and lengths.max() <= context
        assert first.tolist() == sorted(first) and layout.is_whole == (context <= TOKENS)


def test_a_group_of_one_rank_is_plain() -> None:
    (layout,) = batches(1)
    (groups,) = policies.in_order([layout], 1)
    for checkpointing in (False, True):
        setting = training(checkpointing=checkpointing)
        ours, own = shared(setting, groups, 1), plain(setting, layout)
        for key, load in own.items():
            np.testing.assert_allclose(ours[key].attention, load.attention, rtol=1e-9)
            np.testing.assert_allclose(ours[key].linear, load.linear, rtol=1e-9)


def test_shared_documents_are_as_much_work() -> None:
    (layout,) = batches(1)
    whole = plain(training(), layout)
    for degree in (2, 4, 8, 16):
        (groups,) = policies.in_order([layout], degree)
        for ulysses in (False, True):
            loads = shared(training(), groups, degree, ulysses=ulysses)
            for key, load in loads.items():
                total = whole[key].attention.sum()
                # Cut by queries, keys are read by several ranks, and short ranges cost more.
                assert total * (1 - 1e-9) <= load.attention.sum() <= total * (1 + 1e-9 if ulysses else 2.5)
                assert load.exposed.min() > 0 and len(load.attention) == RANKS
                assert load.linear.sum() == pytest.approx(whole[key].linear.sum())
    kv, q, out = MODEL.heads.kv_bytes, MODEL.heads.q_bytes, MODEL.heads.out_bytes
    (groups,) = policies.in_order([layout], 4)
    assert shared(training(), groups, 4)[None, "forward"].sent[0] == TOKENS * kv * 3
    assert shared(training(), groups, 4, ulysses=True)[None, "forward"].sent[0] == TOKENS * (q + kv + out) * 3 / 4
    far, near = (shared(training(nodes), groups, 4)[None, "forward"].exposed for nodes in (8, 1))
    assert (far > near).all()


def test_dealt_documents_stay_whole_within_the_cap() -> None:
    tokens = 8 * TOKENS
    drawn = np.random.default_rng(2).integers(1, tokens // 2, 200)
    (layout,) = micro_batches(drawn, RANKS, tokens, 1, 0)
    lengths, _ = policies.lengths_of(layout)
    (groups,) = policies.by_work(training(), [layout], 1)
    assert sorted(np.concatenate(groups).tolist()) == sorted(lengths.tolist())
    assert tokens < max(group.sum() for group in groups) <= 2 * tokens
    dealt, own = shared(training(), groups, 1), plain(training(), layout)
    assert sum(load.seconds for load in dealt.values()) < sum(load.seconds for load in own.values())
    (too_long,) = micro_batches(np.full(RANKS, 3 * TOKENS), RANKS, TOKENS, 1, 0, 4 * TOKENS)
    assert policies.by_work(training(), [too_long], 1) is None


def test_documents_as_the_loader_stores_them() -> None:
    """The same documents, stored so that less crosses nodes; over a pipeline each micro-batch by itself."""
    for more in ({"checkpointing": True, "zero": 3, "nodes": 4}, {"nodes": 1, "stages": 2, "zero": 0}):
        setting = training(**more)
        drawn = batches(2, ranks=RANKS // setting.stages, context=4 * TOKENS)
        found = {one.name: one for one in outcomes(setting, drawn, 4 * TOKENS, placed=True)}
        assert list(found)[-3:] == [OURS, PLACED, IDEAL]
        assert found[IDEAL].seconds <= found[PLACED].seconds <= 1.005 * found[OURS].seconds
        assert found[PLACED].sent < found[OURS].sent and found[PLACED].tokens == TOKENS


@pytest.mark.parametrize("more", [{}, {"checkpointing": True, "zero": 3}, {"nodes": 1, "stages": 2, "zero": 0}])
def test_parts_are_a_step_and_nothing_beats_the_ideal(more: dict) -> None:
    setting = training(**more)
    drawn = batches(3, ranks=RANKS // setting.stages)
    found = {one.name: one for one in outcomes(setting, drawn, TOKENS)}
    assert list(found) == [PLAIN, "dealt by work", "context parallel", "Ulysses", OURS, IDEAL]
    for one in found.values():
        assert set(one.parts) == set(PARTS) and min(one.parts.values()) > -1e-9
        assert sum(one.parts.values()) == pytest.approx(one.seconds)
        assert one.seconds >= found[IDEAL].seconds * (1 - 1e-9)
    assert max(found[OURS].seconds, found["dealt by work"].seconds) < found[PLAIN].seconds
    if setting.stages == 1:
        end = setting.end(RANKS)
        own = [seconds(setting, plain(setting, one), TOKENS) + end for one in drawn]
        ours = [seconds(setting, plugin(setting, one), TOKENS) + end for one in drawn]
        assert (found[PLAIN].seconds, found[OURS].seconds) == pytest.approx((np.mean(own), np.mean(ours)))


def test_over_nodes_the_plugin_runs_in_two_where_training_does() -> None:
    """docs/nodes.md: not within a node."""
    assert training(1).overlap == "local_first"
    assert training().overlap == "ping_pong"
    assert training(stages=2).overlap == "ping_pong"
    assert training(1, stages=2).overlap == "local_first"


@pytest.mark.parametrize("nodes", [1, 2])
def test_attention_is_repeated_where_memory_is_short(nodes: int) -> None:
    """docs/how_to.md, "Give memory back": as many layers are kept as fit, the others are exchanged again."""
    setting, (layout,) = training(nodes, checkpointing=True), batches(1)
    assert FREE == _MARGIN and training(nodes).kept(RANKS, 10**9) == MODEL.layers
    found = [setting.kept(RANKS, tokens) for tokens in range(TOKENS, 64 * TOKENS, TOKENS)]
    assert found[0] == MODEL.layers and found == sorted(found, reverse=True) and found[-1] == 0
    for kept, tokens in zip(found, range(TOKENS, 64 * TOKENS, TOKENS), strict=True):
        takes = setting.memory(RANKS, tokens, kept=kept)
        assert takes <= (1 - FREE) * MEMORY or kept == 0
        assert kept == MODEL.layers or takes + tokens * MODEL.heads.return_bytes > (1 - FREE) * MEMORY

    class Short(Training):
        def kept(self, ranks: int, tokens: int) -> int:
            return MODEL.layers // 4

    short = Short(**{field.name: getattr(setting, field.name) for field in fields(setting)})
    all_kept, few = (plugin(one, layout) for one in (setting, short))
    forward, backward = few[None, "forward"], few[None, "backward"]
    assert forward.seconds == all_kept[None, "forward"].seconds and backward.meets
    again = backward.seconds - all_kept[None, "backward"].seconds
    whole = planner(setting, layout, None, "forward", in_two=False)
    tasks, compiler = planner(setting, layout, None, "forward").spread(RouteCompiler(layout, whole.home.rows))
    assert again == pytest.approx(0.75 * max(whole.seconds(compiler), float(tasks.loads.max()) / 1e15), rel=0.02)
    sent = sum(compiler.bytes_between(MODEL.heads, "forward")).sum(axis=1)
    assert np.allclose(backward.sent - all_kept[None, "backward"].sent, 0.75 * sent)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_nano_batches_hide_rows_under_all_of_a_layer(checkpointing: bool) -> None:
    """Counted anew from the plans that are chosen for them, by the linear work that a step has."""
    setting, (layout,) = training(checkpointing=checkpointing), batches(1)
    for phase in PHASES:
        worth = Worth(layout, None, phase, setting.cost, setting.options, early=False, in_two=True, layers=32)
        tasks, compiler = worth.spread(RouteCompiler(layout, worth.home.rows))
        assert compiler.moves_rows
        linear, rows = setting.linear(phase) * layout.tokens, compiler.bytes_between(MODEL.heads, phase)
        takes = seconds_in_two(setting.cost, linear, tasks.loads / 1e15, *rows, nodes=setting.options.nodes)
        load = plugin(setting, layout)[None, phase]
        again = PLAIN_HOST["forward"] * (checkpointing and phase == "backward")
        assert load.seconds == pytest.approx(takes, rel=1e-9) and load.meets
        moving = setting.cost.moving_seconds(phase, int(compiler.messages(phase).max()))
        assert load.host == pytest.approx(2 * (PLAIN_HOST[phase] + again) + moving)


def test_a_phase_without_rows_runs_in_two_beside_one_with_them() -> None:
    """All of a micro-batch does; a micro-batch in which nothing moves runs whole."""
    setting = replace(training(), model=replace(MODEL, windows={None: 16, 64: 16}))
    (layout,) = batches(1)
    loads = plugin(setting, layout)
    still, moved = loads[64, "forward"], loads[None, "forward"]
    assert not still.meets and moved.meets
    assert still.seconds == pytest.approx((1 + IN_TWO) * (still.linear + still.attention).max())
    even = Layout.from_lengths([[TOKENS]] * RANKS)
    assert [load.seconds for load in plugin(setting, even).values()] == pytest.approx(
        [load.seconds for load in plain(setting, even).values()]
    )


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_ticks_are_planned_by_nodes(nodes: int, phase: Phase) -> None:
    """As PipelineRuntime does: with the nodes of its servers, and for NCCL."""
    layout = Layout.from_lengths([[65536], *[[16384] * 4] * (RANKS - 1)])
    setting = training(nodes, stages=2)
    for in_two in (False, True):
        worth = Worth(
            layout, None, phase, setting.cost, setting.options, early=False, in_two=in_two, layers=MODEL.layers // 2
        )
        own = planner(setting, layout, None, phase, in_two=in_two)
        (tasks, compiler), (found, _) = (one.spread(RouteCompiler(layout, one.home.rows)) for one in (worth, own))
        assert np.array_equal(found.rows, tasks.rows) and own._search == worth._search
        assert own.seconds(compiler) == worth.seconds(compiler)
        load = plugin(setting, layout, (phase,), in_two=in_two)[None, phase]
        linear = setting.linear(phase) * layout.tokens
        takes = linear.max() + worth.seconds(compiler)
        if in_two:
            flows = compiler.flows(MODEL.heads, phase)
            takes = seconds_in_two(setting.cost, linear, tasks.loads / 1e15, *flows, nodes=setting.options.nodes)
        assert load.meets and load.seconds == pytest.approx(takes)


def test_a_batch_of_a_pipeline_runs_in_two_where_that_may_pay() -> None:
    """All of its ticks or none; over nodes, and not where documents are too short to gain what that costs."""
    long, short = [[TOKENS], *[[2048] * 8] * 7], [[256] * 64] * 8
    for lengths, nodes, in_two in ((long, 2, True), (long, 1, False), (short, 2, False)):
        drawn, setting = [Layout.from_lengths(lengths)] * 4, training(nodes, stages=2)
        found = same_phase(setting, drawn)
        own, other = (same_phase(overlapping(setting, name), drawn)[0] for name in ("local_first", "ping_pong"))
        assert found[0] == (other if in_two else own) and (other < own) == (lengths is long)
        assert found[0] + setting.end(RANKS) <= outcomes(setting, drawn, TOKENS)[0].seconds


def overlapping(setting: Training, name: str) -> Training:
    class Overlapping(Training):
        @property
        def overlap(self) -> str:
            return name

    return Overlapping(**{field.name: getattr(setting, field.name) for field in fields(setting)})


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_layers_without_attention_have_linear_work_alone(stages: int, checkpointing: bool) -> None:
    """Two of four layers attend: as much linear work, half the attention and rows, and as many results to keep."""
    setting = training(1, stages=stages, checkpointing=checkpointing)
    four, two, hybrid = (
        replace(setting, model=replace(MODEL, windows={None: attend}, no_attention=none))
        for attend, none in ((4, 0), (2, 0), (2, 2))
    )
    drawn = batches(2, ranks=RANKS // stages)
    found, all_attend, half = (
        {one.name: one for one in outcomes(one, drawn, TOKENS, placed=True)} for one in (hybrid, four, two)
    )
    assert found.keys() == all_attend.keys() == half.keys() and OURS in found
    for name, one in found.items():
        assert sum(one.parts.values()) == pytest.approx(one.seconds) and min(one.parts.values()) > -1e-9
        assert half[name].seconds < one.seconds
        if name in (PLAIN, IDEAL, OURS):  # the others are dealt otherwise, or share at another degree
            assert one.parts["linear layers"] == pytest.approx(all_attend[name].parts["linear layers"])
            for own, other in ((one.parts["attention"], half[name].parts["attention"]), (one.sent, half[name].sent)):
                assert own == pytest.approx(other)
            assert one.seconds < all_attend[name].seconds and one.memory <= all_attend[name].memory
    assert hybrid.kept(RANKS, TOKENS) == 2
    kept = hybrid.memory(RANKS, TOKENS, kept=2) - hybrid.memory(RANKS, TOKENS, kept=0)
    assert kept == pytest.approx(2 * TOKENS * MODEL.heads.return_bytes / stages * checkpointing)


def test_hybrid_models_are_whole_over_nodes() -> None:
    """PingPong refuses them. A layer without attention costs what it costs without the plugin."""
    setting = replace(training(), model=replace(MODEL, windows={None: 16}, no_attention=16))
    (layout,) = batches(1)
    loads = plugin(setting, layout)
    still, moved, own = loads[0, "forward"], loads[None, "forward"], plain(setting, layout)[0, "forward"]
    assert setting.overlap == "local_first" and moved.meets and moved.exposed.max() > 0
    assert not still.meets and not still.attention.any() and still.seconds == own.seconds == still.linear.max()


@pytest.mark.parametrize("stages", [2, 4])
def test_over_nodes_a_pipeline_is_not_slower_than_plain(stages: int) -> None:
    """Whole documents stay at home where moving them does not pay. (Plans that knew no nodes were slower, up to 11 %,
    where contexts are longer than a rank.)"""
    for contexts, nodes in ((TOKENS, 2), (TOKENS, 4), (2 * TOKENS, 4)):
        setting = training(nodes, stages=stages)
        tokens = 2 * TOKENS if contexts > TOKENS else TOKENS
        lengths = np.random.default_rng(1).lognormal(7.5, 1.6, 6000).astype(np.int64) + 1
        drawn = list(micro_batches(lengths, RANKS // stages, tokens, stages, 0, contexts * tokens // TOKENS))
        found = {one.name: one.seconds for one in outcomes(setting, drawn, contexts * tokens // TOKENS)}
        assert found[OURS] <= found[PLAIN], (contexts, nodes)


def test_ulysses_has_no_more_ranks_than_heads() -> None:
    few = replace(MODEL, heads=replace(MODEL.heads, query=2, key_value=2))
    setting = replace(training(), model=few, cost=CostModel.fitted(few.heads))
    names = {one.name: one.degree for one in outcomes(setting, batches(1), TOKENS)}
    assert names["Ulysses"] == 2 and outcomes(setting, batches(1, context=4 * TOKENS), 4 * TOKENS)[3].name == OURS


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 1), (2, 5), (4, 8)])
def test_equal_micro_batches_take_what_1f1b_takes(stages: int, count: int) -> None:
    fast = replace(CostModel.fitted(MODEL.heads), bytes_per_second=2**60, latency=0)
    setting = replace(training(1, stages=stages), cost=fast, model=replace(MODEL, vocabulary=0, output_flops=0))
    loads = {(None, phase): Load(np.full(2, 1.0 + (phase == "backward")), np.zeros(2)) for phase in PHASES}
    layers = MODEL.layers / stages
    assert one_forward_one_backward(setting, [(loads, 10)] * count) == pytest.approx(3 * layers * (count + stages - 1))


def test_memory_is_near_what_was_measured() -> None:
    """docs/performance.md, Memory and A whole model; the estimate is said to be one."""
    four = Model.of({**LLAMA_3_8B, "num_hidden_layers": 4, "vocab_size": 8192})
    base = replace(training(), model=four)
    whole = replace(training(checkpointing=True, liger=True, zero=3))
    for setting, tokens, kept, measured in (
        (base, 65536, 4, 64.1),
        (base, 131072, 4, 121.2),
        (whole, 65536, 0, 89.3),
        (whole, 65536, 32, 105.1),
    ):
        assert setting.memory(2, tokens, kept=kept) / GIB == pytest.approx(measured, rel=0.1)
