# SPDX-License-Identifier: Apache-2.0
"""``ds_distca doctor`` finds what does not work, and says so by its exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from deepspeed_distca import compat, doctor
from deepspeed_distca.advise import LLAMA_3_8B
from deepspeed_distca.attention_server.kernels.reference import ReferenceKernel
from deepspeed_distca.cli import main
from deepspeed_distca.scheduler.heads import Heads

CPU = torch.device("cpu")


@pytest.fixture
def examine(capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, dict]]:
    """Runs the command: its exit status and report, findings by what was looked at."""

    def run(*arguments: object) -> tuple[int, dict]:
        status = main(["doctor", "--json", *map(str, arguments)])
        report = json.loads(capsys.readouterr().out)
        assert report["good"] == (status == 0)
        return status, {finding["what"]: finding for finding in report["findings"]}

    return run


def test_a_machine_on_which_the_tests_run_is_fine(examine, tmp_path: Path) -> None:
    config, model = tmp_path / "ds_config.json", tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": 2, "distca": {"enabled": True}}))
    model.write_text(json.dumps({**LLAMA_3_8B, "num_hidden_layers": 4}))
    status, found = examine("--config", config, "--model", model, "--tokens-per-rank", 65536)
    assert status == 0 and not any(finding["verdict"] == "bad" for finding in found.values())
    assert [found[what]["verdict"] for what in ("compat", "ds_config", "model", "kernel")] == ["ok"] * 4
    # 4 layers of [65536, 32, 128] bf16 and [32, 65536] fp32.
    assert f"{4 * 65536 * 32 * (256 + 4) / 2**30:.1f} GiB for kept attention" in found["memory"]["text"]


def test_the_text_has_a_line_each_and_a_verdict(capsys) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "the plugin can run here" and any(line.startswith("ok    kernel") for line in lines)


@pytest.mark.parametrize(
    ("block", "verdict", "words"),
    [
        ({"enabled": True, "tolerence": 1}, "bad", "did you mean"),
        ({"enabled": False}, "note", "would do nothing"),
        (None, "note", "would do nothing"),
    ],
)
def test_a_block_is_checked_as_training_does(examine, tmp_path: Path, block, verdict, words) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({} if block is None else {"distca": block}))
    status, found = examine("--config", config)
    assert status == (verdict == "bad")
    assert found["ds_config"]["verdict"] == verdict and words in found["ds_config"]["text"]


@pytest.mark.parametrize("option", ["--config", "--model"])
@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_files_that_cannot_be_read_are_bad(examine, tmp_path: Path, option, text) -> None:
    file = tmp_path / "file.json"
    if text is not None:
        file.write_text(text)
    status, found = examine(option, file)
    finding = found["ds_config" if option == "--config" else "model"]
    assert status == 1 and finding["verdict"] == "bad" and str(file) in finding["text"]


def test_a_kernel_that_is_not_installed_is_bad(examine, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"distca": {"enabled": True, "kernel": "flash_attn_3"}}))
    status, found = examine("--config", config)
    assert status == 1 and "flash_attn_3" in found["kernel"]["text"]


def test_a_kernel_is_run_and_wrong_results_are_seen(examine) -> None:
    heads = Heads(4, 2, 32)
    assert doctor.kernel_error(ReferenceKernel(), heads, CPU, torch.float32) < 1e-5
    right = ReferenceKernel.backward

    def wrong(self, inputs, tasks, spec, grads) -> None:
        right(self, inputs, tasks, spec, grads)
        if inputs.q.dtype == torch.float32:
            grads.dk[-1] += 1.0

    with mock.patch.object(ReferenceKernel, "backward", wrong):
        status, found = examine()
        assert status == 1 and found["kernel"]["verdict"] == "bad"
    with mock.patch.object(ReferenceKernel, "backward", lambda *_: None):  # writes nothing
        assert doctor.kernel_error(ReferenceKernel(), heads, CPU, torch.float32) > 0.1


def test_versions_that_nobody_tried_are_a_note_and_lost_names_are_bad(examine) -> None:
    with mock.patch.dict(compat.TRIED, torch=("1.0.0",)):
        status, found = examine()
        assert status == 0 and found["torch"]["verdict"] == "note" and "1.0.0" in found["torch"]["text"]
    with mock.patch.object(compat, "check", side_effect=compat.CompatError("has no `x`")):
        status, found = examine()
        assert status == 1 and found["compat"]["text"] == "has no `x`"
