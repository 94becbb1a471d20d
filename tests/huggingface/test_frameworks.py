# SPDX-License-Identifier: Apache-2.0
"""Batches in the forms of other frameworks are exact over two ranks with rows moving, and are what these make."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.huggingface import frameworks

DOCUMENTS = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 4, 4, 4, 4, 4]]


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_ranks("tests.huggingface.frameworks_worker:run", 2)


@pytest.mark.parametrize("name", frameworks.FORMS)
def test_exact(found, name):
    for rank, outcomes in enumerate(found):
        outcome = outcomes[name]
        assert isinstance(outcome["error"], float), f"rank {rank}: {outcome}"
        assert outcome["error"] <= 1e-5 and outcome["moved"], f"rank {rank}: {outcome}"


def same(made: dict, real: dict) -> None:
    for key, value in made.items():
        if torch.is_tensor(value):
            assert torch.equal(value, torch.as_tensor(real[key])), (key, value, real[key])
        else:
            assert real.get(key) is value, (key, value, real.get(key))


def test_axolotls_form():
    batching = pytest.importorskip("axolotl.utils.collators.batching")
    features = [
        {
            "input_ids": d,
            "labels": [frameworks.IGNORE, *d[1:]],
            "attention_mask": [1] * len(d),
            "position_ids": list(range(len(d))),
        }
        for d in DOCUMENTS
    ]
    collator = batching.V2BatchSamplerDataCollatorForSeq2Seq(_tokenizer(), pad_to_multiple_of=8)
    same(frameworks.axolotl_multipack(DOCUMENTS), collator(features))


def test_trls_form():
    trainer = pytest.importorskip("trl.trainer.sft_trainer")
    collator = trainer.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    real = collator([{"input_ids": d} for d in DOCUMENTS])
    same(frameworks.trl_padding_free(DOCUMENTS), real)


def test_megatrons_form():
    megatron = pytest.importorskip("megatron.core.packed_seq_params")
    names = set(megatron.PackedSeqParams.__dataclass_fields__)
    assert set(vars(frameworks.megatron_packed(DOCUMENTS)["packed_seq_params"])) == names


def _tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0})), pad_token="<pad>")
