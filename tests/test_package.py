# SPDX-License-Identifier: Apache-2.0
"""The package as it is published: built, installed and tried; and its version, which files beside it say as well."""

from __future__ import annotations

import re
import sys

import deepspeed_distca
from tests.distributed.harness import ROOT, run_program


def test_built_and_installed():
    done = run_program(["bash", "scripts/check_package.sh"], environment={"PYTHON": sys.executable})
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].endswith(f"{deepspeed_distca.__version__} works as installed")


def test_one_version():
    changes = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    assert deepspeed_distca.__version__ == changes == citation


def test_what_takes_long_is_not_imported() -> None:
    slow = ("datasets", "pandas", "transformers.trainer")
    script = f"import sys, deepspeed_distca; print([m for m in {slow} if m in sys.modules])"
    done = run_program([sys.executable, "-c", script])
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout
