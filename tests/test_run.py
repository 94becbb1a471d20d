# SPDX-License-Identifier: Apache-2.0
"""`python -m deepspeed_distca.run`: arguments as every launcher gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_distca.run import script_and_arguments


def test_local_rank_goes_behind_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert script_and_arguments(["--local_rank=1", str(script), "--steps", "3"]) == (
        str(script),
        ["--local_rank=1", "--steps", "3"],
    )
    assert script_and_arguments([str(script)]) == (str(script), [])


@pytest.mark.parametrize("arguments", [[], ["--local_rank=0"], ["nowhere.py"]])
def test_errors_say_how_to_use_it(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage"):
        script_and_arguments(arguments)
