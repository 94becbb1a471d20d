# SPDX-License-Identifier: Apache-2.0
"""The first of the random cases that ``python -m tests.fuzz`` tries for as long as it is told."""

from __future__ import annotations

import collections
import math

from tests.distributed.harness import run_ranks
from tests.fuzz.batches import check_batch
from tests.scheduler.random_checks import check_plan


def test_batches_that_describe_their_documents_in_random_combinations():
    found = collections.Counter(check_batch(seed) for seed in range(3000))
    # Cases of every kind were there, so that the comparison was one.
    assert found["exact"] > 1000 and len(found) > 30


def test_random_batches_through_an_engine():
    found = run_ranks("tests.fuzz.engine:main", 2, first=0, count=150, seconds=math.inf)
    assert found[0] == found[1]
    assert found[0]["exact"] > 50


def test_random_plans():
    for seed in range(1000):
        check_plan(seed)


def test_random_plans_carried_out():
    found = run_ranks("tests.fuzz.attention:main", 3, first=0, count=60, seconds=math.inf)
    assert found[0] == found[1] == found[2]
    for what in ("moved", "relayed", "by nodes", "in two", "crossing", "trees", "trees in windows"):
        assert found[0].get(what), f"no case of {what}: {found[0]}"


def test_random_contradictions_on_some_ranks():
    found = run_ranks("tests.fuzz.doors:main", 2, first=0, count=150, seconds=math.inf)
    assert found[0] == found[1]
    for kind in ("exact: documents", "exact: trees", "refused: documents", "refused: trees"):
        assert sum(times for what, times in found[0].items() if what.startswith(kind)) > 10, found[0]
