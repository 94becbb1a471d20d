# SPDX-License-Identifier: Apache-2.0
"""The pipeline example as a newcomer runs it: two stages on CPU in bf16, saved, resumed, and the model loaded."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.harness import ROOT, run_script

LINE = re.compile(r"step (\d+)/\d+ loss (\d+\.\d+) seconds \d+\.\d+ balance (\d+\.\d+) -> (\d+\.\d+)")
SMALL = ["--hidden-size", "64", "--vocab-size", "512", "--documents", "30", "--tokens-per-rank", "512"]


def launch(folder: Path, *arguments: object) -> dict[int, tuple[str, float, float]]:
    """Step to (loss as printed, balance before, balance after)."""
    script = ROOT / "examples" / "hf_llama" / "train_pipeline.py"
    printed = run_script(script, 2, *SMALL, "--bf16", "--output-dir", folder, *arguments, folder=folder)
    return {int(n): (loss, float(b), float(a)) for n, loss, b, a in LINE.findall(printed)}


def test_the_example_trains_resumes_and_saves_a_whole_model(tmp_path):
    arguments = ["--steps", 5, "--gradient-accumulation-steps", 4, "--checkpoint-layers", 1]
    whole = launch(tmp_path, *arguments, "--save-every", 3, "--save-model", tmp_path / "model")
    assert list(whole) == [1, 2, 3, 4, 5]
    assert float(whole[5][0]) < float(whole[1][0])
    assert all(after < 1.1 < before for _, before, after in whole.values())  # bubbles are filled
    assert (tmp_path / "latest").read_text() == "step3"
    resumed = launch(tmp_path, *arguments, "--resume")
    assert resumed == {step: whole[step] for step in (4, 5)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_hidden_layers == 4
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == model.config.vocab_size
