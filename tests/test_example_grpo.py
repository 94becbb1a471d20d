# SPDX-License-Identifier: Apache-2.0
"""The example of GRPO: it runs, its loss is TRL's, and packing changes no gradient."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.harness import ROOT, run_ranks, run_script

EXAMPLES = ROOT / "examples" / "hf_llama"
LINE = re.compile(r"^step (\d)/3 reward (\d\.\d+) micro-batches (\d+) balance (\d\.\d+) -> (\d\.\d+)", re.MULTILINE)
SMALL = ["--longest-answer", 48, "--tokens-per-rank", 192, "--prompts", 4, "--group", 4, "--hidden-size", 32]


@pytest.fixture
def grpo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import grpo

    return grpo


def test_it_runs(tmp_path: Path):
    options = ["--deepspeed_config", ROOT / "configs" / "ds_config" / "zero1.json", *SMALL, "--steps", 3]
    printed = run_script(EXAMPLES / "train_grpo.py", 2, *options, folder=tmp_path)
    steps = LINE.findall(printed)
    assert [int(step[0]) for step in steps] == [1, 2, 3], printed[-4000:]
    assert all(float(after) <= float(before) + 0.005 for *_, before, after in steps)


@pytest.mark.parametrize(
    ("lengths", "zero", "loss"),
    [
        ([40, 3, 25, 9, 14, 60, 31, 22, 5, 8, 2, 17], 1, "dapo"),
        ([40, 3, 25, 9, 14, 60, 31, 22, 5, 8, 2, 17], 3, "grpo"),
        ([60, 58, 57, 59, 60, 7], 3, "dr_grpo"),
        ([60, 57, 59, 58, 60, 56, 60, 60], 1, "grpo"),
    ],
)
def test_the_gradient_is_that_of_rollouts_one_by_one(lengths, zero, loss):
    """Over three ranks and more than one micro-batch, some of them without a rollout for a rank."""
    reports = run_ranks(
        "tests.grpo_worker:gradients", 3, lengths=[12 * n for n in lengths], cap=768, zero=zero, loss=loss
    )
    assert len(reports[0]["micro_batches"]) > 1 and reports[0]["moved"] > 0
    assert all(report["error"] < 1e-5 for report in reports), reports


@pytest.mark.parametrize("zero", [1, 3])
def test_so_it_is_with_the_models_own_loss(zero):
    """As docs/data.md has it: an accumulation loader of one step's micro-batches."""
    lengths = [480, 36, 300, 108, 720, 372, 696, 700, 715, 720]
    reports = run_ranks("tests.grpo_worker:models_own_loss", 3, lengths=lengths, cap=768, zero=zero)
    assert len(reports[0]["micro_batches"]) > 1 and reports[0]["moved"] > 0
    assert all(report["error"] < 1e-5 for report in reports), reports


def test_advantages_are_those_of_their_group(grpo):
    found = torch.tensor(grpo.advantages([1.0, 2.0, 3.0, 5.0, 5.0, 5.0], group=3))
    torch.testing.assert_close(found, torch.tensor([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]), rtol=2e-4, atol=0)


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_the_loss_is_trls(grpo, loss):
    """TRL's own function on the padded rows of a step, without the trainer around it."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: its own loss cannot be compared with")
    draw = torch.Generator().manual_seed(0)
    answers, longest = [5, 1, 9, 3], 9
    new, old = (torch.randn((4, longest), generator=draw) * 0.4 - 3 for _ in range(2))
    gains = torch.tensor(grpo.advantages(torch.rand(4, generator=draw).tolist(), group=2))
    mask = (torch.arange(longest) < torch.tensor(answers)[:, None]).int()
    new = new.requires_grad_()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        loss_type=loss,
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.0,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        max_completion_length=longest,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ids = torch.zeros((4, longest), dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :2],
        "prompt_mask": torch.ones((4, 2), dtype=torch.int32),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": gains,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    theirs = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    (expected,) = torch.autograd.grad(theirs, new)
    weights = torch.tensor(grpo.token_weights(loss, answers, longest)).repeat_interleave(torch.tensor(answers))
    real = mask.bool()
    ours = grpo.grpo_loss(new[real], old[real], gains.repeat_interleave(torch.tensor(answers)), weights)
    (found,) = torch.autograd.grad(ours, new)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    assert 0 < (expected[real] == 0).sum() < real.sum()  # some tokens are clipped
