# SPDX-License-Identifier: Apache-2.0
"""The example as a newcomer runs it: the `deepspeed` launcher, CPU ranks, a few steps of a very small model."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.distributed.harness import ROOT, free_port, run_program, run_script

TRAIN = ROOT / "examples" / "hf_llama" / "train.py"
LINE = re.compile(r"step (\d+)/\d+ loss (\d+\.\d+) tokens/s (\d+) balance (\d+\.\d+) -> (\d+\.\d+)")
SMALL = [
    "--hidden-size",
    "64",
    "--layers",
    "2",
    "--vocab-size",
    "512",
    "--documents",
    "30",
    "--tokens-per-rank",
    "512",
]


class Step(NamedTuple):
    loss: str  # as printed, so that equality is equality
    tokens_per_second: int
    balance_before: float
    balance_after: float


def launch(
    output: Path, *arguments: object, config: str = "zero1", ranks: int = 2, launched: bool = False
) -> tuple[dict[int, Step], str]:
    """Runs train.py, with DeepSpeed's launcher or without; the steps it reported and everything it printed."""
    path = ROOT / "configs" / "ds_config" / f"{config}.json"
    options = ["--deepspeed_config", path, *SMALL, "--output-dir", output, *arguments]
    if launched:
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "--quiet", "--num_accelerators", ranks]
        done = run_program([*launcher, "--master_port", free_port(), TRAIN, *options], output)
        printed = done.stdout
        assert done.returncode == 0, printed[-6000:]
    else:
        printed = run_script(TRAIN, ranks, *options, folder=output)
    steps = {int(n): Step(loss, int(rate), float(b), float(a)) for n, loss, rate, b, a in LINE.findall(printed)}
    return steps, printed


def test_loss_falls_and_attention_is_balanced(tmp_path):
    larger = ["--vocab-size", 4096, "--tokens-per-rank", 4096, "--documents", 150]
    steps, printed = launch(tmp_path, *larger, "--steps", 12)
    assert list(steps) == list(range(1, 13)), printed[-4000:]
    losses = [float(step.loss) for step in steps.values()]
    assert 8.0 < losses[0] < 8.8  # near log(4096) = 8.32: nothing is learnt yet
    assert sum(losses[-3:]) / 3 < losses[0] - 0.3
    assert all(step.tokens_per_second > 0 for step in steps.values())
    assert all(1.0 <= step.balance_after <= step.balance_before + 0.005 for step in steps.values())
    # The rows are documents of different lengths: some steps have something to balance, and are balanced.
    uneven = [step for step in steps.values() if step.balance_before > 1.1]
    assert uneven and all(step.balance_after < 1.05 for step in uneven), printed[-4000:]


def test_tensor_parallel_ranks_train_as_one(tmp_path):
    """Two replicas of two ranks each have the losses, and the balance, of two ranks."""
    arguments = ["--tokens-per-rank", 2048, "--documents", 80, "--steps", 4]
    one, _ = launch(tmp_path, *arguments)
    shared, printed = launch(tmp_path, *arguments, config="tensor_parallel", ranks=4)
    assert "(2/1 heads" in printed  # of 4/2
    assert len(shared) == 4 and any(step.balance_before > 1.1 for step in shared.values())
    for number, step in shared.items():
        assert float(step.loss) == pytest.approx(float(one[number].loss), abs=2e-4)
        assert (step.balance_before, step.balance_after) == (one[number].balance_before, one[number].balance_after)


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ("zero1", ["--bf16"]),
        ("zero3", ["--gradient-checkpointing", "non-reentrant"]),
    ],
)
def test_save_and_resume_give_the_same_losses(tmp_path, config, arguments):
    arguments = [*arguments, "--gradient-accumulation-steps", 2, "--steps", 5]
    whole, _ = launch(tmp_path, *arguments, "--save-every", 3, config=config)
    assert (tmp_path / "latest").read_text() == "step3"
    resumed, printed = launch(tmp_path, *arguments, "--resume", config=config)
    assert list(resumed) == [4, 5], printed[-4000:]
    assert [step.loss for step in resumed.values()] == [whole[n].loss for n in (4, 5)]
    assert [step.balance_before for step in resumed.values()] == [whole[n].balance_before for n in (4, 5)]


def test_a_pretrained_model_and_texts_of_ones_own(tmp_path):
    sys.path.insert(0, str(TRAIN.parent))
    try:
        from tokenizer import load_tokenizer, train_tokenizer
    finally:
        sys.path.remove(str(TRAIN.parent))
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(12):
        (texts / f"{n}.txt").write_text(
            f"Document {n} counts to {30 * n + 5}: " + " ".join(map(str, range(30 * n + 5)))
        )
    train_tokenizer([path.read_text() for path in sorted(texts.iterdir())], 400, tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes))
    model.bfloat16().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ["--model", tmp_path / "model", "--text-dir", texts, "--steps", 4, "--bf16"]
    steps, printed = launch(tmp_path, *arguments, config="zero3", launched=True)
    assert list(steps) == [1, 2, 3, 4] and "12 documents" in printed
    assert float(steps[4].loss) < float(steps[1].loss)
