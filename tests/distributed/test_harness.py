# SPDX-License-Identifier: Apache-2.0
"""A rank that fails, hangs or dies fails its test: otherwise every other test here would say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks, run_script

WORKER = "tests.distributed.harness_worker"


@pytest.mark.quick
def test_ranks_know_their_place() -> None:
    assert run_ranks(f"{WORKER}:place", 3) == [[0, 3], [1, 3], [2, 3]]


@pytest.mark.quick
@pytest.mark.parametrize(("function", "codes"), [("fails", [0, 1]), ("dies", [0, -6]), ("missing", [1, 1])])
def test_a_failure_is_told(function: str, codes: list[int]) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(f"{WORKER}:{function}", 2)
    text = str(caught.value)
    assert f"exit codes {codes}" in text and "--- rank 1 ---" in text
    if function == "fails":
        assert "rank 0 was here" in text and "ValueError: no more" in text


@pytest.mark.quick
def test_a_rank_that_hangs_is_killed() -> None:
    run_ranks(f"{WORKER}:place", 1)  # whatever is only done once
    with pytest.raises(AssertionError, match=r"exit codes \[0, 'hangs'\]") as caught:
        run_ranks(f"{WORKER}:hangs", 2, quiet=3)
    assert "in hangs" in str(caught.value)  # where it is


SCRIPT = """
import atexit, os, sys
assert __name__ == "__main__" and "deepspeed_distca" not in sys.modules
import deepspeed
assert not hasattr(deepspeed.initialize, "_distca_original")
from beside import NAME
atexit.register(lambda: print("the end of", os.environ["RANK"]))
print(NAME, "in", os.getcwd(), "was given", sys.argv[1:])
sys.exit(int(sys.argv[-1]) * int(os.environ["RANK"]))
"""


@pytest.mark.quick
def test_a_script_is_run_as_a_launcher_runs_it(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("NAME = 'a script'")
    printed = run_script(tmp_path / "script.py", 2, "--steps", 0, folder=tmp_path / "here")
    for rank in range(2):
        given = f"['--local_rank={rank}', '--steps', '0']"
        assert f"a script in {tmp_path / 'here'} was given {given}\nthe end of {rank}\n" in printed
    with pytest.raises(AssertionError, match=r"exit codes \[0, 1\]") as caught:
        run_script(tmp_path / "script.py", 2, 3, launcher="torchrun")
    assert "was given ['3']" in str(caught.value) and "SystemExit: 3" in str(caught.value)
