# SPDX-License-Identifier: Apache-2.0
"""How models of several kinds read their arguments, as found by running them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    MBartConfig,
    MBartForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
)

from deepspeed_distca.huggingface.contract import Contract, find_contract
from deepspeed_distca.huggingface.decoders import UnsupportedModelError, attention_modules
from deepspeed_distca.huggingface.ping_pong import PingPong
from tests.distributed.harness import run_ranks
from tests.distributed.model_families import build
from tests.huggingface.faulty_models import SIZES, llama
from tests.huggingface.test_row_rope import LIMIT, dynamic, longrope

CAUSAL = Contract()
BERT = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=130,
    is_decoder=True,
    attention_probs_dropout_prob=0.0,
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_layer=2, n_head=4, n_embd=32, attn_pdrop=0.0))


def opt() -> PreTrainedModel:
    sizes = dict(hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4)
    return OPTForCausalLM(OPTConfig(vocab_size=97, max_position_embeddings=128, **sizes))


def mbart() -> PreTrainedModel:
    sizes = dict(d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48)
    return MBartForCausalLM(
        MBartConfig(
            vocab_size=97,
            max_position_embeddings=128,
            is_encoder_decoder=False,
            is_decoder=True,
            attention_dropout=0.0,
            **sizes,
        )
    )


class Unaware(LlamaForCausalLM):
    """A loss of its own, which knows of labels alone."""

    reduction = "mean"

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, shift_labels=None, **rest):
        output = super().forward(input_ids=input_ids, **rest)
        if labels is not None:
            logits = output.logits[:, :-1].transpose(1, 2).float()
            output.loss = functional.cross_entropy(logits, labels[:, 1:], reduction=self.reduction)
        return output


class Summing(Unaware):
    reduction = "sum"


class Fused(LlamaForCausalLM):
    """Computes its loss without scores, as fused kernels do."""

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, shift_labels=None, **rest):
        if labels is None:
            return super().forward(input_ids=input_ids, **rest)
        states = self.model(input_ids=input_ids, **rest).last_hidden_state
        loss = self.loss_function(
            functional.linear(states, self.lm_head.weight),
            labels,
            97,
            num_items_in_batch=num_items_in_batch,
            shift_labels=shift_labels,
        )
        return (loss,)


class NoPlaces(LlamaForCausalLM):
    """Takes no position ids and needs none: nothing depends on places."""

    def __init__(self, config) -> None:
        super().__init__(config)
        inner = self.model.rotary_emb
        self.model.rotary_emb = Nowhere(inner)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        labels=None,
        use_cache=None,
        distca_plan=None,
        distca_witness=None,
    ):
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            labels=labels,
            use_cache=use_cache,
            distca_plan=distca_plan,
            distca_witness=distca_witness,
        )


class Nowhere(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x, position_ids):
        return self.inner(x, position_ids * 0)


KINDS: dict[str, tuple] = {
    "Llama": (llama, CAUSAL),
    "a short row": (lambda: llama(max_position_embeddings=12), CAUSAL),
    "GPT-2 with dropout": (gpt2, CAUSAL),
    "OPT": (opt, CAUSAL),
    "BERT": (lambda: BertLMHeadModel(BertConfig(**BERT)), CAUSAL),
    "Mixtral, router loss": (
        lambda: MixtralForCausalLM(
            MixtralConfig(**SIZES, **EXPERTS, output_router_logits=True, router_aux_loss_coef=0.5)
        ),
        CAUSAL,
    ),
    "gpt-oss": (lambda: GptOssForCausalLM(GptOssConfig(**SIZES, **EXPERTS, head_dim=8)), CAUSAL),
    "longrope": (longrope, Contract(rope_limits=(LIMIT,))),
    "dynamic RoPE": (lambda: dynamic(64), Contract(longest_document=63)),
    "a fused loss": (lambda: llama(Fused), CAUSAL),
    "classes of tokens": (
        lambda: llama(LlamaForTokenClassification, num_labels=5),
        Contract("same", False, "mean"),
    ),
    "two classes of tokens": (
        lambda: llama(LlamaForTokenClassification, num_labels=2),
        Contract("same", False, "mean"),
    ),
    "a class of a row": (
        lambda: llama(LlamaForSequenceClassification, num_labels=5, pad_token_id=None),
        Contract(None, False, None, whole_rows=True),
    ),
    "a number for a row": (
        lambda: llama(LlamaForSequenceClassification, num_labels=1),
        Contract(None, False, None, whole_rows=True),
    ),
    "no labels": (lambda: llama(LlamaForQuestionAnswering), Contract(None, False, None)),
    "no head": (lambda: llama(LlamaModel), Contract(None, False, None)),
    "a mean of its own": (lambda: llama(Unaware), Contract("next", False, "mean")),
    "a sum of its own": (lambda: llama(Summing), Contract("next", False, None)),
    "no places": (lambda: llama(NoPlaces), Contract("next", False, "mean", takes_positions=False)),
}


def with_loss(kind: str, weights: dict[int, float] | None = None) -> LlamaForCausalLM:
    """A model with a loss function of its own, where classes may have weights."""
    model = llama()
    of_class = torch.ones(SIZES["vocab_size"])
    for label, weight in (weights or {}).items():
        of_class[label] = weight

    def loss_function(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **rest):
        targets = functional.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
        there = targets != -100
        each = functional.cross_entropy(
            logits.transpose(1, 2).float(), targets, weight=of_class.to(logits.device), reduction="none"
        )
        if kind == "mean over rows":
            return (each.sum(1) / there.sum(1).clamp(min=1)).mean()
        if kind == "focal":
            each = (1 - (-each).exp()) ** 2 * each
        mean = each.sum() / (of_class[targets.clamp(min=0)] * there if kind == "by weights" else there).sum()
        if kind == "by weights, times targets" and num_items_in_batch is not None:
            by_weight = each.sum() / (of_class[targets.clamp(min=0)] * there).sum()
            return by_weight * there.sum() / num_items_in_batch
        return each.sum() / num_items_in_batch if kind == "sum" and num_items_in_batch is not None else mean

    model.loss_function = loss_function
    return model


EVERY_OTHER = dict.fromkeys(range(0, SIZES["vocab_size"], 2), 1.1)
LOSSES: list[tuple[str, dict[int, float] | None, str | None]] = [
    ("by targets", None, "mean"),
    ("focal", None, "mean"),
    ("sum", None, "num_items_in_batch"),
    # Weights that no mean is divided by: it is a mean over targets still.
    ("sum", {2: 10.0}, "num_items_in_batch"),
    ("by targets", {2: 10.0}, "mean"),
    ("by weights", {2: 10.0}, None),
    ("by weights", EVERY_OTHER, None),
    ("by weights, times targets", None, "num_items_in_batch"),
    ("by weights, times targets", {2: 10.0}, None),
    ("by weights, times targets", EVERY_OTHER, None),
    ("mean over rows", None, None),
]


@pytest.mark.parametrize(("kind", "weights", "weighting"), LOSSES)
def test_a_loss_function_of_ones_own_is_weighted_only_if_targets_add_up(kind, weights, weighting):
    torch.manual_seed(0)
    model = with_loss(kind, weights)
    assert contract_of(model).weighting == weighting
    assert contract_of(model.bfloat16()).weighting == weighting


@pytest.mark.parametrize("classes", [2, 5, 40])
def test_classes_of_tokens_with_weights(classes):
    torch.manual_seed(0)
    model = llama(LlamaForTokenClassification, num_labels=classes)
    weights = torch.ones(classes)

    def loss_function(logits, labels, config, **rest):
        return functional.cross_entropy(logits.view(-1, classes), labels.view(-1), weight=weights)

    model.loss_function = loss_function
    assert contract_of(model).weighting == "mean"
    weights[-1] = 1.5
    assert contract_of(model).weighting is None


def beside_axes(found: Contract) -> Contract:
    """What was found, but for whether positions may have several axes: of that test_row_rope.py has the cases."""
    return replace(found, takes_axes=True)


def contract_of(model: PreTrainedModel, probe: bool = True) -> Contract:
    return find_contract(model, model, attention_modules(model), device=torch.device("cpu"), probe=probe)


@pytest.mark.parametrize("kind", KINDS)
def test_found_by_running_it(kind):
    make, expected = KINDS[kind]
    torch.manual_seed(0)
    model = make()
    settings = model.config.to_dict()
    found = contract_of(model)
    assert beside_axes(found) == expected
    assert contract_of(model.bfloat16()) == found
    assert model.config.to_dict() == settings


#: A model, and what is found with several documents in a row.
ALONE = {
    "MBart": (mbart, "position_ids"),
    "RoBERTa": (lambda: RobertaForCausalLM(RobertaConfig(**BERT)), "position_ids"),
    "convolutions": (lambda: build("lfm2", {}), "Install `causal.conv1d`"),
    "a gated delta net": (lambda: build("qwen3_next", {}), "Install `causal.conv1d`"),
    "Mamba 2": (lambda: build("falcon_h1", {}), "Install `mamba.ssm`"),
}


@pytest.mark.parametrize("kind", ALONE)
def test_a_document_a_row_where_several_are_not_exact(kind):
    make, says = ALONE[kind]
    model = make()
    found = contract_of(model)
    assert found.rows == "alone" and re.search(says, found.why)
    assert type(model).__name__ in found.name and model.config.model_type in found.name
    assert contract_of(model.bfloat16()) == found


def test_a_state_cannot_go_on_in_the_second_half_of_a_row():
    model = build("lfm2", {})
    with pytest.raises(UnsupportedModelError, match="Lfm2ForCausalLM.*second half.*local_first"):
        PingPong(model, attention_modules(model), Contract(rows="alone"))


def test_position_ids_of_axes_are_not_divided_as_rows_of_a_batch():
    """Whatever their number: four axes of a batch of 4 x 4 tokens look like rows."""
    model = llama()
    halves = PingPong(model, attention_modules(model), Contract())
    ids = torch.zeros(4, 4, dtype=torch.int64)
    given = {"input_ids": ids, "mm_token_type_ids": ids, "inputs_embeds": torch.zeros(4, 4, 4)}
    first, second = halves._halves(given, ids, 6)
    assert first["inputs_embeds"].shape == (1, 6, 4) and second["mm_token_type_ids"].shape == (1, 10)
    for axes in (3, 4):
        with pytest.raises(UnsupportedModelError, match=rf"how to divide position_ids \[{axes}, 4, 4\]"):
            halves._halves({**given, "position_ids": ids.expand(axes, 4, 4)}, ids, 6)


def test_without_the_probe_other_mixers_are_refused_by_their_names():
    with pytest.raises(UnsupportedModelError, match="Lfm2ForCausalLM.*layers of kind conv.*probe"):
        contract_of(build("lfm2", {}), probe=False)


def test_without_the_probe_only_rotary_embeddings_are_asked():
    for model, expected in (
        (llama(LlamaForTokenClassification), Contract(takes_axes=False)),
        (longrope(), Contract(rope_limits=(LIMIT,), takes_axes=False)),
        (dynamic(64), Contract(longest_document=63, takes_axes=False)),
        (gpt2(), Contract()),
    ):
        assert contract_of(model, probe=False) == expected


def test_partitioned_parameters_and_the_training_after_it():
    """Ranks of ZeRO-3 find the same, and train on as if nothing had been."""
    ranks = run_ranks("tests.huggingface.probe_worker:run", 2)
    for found in ranks:
        assert found["contract"][:7] == ["next", True, "num_items_in_batch", True, False, None, "packed"]
        assert found["refused"] == ranks[0]["refused"] and "passes between tokens" in found["refused"]
        assert found["partitioned"]
        assert found["probed"] == found["plain"] and len(set(found["plain"])) == len(found["plain"])
        rows, why = found["hybrid"]
        assert rows == "alone" and "Install" in why and found["hybrid partitioned"]
        assert found["hybrid probed"] == found["hybrid plain"]
