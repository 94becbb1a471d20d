# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer with options that change batches or losses, and TRL's trainers: losses, gradients and
parameters of every step over two ranks are those without the plugin, with rows moving. docs/compatibility.md names
these tests."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_ranks
from tests.huggingface.test_compatibility_deepspeed import check

pytest.importorskip("trl")
from tests.huggingface import trainers_worker


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks("tests.huggingface.trainers_worker:run", 2, folder=str(tmp_path_factory.mktemp("trainers")))


@pytest.mark.parametrize("option", [*trainers_worker.OPTIONS, "auto_find_batch_size"])
def test_trainer(ranks, option):
    check(ranks, f"Trainer, {option}")


@pytest.mark.parametrize("name", [n for n in trainers_worker.MAKERS if n.startswith("SFT")])
def test_sft(ranks, name):
    check(ranks, name)


@pytest.mark.parametrize("name", ["DPO", "DPO, PEFT"])
def test_dpo(ranks, name):
    check(ranks, name)


def test_reward(ranks):
    check(ranks, "reward")


@pytest.mark.parametrize("name", ["GRPO", "GRPO, beta"])
def test_grpo(ranks, name):
    check(ranks, name)
