# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed can do beside plain training goes with the plugin: loss, gradients and parameters of three steps over
two ranks are those of plain training, with rows moving. What does not go is refused by name. docs/compatibility.md
names these tests."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_ranks
from tests.huggingface import compatibility_worker

BOUND = 1e-5
#: Muon makes all singular values of an update one, those of rounding included.
MUON = 1e-4
OTHERS = ("checkpoint", "universal", "Muon", "refused")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(
        "tests.huggingface.compatibility_worker:run", 2, folder=str(tmp_path_factory.mktemp("compatibility"))
    )


def check(ranks: list[dict], name: str, bound: float = BOUND) -> None:
    for rank, outcomes in enumerate(ranks):
        outcome = outcomes[name]
        assert isinstance(outcome["error"], float), f"rank {rank}: {outcome}"
        assert outcome["error"] <= bound, f"rank {rank}: {outcome}"
        assert outcome["moved"] or name == "plain", f"rank {rank}: no rows moved"


@pytest.mark.parametrize("name", [n for n in compatibility_worker.SCENARIOS if not n.startswith(OTHERS)])
def test_exact(ranks, name):
    check(ranks, name)


@pytest.mark.parametrize("name", [n for n in compatibility_worker.SCENARIOS if n.startswith("checkpoint")])
def test_a_checkpoint_goes_on_as_if_nothing_had_been(ranks, name):
    check(ranks, name)


@pytest.mark.parametrize("name", [n for n in compatibility_worker.SCENARIOS if n.startswith("universal")])
def test_a_universal_checkpoint_goes_on_as_if_nothing_had_been(ranks, name):
    check(ranks, name)


def test_muon(ranks):
    check(ranks, "Muon", MUON)


@pytest.mark.parametrize("name", [n for n in compatibility_worker.SCENARIOS if n.startswith("refused")])
def test_deepcompile_is_refused(ranks, name):
    for outcomes in ranks:
        error = outcomes[name]["error"]
        assert error.startswith("DistCAConfigError: ") and "`compile.deepcompile` to false" in error, error
