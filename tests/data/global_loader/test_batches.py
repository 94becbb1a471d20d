# SPDX-License-Identifier: Apache-2.0
"""How a step's batches come from a worker."""

from __future__ import annotations

from itertools import islice

import torch

from deepspeed_distca.data.global_loader import GlobalPackedLoader
from deepspeed_distca.data.global_loader.batches import divide_again, join
from tests.data.batches import same, spread
from tests.data.configs import config


def test_a_worker_hands_a_step_over_in_one_tensor() -> None:
    """Each tensor takes a file descriptor; a worker that has none left loses the step, and its loader waits."""
    loader = GlobalPackedLoader(spread(60), rank=0, num_ranks=2, tokens_per_rank=48, config=config(4))
    batches = list(islice(loader, 4))
    joined, rest = join(batches)
    assert joined.numel() == sum(v.numel() for batch in batches for v in batch.values() if torch.is_tensor(v))
    assert not any(torch.is_tensor(value) for _, batch in rest for value in batch.values())
    assert len(batches) == 4 and same(divide_again(joined, rest), batches)
