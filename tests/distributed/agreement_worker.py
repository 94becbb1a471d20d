# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: what ranks agree on, and what they say when one of them has gone on without the others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from deepspeed_distca.attention_server.coordination.agreement import (
    Agreement,
    AgreementError,
    GlobalMicroBatch,
    MicroBatch,
    agreement_group,
)
from deepspeed_distca.layout import Layout


def run(seed: int) -> dict:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    agreement = Agreement(agreement_group([[0, 1]], timedelta(seconds=20)), servers=2, fingerprint=seed)
    rng = np.random.default_rng(seed)  # the same on all ranks: each knows what the others have

    def gather(number: int, lengths: list[list[int]]) -> Callable[[], GlobalMicroBatch]:
        """Micro-batch `number`: ranks that are at the same one find twice that many targets."""
        return agreement.gather(MicroBatch(Layout.from_lengths([lengths[rank]]), targets=number))

    def agrees(number: int, lengths: list[list[int]]) -> bool:
        together = gather(number, lengths)()
        assert together.step_targets is None
        same = np.array_equal(together.layout.segments, Layout.from_lengths(lengths).segments)
        return same and together.targets == 2 * number

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
        results["numbers"][n] = agrees(n, lengths) and [row.tolist() for row in values] == right
    words = "what is wrong, at length: " + "ä" * 700
    results["long error"] = message_of(lambda: agreement.gather(ValueError(words) if rank else MicroBatch(
        Layout.from_lengths([[3]]), 1))())  # fmt: skip
    results["values' error"] = message_of(lambda: agreement.gather_values(ValueError("no") if rank else np.arange(2)))

    # Rank 1 leaves a micro-batch unasked, and the other one asks for it, or asks further, before it notices.
    first = gather(1, few)
    if rank == 0:
        assert first().targets == 2
    results["left"] = message_of(gather(2, few))
    results["after it"] = agrees(3, few)
    number, many = 4, [[1] * 1600, [2] * 40]
    for name, ask in (("digest", lambda: agreement.same(3, "something")()), ("documents", None)):
        first = gather(number, many if ask is None else few)
        if rank == 0:
            if ask is not None:
                first()
            results[f"left at the {name}"] = message_of(ask or first)
        results[f"after the {name}"] = [agrees(number + more, few) for more in (1, 2)]
        number += 3
    # A rank's own error is the one that it raises, also where the other has left and does not hear of it.
    wrong = agreement.gather(ValueError("a cause") if rank == 0 else MicroBatch(Layout.from_lengths([[3]]), number))
    if rank == 0:
        results["cause"] = message_of(wrong)
    results["after the cause"] = agrees(number + 1, few)
    gather(number + 2, few)
    results["left by all"] = agrees(number + 3, few)
    alone = Agreement(agreement_group([[0, 1]], timedelta(seconds=20)), servers=1, fingerprint=seed)
    shared = MicroBatch(Layout.from_lengths([[3], [2]]), targets=1)
    results["shared by nobody"] = message_of(alone.gather(shared))
    given = [{"targets": value} for value in (-1, 2**62, True, 1.0)] + [{"targets": 0, "step_targets": 2**70}]
    ordinary = MicroBatch(Layout.from_lengths([[3]]), targets=2**62 - 1)
    results["counts"] = [
        message_of(agreement.gather(MicroBatch(Layout.from_lengths([[3]]), **counts) if rank else ordinary))
        for counts in given
    ]
    results["many targets"] = agreement.gather(ordinary)().targets == 2 * (2**62 - 1)
    return {**results, "words": words}
