# SPDX-License-Identifier: Apache-2.0
"""Recomputation does not repeat core attention, under every kind of checkpointing, and is never wrong for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from deepspeed_distca.attention_server.server import PlanOptions
from deepspeed_distca.attention_server.steps import ForwardSteps
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.huggingface.kept_attention import KeptAttention
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import CostModel
from deepspeed_distca.scheduler.heads import Heads
from tests.distributed.harness import run_ranks
from tests.huggingface import kept_attention_worker
from tests.huggingface.lone_server import lone_server

HEADS, DIM, TOKENS = 2, 4, 29
WIDTH = HEADS * DIM
BOUND = 1e-5


def make_plan():
    heads = Heads(query=HEADS, key_value=HEADS, head_dim=DIM, value_dim=None, element_size=8)
    server = lone_server(CostModel.fitted(heads), PlanOptions(0.0, 1, None, None))
    return server.plan_alone(Layout.from_lengths([[17, 1, 11]]))


class Layer(nn.Module):
    """Attention with projections; products and other operations that its kernel is made of follow after it."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda out: out) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Parameter(0.1 * torch.randn(HEADS, DIM, DIM))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.change = change

    def forward(self, x: torch.Tensor, plan, kept: KeptAttention | None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(1)
        spec = AttentionSpec(DIM**-0.5, None, None)
        if kept is None:
            out, _ = plan.attend(q, k, v, spec)
        else:
            out, _ = kept.attend(self, plan, q, k, v, spec)
        mixed = torch.bmm(self.change(out).transpose(0, 1), self.mix)
        return x + self.o((mixed - mixed.mean()).exp().log1p().transpose(0, 1).flatten(1))


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return nn.ModuleList([Layer() for _ in range(3)]).double()


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """Grows by one with every forward of core attention."""
    calls, forward = [], ForwardSteps.serve

    def count(*arguments):
        calls.append(1)
        return forward(*arguments)

    monkeypatch.setattr(ForwardSteps, "serve", count)
    return calls


def gradients(
    layers, order, through, kept: KeptAttention | None, backward=torch.Tensor.backward
) -> list[torch.Tensor]:
    """Gradients of all weights after the layers of `order`, each run by `through(layer, x, plan, kept)`."""
    layers.zero_grad()
    x = torch.randn((TOKENS, WIDTH), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x.to(layers[0].mix.device).requires_grad_()
    plan, y = make_plan(), x
    for i in order:
        y = through(layers[i], y, plan, kept)
    backward(y.square().sum())
    return [x.grad, *(p.grad.clone() for p in layers.parameters() if p.grad is not None)]


def plain(layer, *arguments):
    return layer(*arguments)


REENTRANT = partial(checkpoint, use_reentrant=True)
NON_REENTRANT = partial(checkpoint, use_reentrant=False)


def selective(saved: Callable) -> Callable:
    def policy(context, operation, *_, **__):
        return CheckpointPolicy.MUST_SAVE if saved(operation) else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(NON_REENTRANT, context_fn=partial(create_selective_checkpoint_contexts, policy))


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}
ONCE = {
    "reentrant": REENTRANT,
    "non-reentrant": NON_REENTRANT,
    "non-reentrant to the end": partial(NON_REENTRANT, early_stop=False),
    "products are saved": selective(lambda op: op in PRODUCTS),
    "all but views are saved": selective(lambda op: not op.is_view),
}


def same(given: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(given) == len(expected) and all(map(torch.equal, given, expected))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("how", ONCE)
def test_computed_once_bit_by_bit(layers, computed, how, device):
    layers.to(device)  # on a GPU backward, and recomputation with it, is another thread's
    expected = gradients(layers, range(3), plain, None)
    del computed[:]
    kept = KeptAttention()
    assert same(gradients(layers, range(3), ONCE[how], kept), expected)
    assert len(computed) == 3 and len(kept) == 0


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_kept_until_its_own_recomputation(layers, computed, how):
    kept, seen = KeptAttention(), []

    def backward(loss):
        seen.append(len(kept))
        for layer in layers:
            layer.qkv.weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(kept)))
        loss.backward()

    gradients(layers, range(3), ONCE[how], kept, backward)
    assert seen == [3, 2, 1, 0]


