# SPDX-License-Identifier: Apache-2.0
"""The `distca` block: what is accepted, and errors that name the key, what was given and what is allowed."""

from __future__ import annotations

import pytest

from deepspeed_distca.config import DistCAConfig, DistCAConfigError, get_distca_config, parse_config


def test_defaults_and_documented_options() -> None:
    config = parse_config({})
    assert config.enabled and config.kernel is None and config.overlap is None and config.servers is None
    assert config.tolerance == 0.005 and config.check_plan and config.token_weighted_loss


def test_no_block_or_disabled_is_none() -> None:
    assert get_distca_config({}) is None
    assert get_distca_config({"distca": {"enabled": False}}) is None
    assert isinstance(get_distca_config({"distca": {"enabled": True}}), DistCAConfig)


@pytest.mark.parametrize("value", ["off", 3, ["enabled"], True])
def test_block_that_is_no_block(value: object) -> None:
    with pytest.raises(DistCAConfigError, match="must be a block of options"):
        get_distca_config({"distca": value})


def test_int_is_a_float() -> None:
    assert parse_config({"tolerance": 0, "timeout_seconds": 30}).timeout_seconds == 30.0


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"tolerence": 0.1}, ["`distca.tolerence`", "0.1", "tolerance", "granularity"]),
        ({"tolerance": -0.5}, ["`distca.tolerance`", "-0.5", "greater than or equal to 0"]),
        ({"tolerance": "0.1"}, ["`distca.tolerance`", "'0.1'", "valid number"]),
        ({"tolerance": float("nan")}, ["`distca.tolerance`", "nan", "finite"]),
        ({"tolerance": float("inf")}, ["`distca.tolerance`", "inf"]),
        ({"enabled": 1}, ["`distca.enabled`", "1", "boolean"]),
        ({"enabled": "yes"}, ["`distca.enabled`", "'yes'"]),
        ({"granularity": 0}, ["`distca.granularity`", "0", "greater than or equal to 1"]),
        ({"granularity": 1.5}, ["`distca.granularity`", "1.5", "integer"]),
        ({"granularity": True}, ["`distca.granularity`", "True", "integer"]),
        ({"min_shard_tokens": -1}, ["`distca.min_shard_tokens`", "-1"]),
        ({"servers": 0}, ["`distca.servers`", "0"]),
        ({"max_received_rows": 0}, ["`distca.max_received_rows`", "0"]),
        ({"min_gain": -1}, ["`distca.min_gain`", "-1", "greater than or equal to 0"]),
        ({"kernel": "flash"}, ["`distca.kernel`", "'flash'", "flash_attn_4", "reference"]),
        ({"overlap": "always"}, ["`distca.overlap`", "'always'", "local_first", "none"]),
        ({"exchange": "nvlink"}, ["`distca.exchange`", "'nvlink'", "nccl", "peer_copy"]),
        ({"staging_mib": 0}, ["`distca.staging_mib`", "0", "greater than or equal to 1"]),
        ({"cost_model": ""}, ["`distca.cost_model`", "''", "at least 1 character"]),
        ({"cost_model": {"pair": 1}}, ["`distca.cost_model`", "{'pair': 1}", "valid string"]),
        ({"timeout_seconds": 0}, ["`distca.timeout_seconds`", "0", "greater than 0"]),
        (
            {"server_weights": "measure"},
            ["`distca.server_weights`", "'measure'", "list of whole numbers"],
        ),
        ({"server_weights": [1, 2.5]}, ["`distca.server_weights`", "[1, 2.5]", "list of whole numbers"]),
        ({"server_weights": [True, 1]}, ["`distca.server_weights`", "[True, 1]"]),
        ({"server_weights": 3}, ["`distca.server_weights` was given 3;"]),
        ({"server_weights": "auto"}, ["`distca.server_weights`", "auto", "leave the key out"]),
        ({"tolerance": "auto"}, ["`distca.tolerance`", "auto", "leave the key out"]),
        ({"kernel": "auto"}, ["`distca.kernel`", "auto", "leave the key out"]),
        ({"tolerance": -1, "granularity": 0}, ["`distca.tolerance`", "`distca.granularity`"]),
    ],
)
def test_errors_name_key_value_and_what_is_allowed(block: dict, words: list[str]) -> None:
    with pytest.raises(DistCAConfigError) as raised:
        parse_config(block)
    for word in words:
        assert word in str(raised.value), raised.value


def test_weights_are_a_list() -> None:
    for given in ([3, 4], None):
        assert parse_config({"server_weights": given}).server_weights == given
    with pytest.raises(DistCAConfigError, match="a list of whole numbers"):
        parse_config({"server_weights": "measured"})


def test_a_value_that_is_none_of_several_things_is_one_sentence() -> None:
    for given in ("measure", [1, 2.5, "x"], {"a": 1}):
        with pytest.raises(DistCAConfigError) as raised:
            parse_config({"server_weights": given})
        assert str(raised.value).count("was given") == 1 and ";" not in str(raised.value).split("allowed")[1]
