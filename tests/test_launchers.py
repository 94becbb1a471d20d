# SPDX-License-Identifier: Apache-2.0
"""Every way of training, each started by its real launcher on two CPU ranks, reaches the same losses."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import ROOT, free_port, run_program, run_script

SCRIPTS = ROOT / "tests" / "huggingface" / "scripts"
EXAMPLES = ROOT / "examples" / "hf_llama"
STEPS = 20


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def deepspeed(*arguments: object) -> list[object]:
    return [_program("deepspeed"), "--quiet", "--num_accelerators", 2, "--master_port", free_port(), *arguments]


def torchrun(*arguments: object) -> list[object]:
    return [_program("torchrun"), "--nproc_per_node", 2, "--master_port", free_port(), *arguments]


def accelerate(config: Path, *arguments: object) -> list[object]:
    start = [_program("accelerate"), "launch", "--config_file", config]
    return [*start, "--main_process_port", free_port(), *arguments]


def accelerate_config(folder: Path) -> Path:
    """configs/accelerate/deepspeed.yaml with the tests' DeepSpeed config."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import common
    finally:
        sys.path.remove(str(SCRIPTS))
    (folder / "ds.json").write_text(json.dumps(common.config()))
    text = (ROOT / "configs" / "accelerate" / "deepspeed.yaml").read_text()
    changed = text.replace("configs/ds_config/zero1.json", str(folder / "ds.json"))
    assert changed != text
    (folder / "accelerate.yaml").write_text(changed)
    return folder / "accelerate.yaml"


def run(command: list[object], folder: Path) -> tuple[dict, str]:
    """What rank 0 reported, and all that was printed."""
    output = folder / "report.json"
    environment = {
        "TEST_OUTPUT": str(output),
        "TEST_FOLDER": str(folder / "trainer"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = run_program(command, environment=environment)
    assert done.returncode == 0, done.stdout[-6000:]
    return json.loads(output.read_text()) if output.exists() else {}, done.stdout


def steps(losses: list[float] | dict[str, float]) -> list[float]:
    return losses if isinstance(losses, list) else [losses[str(n)] for n in range(1, len(losses) + 1)]


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict:
    report, printed = run(deepspeed(SCRIPTS / "bare.py"), tmp_path_factory.mktemp("bare"))
    line = next(line for line in printed.splitlines() if line.startswith("distca: "))
    for words in (
        "2 attention layers of LlamaForCausalLM",
        "2 attention servers",
        "kernel ",
        "overlap ",
        "cost model ",
    ):
        assert words in line, line
    return report


def test_the_bare_engine_learns(bare):
    assert len(bare["losses"]) == STEPS and bare["losses"][-1] < bare["losses"][0] - 1.0
    assert bare["moved"] > 0


def test_accelerate_gives_the_same_losses(bare, tmp_path):
    report, _ = run(accelerate(accelerate_config(tmp_path), SCRIPTS / "accelerate_loop.py"), tmp_path)
    assert report["losses"] == pytest.approx(bare["losses"], abs=1e-4)
    assert report["moved"] == bare["moved"]


def test_trl_gives_the_same_losses(bare, tmp_path):
    pytest.importorskip("trl")
    report, _ = run(torchrun(SCRIPTS / "sft_trainer.py"), tmp_path)
    assert steps(report["losses"]) == pytest.approx(bare["losses"], abs=1e-4)
    assert report["moved"] == bare["moved"]


def test_trainer_gives_the_same_losses_and_resumes(bare, tmp_path):
    # Stopped after 10 of the 20 steps, where it has saved; then resumed by another launcher.
    first, _ = run(torchrun(SCRIPTS / "hf_trainer.py", "--stop-after", 10), tmp_path)
    assert steps(first["losses"]) == pytest.approx(bare["losses"][:10], abs=1e-4)
    resumed, _ = run(deepspeed(SCRIPTS / "hf_trainer.py", "--resume"), tmp_path)
    assert [int(n) for n in resumed["losses"]] == list(range(11, STEPS + 1))
    assert list(resumed["losses"].values()) == pytest.approx(bare["losses"][10:], abs=1e-4)
    # Evaluation ran in between on seven rows over two ranks, and after training.
    assert list(first["eval_losses"])[:2] == ["5", "10"] and list(resumed["eval_losses"])[:2] == ["15", "20"]
    evaluations = [*first["eval_losses"].values(), *resumed["eval_losses"].values()]
    assert evaluations == sorted(evaluations, reverse=True)
    assert resumed["final"] == pytest.approx(resumed["eval_losses"]["20"], abs=1e-6)


def test_a_script_that_knows_nothing_of_the_plugin(tmp_path):
    script = (SCRIPTS / "untouched.py", "--steps", 4)
    module = "deepspeed_distca.run"
    commands = {
        "deepspeed": deepspeed("--module", module, *script),
        "torchrun": torchrun("-m", module, *script),
        "accelerate": accelerate(accelerate_config(tmp_path), "-m", module, *script),
    }
    reports = {name: run(command, tmp_path)[0] for name, command in commands.items()}
    assert all(report["moved"] for report in reports.values())
    first, *others = (report["losses"] for report in reports.values())
    assert len(first) == 4 and all(losses == first for losses in others)
    assert reports["deepspeed"]["local_rank"] == 0


SMALL = ["--hidden-size", 64, "--vocab-size", 512, "--documents", 30, "--tokens-per-rank", 512, "--steps", 3]


def test_the_examples_run(tmp_path):
    """As the documentation has them, but small; those for DeepSpeed's launcher, which has started others above, on
    ranks that are forked."""
    options = [*SMALL, "--output-dir", tmp_path]
    config = ROOT / "configs" / "accelerate" / "deepspeed_zero3.yaml"
    _, printed = run(accelerate(config, EXAMPLES / "train_accelerate.py", *options), tmp_path)
    losses = [float(x) for x in re.findall(r"^step \d/3 loss (\d+\.\d+) balance", printed, re.MULTILINE)]
    assert len(losses) == 3 and 5.5 < losses[0] < 7.0, printed[-3000:]
    options = ["--deepspeed_config", ROOT / "configs" / "ds_config" / "zero1.json", *options]
    printed = run_script(EXAMPLES / "train_trainer.py", 2, *options, "--save-every", 3)
    losses = [float(x) for x in re.findall(r"^step \d/3 loss (\d+\.\d+)", printed, re.MULTILINE)]
    assert len(losses) == 3 and 5.5 < losses[0] < 7.0, printed[-3000:]
    assert "evaluation: loss" in printed and (tmp_path / "checkpoint-3").is_dir()
    printed = run_script(EXAMPLES / "train_trl.py", 2, *options)
    losses = [float(x) for x in re.findall(r"^step \d/3 loss (\d+\.\d+)", printed, re.MULTILINE)]
    assert len(losses) == 3 and 5.5 < losses[0] < 7.0, printed[-3000:]
    balance = re.search(r"^done; last step's balance (\d\.\d+) -> (\d\.\d+)", printed, re.MULTILINE)
    assert balance and float(balance[2]) <= float(balance[1]), printed[-3000:]
