# SPDX-License-Identifier: Apache-2.0
"""Tiny random instances of transformers' causal decoders: those that must be exact, and those that must be refused."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 97
NOT_AN_OPTION = object()
WINDOW = 6

_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_EXPERTS = dict(
    num_local_experts=4, num_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
)
_GPT2 = dict(vocab_size=VOCABULARY, n_layer=2, n_head=4, n_embd=32, n_positions=512)
_NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
_ALL_HEADS = dict(num_key_value_heads=NOT_AN_OPTION)  # every query head has its own keys and values
_WINDOW = dict(sliding_window=WINDOW)
_ALTERNATING = dict(**_WINDOW, num_hidden_layers=3, layer_types=["sliding_attention", "full_attention"] * 2)
_ALTERNATING["layer_types"] = _ALTERNATING["layer_types"][:3]
_LATENT = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    head_dim=4,
    num_key_value_heads=4,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    first_k_dense_replace=1,
)

#: By the name in the table: (model_type, options beside the common ones).
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama, tied embeddings": ("llama", dict(tie_word_embeddings=True)),
    "Mistral": ("mistral", _WINDOW),
    "Mistral, no window": ("mistral", dict(sliding_window=None)),
    "Ministral": ("ministral", _ALTERNATING),
    "Ministral 3": ("ministral3", _WINDOW),
    "Mixtral": ("mixtral", {**_EXPERTS, **_WINDOW}),
    "Qwen2": ("qwen2", {}),
    "Qwen2, windows": ("qwen2", dict(use_sliding_window=True, max_window_layers=1, **_WINDOW)),
    "Qwen2-MoE": ("qwen2_moe", dict(**_EXPERTS, shared_expert_intermediate_size=16)),
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE": ("qwen3_moe", _EXPERTS),
    "Gemma": ("gemma", {}),
    "Gemma 2": ("gemma2", dict(**_ALTERNATING, attn_logit_softcapping=2.0, query_pre_attn_scalar=24)),
    "Gemma 3": ("gemma3_text", _ALTERNATING),
    "VaultGemma": ("vaultgemma", dict(**_ALTERNATING, attn_logit_softcapping=2.0)),
    "Phi": ("phi", {}),
    "Phi-3": ("phi3", _WINDOW),
    "Phi-3.5-MoE": ("phimoe", dict(**_EXPERTS, sliding_window=None, router_jitter_noise=0.0, input_jitter_noise=0.0)),
    "gpt-oss": ("gpt_oss", dict(**_EXPERTS, **_ALTERNATING)),
    "DeepSeek-V2": ("deepseek_v2", {**_EXPERTS, **_LATENT}),
    "DeepSeek-V3": ("deepseek_v3", {**_EXPERTS, **_LATENT}),
    "GLM": ("glm", {}),
    "GLM-4": ("glm4", {}),
    "GLM-4-MoE": ("glm4_moe", dict(**_EXPERTS, n_shared_experts=1, first_k_dense_replace=1)),
    "Granite": ("granite", {}),
    "Granite-MoE": ("granitemoe", _EXPERTS),
    "Cohere": ("cohere", {}),
    "Cohere 2": ("cohere2", _ALTERNATING),
    "OLMo": ("olmo", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", _ALTERNATING),
    "OLMoE": ("olmoe", _EXPERTS),
    "FlexOLMo": ("flex_olmo", _EXPERTS),
    "SmolLM3": ("smollm3", dict(no_rope_layers=[1, 0])),
    "StarCoder2": ("starcoder2", dict(**_WINDOW, residual_dropout=0.0, embedding_dropout=0.0)),
    "EXAONE 4": ("exaone4", _ALTERNATING),
    "Seed-OSS": ("seed_oss", dict(attention_dropout=0.0, residual_dropout=0.0)),
    "ERNIE 4.5": ("ernie4_5", {}),
    "ERNIE 4.5-MoE": ("ernie4_5_moe", dict(**_EXPERTS, moe_num_experts=4, moe_k=2)),
    "Hunyuan": ("hunyuan_v1_dense", {}),
    "CWM": ("cwm", _ALTERNATING),
    "Apertus": ("apertus", {}),
    "Arcee": ("arcee", {}),
    "Helium": ("helium", {}),
    "Persimmon": ("persimmon", _ALL_HEADS),
    "GPT-NeoX": ("gpt_neox", _ALL_HEADS),
    "GPT-2": ("gpt2", {**_GPT2, **_ALL_HEADS, **_NO_DROPOUT}),
    "GPT-BigCode": ("gpt_bigcode", {**_GPT2, **_ALL_HEADS, **_NO_DROPOUT}),
    "GPT-J": ("gptj", {**_GPT2, **_ALL_HEADS, **_NO_DROPOUT, "rotary_dim": 4}),
    "OPT": ("opt", dict(**_ALL_HEADS, dropout=0.0, word_embed_proj_dim=32, ffn_dim=48)),
}

#: By the name in the table: (model_type, options, what the error must mention).
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama 4": ("llama4_text", dict(**_EXPERTS, intermediate_size_mlp=48), "chunked attention"),
    "Bloom": ("bloom", dict(n_layer=2, n_head=4), "attention interface"),
    "Falcon": ("falcon", dict(head_dim=NOT_AN_OPTION), "attention interface"),
    "MPT": ("mpt", dict(d_model=32, n_heads=4, n_layers=2), "attention interface"),
    "LFM2": ("lfm2", dict(layer_types=["conv", "full_attention"]), "conv"),
    "MiniMax": ("minimax", _EXPERTS, "linear_attention"),
    "Qwen3-Next": ("qwen3_next", dict(**_EXPERTS, shared_expert_intermediate_size=16), "linear_attention"),
    "GPT-2, attention dropout": ("gpt2", _GPT2, "attn_pdrop"),
    "Seed-OSS, attention dropout": ("seed_oss", {}, "attention_dropout"),
    "OPT, layerdrop": (
        "opt",
        dict(**_ALL_HEADS, dropout=0.0, layerdrop=0.1, word_embed_proj_dim=32, ffn_dim=48),
        "layerdrop 0.1",
    ),
    "Gemma 3, bidirectional": ("gemma3_text", dict(**_WINDOW, use_bidirectional_attention=True), "bidirectional"),
    "BART": (
        "bart",
        {"class": "BartForConditionalGeneration", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
        "encoder-decoder",
    ),
}

#: Refused in the first forward, before anything is stepped on: what only shows there.
REFUSED_RUNNING: dict[str, tuple[str, dict[str, Any], str]] = {
    # Masks by a window that its attention calls do not convey.
    "Phi-3.5-MoE, window": ("phimoe", {**_EXPERTS, **_WINDOW}, "window"),
    # Their decoder layers keep keyword arguments, which carry the plan, from attention.
    "Nemotron": ("nemotron", {}, "keyword arguments"),
    "StableLM": ("stablelm", {}, "keyword arguments"),
}


def build(model_type: str, options: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A model in fp32 with weights of the seed, whose own attention is eager: what all others are measured by."""
    options = {**_COMMON, **options}
    cls = getattr(transformers, options.pop("class", None) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    config = AutoConfig.for_model(model_type, **{key: v for key, v in options.items() if v is not NOT_AN_OPTION})
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = cls(config)
    for parameter in model.parameters():
        # Sinks and the like start at zero or uninitialised, and would not be seen.
        if parameter.ndim == 1 and not bool(parameter.isfinite().all() and parameter.abs().max() > 0):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def features(model: PreTrainedModel, windows: list[int | None]) -> str:
    """What of its attention is special, for the table."""
    config = model.config.get_text_config()
    heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    shared = 1 if getattr(config, "multi_query", False) else shared
    found = []
    if getattr(config, "qk_nope_head_dim", None):
        found.append("latent attention")
    elif shared and shared < heads:
        found.append("grouped queries" if shared > 1 else "one key/value head")
    if any(windows):
        found.append("sliding window" if all(windows) else "window in some layers")
    if getattr(config, "attn_logit_softcapping", None):
        found.append("softcap")
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        found.append("sinks")
    if any("experts" in name for name, _ in model.named_parameters()):
        found.append("experts")
    if config.tie_word_embeddings:
        found.append("tied embeddings")
    return ", ".join(found)
