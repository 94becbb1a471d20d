# SPDX-License-Identifier: Apache-2.0
"""Stored cost models: what is read back, which one is chosen, and what is said of files that cannot be used."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_distca.scheduler import CostModel, Heads
from deepspeed_distca.scheduler.cost_model import MAX_COST, MAX_TERM, MovingCost, PhaseCost
from deepspeed_distca.scheduler.profiles import (
    SHIPPED,
    Profile,
    ProfileError,
    Setting,
    cache_folder,
    choose,
    file_name,
)

HEADS = Heads(32, 8, 128)
H200 = Setting("NVIDIA H200", "sm90", "flash_attn_4", "bf16")
H100 = Setting("NVIDIA H100 80GB HBM3", "sm90", "flash_attn_4", "bf16")
A100 = Setting("NVIDIA A100-SXM4-80GB", "sm80", "torch_varlen", "bf16")


def profile(setting: Setting = A100, heads: Heads = HEADS, pair: int = 12_345) -> Profile:
    moving = MovingCost(11, 12), MovingCost(13, 14)
    cost = CostModel(heads, PhaseCost(pair, 1, 2, 3), PhaseCost(2 * pair, 4, 5, 6), 7, 89, 10, *moving)
    return Profile(setting, cost, {"date": "2026-01-02"})


def store(folder: Path, given: Profile) -> Path:
    path = folder / file_name(given.setting, given.cost.heads)
    given.save(path)
    return path


def test_what_is_stored_is_read_back(tmp_path):
    for heads in (HEADS, Heads(6, 2, 96, value_dim=64, element_size=4)):
        given = profile(heads=heads)
        path = store(tmp_path / "new" / "folder", given)
        assert Profile.load(path) == given
        assert [p.name for p in path.parent.iterdir()].count(path.name) == len(list(path.parent.glob(".*"))) + 1
        assert CostModel.from_terms(heads, given.cost.terms) == given.cost


@pytest.mark.parametrize("missing", [("forward", "backward"), ("backward",)])
def test_a_profile_from_before_moving_rows_was_measured_gets_the_shipped_price(tmp_path, missing):
    given = profile()
    values = given.to_dict()
    for phase in missing:
        del values["cost_model"][f"moving_{phase}"]
    path = tmp_path / file_name(A100, HEADS)
    path.write_text(json.dumps(values))
    shipped = {f"moving_{phase}": getattr(CostModel(), f"moving_{phase}") for phase in missing}
    assert shipped["moving_backward"].layer > 0
    assert choose(A100, HEADS, folder=tmp_path).cost == replace(given.cost, **shipped)


def test_names_tell_settings_apart():
    heads = [HEADS, Heads(32, 4, 128), Heads(32, 8, 64), Heads(32, 8, 128, value_dim=64), Heads(16, 8, 128)]
    settings = [H200, H100, A100, replace(A100, kernel="flash_attn_2"), replace(A100, dtype="fp16")]
    names = {file_name(s, h) for s in settings for h in heads}
    assert len(names) == len(heads) * len(settings)
    assert file_name(H200, Heads(32, 8, 128, value_dim=128)) == file_name(H200, HEADS)


def test_precedence(tmp_path):
    folder = tmp_path / "cache"
    default = choose(A100, HEADS, folder=folder)
    assert default.cost == CostModel.fitted(HEADS) and "default" in default.source
    shipped = choose(H200, HEADS, folder=folder)
    assert "shipped for NVIDIA H200" in shipped.source and shipped.source != default.source
    for setting in (A100, H200):
        path = store(folder, profile(setting))
        cached = choose(setting, HEADS, folder=folder)
        assert cached.cost == profile(setting).cost and str(path) in cached.source
        own = tmp_path / "mine.json"
        profile(H100, pair=99).save(own)
        named = choose(setting, HEADS, own, folder=folder)
        assert named.cost == profile(pair=99).cost and str(own) in named.source and H100.device in named.source


@pytest.mark.parametrize("change", [{"device": "other"}, {"kernel": "flash_attn_2"}, {"dtype": "fp16"}])
def test_measured_with_something_else(tmp_path, change):
    store(tmp_path, profile())
    assert choose(replace(A100, **change), HEADS, folder=tmp_path).cost == CostModel.fitted(HEADS)


def test_other_heads_are_scaled_from_the_nearest(tmp_path):
    for heads, pair in ((HEADS, 1000), (Heads(32, 8, 64), 500), (Heads(8, 8, 128), 300)):
        store(tmp_path, profile(heads=heads, pair=pair))
    wanted = Heads(64, 8, 128, element_size=4)
    choice = choose(A100, wanted, folder=tmp_path)
    assert choice.cost.heads == wanted and choice.cost.forward.pair == 2000
    assert "scaled from 32/8 heads of 128" in choice.source
    assert choose(A100, Heads(16, 2, 64), folder=tmp_path).cost.forward.pair == 250
    assert choose(A100, Heads(4, 4, 128), folder=tmp_path).cost.forward.pair == 150
    # The rest is no task's cost.
    assert (choice.cost.launch, choice.cost.bytes_per_second, choice.cost.latency) == (7, 89, 10)
    # The same heads in a wider type need no scaling, and none is mentioned.
    same = choose(A100, replace(HEADS, element_size=4), folder=tmp_path)
    assert same.cost.forward.pair == 1000 and "scaled from" not in same.source


def test_every_shipped_profile_can_be_used():
    paths = list(SHIPPED.glob("*.json"))
    assert paths
    for path in paths:
        given = Profile.load(path)
        assert path.name == file_name(given.setting, given.cost.heads)
        assert choose(given.setting, given.cost.heads, folder=None).cost == given.cost


def test_cards_of_the_same_architecture_say_whose_profile_they_use():
    choice = choose(H100, HEADS, folder=None)
    assert choice.cost == choose(H200, HEADS, folder=None).cost
    for words in ("shipped for NVIDIA H200", H100.device, "ds_distca profile"):
        assert words in choice.source
    # Another kernel's times are not its times.
    assert "default" in choose(replace(H200, kernel="torch_varlen"), HEADS, folder=None).source
    assert "default" in choose(replace(H200, kernel=None), HEADS, folder=None).source


def broken(change: dict) -> bytes:
    return json.dumps({**profile().to_dict(), **change}).encode()


COST = profile().cost.to_dict()
DEAR = {**COST["forward"], "task": MAX_TERM}
BROKEN = {
    "empty": (b"", "not valid JSON"),
    "cut off": (broken({})[:100], "not valid JSON"),
    "binary": (b"\xff\x00\xfe", "not valid JSON"),
    "deep": (b"[" * 100_000, "not valid JSON"),
    "a list": (b"[]", "not a cost model"),
    "format": (broken({"format": 2}), "format is 2"),
    "unknown key": (broken({"surprise": 1}), "surprise"),
    "no device": (broken({"device": ""}), "device must be"),
    "about": (broken({"about": 3}), "about must be"),
    "float": (broken({"cost_model": {**COST, "launch": 1.5}}), "launch must be"),
    "no phase": (broken({"cost_model": {k: v for k, v in COST.items() if k != "forward"}}), "forward"),
    "beyond int64": (broken({"cost_model": {**COST, "latency": MAX_COST + 1}}), "latency must be"),
    "nan": (broken({"cost_model": {**COST, "latency": float("nan")}}), "latency must be"),
    "infinite": (broken({"cost_model": {**COST, "bytes_per_second": float("inf")}}), "bytes_per_second must be"),
    "negative": (broken({"cost_model": {**COST, "backward": {**COST["backward"], "task": -1}}}), "task must be"),
    "text": (broken({"cost_model": {**COST, "forward": {**COST["forward"], "pair": "9"}}}), "pair must be"),
    "a flag": (broken({"cost_model": {**COST, "launch": True}}), "launch must be"),
    "a flag for its format": (broken({"format": True}), "format is True"),
    "digits": (broken({}).replace(b"89", b"8" * 5000), "digits"),
    "twice": (broken({})[:-1] + b', "format": 1}', "'format' is repeated"),
    "half a phase": (broken({"cost_model": {**COST, "backward": {"pair": 1}}}), "backward must have the keys"),
    "half of moving": (
        broken({"cost_model": {**COST, "moving_forward": {"layer": 1}}}),
        "moving_forward must have the",
    ),
    "negative moving": (
        broken({"cost_model": {**COST, "moving_backward": {"layer": 1, "message": -1}}}),
        "message of moving rows must be",
    ),
    "no moving": (broken({"cost_model": {**COST, "moving_backward": None}}), "moving_backward must have the keys"),
    "no cost model": (broken({"cost_model": None}), "expected a mapping"),
    "heads": (broken({"cost_model": {**COST, "heads": {**COST["heads"], "query": 2**40}}}), "query must be"),
    "scaled beyond int64": (
        broken({"cost_model": {**COST, "heads": {**COST["heads"], "query": 8}, "forward": DEAR}}),
        "task must be",
    ),
    "other device": (broken({"device": "NVIDIA H200"}), "its name says NVIDIA A100"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_passed_over_with_a_warning(tmp_path, caplog, case):
    content, words = BROKEN[case]
    path = tmp_path / file_name(A100, HEADS)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        choice = choose(A100, HEADS, folder=tmp_path)
    assert choice.cost == CostModel.fitted(HEADS)
    (record,) = caplog.records
    for part in (str(path), words, choice.source, "ds_distca profile"):
        assert part in record.getMessage()


def test_a_folder_in_place_of_the_file(tmp_path, caplog):
    path = tmp_path / file_name(A100, HEADS)
    path.mkdir()
    assert choose(A100, HEADS, folder=tmp_path).cost == CostModel.fitted(HEADS)
    assert str(path) in caplog.text


def test_a_broken_file_beside_one_that_can_be_used(tmp_path, caplog):
    (tmp_path / file_name(A100, HEADS)).write_text("{")
    other = store(tmp_path, profile(heads=Heads(16, 8, 128)))
    choice = choose(A100, HEADS, folder=tmp_path)
    assert str(other) in choice.source and str(other) in caplog.text
    # The right file makes broken ones of other heads nobody's business.
    caplog.clear()
    store(tmp_path, profile())
    other.write_text("{")
    assert choose(A100, HEADS, folder=tmp_path).cost == profile().cost
    assert not caplog.records


@pytest.mark.parametrize("case", [name for name in BROKEN if name != "other device"])
def test_a_file_that_the_user_named_must_be_right(tmp_path, case):
    content, words = BROKEN[case]
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=words) as raised:
        choose(A100, HEADS, path, folder=None)
    assert str(path) in str(raised.value)
    with pytest.raises(ProfileError, match="none.json"):
        choose(A100, HEADS, tmp_path / "none.json", folder=None)


def test_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "deepspeed_distca"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / "home" / ".cache" / "deepspeed_distca"
