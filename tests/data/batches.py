# SPDX-License-Identifier: Apache-2.0
"""Documents for tests, and batches that are the same."""

from __future__ import annotations

import numpy as np
import torch

VOCABULARY = 50_000


def corpus(lengths, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, size=int(n)) for n in lengths]


def spread(count: int, seed: int = 0) -> list[np.ndarray]:
    """Documents of very different lengths, the longest of several ranks' budgets of 64 tokens."""
    lengths = np.random.default_rng(seed).lognormal(2.6, 1.0, size=count).astype(int) + 1
    return corpus(np.minimum(lengths, 150), seed)


def same(a: list[dict], b: list[dict]) -> bool:
    """Bit-identical batches."""
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) if torch.is_tensor(x[k]) else x[k] == y[k] for k in x)
        for x, y in zip(a, b, strict=True)
    )


def assert_same(batch, expected):
    assert batch.keys() == expected.keys()
    for key, value in expected.items():
        if torch.is_tensor(value):
            assert batch[key].dtype == value.dtype, key
            torch.testing.assert_close(batch[key], value, rtol=0, atol=0)
        else:
            assert batch[key] == value, key
