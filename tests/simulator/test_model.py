# SPDX-License-Identifier: Apache-2.0
"""What the simulator counts of a model is what transformers' own model has."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from deepspeed_distca.scheduler import Heads
from deepspeed_distca.simulator.model import LLAMA_3_8B, Model

TOKENS = 4096
#: Operators that move nothing, or are matrix products, or stand for core attention's copies.
FREE = ("view", "aten.t.", "transpose", "expand", "slice.", "unsqueeze", "detach", "alias", "mm.", "empty", "clone")


class Elementwise(TorchDispatchMode):
    """Counts the bytes that element-wise operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = str(function)
        if "_backward" in name or not any(free in name for free in FREE):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if torch.is_tensor(leaf)]
            self.bytes[name] += sum(t.numel() * t.element_size() for t in tensors if 0 not in t.stride())
        return out


class Attention(torch.autograd.Function):
    """Core attention that computes nothing."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.shapes = q.shape, k.shape, v.shape
        return q.new_empty(q.shape).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx, grad):
        return tuple(grad.new_empty(shape) for shape in ctx.shapes)


@pytest.mark.parametrize(
    ("hidden", "wide", "query", "key_value", "head_dim"),
    [(4096, 14336, 32, 8, 128), (2048, 8192, 32, 8, 64), (8192, 22016, 64, 16, 128)],
)
def test_elementwise_bytes_are_transformers_own(hidden, wide, query, key_value, head_dim) -> None:
    AttentionInterface.register("nothing", lambda module, q, k, v, *_, **__: (Attention.apply(q, k, v), None))
    sizes = dict(hidden_size=hidden, intermediate_size=wide, num_attention_heads=query, head_dim=head_dim)
    config = LlamaConfig(**sizes, num_key_value_heads=key_value, num_hidden_layers=1, vocab_size=8)
    config._attn_implementation = "nothing"
    model = Model.of(config.to_dict())
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
        x = torch.empty(1, TOKENS, hidden, dtype=torch.bfloat16, requires_grad=True)
        rope = LlamaRotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
        with Elementwise() as forward:
            y = layer(x, position_embeddings=rope)
            y = y[0] if isinstance(y, tuple) else y
        with Elementwise() as backward:
            y.backward(torch.empty_like(y))
    for phase, counted in (("forward", forward), ("backward", backward)):
        assert model.element_bytes(phase, liger=False) == pytest.approx(counted.bytes.total() / TOKENS, rel=0.01)
        assert model.element_bytes(phase, liger=True) < model.element_bytes(phase, liger=False) / 2


def test_parameters_and_products_are_the_models_own() -> None:
    config = LlamaConfig(**{key: value for key, value in LLAMA_3_8B.items() if key != "model_type"})
    with torch.device("meta"):
        own = LlamaForCausalLM(config)
    model = Model.of(config.to_dict())
    assert model.parameters == pytest.approx(sum(p.numel() for p in own.parameters()), rel=1e-4)
    products = sum(p.numel() for name, p in own.model.layers[0].named_parameters() if "norm" not in name)
    assert (model.layer_parameters, model.layer_flops) == (products, 2 * products)
    tied = Model.of({**LLAMA_3_8B, "tie_word_embeddings": True})
    assert model.parameters - tied.parameters == 4096 * 128256


def test_experts_count_once_in_time_and_all_in_memory() -> None:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    one, eight = Model.of(LLAMA_3_8B), Model.of({**LLAMA_3_8B, **experts})
    feed_forward = 3 * 4096 * 14336
    assert eight.layer_flops - one.layer_flops == 2 * feed_forward
    assert eight.layer_parameters - one.layer_parameters == 7 * feed_forward


def test_layers_without_attention_are_told_apart() -> None:
    mixed = ["linear_attention", "conv", "linear_attention", "full_attention"] * 8
    hybrid = Model.of({**LLAMA_3_8B, "layer_types": mixed})
    assert (hybrid.windows, hybrid.kinds, hybrid.layers) == ({None: 8}, {None: 8, 0: 24}, 32)
    assert hybrid.parameters == Model.of(LLAMA_3_8B).parameters
    assert Model.of({**LLAMA_3_8B, "layers_block_type": mixed}) == hybrid
    windowed = Model.of(
        {**LLAMA_3_8B, "layer_types": ["sliding_attention", "full_attention", *["moe"] * 30], "sliding_window": 512}
    )
    assert windowed.kinds == {None: 1, 512: 1, 0: 30}
    plain = Model.of({**LLAMA_3_8B, "layer_types": ["full_attention", "chunked_attention", "hybrid", "attention"] * 8})
    assert plain == Model.of(LLAMA_3_8B)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [(["conv"] * 32, "none of the model's 32 layers has attention"), (["conv"] * 8, "kinds .* of 8")],
)
def test_kinds_of_layers_that_cannot_be_are_refused(kinds: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Model.of({**LLAMA_3_8B, "layer_types": kinds})


def test_heads_are_those_with_which_an_engine_plans() -> None:
    latent = {**LLAMA_3_8B, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    assert Model.of(latent).heads == Heads(32, 32, 192, value_dim=128)
    assert Model.of({**LLAMA_3_8B, "multi_query": True}).heads == Heads(32, 1, 128)
