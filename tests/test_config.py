# SPDX-License-Identifier: Apache-2.0
"""The `distca` block: what is accepted, and errors that name the key, what was given and what is allowed."""

from __future__ import annotations

import pytest

from deepspeed_distca.config import (
    AdvancedConfig,
    DistCAConfig,
    DistCAConfigError,
    get_distca_config,
    named_options,
    parse_config,
)
from deepspeed_distca.defaults import TOLERANCE


def test_defaults_and_documented_options() -> None:
    config = parse_config({})
    assert config.enabled and config.kernel is None and config.overlap is None and config.servers is None
    assert config.token_weighted_loss and config.advanced.tolerance == TOLERANCE and config.advanced.probe


def test_no_block_or_disabled_is_none() -> None:
    assert get_distca_config({}) is None
    assert get_distca_config({"distca": {"enabled": False}}) is None
    assert isinstance(get_distca_config({"distca": {"enabled": True}}), DistCAConfig)


@pytest.mark.parametrize("value", ["off", 3, ["enabled"], True])
def test_block_that_is_no_block(value: object) -> None:
    with pytest.raises(DistCAConfigError, match="must be a block of options"):
        get_distca_config({"distca": value})


def test_int_is_a_float() -> None:
    assert parse_config({"advanced": {"tolerance": 0}, "timeout_seconds": 30}).timeout_seconds == 30.0


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"servers": 0}, ["`distca.servers`", "0"]),
        ({"enabled": 1}, ["`distca.enabled`", "1", "boolean"]),
        ({"enabled": "yes"}, ["`distca.enabled`", "'yes'"]),
        ({"kernel": "flash"}, ["`distca.kernel`", "'flash'", "flash_attn_4", "reference"]),
        ({"kernel": "auto"}, ["`distca.kernel`", "auto", "leave the key out"]),
        ({"overlap": "always"}, ["`distca.overlap`", "'always'", "local_first", "none"]),
        ({"cost_model": ""}, ["`distca.cost_model`", "''", "at least 1 character"]),
        ({"cost_model": {"pair": 1}}, ["`distca.cost_model`", "{'pair': 1}", "valid string"]),
        ({"timeout_seconds": 0}, ["`distca.timeout_seconds`", "0", "greater than 0"]),
        ({"advanced": 3}, ["`distca.advanced`", "3", "a block of options"]),
        ({"advanced": None}, ["`distca.advanced`", "None", "a block of options"]),
        ({"advanced": "auto"}, ["`distca.advanced`", "'auto'", "a block of options"]),
    ],
)
def test_errors_name_key_value_and_what_is_allowed(block: dict, words: list[str]) -> None:
    check(block, words)


