# SPDX-License-Identifier: Apache-2.0
"""`distca.overlap` left out: two nano-batches over a slow link, exact as ever, and whole ones where that cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepspeed_distca.scheduler import CostModel, Heads
from deepspeed_distca.scheduler.profiles import Profile, Setting
from tests.distributed.harness import run_ranks
from tests.distributed.test_ping_pong import LAYOUTS, TOLERANCE, segments

WORKER = "tests.distributed.overlap_choice_worker:"
#: What comes up after two nano-batches have run.
LATER = ("reentrant later", "a hook on one rank")
MOVES, STAYS = LAYOUTS["one long document"], [segments(60, 3), segments(60, 3, first=2)]


@pytest.fixture
def cost_models(tmp_path) -> dict[str, str]:
    """Files of cost models for a slow link and for one that takes no time."""
    found = {}
    for name, rate in (("slow", 10**6), ("fast", 10**18)):
        cost = replace(CostModel.fitted(Heads(4, 2, 8, element_size=4)), bytes_per_second=rate, latency=0)
        found[name] = str(tmp_path / f"{name}.json")
        Profile(Setting("a device", "sm90", "flash_attn_4", "fp32"), cost).save(tmp_path / f"{name}.json")
    return found


def test_the_links_rate_decides_and_training_is_exact(cost_models) -> None:
    slow, fast = ({"overlap": None, "cost_model": cost_models[name]} for name in ("slow", "fast"))
    cases = [
        dict(layouts=[MOVES, STAYS, LAYOUTS["longer than a rank"]], block=slow, zero=1),
        dict(layouts=[MOVES, MOVES], block=slow, zero=2, checkpointing=True),
        dict(layouts=[MOVES, MOVES], block=fast, zero=1),
        dict(layouts=[MOVES, MOVES], block={**slow, "overlap": "local_first"}, zero=0),
    ]
    # Of two steps; the first micro-batch that favours two and the one after it run whole.
    splits = [[False, False, True, True, False, True], [False, False, True, True], [False] * 4, [False] * 4]
    results = run_ranks(WORKER + "train_cases", 2, timeout=280, cases=cases)
    for outcomes in results:
        assert [outcome["splits"] for outcome in outcomes] == splits
        for case, outcome in zip(cases, outcomes, strict=True):
            assert abs(outcome["loss"] - outcome["expected"]) < TOLERANCE * outcome["expected"], (case, outcome)
            assert outcome["gradient_error"] < TOLERANCE, (case, outcome)
    words = ["overlap local_first or ping_pong,"] * 3 + ["overlap local_first,"]
    assert all(word in outcome["printed"] for word, outcome in zip(words, results[0], strict=True))


def test_whole_wherever_two_nano_batches_cannot_be(cost_models) -> None:
    results = run_ranks(WORKER + "fallbacks", 2, timeout=280, slow=cost_models["slow"])
    faults = [{name: outcome["fault"] for name, outcome in found.items()} for found in results]
    assert all("reentrant" in fault[name] for fault in faults for name in ("reentrant", "DeepSpeed's", "by hand"))
    assert [bool(fault["a hook on one rank"]) for fault in faults] == [False, True]
    for found in results:
        for name, outcome in found.items():
            assert outcome["error"] < TOLERANCE, (name, outcome)
            before, after = {"nothing": (True, True)}.get(name, (name in LATER, False))
            assert outcome["splits"] == [False, False, before, after, after], (name, outcome)
