# SPDX-License-Identifier: Apache-2.0
"""ruff over the repository and mypy over the package find nothing; their settings are in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("command", ["ruff check", "ruff format --check"])
def test_ruff_finds_nothing(command: str) -> None:
    _run(command)


@pytest.mark.long
def test_mypy_finds_nothing() -> None:
    _run("mypy")


def _run(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, f"{command}:\n{done.stdout}{done.stderr}"
