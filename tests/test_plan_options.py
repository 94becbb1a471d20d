# SPDX-License-Identifier: Apache-2.0
"""Which micro-batches move rows: what the block says, the device's default, and the size of the model's layers."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

from deepspeed_distca.config import parse_config
from deepspeed_distca.defaults import MIN_GAIN
from deepspeed_distca.layout import Layout
from deepspeed_distca.model_sizes import linear_flops
from deepspeed_distca.plan_options import plan_options
from deepspeed_distca.scheduler import worth
from deepspeed_distca.scheduler.balance import balance
from deepspeed_distca.scheduler.cost_model import CostModel, MovingCost
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import task_costs
from deepspeed_distca.scheduler.weights import finishing_weights
from deepspeed_distca.scheduler.worth import PlanOptions, phase_seconds
from tests.huggingface.lone_server import NoExchange, lone_server

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SIZES = dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2, vocab_size=32)


@pytest.fixture(autouse=True)
def free_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The price of a search is test_worth.py's: single layers would have to pay it alone here."""
    monkeypatch.setattr(worth, "SEARCH", 0.0)
    monkeypatch.setattr(worth, "SEARCH_SEGMENT", 0.0)


def test_linear_flops_are_two_for_each_weight_of_a_layer() -> None:
    config = LlamaConfig(**SIZES, num_hidden_layers=1)
    with torch.device("meta"):
        layer = LlamaForCausalLM(config).model.layers[0]
    assert linear_flops(config) == 2 * sum(p.numel() for p in layer.parameters() if p.ndim == 2)


def test_a_token_goes_through_the_experts_that_it_is_given_to() -> None:
    one = linear_flops(MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=1))
    assert one == linear_flops(LlamaConfig(**SIZES))
    two = linear_flops(MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2))
    assert two - one == 2 * 3 * 64 * 160


@pytest.mark.parametrize(
    ("block", "on_cpu", "on_gpu"), [({}, 0.0, MIN_GAIN), ({"advanced": {"min_gain": 0.1}}, 0.1, 0.1)]
)
def test_the_default_is_the_devices(block, on_cpu, on_gpu) -> None:
    model = LlamaConfig(**SIZES)
    assert plan_options(parse_config(block), CPU, model).min_gain == on_cpu
    assert plan_options(parse_config(block), GPU, model).min_gain == on_gpu


def test_servers_are_in_the_nodes_of_their_ranks() -> None:
    model, given = LlamaConfig(**SIZES), parse_config({"advanced": {"node_size": 4}})
    for servers, nodes in ((range(8), (0,) * 4 + (1,) * 4), (range(6, 12), (0, 0, 1, 1, 1, 1)), ([8, 9], (0, 0))):
        machines = dict.fromkeys(servers, "one")
        assert plan_options(given, GPU, model, servers=machines).topology.nodes == nodes
        assert plan_options(parse_config({}), GPU, model, servers=machines).nodes is None
    machines = dict(zip(range(6), "xxyyzx", strict=True))
    assert plan_options(parse_config({}), GPU, model, servers=machines).nodes.nodes == (0, 0, 1, 1, 2, 0)
    assert plan_options(parse_config({}), GPU, model).nodes is None


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_rows_move_only_for_more_than_that_share_of_the_phase(phase) -> None:
    model = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    cost = CostModel.fitted(Heads(32, 8, 128))
    layout = Layout.from_lengths([[32768], [1024] * 32])
    linear = 2 * 218_103_808 * 32768 * cost.forward.pair / (2 * 32 * 256) / 1e15 * (1 if phase == "forward" else 2)

    def loads(min_gain: float) -> tuple[float, float, list[float]]:
        return planned(model, cost, layout, phase, min_gain)

    before, after, _ = loads(0.0)
    assert before > 1.2 and after < 1.01
    mean = sum(loads(1.0)[2]) / 2
    share = (before - 1) * mean / (linear + before * mean)
    assert 0.01 < share < 1
    assert loads(share * 0.8)[1] == after  # transfers over NVLink take a part
    assert loads(share * 1.01)[1] == before


