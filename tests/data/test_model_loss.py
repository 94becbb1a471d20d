# SPDX-License-Identifier: Apache-2.0
"""A packed row through a HuggingFace model: the same loss and gradients as its documents run alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deepspeed_distca.data import AccumulationLoader, PackedSequenceCollator


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).double()


def alone(model, features):
    """Sum of the losses of each document run by itself, the number of targets, and the gradients of the mean."""
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for feature in features:
        ids = torch.tensor([feature["input_ids"]])
        labels = torch.tensor(feature["labels"])[1:]
        if not (labels != -100).any():
            continue
        logits = model(input_ids=ids).logits[0, :-1].float()
        total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        targets += int((labels != -100).sum())
    return total, targets, torch.autograd.grad(total / targets, list(model.parameters()))


@pytest.mark.parametrize("labels", ["shift_labels", "labels"])
@pytest.mark.parametrize("lengths", [[7, 1, 13, 2, 5], [9, 8, 8, 12, 8, 12], [1, 1, 3]])
def test_packed_row_equals_documents_alone(model, lengths, labels):
    rng = np.random.default_rng(len(lengths))
    features = []
    for n in lengths:
        ids = rng.integers(0, 97, n)
        features.append({"input_ids": ids.tolist(), "labels": np.where(rng.random(n) < 0.2, -100, ids).tolist()})
    total, targets, expected = alone(model, features)
    batch = next(iter(AccumulationLoader([PackedSequenceCollator()(features)], 1)))
    assert batch["num_targets"] == targets
    if labels == "labels":  # a model that shifts by itself finds the same targets
        del batch["shift_labels"]
    # The whole batch goes in: what only the plugin reads must not disturb the model where the plugin is off.
    loss = model(**batch).loss
    torch.testing.assert_close(loss.double(), total.double() / targets, rtol=1e-6, atol=1e-7)
    for found, wanted in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
