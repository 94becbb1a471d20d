# SPDX-License-Identifier: Apache-2.0
"""The probe alone refuses what no list of names knows, passes what is exact, and leaves no trace."""

from __future__ import annotations

import copy
import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from deepspeed_distca.huggingface.attention_names import AttentionNames
from deepspeed_distca.huggingface.contract import Contract, find_contract
from deepspeed_distca.huggingface.decoders import UnsupportedModelError, attention_modules
from tests.huggingface.faulty_models import FAULTS, FINE_ALONE, SIZES, in_a_layer, llama

CPU = torch.device("cpu")
#: Of a causal language model with rotary embeddings of one axis.
OF_CAUSAL = Contract(takes_axes=False)


def contract_of(model: LlamaForCausalLM, module: nn.Module | None = None, probe: bool = True) -> Contract:
    return find_contract(model if module is None else module, model, attention_modules(model), device=CPU, probe=probe)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_found_by_what_it_does(fault, dtype):
    build, says = FAULTS[fault]
    model = build().to(dtype)
    if fault in FINE_ALONE:
        found = contract_of(model)
        assert found.rows == "alone" and says in found.why and found.name == f"{type(model).__name__} (llama)"
        return
    with pytest.raises(UnsupportedModelError, match=says) as error:
        contract_of(model)
    if fault != "arguments that do not reach attention":
        assert f"{type(model).__name__} (llama)" in str(error.value)
    contract_of(model, probe=False)


def test_what_a_token_gets_of_itself_is_no_fault():
    assert contract_of(in_a_layer(nn.Linear(32, 32))) == OF_CAUSAL
    assert contract_of(in_a_layer(nn.Dropout(0.5))) == OF_CAUSAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("seed", range(3))
def test_many_experts_in_many_layers_are_no_fault(dtype, seed):
    torch.manual_seed(seed)
    options = {**SIZES, "num_hidden_layers": 12, "moe_intermediate_size": 16, "num_experts": 32}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**options, num_experts_per_tok=4, head_dim=8)).to(dtype)
    assert contract_of(model) == OF_CAUSAL


class Stateful(nn.Module):
    """Changes all that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.zeros(3))
        self.calls, self.kept = 0, None
        self.noise = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.add_(1.0)
        self.kept = x.detach()
        self.later = random.random() + np.random.rand()
        return self.noise(x)


def test_no_trace_is_left():
    model = in_a_layer(Stateful())
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    model.model.layers[1].eval()
    change = model.model.layers[0].mlp.change
    state = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    checkpointing = [getattr(m, "gradient_checkpointing", None) for m in model.modules()]
    settings = copy.deepcopy(model.config.to_dict())
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    keys = [set(m.__dict__) for m in model.modules()]
    random_numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert contract_of(model) == OF_CAUSAL
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert (change.calls, change.kept) == (0, None) and not change.seen.any()
    assert modes == [m.training for m in model.modules()]
    assert checkpointing == [getattr(m, "gradient_checkpointing", None) for m in model.modules()]
    assert settings == model.config.to_dict() and model.config._attn_implementation == "sdpa"
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert keys == [set(m.__dict__) for m in model.modules()]
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(random_numbers[0], torch.get_rng_state())
    assert random_numbers[1] == random.getstate() and (random_numbers[2] == np.random.get_state()[1]).all()


def test_nor_by_a_model_that_fails():
    build, _ = FAULTS["targets of other documents"]
    model = build().eval()
    before = {key: value for key, value in model.model.__dict__.items() if key != "_modules"}
    with pytest.raises(UnsupportedModelError):
        contract_of(model)
    assert before == {key: value for key, value in model.model.__dict__.items() if key != "_modules"}
    assert model.config._attn_implementation == "sdpa" and not model.training
    assert not model._forward_hooks and not model._forward_pre_hooks


class Trainer(nn.Module):
    """What may be around a decoder."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder


class Weighing(Trainer):
    def forward(self, input_ids, **rest):
        return 2 * self.decoder(input_ids=input_ids, **rest).loss


class Batches(Trainer):
    def forward(self, batch):
        return self.decoder(**batch)


class Pairs(Trainer):
    def forward(self, **batch):
        return self.decoder(batch["chosen"]).logits - self.decoder(batch["rejected"]).logits


def adapted(decoder: LlamaForCausalLM) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(decoder, LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def compiled(decoder: LlamaForCausalLM) -> nn.Module:
    def backend(*_):
        raise AssertionError("compiled for a few tokens")

    return torch.compile(decoder, backend=backend)


@pytest.mark.parametrize("around", [Trainer, Weighing, Batches, Pairs, adapted, compiled])
def test_what_is_around_a_decoder_may_want_anything(around):
    model = llama()
    assert contract_of(model, around(model)) == OF_CAUSAL


def test_it_is_cheap():
    model = llama()
    calls = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    contract_of(model)
    handle.remove()
    assert len(calls) == 5
    start = time.monotonic()
    contract_of(model)
    assert time.monotonic() - start < 3  # 0.03 s on a machine that does nothing else


def test_an_attention_that_is_ours_already_is_put_back():
    model = llama()
    names = AttentionNames(attention_modules(model))
    contract_of(model)
    names.use("distca")
    names.restore()
    assert model.config._attn_implementation == "sdpa"
