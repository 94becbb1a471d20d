# SPDX-License-Identifier: Apache-2.0
"""Batches with trees are exact or refused, on two ranks: see trees_worker."""

from __future__ import annotations

import pytest

from tests.distributed import trees_worker
from tests.distributed.harness import run_ranks
from tests.distributed.scenarios import check_exact, check_refused

#: Words of the error on rank 0 and on rank 1.
REFUSED = {
    "without the plugin": ("engine without the plugin", "engine without the plugin"),
    "without a block": ("engine without the plugin", "engine without the plugin"),
    "detached": ("engine without the plugin", "engine without the plugin"),
    "longrope, texts on both sides": ("up to 42 tokens and longer", "rank 0 .*up to 42 tokens and longer"),
    "no positions": ("MBartForCausalLM .*cannot run on trees", "MBartForCausalLM .*cannot run on trees"),
    "a parent that is not there": ("rank 1 .*the one at row 1, but there is none", "at row 1, but there is none"),
    "positions that do not go on": ("rank 1 .*token 2 of row 0 has position 0", "token 2 .* has position 0"),
    "cu_seqlens beside": ("rank 1 .*cu_seqlens was given beside", "cu_seqlens was given beside"),
    "padding": ("rank 1 .*attention_mask: a batch with trees has no padding", "no padding"),
    "a token with two targets": ("rank 1 .*begin with .1, 2.", "begin with .1, 2."),
}


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_ranks("tests.distributed.trees_worker:run", 2)


@pytest.mark.parametrize("name", [name for name in trees_worker.SCENARIOS if name not in REFUSED])
def test_exact(found, name):
    check_exact(found, name)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(found, name):
    check_refused(found, name, REFUSED[name])