def test_only_layers_that_are_recomputed_are_kept(layers, computed):
    kept, seen = KeptAttention(), []
    expected = gradients(layers, range(3), plain, None)

    def through(layer, *arguments):
        y = (NON_REENTRANT if layer is layers[1] else plain)(layer, *arguments)
        seen.append(len(kept))
        return y

    del computed[:]
    assert same(gradients(layers, range(3), through, kept), expected)
    assert seen == [0, 1, 1] and len(computed) == 3 and len(kept) == 0


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("order", [(0, 1, 0, 2), (0, 0, 1, 1, 1), (1, 1, 0, 2)])
def test_a_layer_that_is_called_again_is_computed_again(layers, computed, how, order):
    expected = gradients(layers, order, plain, None)
    del computed[:]
    kept = KeptAttention()
    assert same(gradients(layers, order, ONCE[how], kept), expected)
    repeated = [i for i in order if order.count(i) > 1]
    assert len(computed) == len(order) + len(repeated) and len(kept) == 0


def test_called_again_outside_the_checkpoint(layers):
    expected = gradients(layers, (0, 0), plain, None)
    kept, calls = KeptAttention(), iter([REENTRANT, plain])
    assert same(gradients(layers, (0, 0), lambda *a: next(calls)(*a), kept), expected)


def test_out_that_was_changed_in_place_is_computed_again(layers, computed):
    expected = gradients(layers, range(3), plain, None)
    del computed[:]

    def halve_and_double(out):
        # In place as long as autograd does not look on, which is when the reentrant first pass runs.
        return out * 0.5 * 2 if torch.is_grad_enabled() else out.mul_(0.5) * 2

    layers[1].change = halve_and_double
    assert same(gradients(layers, range(3), REENTRANT, KeptAttention()), expected)
    assert len(computed) == 4


def test_recomputed_twice(layers, computed):
    def backward(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    expected = gradients(layers, range(3), plain, None, backward)
    del computed[:]
    assert same(gradients(layers, range(3), NON_REENTRANT, KeptAttention(), backward), expected)
    assert len(computed) == 6


@pytest.mark.parametrize("inner", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("outer", ["reentrant", "non-reentrant"])
def test_checkpoints_within_checkpoints(layers, computed, outer, inner):
    expected = gradients(layers, range(3), plain, None)
    del computed[:]
    kept = KeptAttention()
    assert same(gradients(layers, range(3), partial(ONCE[outer], ONCE[inner]), kept), expected)
    assert len(computed) == 3 and len(kept) == 0


def test_offloading_is_no_checkpoint(layers, computed):
    expected = gradients(layers, range(3), plain, None)
    del computed[:]
    kept, seen = KeptAttention(), []
    with torch.autograd.graph.save_on_cpu():
        given = gradients(layers, range(3), plain, kept, lambda loss: (seen.append(len(kept)), loss.backward()))
        assert same(given, expected)
    assert seen == [0] and len(computed) == 3
    with torch.autograd.graph.save_on_cpu():
        assert same(gradients(layers, range(3), NON_REENTRANT, KeptAttention()), expected)
    assert len(computed) == 6


@pytest.fixture(scope="module")
def ranks():
    return run_ranks("tests.huggingface.kept_attention_worker:run", 2, seed=5)


def test_models_are_exact_and_repeat_nothing(ranks):
    waiting = {name: n for name, (_, n) in kept_attention_worker.MODELS.items()}
    waiting.update({"off": 0, "offloaded": 0, "offloaded non-reentrant": kept_attention_worker.LAYERS})
    for rank in ranks:
        assert rank["steps"].keys() == waiting.keys()
        once = rank["steps"]["off"]["counts"]
        assert once["attention"] == kept_attention_worker.LAYERS and once["exchanges"] > 0
        for name, step in rank["steps"].items():
            assert step["gradient_error"] < BOUND, (name, step)
            assert (step["waiting"], step["left"]) == (waiting[name], 0), (name, step)
            assert step["counts"] == once, (name, step)


def test_micro_batches_and_engines_that_interleave(ranks):
    for rank in ranks:
        once = rank["steps"]["off"]["counts"]
        for found in (*rank["two at once"].values(), rank["two engines"]):
            assert found["gradient_error"] < BOUND and found["left"] == 0, found
            assert found["counts"] == {name: 2 * n for name, n in once.items()}, found
        assert all(f["waiting"] == 2 * kept_attention_worker.LAYERS for f in rank["two at once"].values())


def test_nothing_is_left_of_a_forward_without_backward(ranks):
    for rank in ranks:
        for how, found in rank["nothing left"].items():
            expected = {"waiting": kept_attention_worker.LAYERS, "dropped": [], "no_grad": [], "evaluation": []}
            assert found == expected, how


def test_ranks_that_differ_in_the_option_are_refused(ranks):
    words = "`distca.keep_attention` is true on ranks [0] and false on ranks [1]"
    assert all(words in rank["different options"] for rank in ranks)
