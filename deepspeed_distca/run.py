# SPDX-License-Identifier: Apache-2.0
"""Runs a training script that cannot be touched, with the plugin installed before it.

deepspeed --module deepspeed_distca.run train.py ...
accelerate launch -m deepspeed_distca.run train.py ...
torchrun --nproc_per_node 2 -m deepspeed_distca.run train.py ...

A framework's module in the place of the script, as for `python -m`: `deepspeed_distca.run -m package.train ...`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import deepspeed_distca

_USAGE = "usage: python -m deepspeed_distca.run SCRIPT|-m MODULE [ARGUMENT ...]"


def script_and_arguments(arguments: list[str]) -> tuple[str, list[str]]:
    """The script, or ``-m`` and a module's name in one string, and its own arguments. DeepSpeed's launcher puts
    ``--local_rank=N`` before the script's name; it is meant for the script and goes behind it.

    Raises:
        SystemExit: no script was given, or there is no such file.
    """
    for index, argument in enumerate(arguments):
        if argument == "-m" and len(arguments) > index + 1:
            return f"-m {arguments[index + 1]}", arguments[:index] + arguments[index + 2 :]
        if not argument.startswith("-"):
            if not Path(argument).is_file():
                raise SystemExit(f"deepspeed_distca.run: there is no script {argument!r}; {_USAGE}")
            return argument, arguments[:index] + arguments[index + 1 :]
    raise SystemExit(f"deepspeed_distca.run: no script was given; {_USAGE}")


def main() -> None:
    """Runs the script, or the module, named on the command line as ``__main__``."""
    deepspeed_distca.install()
    script, arguments = script_and_arguments(sys.argv[1:])
    sys.argv = [script, *arguments]
    if script.startswith("-m "):
        sys.path[0] = ""
        runpy.run_module(script[3:], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