def test_transfers_may_take_what_balance_saves() -> None:
    model = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    layout = Layout.from_lengths([[65536], [4096] * 16])
    spanning = Layout.from_ranks([[(0, 0, 65536)], [(0, 65536, 4096), *((d, 0, 4096) for d in range(1, 16))]])
    slow = replace(CostModel.fitted(Heads(32, 8, 128)), bytes_per_second=10**9)
    for phase in ("forward", "backward"):
        assert planned(model, CostModel.fitted(Heads(32, 8, 128)), layout, phase, 0.02)[1] < 1.01
        before, after, _ = planned(model, slow, layout, phase, 0.02)
        assert after == before > 1.8  # 0.4 GB there and back would take longer than the straggler
        assert planned(model, slow, layout, phase, 0.0)[1] < 1.01  # not asked for
        assert planned(model, slow, spanning, phase, 0.02)[1] < 1.01  # rows travel anyway
        assert planned(model, slow, layout, phase, 0.02, (0, 1))[2][0] == 0  # a server that computes nothing
        assert planned(model, slow, layout, phase, 0.02, (1, 2))[2][0] > 0


@settings(max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(1, 3000), max_size=4), min_size=2, max_size=5),
    weights=st.none() | st.lists(st.integers(1, 4), min_size=5, max_size=5),
    share=st.sampled_from([0.99, 1.01]) | st.floats(0, 2),
)
def test_a_plan_that_saves_too_little_keeps_every_row_at_home(lengths, weights, share) -> None:
    layout = Layout.from_lengths(lengths)
    weights = None if weights is None else tuple(weights[: layout.num_ranks])
    speeds = np.array(weights or [1] * layout.num_ranks) / np.mean(weights or [1])
    nothing = dict(bytes_per_second=10**18, latency=0, moving_forward=MovingCost(), moving_backward=MovingCost())
    cost = replace(CostModel.area(Heads()), **nothing)
    flops = 10_000_000
    spread, start = weights, 0.0
    if weights is not None:
        linear = [cost.linear_cost(flops * tokens) for tokens in layout.tokens.tolist()]
        spread = finishing_weights(weights, linear, balance(layout, cost, tolerance=0).loads_before.tolist())
        start = np.array(linear) / 1e15 / speeds
    free = balance(layout, cost, tolerance=0, server_weights=spread)
    before, after = ((start + loads / 1e15 / speeds).max() for loads in (free.loads_before, free.loads))
    if weights is not None:
        # Transfers take no time, but rows leave after their rank's linear work only.
        compiler = RouteCompiler(layout, free.rows)
        at_home, away = (x / 1e15 / speeds for x in compiler.loads(lambda rows: task_costs(rows, cost, "forward")))
        sizes = compiler.bytes_between(cost.heads, "forward")
        after = phase_seconds(cost, at_home, away, *sizes, early=True, start=start)
    assume(before - after > 1e-9 * before and abs(share - 1) > 1e-4)
    # With speeds, linear work is in both already.
    whole = before + (cost.linear_seconds(flops * int(layout.tokens.max())) if weights is None else 0.0)
    min_gain = share * (before - after) / whole
    options = PlanOptions(0.0, 128, None, weights, min_gain, linear_flops=flops)
    server = lone_server(cost, options, NoExchange(early=True))
    with mock.patch.dict(worth.PLAIN_HOST, forward=0.0):
        server.plan_tick("forward", [(layout, None, 1)], note=True)
    expected = free.loads_before if share > 1 else free.loads
    assert server.planned.predicted_server_seconds == (cost.seconds(expected) / speeds).tolist()


def planned(
    model: LlamaConfig,
    cost: CostModel,
    layout: Layout,
    phase: str,
    min_gain: float,
    weights: tuple[int, ...] | None = None,
) -> tuple[float, float, list[float]]:
    """Balance before and after, and predicted seconds of the servers."""
    options = plan_options(parse_config({"advanced": {"min_gain": min_gain}}), CPU, model, weights)
    server = lone_server(cost, options)
    server.plan_tick(phase, [(layout, None, 1)], note=True)
    stats = server.planned
    return stats.balance_before, stats.balance_after, stats.predicted_server_seconds
