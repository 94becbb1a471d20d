# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings that depend on the row are found by asking them, and rotate each token by its own document."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from deepspeed_distca.huggingface.contract import Contract
from deepspeed_distca.huggingface.decoders import UnsupportedModelError
from deepspeed_distca.huggingface.ping_pong import PingPong
from deepspeed_distca.huggingface.row_rope import RowRope, longest_document, row_rules, takes_axes
from tests.distributed.model_families import build

SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    eos_token_id=2,
)
LIMIT = 16
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0] * 4,
    long_factor=[4.0, 3.0, 2.0, 1.5],
    original_max_position_embeddings=LIMIT,
)


def longrope() -> Phi3ForCausalLM:
    return Phi3ForCausalLM(
        Phi3Config(
            **SIZES, max_position_embeddings=64, original_max_position_embeddings=LIMIT, rope_parameters=dict(LONGROPE)
        )
    )


def dynamic(length: int) -> LlamaForCausalLM:
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=length, rope_parameters=rope))


def rotated(rotary: nn.Module, positions: list[int], **more) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary(torch.zeros(1, len(positions), 1), torch.tensor([positions]), **more)


def expected(rotary: nn.Module, pieces: list[tuple[int, int, int]], **more) -> list[torch.Tensor]:
    """Pieces (start, length, whole length) of documents, each as in its whole document alone."""
    parts = [[t[:, a : a + n] for t in rotated(rotary, list(range(whole)), **more)] for a, n, whole in pieces]
    return [torch.cat(tensors, 1) for tensors in zip(*parts, strict=True)]


ROWS = {
    "all short": [(0, 5, 5), (0, 16, 16)],
    "all long": [(0, 17, 17), (0, 30, 30)],
    "both": [(0, 13, 13), (0, 29, 29), (0, 5, 5), (0, 16, 16), (0, 17, 17)],
    "a long one's beginning": [(0, 14, 24), (0, 5, 5)],
    "only its beginning": [(0, 14, 24)],
    "its end": [(14, 10, 24), (0, 7, 7)],
}


@pytest.mark.parametrize("row", ROWS)
def test_each_token_is_rotated_as_in_its_document_alone(row):
    model = longrope()
    rotary, pieces = model.model.rotary_emb, ROWS[row]
    wanted = expected(copy.deepcopy(rotary), pieces)
    rope = RowRope(model)
    rope.begin(np.repeat([whole for *_, whole in pieces], [n for _, n, _ in pieces])[None])
    given = rotated(rotary, [a + i for a, n, _ in pieces for i in range(n)])
    rope.end()
    assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))


def test_outside_of_planned_forwards_the_model_is_as_it_was():
    model = longrope()
    positions = [*range(13), *range(29)]
    own = rotated(model.model.rotary_emb, positions)
    rope = RowRope(model)
    lengths = np.repeat([13, 29], [13, 29])[None]
    twin = copy.deepcopy(model)
    rope.begin(lengths)
    assert not torch.equal(rotated(model.model.rotary_emb, positions)[0], own[0])
    assert torch.equal(rotated(twin.model.rotary_emb, positions)[0], own[0])
    rope.end()
    assert torch.equal(rotated(model.model.rotary_emb, positions)[0], own[0])
    rope.begin(lengths)
    rope.remove()
    assert torch.equal(rotated(model.model.rotary_emb, positions)[0], own[0])
    assert not model.model.rotary_emb._forward_hooks


def test_rows_of_a_batch_and_positions_for_all_of_them():
    model = longrope()
    rotary = model.model.rotary_emb
    long, short = (expected(copy.deepcopy(rotary), [(0, n, n)]) for n in (20, 10))
    rope = RowRope(model)
    rope.begin(np.stack([np.full(20, 20), np.full(20, 10)]))
    given = rotated(rotary, list(range(20)))
    assert torch.equal(given[0][0], long[0][0])
    assert torch.equal(given[0][1, :10], short[0][0])


