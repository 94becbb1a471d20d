# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of targets against torch's cross entropy, and their sums by answer."""

from __future__ import annotations

import pytest
import torch

from deepspeed_distca.data import answer_losses, answer_sums, token_logps

NONE = -100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities(dtype, monkeypatch):
    monkeypatch.setattr(answer_losses, "_BLOCK", 11 * 3)
    torch.manual_seed(0)
    logits = (torch.randn(1, 9, 11) * 4).to(dtype).requires_grad_()
    targets = torch.tensor([[3, NONE, 5, 10, 0, NONE, NONE, 1]])  # one row of logits is left over
    expected = -torch.nn.functional.cross_entropy(logits[0, :8].float(), targets[0], reduction="none")
    found = token_logps(logits, targets)
    assert found.shape == (1, 8) and found.dtype == torch.float32
    torch.testing.assert_close(found[0], expected)
    factors = torch.randn(8)
    gradients = [torch.autograd.grad((v * factors).sum(), logits)[0] for v in (found, expected)]
    assert gradients[0].dtype == dtype
    torch.testing.assert_close(*gradients, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 11), (2, 4, 11), (1, 7, 11)])
def test_logits_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"logits (must be \[1, tokens, vocabulary\]|has 7 rows for the 8)"):
        token_logps(torch.zeros(shape), torch.zeros(1, 8, dtype=torch.int64))


def test_sums_of_answers():
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]], requires_grad=True)
    sums = answer_sums(values, torch.tensor([[-1, 0, 2, 0, -1]]), 4)
    assert sums.tolist() == [0 + 2 + 4, 0, 3, 0]
    (sums * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert values.grad.tolist() == [[0, 1, 3, 1, 0]]
