# SPDX-License-Identifier: Apache-2.0
"""What training frameworks hand to a model for packed documents, made from documents by hand.

Read from the packages of the versions named, on 2026-11-30. test_frameworks compares with the real collators where
these can be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain
from types import SimpleNamespace
from typing import Any

import torch

IGNORE = -100

#: A batch from documents' token ids.
Form = Callable[[list[list[int]]], dict[str, Any]]


def _row(values: list[int]) -> torch.Tensor:
    return torch.tensor([values])


def _flat(documents: list[list[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    """Documents in one row, labels and positions of each its own, and tokens of padding behind them."""
    return {
        "input_ids": _row([*chain(*documents), *[0] * pad]),
        "labels": _row([*chain(*([IGNORE, *d[1:]] for d in documents)), *[IGNORE] * pad]),
        "position_ids": _row([*chain(*(range(len(d)) for d in documents)), *[0] * pad]),
    }


def _cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def llama_factory_neat(documents: list[list[int]]) -> dict[str, Any]:
    """LLaMA-Factory 0.9.5, ``neat_packing: true`` with ``flash_attn: fa2``
    (data/collator.py, SFTDataCollatorWith4DAttentionMask): padding is cut off, there is no mask."""
    return {**_flat(documents), "attention_mask": None}


def llama_factory(documents: list[list[int]]) -> dict[str, Any]:
    """LLaMA-Factory 0.9.5, ``packing: true`` (data/processor/supervised.py): a mask of ones over padding as well,
    whose positions stay at 0."""
    batch = _flat(documents, pad=3)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def axolotl_multipack(documents: list[list[int]], multiple: int = 8) -> dict[str, Any]:
    """axolotl 0.19.0, ``sample_packing: true`` (utils/collators/batching.py, V2BatchSamplerDataCollatorForSeq2Seq): a
    mask that numbers documents, positions that count on from 0 in padding."""
    tokens = sum(map(len, documents))
    pad = -tokens % multiple
    numbers = chain(*([i + 1] * len(d) for i, d in enumerate(documents)))
    batch = _flat(documents, pad)
    batch["position_ids"][0, tokens:] = torch.arange(pad)
    return {**batch, "attention_mask": _row([*numbers, *[0] * pad])}


def swift_padding_free(documents: list[list[int]]) -> dict[str, Any]:
    """ms-swift 4.6.0, ``--packing true`` or ``--padding_free true`` (template/base.py, packing_row; the trainer adds
    the cumulative lengths from position ids, utils/transformers_utils.py, get_packed_seq_params)."""
    lengths = [len(d) for d in documents]
    cumulative = _cumulative(lengths)
    return {
        **_flat(documents),
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def trl_padding_free(documents: list[list[int]]) -> dict[str, Any]:
    """TRL 1.16.0, ``padding_free=True`` (trainer/sft_trainer.py, DataCollatorForLanguageModeling)."""
    return _flat(documents)


def megatron_packed(documents: list[list[int]]) -> dict[str, Any]:
    """megatron-core 0.16.1 (packed_seq_params.py, PackedSeqParams): documents one after another."""
    cumulative, longest = _cumulative([len(d) for d in documents]), max(map(len, documents))
    params = SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None,
        cp_group=None,
    )
    return {**_flat(documents), "packed_seq_params": params}


def megatron_padded(documents: list[list[int]], multiple: int = 4) -> dict[str, Any]:
    """The same with every document in a space of its own, as for context parallelism: real lengths in cu_seqlens,
    spaces in cu_seqlens_padded. No position ids: Megatron makes its own."""
    lengths = [len(d) for d in documents]
    spaces = [-(-n // multiple) * multiple for n in lengths]
    ids, labels = [], []
    for document, space in zip(documents, spaces, strict=True):
        ids += [*document, *[0] * (space - len(document))]
        labels += [IGNORE, *document[1:], *[IGNORE] * (space - len(document))]
    params = SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=_cumulative(lengths),
        cu_seqlens_kv=_cumulative(lengths),
        cu_seqlens_q_padded=_cumulative(spaces),
        cu_seqlens_kv_padded=_cumulative(spaces),
    )
    return {"input_ids": _row(ids), "labels": _row(labels), "packed_seq_params": params}


def verl_rmpad(documents: list[list[int]]) -> dict[str, Any]:
    """verl 0.9.1, ``use_remove_padding=True`` (workers/engine/fsdp/transformer_impl.py): no labels, the loss is made
    from logits."""
    batch = _flat(documents)
    return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "attention_mask": None}


FORMS: dict[str, Form] = {
    form.__name__: form
    for form in (
        llama_factory_neat,
        llama_factory,
        axolotl_multipack,
        swift_padding_free,
        trl_padding_free,
        megatron_packed,
        megatron_padded,
        verl_rmpad,
    )
}
