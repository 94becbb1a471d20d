# SPDX-License-Identifier: Apache-2.0
"""`python -m deepspeed_distca.run`: arguments as every launcher gives them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepspeed_distca.run import script_and_arguments
from tests.distributed.harness import run_program


def test_local_rank_goes_behind_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert script_and_arguments(["--local_rank=1", str(script), "--steps", "3"]) == (
        str(script),
        ["--local_rank=1", "--steps", "3"],
    )
    assert script_and_arguments([str(script)]) == (str(script), [])


def test_a_module_in_the_place_of_a_script(tmp_path: Path) -> None:
    assert script_and_arguments(["--local_rank=1", "-m", "trainer.cli", "-m", "x"]) == (
        "-m trainer.cli",
        ["--local_rank=1", "-m", "x"],
    )
    (tmp_path / "trainer.py").write_text(
        "import sys, deepspeed\n"
        "installed = hasattr(deepspeed.initialize, '__wrapped__')\n"
        "print(__name__, sys.argv[1:], installed, sys.argv[0].endswith('trainer.py'))\n"
    )
    done = run_program(
        [sys.executable, "-m", "deepspeed_distca.run", "-m", "trainer", "--steps", "3"], folder=tmp_path
    )
    assert "__main__ ['--steps', '3'] True True" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["--local_rank=0"], ["nowhere.py"], ["-m"]])
def test_errors_say_how_to_use_it(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage"):
        script_and_arguments(arguments)