def test_kinds_of_layers_may_differ():
    rope = {"sliding_attention": dict(rope_type="default", rope_theta=1e4), "full_attention": dict(LONGROPE)}
    config = Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        max_position_embeddings=64,
        rope_parameters=rope,
        layer_types=["full_attention"],
    )
    config.layer_types = ["sliding_attention", "full_attention"]
    config.num_hidden_layers = 2
    model = Gemma3ForCausalLM(config)
    rotary, pieces = model.model.rotary_emb, ROWS["both"]
    assert [(r.layer_type, r.limit) for r in row_rules(model)] == [("full_attention", LIMIT)]
    try:
        wanted = {kind: expected(copy.deepcopy(rotary), pieces, layer_type=kind) for kind in config.layer_types}
    except UnboundLocalError:
        pytest.skip("this version of transformers cannot rotate a second long row itself (5.17)")
    row_rope = RowRope(model)
    row_rope.begin(np.repeat([n for _, n, _ in pieces], [n for _, n, _ in pieces])[None])
    for kind in config.layer_types:
        given = rotated(rotary, [i for _, n, _ in pieces for i in range(n)], layer_type=kind)
        assert torch.equal(given[0], wanted[kind][0])


@pytest.mark.parametrize("length", [64, 1000, 131072])
def test_frequencies_that_follow_the_length_have_a_limit(length):
    model = dynamic(length)
    rules = row_rules(model)
    assert [(r.kind, r.two_sided) for r in rules] == [("dynamic", False)]
    # A row of that very length keeps the frequencies of a longer one before it, as in an evaluation.
    assert longest_document(rules) == length - 1
    assert model.model.rotary_emb.max_seq_len_cached == length  # it was not asked itself


def test_ordinary_ones_depend_on_nothing():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    assert row_rules(model) == [] and longest_document([]) is None
    RowRope(model)
    assert not model.model.rotary_emb._forward_hooks


class Relative(nn.Module):
    """Stretches positions to the row's length."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x, position_ids):
        return self.inner(x, position_ids * 100 / (position_ids.max() + 1))


class Steps(Relative):
    """A kind that has no name here: another set of frequencies from position 40 on."""

    def forward(self, x, position_ids):
        cos, sin = self.inner(x, position_ids)
        return (cos, sin) if position_ids.max() < 40 else (2 * cos, 2 * sin)


def test_unknown_kinds_are_found_by_what_they_do():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    own = model.model.rotary_emb
    model.model.rotary_emb = Relative(own)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM: model.rotary_emb \(Relative\)"):
        row_rules(model)
    model.model.rotary_emb = Steps(own)
    assert [(r.limit, r.two_sided) for r in row_rules(model)] == [(40, True)]


def test_inside_layers_two_sets_are_refused():
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 2}))
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = Steps(model.model.rotary_emb)
    with pytest.raises(UnsupportedModelError, match="inside a layer"):
        row_rules(model)


@pytest.mark.parametrize("model", [longrope, lambda: dynamic(64)], ids=["longrope", "dynamic"])
def test_halves_of_a_row_would_not_share_it(model):
    model = model()
    with pytest.raises(UnsupportedModelError, match="longest position"):
        PingPong(model, [layer.self_attn for layer in model.model.layers], Contract())


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_position_ids_of_several_axes_are_for_models_that_put_them_together(axes):
    class Together(nn.Module):
        def forward(self, x, position_ids):
            return position_ids.expand(axes, -1, -1).sum(0)[..., None].float()

    class WithAxes(nn.Module):
        def __init__(self):
            super().__init__()
            self.rotary, self.of_images = Together(), dynamic(64).model.rotary_emb

    assert takes_axes(WithAxes())
    assert not takes_axes(dynamic(64)) and not takes_axes(longrope())
    assert takes_axes(nn.Linear(2, 2))  # no rotary embedding says that they may not be


def test_a_model_says_whether_it_takes_several_axes():
    for model_type, options, takes in (
        ("llama", {}, False),
        ("gemma3_text", {}, False),
        ("gpt2", {}, True),
        ("qwen3_5_text", {}, True),
    ):
        assert takes_axes(build(model_type, options)) is takes, model_type
