# SPDX-License-Identifier: Apache-2.0
"""A tiny random instance of every causal decoder that transformers has, made from its configuration class.

The numbers of a configuration are known by their names (``hidden_size``, ``n_embd``, ``d_model``, ...), whatever the
class, so a model that a later version brings is made too. What the names do not tell is in ``EXCEPTIONS``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

#: Documents have tokens 3 to 96; before are padding, beginning and end, behind those that stand for images and sound.
VOCABULARY = 128
WINDOW = 6
_HIDDEN, _HEADS, _KEY_VALUE_HEADS, _HEAD_DIM, _EXPERTS, _LONGEST = 32, 4, 2, 8, 4, 256

#: By the whole name of a number: what it is in a tiny model. The first that matches counts.
_NUMBERS: tuple[tuple[str, Any], ...] = (
    (r"(.*_)?vocab_size(_per_layer_input|_base)?", VOCABULARY),
    (r"hidden_size_per_layer_input|laurel_rank|adapter_rank|gated_norm_rank|loop_gate_rank|hc_lowrank", _HEAD_DIM),
    (r"(attention_|router_)?hidden_size(_global)?|d_model|n_embd|emb_dim|lru_width|dim_model_base", _HIDDEN),
    (r"(word_|pronunciation_|shape_|ple_)?embed(ding)?_(proj_)?dim|((in|out)put_)?embedding_size", _HIDDEN),
    (r"(.*_)?intermediate_size(_mlp)?|.*ffn_dim|(expert_)?ffn_hidden_size|n_inner|d_inner|dff|dim_ff", 48),
    (r"feed_forward_size", 48),
    (r"num_(hidden_)?layers|n_layers?|num_blocks|(num_)?(en|de)coder_layers", 2),
    (r"(\w+_)?attention_heads|n_heads?|num_heads|linear_num_(value_)?heads", _HEADS),
    (r"(swa_)?num_key_value_heads|num_kv_heads|num_query_groups|linear_num_key_heads", _KEY_VALUE_HEADS),
    (
        r"(swa_|global_|linear_(key_|value_)?)?head_dim|kv_channels|dim_head|d_head|attention_head_(size|dim)",
        _HEAD_DIM,
    ),
    (r"(swa_)?v_head_dim|qk_nope_head_dim|index_head_dim|mamba_(d_head|headdim|head_dim)", _HEAD_DIM),
    (r"qk_rope_head_dim|rotary_dim", _HEAD_DIM // 2),
    (r"qk_head_dim", _HEAD_DIM + _HEAD_DIM // 2),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"n_mamba_heads|mamba_expand|index_n_heads|heads_per_ngram|split_ngram_parts", 2),
    (r"mamba_d_state|ssm_state_size|state_size|time_step_rank|mamba_dt_rank|(mamba_)?chunk_size|d_rel", 16),
    (r"(q|kv|o)_lora_rank", 16),
    (r"index_topk", 4),
    (r"(moe_)?num_(local_)?experts|n_routed_experts|zero_expert_num", _EXPERTS),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts", 2),
    (r"n_shared_experts|(moe_)?num_shared_experts", 1),
    (r"n_groups?|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers|o_groups|max_window_layers", 1),
    (r"sliding_window(_size)?|(attention_)?window_size|keep_window_size|local_attention", WINDOW),
    (r"max_(position_embeddings|seq_len|(target|source)_positions)|n_positions|n_ctx", _LONGEST),
    (r"model_max_length|context_length", _LONGEST),
    (r".*logit_softcapping|logits?_soft_cap", 2.0),
    (r"query_pre_attn_scalar", 24),
    (r"pad_token_id", 0),
    (r"bos_token_id|decoder_start_token_id", 1),
    (r"eos_token_id|forced_eos_token_id|sep_token_id", 2),
)
#: Given, too, where a class leaves them out.
_OPEN = re.compile(
    r"head_dim|sliding_window|(n_routed|num_local|n_shared)_experts|num_(experts_per_tok|key_value_heads)"
)
#: Lists with an entry for every layer. A tiny model has one layer of each kind, two at least.
_BY_LAYER = re.compile(r"(mlp_)?layer_types|layers_block_type|block_types|attn_layers|attention_layers|indexer_types")
_DEPTH = re.compile(r"num_(hidden_)?layers|n_layers?|num_blocks")
_OFF = re.compile(r".*(dropout|pdrop|layerdrop|jitter).*")
_ON = re.compile(r"is_decoder|causal|use_sliding_window")
_TOKEN = re.compile(r".*_token_(id|index)")
_BOTH_KINDS = ["sliding_attention", "full_attention"]

#: By model type: what the names of its numbers do not tell.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1]),
    "blt": dict(encoder_hash_byte_group_size=[3, 4], encoder_hash_byte_group_vocab=VOCABULARY),
    "cohere_compass_text": dict(
        layer_types=_BOTH_KINDS,
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]) for kind in _BOTH_KINDS
        },
    ),
    "dbrx": dict(
        attn_config={"rope_theta": 1e4, "kv_n_heads": _KEY_VALUE_HEADS, "clip_qkv": 8.0},
        ffn_config={"moe_num_experts": _EXPERTS, "moe_top_k": 2},
    ),
    "dory": dict(
        num_hidden_layers=3,
        layer_types=[*_BOTH_KINDS, "sliding_attention"],
        n_input_layers=1,
        n_recurrent_layers=1,
        n_output_layers=1,
    ),
    "dots3_note": dict(
        vision_config={"adapter_in_dim": _HIDDEN, "adapter_out_dim": _HIDDEN},
        audio_config={"adapter_input_size": _HIDDEN, "adapter_out_dim": _HIDDEN},
    ),
    "dots3_note_text": dict(per_layer_config={}, head_dim=_HEAD_DIM + _HEAD_DIM // 2),
    "falcon_h1": dict(mamba_d_ssm=2 * _HIDDEN),
    "flint": dict(mlp_only_layers=[0]),
    "gemma3n_text": dict(
        # Two layers more, that use the keys and values of the first two.
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=_BOTH_KINDS * 2,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        intermediate_size=[48] * 4,
    ),
    "gemma4_text": dict(per_layer_config={1: {"head_dim": 2 * _HEAD_DIM}}),
    "gemma4_unified_text": dict(per_layer_config={1: {"head_dim": 2 * _HEAD_DIM}}),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention"]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "laguna": dict(num_attention_heads_per_layer=[_HEADS, 2 * _HEADS]),
    "mamba2": dict(num_heads=2 * _HIDDEN // _HEAD_DIM),
    "minimax": dict(sliding_window=None),
    "minimax_m3_vl_text": dict(
        layer_types=["full_attention", "minimax_m3_sparse"], index_block_size=4, index_topk_blocks=2
    ),
    "ministral3": dict(
        # Scales its queries by their positions, from 8 on.
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=4.0,
            original_max_position_embeddings=8,
            max_position_embeddings=8,
            llama_4_scaling_beta=0.1,
        )
    ),
    "mllama_text_model": dict(num_hidden_layers=3, cross_attention_layers=[1]),
    "qwen4_exp_text": dict(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=_HEAD_DIM, indexer_budget=16, indexer_compress_ratio=4
    ),
    "reformer": dict(axial_pos_embds=False),
    "smollm3": dict(no_rope_layers=[1, 0]),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "hybrid"],
        attention_hidden_size=2 * _HIDDEN,
        attention_head_dim=2 * _HIDDEN // _HEADS,
    ),
    "zamba2": dict(
        num_key_value_heads=_HEADS,
        attention_hidden_size=2 * _HIDDEN,
        attention_head_dim=2 * _HIDDEN // _HEADS,
        n_mamba_heads=2 * _HIDDEN // _HEAD_DIM,
    ),
    "zaya": dict(num_experts_per_tok=1),
}

#: Cannot run alone on a row of tokens, and why.
NOT_APPLICABLE: dict[str, str] = {
    "gemma3n": "its vision part needs the package timm; gemma3n_text is the same decoder",
    "gemma4_assistant": "drafts from keys and values of another model",
    "gemma4_unified_assistant": "drafts from keys and values of another model",
    "musicgen": "a token is four codes of sound",
    "musicgen_melody": "a token is four codes of sound",
}

_LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0] * 4,
    long_factor=[4.0, 3.0, 2.0, 1.5],
    original_max_position_embeddings=16,
)
#: Beside one instance of every model type: (model type, options), by the name in the table.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart (encoder-decoder)": ("bart", {"class": "BartForConditionalGeneration"}),
    "bert (not a decoder)": ("bert", dict(is_decoder=False)),
    "gemma3_text (bidirectional)": ("gemma3_text", dict(use_bidirectional_attention=True)),
    "gpt2 (attention dropout)": ("gpt2", dict(attn_pdrop=0.1)),
    "llama (dynamic rope)": (
        "llama",
        # Exact for documents up to max_position_embeddings.
        dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0), max_position_embeddings=64),
    ),
    "llama (tied embeddings)": ("llama", dict(tie_word_embeddings=True)),
    "mistral (no window)": ("mistral", dict(sliding_window=None)),
    "opt (layerdrop)": ("opt", dict(layerdrop=0.1)),
    "phi3 (longrope)": (
        "phi3",
        dict(rope_parameters=_LONGROPE, original_max_position_embeddings=16, max_position_embeddings=64),
    ),
    "phimoe (no window)": ("phimoe", dict(sliding_window=None)),
    "qwen2_moe (no window)": ("qwen2_moe", dict(use_sliding_window=False, layer_types=["full_attention"] * 2)),
    "seed_oss (attention dropout)": ("seed_oss", dict(attention_dropout=0.1)),
}

#: Every model type of transformers' mapping, and the variants.
ALL: dict[str, tuple[str, dict[str, Any]]] = dict(
    sorted({**{name: (name, {}) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}, **VARIANTS}.items())
)

#: Families that other tests go through too, by the names they have there.
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {}),
    "Llama, tied embeddings": VARIANTS["llama (tied embeddings)"],
    "Mistral, no window": VARIANTS["mistral (no window)"],
    "Ministral": ("ministral", {}),
    "Ministral 3": ("ministral3", {}),
    "Mixtral": ("mixtral", {}),
    "Qwen2": ("qwen2", dict(use_sliding_window=False, layer_types=["full_attention"] * 2)),
    "Qwen2, windows": ("qwen2", {}),
    "Qwen2-MoE": VARIANTS["qwen2_moe (no window)"],
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE": ("qwen3_moe", {}),
    "Gemma": ("gemma", {}),
    "Gemma 2": ("gemma2", {}),
    "Gemma 3": ("gemma3_text", {}),
    "VaultGemma": ("vaultgemma", {}),
    "Phi": ("phi", {}),
    "Phi-3": ("phi3", {}),
    "Phi-3.5-MoE": VARIANTS["phimoe (no window)"],
    "gpt-oss": ("gpt_oss", {}),
    "DeepSeek-V2": ("deepseek_v2", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "GLM": ("glm", {}),
    "GLM-4": ("glm4", {}),
    "GLM-4-MoE": ("glm4_moe", {}),
    "Granite": ("granite", {}),
    "Granite-MoE": ("granitemoe", {}),
    "Cohere": ("cohere", {}),
    "Cohere 2": ("cohere2", {}),
    "OLMo": ("olmo", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", {}),
    "OLMoE": ("olmoe", {}),
    "FlexOLMo": ("flex_olmo", {}),
    "SmolLM3": ("smollm3", {}),
    "StarCoder2": ("starcoder2", {}),
    "EXAONE 4": ("exaone4", {}),
    "Seed-OSS": ("seed_oss", {}),
    "ERNIE 4.5": ("ernie4_5", {}),
    "ERNIE 4.5-MoE": ("ernie4_5_moe", {}),
    "Hunyuan": ("hunyuan_v1_dense", {}),
    "CWM": ("cwm", {}),
    "Apertus": ("apertus", {}),
    "Arcee": ("arcee", {}),
    "Helium": ("helium", {}),
    "Persimmon": ("persimmon", {}),
    "GPT-NeoX": ("gpt_neox", {}),
    "GPT-2": ("gpt2", {}),
    "GPT-BigCode": ("gpt_bigcode", {}),
    "GPT-J": ("gptj", {}),
    "OPT": ("opt", {}),
}


def _tiny(config: PreTrainedConfig) -> dict[str, Any]:
    """The arguments of a tiny configuration, from one of the same class with its own numbers."""
    tiny: dict[str, Any] = {}
    tokens = iter(range(VOCABULARY - 30, VOCABULARY))
    for key, value in config.to_dict().items():
        if key in config.sub_configs:
            if value is not None:
                part = getattr(config, key)
                tiny[key] = {"model_type": part.model_type, **_tiny(part), **EXCEPTIONS.get(part.model_type, {})}
        elif isinstance(value, bool):
            if _ON.fullmatch(key):
                tiny[key] = True
        elif isinstance(value, int | float) or (value is None and _OPEN.fullmatch(key)):
            found = [number for names, number in _NUMBERS if re.fullmatch(names, key)]
            if _OFF.fullmatch(key):
                tiny[key] = type(value)(0)
            elif found:
                tiny[key] = found[0]
            elif _TOKEN.fullmatch(key):
                tiny[key] = next(tokens)
        elif isinstance(value, list | tuple) and _BY_LAYER.fullmatch(key):
            tiny[key] = list(dict.fromkeys(value))
    if "sliding_window" in tiny and tiny.get("layer_types") == ["full_attention"]:
        tiny["layer_types"] = _BOTH_KINDS
    kinds = [key for key in tiny if _BY_LAYER.fullmatch(key)]
    depth = max([2, *(len(tiny[key]) for key in kinds)])
    tiny |= {key: (tiny[key] * depth)[:depth] for key in kinds}
    tiny |= {key: depth for key in tiny if _DEPTH.fullmatch(key)}
    if "qk_rope_head_dim" in tiny:  # latent attention: every query head has its own keys and values
        tiny |= {key: _HEAD_DIM // 2 for key in tiny if key == "head_dim"}
        tiny |= {key: _HEADS for key in tiny if key == "num_key_value_heads"}
    return tiny


def tiny_config(model_type: str, options: dict[str, Any]) -> PreTrainedConfig:
    """The tiny configuration of a model type, with further options of its class.

    Raises:
        what its class raises of numbers that do not fit together.
    """
    cls = CONFIG_MAPPING[model_type]
    given = {**EXCEPTIONS.get(model_type, {}), **options}
    first = cls()
    if hasattr(first, "use_sliding_window"):  # a class that has windows only when asked
        asked = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
        first = cls(**{key: value for key, value in asked.items() if hasattr(first, key)})
    arguments = _tiny(first)
    for key, value in given.items():
        arguments[key] = {**arguments[key], **value} if key in cls.sub_configs else value
    return cls(**arguments)


def build(model_type: str, options: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A tiny model in fp32 with weights of the seed, whose own attention is eager: what all others are measured by.

    Args:
        options: further numbers of its configuration; "class": another class than the mapping's.
    """
    options = dict(options)
    cls = getattr(transformers, options.pop("class", None) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    config = tiny_config(model_type, options)
    if not isinstance(config, cls.config_class):  # the decoder of a model of several parts
        parts = [getattr(config, key) for key in config.sub_configs]
        config = next((part for part in parts if isinstance(part, cls.config_class)), config)
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = cls(config)
    for module in model.modules():
        # Gemma 3n takes the norm of every token, which has no derivative where padding's embedding is zero.
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.normal_(module.weight.data[module.padding_idx], std=0.02)
    for parameter in model.parameters():
        # Sinks and the like start at zero or uninitialised, and would not be seen.
        if parameter.ndim == 1 and not bool(parameter.isfinite().all() and parameter.abs().max() > 0):
            nn.init.normal_(parameter, std=0.5)
    return model


def features(model: PreTrainedModel, windows: Sequence[int | None]) -> str:
    """What of its attention is special, for the table."""
    config = model.config.get_text_config()
    heads, shared = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    shared = 1 if getattr(config, "multi_query", False) else shared
    found = []
    if getattr(config, "qk_nope_head_dim", None):
        found.append("latent attention")
    elif heads and shared and shared < heads:
        found.append("grouped queries" if shared > 1 else "one key/value head")
    if any(windows):
        found.append("windows" if all(windows) else "windows in some layers")
    if getattr(config, "attn_logit_softcapping", None):
        found.append("softcap")
    names = [name for name, _ in model.named_parameters()]
    if any(name.endswith(("sinks", "sink")) for name in names):
        found.append("sinks")
    if any("experts" in name for name in names):
        found.append("experts")
    if getattr(config, "tie_word_embeddings", False):
        found.append("tied embeddings")
    return ", ".join(found)
