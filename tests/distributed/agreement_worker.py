# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: what ranks agree on, and what they say when one of them has gone on without the others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from deepspeed_distca.attention_server.agreement import Agreement, AgreementError, MicroBatch, agreement_group
from deepspeed_distca.layout import Layout


def run(seed: int) -> dict:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    agreement = Agreement(agreement_group([[0, 1]], timedelta(seconds=20)), servers=2, fingerprint=seed)
    rng = np.random.default_rng(seed)  # the same on all ranks: each knows what the others have

    def gather(lengths: list[list[int]]) -> Callable[[], object]:
        return agreement.gather(MicroBatch(Layout.from_lengths([lengths[rank]]), targets=rank + 1))

    def agrees(lengths: list[list[int]]) -> bool:
        together = gather(lengths)()
        assert together.targets == 3 and together.step_targets is None and not together.in_two
        return np.array_equal(together.layout.segments, Layout.from_lengths(lengths).segments)

    def message_of(run: Callable[[], object]) -> str:
        try:
            run()
        except (AgreementError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    results: dict = {"numbers": {}}
    few = [[5, 3], [7]]
    for n in (0, 1, 502, 503, 1013, 1014, 2500):
        lengths = [rng.integers(1, 9, size=n).tolist() or [1], [4, 2]]
        values = agreement.gather_values(np.arange(n if rank else n // 2))
        right = [list(range(n // 2)), list(range(n))]
        results["numbers"][n] = agrees(lengths) and [row.tolist() for row in values] == right
    words = "what is wrong, at length: " + "ä" * 700
    results["long error"] = message_of(lambda: agreement.gather(ValueError(words) if rank else MicroBatch(
        Layout.from_lengths([[3]]), 1))())  # fmt: skip
    results["values' error"] = message_of(lambda: agreement.gather_values(ValueError("no") if rank else np.arange(2)))

    # Rank 1 leaves a micro-batch unasked, and the other one asks for it, or asks further, before it notices.
    first = gather(few)
    if rank == 0:
        first()
    results["left"] = message_of(gather(few))
    results["after it"] = agrees(few)
    many = [[1] * 600, [2] * 40]
    for name, ask in (("digest", lambda: agreement.same(3, "something")), ("documents", None)):
        first = gather(many if ask is None else few)
        if rank == 0:
            if ask is not None:
                first()
            results[f"left at the {name}"] = message_of(ask or first)
        else:
            results[f"left at the {name}"] = message_of(gather(few))
        results[f"after the {name}"] = agrees(few)
    gather(few)
    results["left by all"] = agrees(few)
    alone = Agreement(agreement_group([[0, 1]], timedelta(seconds=20)), servers=1, fingerprint=seed)
    shared = MicroBatch(Layout.from_lengths([[3], [2]]), targets=1)
    results["shared by nobody"] = message_of(alone.gather(shared))
    return {**results, "words": words}
