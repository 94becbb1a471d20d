# SPDX-License-Identifier: Apache-2.0
"""A small byte-level BPE tokenizer, trained on the spot, so that the example needs no download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Sequence[str], vocab_size: int, path: Path, sample_characters: int = 2_000_000) -> None:
    """Trains on the first ``sample_characters`` of the texts and writes the tokenizer to ``path``."""
    sample, room = [], sample_characters
    for text in texts:
        sample.append(text[:room])
        room -= len(sample[-1])
        if room <= 0:
            break
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(sample, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that :func:`train_tokenizer` wrote."""
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)
