# SPDX-License-Identifier: Apache-2.0
"""The example of shared prompts: it runs, and sharing changes no gradient."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.harness import ROOT, run_ranks, run_script

LINE = re.compile(
    r"^step (\d)/3 tokens (\d+), without sharing (\d+) micro-batches (\d+) losses (\S+) (\S+) ", re.MULTILINE
)
SMALL = ["--longest-answer", 32, "--prompt-tokens", 48, "--prompts", 6, "--group", 4, "--hidden-size", 32]


def test_it_runs(tmp_path: Path):
    config = ROOT / "configs" / "ds_config" / "zero1.json"
    options = ["--deepspeed_config", config, *SMALL, "--tokens-per-rank", 320, "--steps", 3]
    script = ROOT / "examples" / "hf_llama" / "shared_prompts.py"
    printed = run_script(script, 2, *options, folder=tmp_path)
    steps = LINE.findall(printed)
    assert [int(step[0]) for step in steps] == [1, 2, 3], printed[-4000:]
    assert all(int(shared) < 0.7 * int(alone) for _, shared, alone, *_ in steps)
    # The first update is from the policy that gave the old log-probabilities; after it the loss is lower.
    assert all(float(second) < float(first) for *_, first, second in steps)


@pytest.mark.parametrize(
    ("zero", "loss"),
    [(1, "dapo"), (3, "grpo"), (3, "dr_grpo")],
)
@pytest.mark.parametrize(
    "sizes",
    [
        [(96, [40, 3, 25]), (200, [9, 14, 60, 31]), (1, [22, 5]), (2, [8, 2]), (150, [300, 4])],
        [(400, [60, 58, 57, 59, 60, 7])],  # one tree; the other ranks have no row
    ],
)
def test_the_gradient_is_that_of_rollouts_one_by_one(sizes, zero, loss):
    """Over three ranks, some of them without a row."""
    reports = run_ranks("tests.shared_prompts_worker:gradients", 3, sizes=sizes, cap=768, zero=zero, loss=loss)
    assert all(report["error"] < 1e-5 for report in reports), reports
    if len(sizes) == 1:
        assert reports[0]["moved"] > 0
