# SPDX-License-Identifier: Apache-2.0
"""A model of the same architecture as another one's configuration, small enough to be made and run on any machine."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_VOCABULARY, _WIDE, _EXPERTS = 512, 64, 4
#: Numbers by their names, in the order in which they are looked for: the most that each may be.
_MOST = (
    (r"(vocab|vocabulary)_size(_\w+)?", _VOCABULARY),
    (r"\w*(intermediate|ffn)_(size|dim)(_mlp)?|d_ff|n_inner", _WIDE),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts", _EXPERTS),
    (r"(moe_)?(num_experts_per_tok|top_?k)|num_experts_per_token", 2),
    (r"n_group|topk_group|first_k_dense_replace|num_dense_layers", 1),
)
_TOKEN = re.compile(r"\w*_token_(id|index)")


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy with a layer of each kind (two at least), few heads of the same dimension, a small vocabulary and few
    experts; what else the configuration says, it says."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    _take_layers(text)
    query = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or query
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // query
    key_value = min(shared, 2)
    heads = key_value * min(query // shared, 2)
    text.num_attention_heads, text.hidden_size = heads, heads * head_dim
    if getattr(text, "num_key_value_heads", None) is not None:
        text.num_key_value_heads = key_value
    tokens = 0
    for key, value in list(vars(text).items()):
        if _TOKEN.fullmatch(key) and value is not None:
            tokens += 1
            setattr(text, key, tokens)
        elif isinstance(value, int) and not isinstance(value, bool):
            most = next((number for names, number in _MOST if re.fullmatch(names, key)), value)
            setattr(text, key, min(value, most))
    return small


def _take_layers(text: Any) -> None:
    """One layer of each kind, as lists with an entry for every layer tell them; two at least."""
    depth = text.num_hidden_layers
    lists = {k: v for k, v in vars(text).items() if isinstance(v, list | tuple) and len(v) == depth}
    kinds = [repr([v[i] for v in lists.values()]) for i in range(depth)]
    chosen = [i for i in range(depth) if kinds.index(kinds[i]) == i]
    chosen += [i for i in range(depth) if i not in chosen][: max(0, 2 - len(chosen))]
    text.num_hidden_layers = len(chosen)
    for key, values in lists.items():
        setattr(text, key, [values[i] for i in sorted(chosen)])


def small_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A causal language model of :func:`small_config`, in fp32 on the host, with the same random weights every time.

    Raises:
        what its class raises of numbers that do not fit together.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(small_config(config), dtype=torch.float32)
