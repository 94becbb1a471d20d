# SPDX-License-Identifier: Apache-2.0
"""Peer copies are used by all ranks or by none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.exchange.choice import make_exchange
from tests.distributed.exchange_choice_worker import NO_ACCESS, NO_MEMORY
from tests.distributed.harness import run_ranks


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="about ranks without GPUs")
def test_ranks_agree() -> None:
    for rank, found in enumerate(run_ranks("tests.distributed.exchange_choice_worker:agree", 3)):
        assert found["none"] == ""
        assert found["one"] == "rank 1: no link"
        assert found["long"].startswith("rank 2: ääää") and len(found["long"]) < 300
        assert found["all"] == "rank 0: problem 0"
        assert found["nodes"] == 1 and found["devices"] == [0, 1, 2]
        assert {found["asked"], found["some"], found["nobody"]} == {"PeerToPeerExchange"}
        # A line of the first rank; unasked only about memory, since less of it would have done.
        told = {case: text for case, text in found["printed"].items() if text}
        assert set(told) == (
            set() if rank else {f"peer_copy {NO_MEMORY}", f"peer_copy {NO_ACCESS}", f"None {NO_MEMORY}"}
        )
        for case, text in told.items():
            problem = case.split(" ", 1)[1]
            remedy = " (a `staging_mib` below 1536 may fit)" if problem == NO_MEMORY else ""
            assert text == (
                f"distca: no exchange by peer copies: rank 1: {problem}{remedy}; NCCL's sends and receives are used\n"
            )
        assert found["inside"] == "1" and found["outside"] is None
        assert found["arrived"] == [float((rank - 1) % 3)] * 3


def test_peer_copies_on_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match='`exchange` was given "peer_copy".*cpu; leave the key out'):
        make_exchange("peer_copy", dist.ProcessGroup, torch.device("cpu"), timeout=10, staging_mib=1)
