# SPDX-License-Identifier: Apache-2.0
"""The small model of most tests: a Llama of two layers with grouped-query attention, in fp32."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 97
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)


def llama(cls: type = LlamaForCausalLM, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """The same on every rank.

    Args:
        cls: the model's class.
        options: of LlamaConfig, beside or instead of SIZES.
    """
    torch.manual_seed(seed)
    return cls(LlamaConfig(**{**SIZES, **options}))
