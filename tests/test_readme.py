# SPDX-License-Identifier: Apache-2.0
"""The README's quickstart runs as it stands and prints what the README says; its links lead somewhere."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import ROOT, free_port, run_program

TEXT = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL).group(1)


def words(line: str) -> str:
    return re.sub(r"[\d.]+", "n", line)


@pytest.mark.long
@pytest.mark.quick
def test_quickstart(tmp_path):
    (tmp_path / "ds_config.json").write_text(block("json"))
    (tmp_path / "train.py").write_text(block("python"))
    command = re.search(r"`DS_ACCELERATOR=cpu (deepspeed [^`]*)`", TEXT).group(1).split()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command[1:1] = ["--master_port", free_port()]
    # DeepSpeed compiles its collectives for CPUs here, a minute of a core, once for this environment: in a place that
    # checkouts share each would do so again, since paths differ, and wait for the other.
    extensions = str(Path(sys.prefix, "torch_extensions"))
    environment = {"PYTHONPATH": str(ROOT), "PATH": path, "TORCH_EXTENSIONS_DIR": extensions}
    environment["TORCHDYNAMO_DISABLE"] = "0"  # the one program that has it all, as a newcomer does
    run = run_program(command, tmp_path, environment)
    assert run.returncode == 0, run.stdout[-3000:]
    said = re.search(r"^    (loss \d.*)$", TEXT, re.MULTILINE).group(1)
    printed = [line for line in run.stdout.splitlines() if line.startswith("loss ")]
    # Times are the machine's; the loss, to rounding, and the plan are not.
    assert [words(line) for line in printed] == [words(said)] * 4, printed
    assert any(line.startswith(said[: said.index(" MiB")]) for line in printed), printed
    assert "very same tokens" not in run.stdout


def test_it_is_short_and_its_links_lead_somewhere():
    assert len(TEXT.splitlines()) <= 120
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert target.startswith("https://") or (ROOT / target).exists(), target
