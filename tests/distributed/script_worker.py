# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of harness.run_script: a script, as an interpreter runs it that a launcher started with it."""

from __future__ import annotations

import atexit
import os
import runpy
import sys

import deepspeed_distca


def run(script: str, arguments: list[str], folder: str, launcher: str) -> None:
    """The script imports the plugin itself, or is without it."""
    deepspeed_distca.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed_distca"]:
        del sys.modules[name]
    os.chdir(folder)
    local_rank = [f"--local_rank={os.environ['LOCAL_RANK']}"] if launcher == "deepspeed" else []
    sys.argv[:] = [script, *local_rank, *arguments]
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    sys.path.insert(0, os.path.dirname(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        atexit._run_exitfuncs()
