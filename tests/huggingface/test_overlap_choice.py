# SPDX-License-Identifier: Apache-2.0
"""Which micro-batches run in two nano-batches where the block does not say: by the link, and what is possible."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from deepspeed_distca import engine_hooks
from deepspeed_distca.attention_server import phase_planner
from deepspeed_distca.attention_server.agreement import GlobalMicroBatch
from deepspeed_distca.attention_server.phase_planner import NANO_COST, NANO_SECONDS, PlanOptions
from deepspeed_distca.attention_server.server import AttentionServer
from deepspeed_distca.config import parse_config
from deepspeed_distca.huggingface.decoders import attention_modules
from deepspeed_distca.huggingface.optional_ping_pong import OptionalPingPong
from deepspeed_distca.huggingface.ping_pong import PingPong
from deepspeed_distca.huggingface.ping_pong_trial import Trial
from deepspeed_distca.layout import Layout
from deepspeed_distca.plan_options import linear_flops
from deepspeed_distca.scheduler.cost_model import CostModel
from deepspeed_distca.scheduler.heads import Heads
from tests.distributed.engine_worker import tiny_llama
from tests.huggingface.lone_server import lone_server

MODEL = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
NVLINK = CostModel.fitted(Heads(32, 8, 128))
SLOW = replace(NVLINK, bytes_per_second=30 * 10**9)
LONG_SHORT = Layout.from_lengths([[65536], [4096] * 16])
EVEN = Layout.from_lengths([[4096] * 16, [4096] * 16])


def server(
    cost: CostModel, mode: str = "exposed", flops: int | None = None, min_gain: float = 0.04
) -> AttentionServer:
    options = PlanOptions(0.005, 128, None, None, None, min_gain, linear_flops(MODEL) if flops is None else flops)
    return lone_server(cost, options, ping_pong=mode)


def in_two(of: AttentionServer, layout: Layout, all_can: bool = True) -> bool:
    plan, _ = of.plan(lambda: GlobalMicroBatch(layout, 1, None, all_can))
    return plan.ping_pong is not None


@pytest.mark.parametrize("min_gain", [0.0, 0.04])
def test_two_nano_batches_where_the_link_is_slow(min_gain) -> None:
    slow, fast = server(SLOW, min_gain=min_gain), server(NVLINK, min_gain=min_gain)
    assert in_two(slow, LONG_SHORT) and slow.favoured_two
    assert not in_two(fast, LONG_SHORT) and not fast.favoured_two


def test_each_micro_batch_by_its_own_plan() -> None:
    slow = server(SLOW)
    assert [in_two(slow, layout) for layout in (EVEN, LONG_SHORT, EVEN)] == [False, True, False]


def test_all_ranks_or_none() -> None:
    slow = server(SLOW)
    assert not in_two(slow, LONG_SHORT, all_can=False)
    assert slow.favoured_two  # so that they can be made ready


def test_small_layers_do_not_pay_for_second_launches() -> None:
    layout = Layout.from_lengths([[2048], [128] * 16])
    small = linear_flops(LlamaConfig(hidden_size=512, intermediate_size=1536, num_attention_heads=8))
    cost = replace(CostModel.fitted(Heads(8, 8, 64)), latency=0, bytes_per_second=10**10)
    planner = server(cost, flops=small, min_gain=0.0)._planner
    planned = [planner.plan(layout, None, phase, 1, weigh=True) for phase in ("forward", "backward")]
    exposed = sum(p.exposed for p in planned)
    assert NANO_COST * cost.linear_seconds(3 * small * 2048) < exposed < NANO_SECONDS
    assert not planner.favours_two(planned, layout)


def test_never_where_the_size_of_linear_layers_is_not_known() -> None:
    assert not in_two(server(SLOW, flops=0), LONG_SHORT)


def test_as_soon_as_more_is_exposed_than_two_nano_batches_cost() -> None:
    layer = NVLINK.linear_seconds(3 * linear_flops(MODEL) * 65536)  # forward, and twice that in backward
    cost = NANO_COST * layer + NANO_SECONDS
    for share, expected in ((0.99, False), (1.01, True)):
        # Half of it in either phase.
        with mock.patch.object(phase_planner, "exposed_seconds", lambda *_, s=share: s * cost / 2):
            assert in_two(server(NVLINK), LONG_SHORT) is expected


@pytest.mark.parametrize("mode", ["never", "moved", "always"])
def test_nothing_is_predicted_that_no_rule_asks_for(mode) -> None:
    with mock.patch.object(phase_planner, "phase_seconds") as predict:
        in_two(server(SLOW, mode, min_gain=0.0), LONG_SHORT)
    predict.assert_not_called()


def test_a_phase_is_predicted_once_for_both_rules() -> None:
    predicted = mock.Mock(side_effect=phase_planner.phase_seconds)
    with mock.patch.object(phase_planner, "phase_seconds", predicted):
        in_two(server(SLOW), LONG_SHORT)
    assert predicted.call_count == 2  # forward and backward


def possible(
    block: dict, decoder=None, zero: int = 1, servers: int = 4, moe: bool = False, device: str = "cuda"
) -> str:
    engine = SimpleNamespace(
        zero_optimization_stage=lambda: zero,
        has_moe_layers=moe,
        device=torch.device(device, 0 if device == "cuda" else None),
    )
    with mock.patch.object(engine_hooks.dist, "get_world_size", lambda: 4):
        return engine_hooks._nano_batches(parse_config(block), engine, decoder or tiny_llama(), servers, 4)


def test_where_the_choice_is_made() -> None:
    assert possible({}) == possible({"cost_model": "file"}, device="cpu") == "exposed"
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert possible({}, tiny_llama(rope_parameters=dynamic)) == "never"
    assert possible({}, zero=3) == possible({}, servers=2) == possible({}, servers=1) == "never"
    assert possible({}, moe=True) == possible({}, device="cpu") == "never"
    for named in ("none", "local_first"):
        assert possible({"overlap": named}) == "never"
    assert possible({"overlap": "ping_pong"}, zero=3) == "moved"
    assert possible({"overlap": "ping_pong"}, zero=3, servers=2) == "always"


def reentrant(model) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})


def offloaded(model) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = lambda function, *args: checkpoint(function, *args, use_reentrant=False)


def unsaid(model) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.layers[0]._gradient_checkpointing_func = functools.partial(checkpoint)


def compiled_forward(model) -> None:
    model.model.norm.forward = torch.compile(model.model.norm.forward)


FAULTS = {
    "compiled": lambda model: model.compile(),
    "a compiled layer": lambda model: model.model.layers[1].compile(),
    "a compiled forward": compiled_forward,
    "reentrant": reentrant,
    "offloaded": offloaded,
    "unsaid": unsaid,
    "a hook": lambda model: model.model.layers[0].register_forward_hook(lambda *_: None),
    "a hook before": lambda model: model.model.norm.register_forward_pre_hook(lambda *_: None),
    "a hook in backward": lambda model: model.model.norm.register_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("how", FAULTS)
def test_what_stands_against_halves_is_seen_before_they_run(how) -> None:
    model = tiny_llama()
    optional = OptionalPingPong(model, attention_modules(model), nn.Sequential(model))
    assert not optional.ready(True) and "forward" in model.model.__dict__  # to be looked on, whole
    optional._ping_pong.seen = True
    assert optional.ready(True) and not optional.ready(False)
    FAULTS[how](model)
    assert not optional.ready(True) and optional.trial.fault
    assert "forward" not in model.model.__dict__ and not optional.split


def test_a_hook_on_all_modules_stands_against_halves() -> None:
    model = tiny_llama()
    optional = OptionalPingPong(model, attention_modules(model), model)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not optional.ready(True) and "all modules" in optional.trial.fault
    finally:
        hook.remove()


def test_a_forward_that_was_patched_before_is_given_back() -> None:
    model = tiny_llama()
    own = model.model.forward

    def patched(*args, **kwargs):
        return own(*args, **kwargs)

    model.model.forward = patched
    optional = OptionalPingPong(model, attention_modules(model), model)
    optional.ready(True)
    assert model.model.forward is not patched
    optional.remove()
    assert model.model.forward is patched


@pytest.mark.parametrize("odd", [[torch.zeros(1, 6, 2)], {"a": (torch.zeros(6),)}, torch.zeros(2, 3)])
def test_arguments_that_would_go_whole_to_both_halves_are_a_fault(odd) -> None:
    model = tiny_llama()
    trial = Trial()
    ping_pong = PingPong(model, attention_modules(model), trial)
    rows = torch.zeros(2, 6, dtype=torch.int64)
    inputs = {"input_ids": rows, "position_ids": rows, "use_cache": False, "some": None}
    output = (torch.zeros(2, 6, 8),)
    trial.rehearse(lambda: ping_pong._rehearse((), inputs, output))
    assert trial.fault is None
    trial.rehearse(lambda: ping_pong._rehearse((), {**inputs, "odd": odd}, output))
    assert "do not know how to divide odd" in trial.fault
    ping_pong.remove()


def test_whatever_halves_would_raise_is_a_fault() -> None:
    model = tiny_llama()
    trial = Trial()
    ping_pong = PingPong(model, attention_modules(model), trial)
    trial.rehearse(lambda: ping_pong._rehearse((), {"pixels": torch.zeros(3)}, None))
    assert "inputs_embeds" in trial.fault
    ping_pong.remove()


def test_a_model_is_left_as_it_is_until_two_are_favoured() -> None:
    model = tiny_llama()
    optional = OptionalPingPong(model, attention_modules(model), model)
    assert not optional.ready(False) and "forward" not in model.model.__dict__


def test_what_does_not_stand_against_halves() -> None:
    model = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.register_forward_hook(lambda *_: None)
    model.model.register_forward_hook(lambda *_: None)
    optional = OptionalPingPong(model, attention_modules(model), nn.Sequential(model))
    assert not optional.ready(True) and optional.trial.fault is None
    wrapped = nn.Sequential(torch.compile(tiny_llama()))
    inner = wrapped[0]._orig_mod
    optional = OptionalPingPong(inner, attention_modules(inner), wrapped)
    assert not optional.ready(True) and "compiled" in optional.trial.fault


def test_modes_of_a_thread_stand_against_halves() -> None:
    model = tiny_llama()
    optional = OptionalPingPong(model, attention_modules(model), model)
    with torch.device("meta"):
        assert not optional.ready(True)
    assert "mode" in optional.trial.fault