@pytest.mark.parametrize(
    ("advanced", "words"),
    [
        ({"tolerance": -0.5}, ["`distca.advanced.tolerance`", "-0.5", "greater than or equal to 0"]),
        ({"tolerance": "0.1"}, ["`distca.advanced.tolerance`", "'0.1'", "valid number"]),
        ({"tolerance": float("nan")}, ["`distca.advanced.tolerance`", "nan", "finite"]),
        ({"tolerance": float("inf")}, ["`distca.advanced.tolerance`", "inf"]),
        ({"tolerance": "auto"}, ["`distca.advanced.tolerance`", "auto", "leave the key out"]),
        ({"granularity": 0}, ["`distca.advanced.granularity`", "0", "greater than or equal to 1"]),
        ({"granularity": 1.5}, ["`distca.advanced.granularity`", "1.5", "integer"]),
        ({"granularity": True}, ["`distca.advanced.granularity`", "True", "integer"]),
        ({"max_received_rows": 0}, ["`distca.advanced.max_received_rows`", "0"]),
        ({"min_gain": -1}, ["`distca.advanced.min_gain`", "-1", "greater than or equal to 0"]),
        ({"exchange": "nvlink"}, ["`distca.advanced.exchange`", "'nvlink'", "nccl", "peer_copy"]),
        ({"staging_mib": 0}, ["`distca.advanced.staging_mib`", "0", "greater than or equal to 1"]),
        ({"pipeline_scope": "all"}, ["`distca.advanced.pipeline_scope`", "'all'", "stage", "grid"]),
        ({"server_weights": "measured"}, ["`distca.advanced.server_weights`", "'measured'", "list of whole numbers"]),
        ({"server_weights": [1, 2.5]}, ["`distca.advanced.server_weights`", "[1, 2.5]", "list of whole numbers"]),
        ({"server_weights": [True, 1]}, ["`distca.advanced.server_weights`", "[True, 1]"]),
        ({"server_weights": 3}, ["`distca.advanced.server_weights` was given 3;"]),
        ({"server_weights": "auto"}, ["`distca.advanced.server_weights`", "auto", "leave the key out"]),
    ],
)
def test_advanced_options_are_checked_as_well(advanced: dict, words: list[str]) -> None:
    check({"advanced": advanced}, words)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"tolerance": 0.01}, ["`distca.tolerance` belongs under", 'write "advanced": {"tolerance": 0.01}']),
        (
            {"probe": False, "advanced": {"tolerance": 0.1}, "server_weights": [1, 2]},
            [
                "`distca.probe` and `distca.server_weights` belong under",
                'write "advanced": {"tolerance": 0.1, "probe": false, "server_weights": [1, 2]}',
            ],
        ),
        (
            {"pipeline": {"scope": "stage"}},
            ["`distca.pipeline` belongs", 'write "advanced": {"pipeline_scope": "stage"}'],
        ),
        ({"pipeline": {}}, ['write "advanced": {"pipeline_scope": "grid"}']),
        ({"advanced": {"servers": 2}}, ["`distca.advanced.servers`", 'write "servers": 2 beside "advanced"']),
        ({"check_plan": False}, ["`distca.check_plan` was taken out", "always compared", "remove it"]),
        ({"advanced": {"min_shard_tokens": 256}}, ["`distca.advanced.min_shard_tokens` was taken out", "remove it"]),
    ],
)
def test_keys_of_earlier_versions_and_of_the_other_level(block: dict, words: list[str]) -> None:
    check(block, words)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"servrs": 2}, ["`distca.servrs` is not an option (given: 2)", "did you mean `distca.servers`?"]),
        ({"tolerence": 0.1}, ["`distca.tolerence`", "0.1", "did you mean `distca.advanced.tolerance`?"]),
        ({"advanced": {"tolerence": 0.1}}, ["`distca.advanced.tolerence`", "mean `distca.advanced.tolerance`?"]),
        (
            {"x": 1},
            ["`distca.x` is not an option (given: 1); options: enabled, overlap", 'under "advanced": tolerance'],
        ),
    ],
)
def test_unknown_keys_get_the_nearest_known_one(block: dict, words: list[str]) -> None:
    check(block, words)


def test_all_that_is_wrong_is_told_at_once() -> None:
    advanced = {"granularity": 0, "servers": 2, "shards": 1, "exchange": "auto"}
    block = {
        "tolerance": -1,
        "kernel": "auto",
        "overlap": "always",
        "chek": 1,
        "check_plan": True,
        "advanced": advanced,
    }
    names = ("tolerance", "kernel", "overlap", "chek", "check_plan")
    check(block, [f"`distca.{name}`" for name in names] + [f"`distca.advanced.{name}`" for name in advanced])
    check(block, ["`distca.advanced.tolerance` was given -1"])


def test_there_are_eight_everyday_options_and_each_has_one_name() -> None:
    config = parse_config({"servers": 2, "advanced": {"server_weights": [3, 4]}})
    assert len(DistCAConfig.model_fields) == 9 and not set(DistCAConfig.model_fields) & set(
        AdvancedConfig.model_fields
    )
    named = named_options(config)
    assert named["`distca.servers`"] == 2 and named["`distca.advanced.server_weights`"] == [3, 4]
    assert len(named) == 8 + len(AdvancedConfig.model_fields)
    assert parse_config(config) is config


def test_a_value_that_is_none_of_several_things_is_one_sentence() -> None:
    for given in ("measure", [1, 2.5, "x"], {"a": 1}):
        with pytest.raises(DistCAConfigError) as raised:
            parse_config({"advanced": {"server_weights": given}})
        assert str(raised.value).count("was given") == 1 and ";" not in str(raised.value).split("allowed")[1]


def check(block: dict, words: list[str]) -> None:
    """The block is refused in these words."""
    with pytest.raises(DistCAConfigError) as raised:
        parse_config(block)
    for word in words:
        assert word in str(raised.value), raised.value
