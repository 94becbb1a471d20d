# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on micro-batches of any number of documents, and notice one that has left without the others."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def ranks():
    return run_ranks("tests.distributed.agreement_worker:run", 2, seed=5)


def test_any_number_of_documents_and_values(ranks):
    assert all(all(rank["numbers"].values()) for rank in ranks), [rank["numbers"] for rank in ranks]


def test_errors_reach_every_rank_in_full(ranks):
    words = ranks[0]["words"]
    assert ranks[1]["long error"] == f"ValueError: {words}"
    assert ranks[0]["long error"] == f"AgreementError: rank 1 cannot use its micro-batch: {words}"
    assert ranks[1]["values' error"] == "ValueError: no" and ranks[0]["values' error"].endswith("micro-batch: no")


def test_a_micro_batch_that_one_rank_left_is_an_error_on_all(ranks):
    for rank in ranks:
        assert "ranks [1] left the last micro-batch before its first attention layer" in rank["left"]
    # While the others still agree on it, they learn it at once; the one that left has its own error.
    assert "rank 0: digest, rank 1: micro_batch" in ranks[0]["left at the digest"]
    assert "rank 0: more, rank 1: micro_batch" in ranks[0]["left at the documents"]
    assert ranks[0]["cause"] == "ValueError: a cause"


def test_a_layout_of_several_ranks_needs_as_many_servers(ranks):
    for rank in ranks:
        assert rank["shared by nobody"] == "AgreementError: the layout has 2 ranks, but 1 servers share attention"


def test_counts_that_are_none_are_named_on_every_rank(ranks):
    for rank, begin in zip(ranks, ("AgreementError: rank 1 cannot use its micro-batch", "ValueError"), strict=True):
        assert [message.split(": `")[0] for message in rank["counts"]] == [begin] * 5
        for message, value in zip(rank["counts"], ("-1", str(2**62), "True", "1.0", str(2**70)), strict=True):
            assert f"was given {value}; allowed: a whole number from 0 to {2**62 - 1}" in message
        assert "`step_targets`" in rank["counts"][-1] and rank["many targets"]


def test_ranks_are_at_the_same_micro_batch_after_it(ranks):
    for rank in ranks:
        assert rank["after it"] and rank["after the cause"] and rank["left by all"]
        assert rank["after the digest"] == rank["after the documents"] == [True, True]
