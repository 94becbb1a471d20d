# SPDX-License-Identifier: Apache-2.0
"""Texts of very different lengths for trainers that tokenise themselves, and a tokenizer of whole words for them."""

from __future__ import annotations

import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_llama import VOCABULARY

_DRAW = random.Random(0)


def _text(words: int) -> str:
    return " ".join(f"w{_DRAW.randrange(1, VOCABULARY)}" for _ in range(words))


TEXTS = [_text(n) for n in (120, 3, 9, 30, 2, 77, 12, 5, 100, 21, 4, 60, 33, 7, 90, 11, 6, 45)]
PROMPTS = [_text(n) for n in (160, 3, 5, 140, 120, 2, 8, 21, 4, 44, 12, 6)]
_CHOSEN = (3, 40, 7, 2, 9, 70, 4, 31, 5, 12, 2, 25)
_REJECTED = (50, 4, 9, 22, 3, 6, 41, 2, 17, 8, 33, 5)
PREFERENCES = [
    {"prompt": prompt + " ", "chosen": _text(n), "rejected": _text(m)}
    for prompt, n, m in zip(PROMPTS, _CHOSEN, _REJECTED, strict=True)
]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<eos>": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    model = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", pad_token="<eos>")
