# SPDX-License-Identifier: Apache-2.0
"""Weights of the data-parallel ranks from fabricated speeds: groups, what is printed, and what is not measured."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from deepspeed_distca import server_weights
from deepspeed_distca.config import DistCAConfigError, parse_config
from deepspeed_distca.profiling.speeds import UnmeasuredError
from deepspeed_distca.server_weights import agreed_weights, weights_of_servers

CPU = torch.device("cpu")
MEASURED = {"server_weights": "measured"}


@pytest.fixture
def agree(monkeypatch):
    """agreed_weights with these speeds of all ranks, or this error; None: nothing may be measured."""

    def call(speeds, groups: list[list[int]], servers: int, block=MEASURED, rank: int = 0):
        given = mock.Mock(side_effect=[speeds] if speeds else AssertionError("measured"))
        monkeypatch.setattr(server_weights, "speeds_of_ranks", given)
        monkeypatch.setattr(server_weights.dist, "get_rank", lambda: rank)
        return agreed_weights(parse_config(block), CPU, groups, servers)

    return call


def test_measured_weights_and_the_line_that_repeats_them(agree, capsys) -> None:
    assert agree([640.0, 622.0], [[0, 1]], 2) == [1000, 972]
    assert capsys.readouterr().out == (
        "distca: measured speeds 1.0000, 0.9719 of the fastest device (640.0 matrix products a second); "
        '"server_weights": [1000, 972] repeats this run with the same plans\n'
    )
    assert agree([640.0, 622.0], [[0, 1]], 2, rank=1) == [1000, 972]
    assert agree([640.0, 639.0], [[0, 1]], 2, rank=1) == [1000, 1000]
    assert capsys.readouterr().out == ""
    assert agree([640.0, 639.0], [[0, 1]], 2) == [1000, 1000]
    assert capsys.readouterr().out == (
        "distca: measured speeds 1.0000, 0.9984 of the fastest device (640.0 matrix products a second): equal within "
        '0.5%; "server_weights": [1000, 1000] repeats this run with the same plans\n'
    )


def test_groups_of_servers_take_their_ranks_part(agree) -> None:
    weights = agree([100.0, 80.0, 100.0, 90.0], [[0, 1, 2, 3]], 2)
    assert weights == [1000, 800, 1000, 900]
    assert [weights_of_servers(weights, 4, 2, rank) for rank in range(4)] == [(1000, 800)] * 2 + [(1000, 900)] * 2


def test_ranks_with_the_same_tokens_are_as_fast_as_the_slowest_of_them(agree) -> None:
    # Tensor parallelism: ranks 0 and 1 have the same tokens, and so have 2 and 3.
    assert agree([100.0, 90.0, 95.0, 80.0], [[0, 2], [1, 3]], 2) == [1000, 889]


def test_nothing_is_measured_where_nothing_depends_on_it(agree) -> None:
    assert agree(None, [[0]], 1) is None
    assert agree(None, [[0, 1]], 1) is None
    assert agree(None, [[0, 1]], 2, {"server_weights": [3, 4]}) == [3, 4]
    assert agree(None, [[0, 1]], 2, {}) is None


@pytest.mark.parametrize(
    ("reason", "end"),
    [("", "whole numbers"), ("RuntimeError: no room", "whole numbers. On this rank: RuntimeError: no room")],
)
def test_a_device_that_cannot_be_measured(agree, reason, end) -> None:
    with pytest.raises(DistCAConfigError, match=r"ranks \[1\] could not be measured.*400 MiB.*as a list") as caught:
        agree(UnmeasuredError([1], reason), [[0, 1]], 2)
    assert str(caught.value).endswith(end)
