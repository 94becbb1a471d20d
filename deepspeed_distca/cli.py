# SPDX-License-Identifier: Apache-2.0
"""The command ``ds_distca``; also ``python -m deepspeed_distca.cli``.

Exit status 0: done. 1: `doctor` found what will not work. 2: the command line or its input is wrong, which one line on
stderr explains.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

_MESSAGE_LENGTH = 400


class UsageError(Exception):
    """The command line or its input is wrong; the message says what was given and what is allowed."""


#: What each command does.
COMMANDS = {
    "plan": "Balance the core attention of a layout.",
    "advise": "Predict from the lengths of documents what the plugin would gain, by what training plans with.",
    "simulate": "Predict a training step of any number of GPUs by every way to share attention, side by side.",
    "doctor": "Look at versions, the attention kernel, a DeepSpeed config and a model: can the plugin run here?",
    "profile": "Measure the attention kernel of this device, and under torchrun the exchange between ranks, for the "
    "cost model of training.",
}


def module_of(command: str) -> ModuleType:
    """The module that has `add_arguments(parser)` and `run(arguments)`, which returns the exit status. It is imported
    when the command is asked for, so that none pays for, or fails by, what others need."""
    return import_module(f"deepspeed_distca.commands.{command}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, or `argv` in its place, and returns the exit status."""
    parser = _Parser(prog="ds_distca", description="Tools for core attention disaggregation.")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher `deepspeed`
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, words in COMMANDS.items():
        subparsers.add_parser(name, help=words, description=words).command = name
    try:
        arguments = parser.parse_args(argv)
        return module_of(arguments.command).run(arguments)
    except UsageError as error:
        message = " ".join(str(error).split())
        if len(message) > _MESSAGE_LENGTH:
            message = message[: _MESSAGE_LENGTH - 4] + " ..."
        print(f"ds_distca: error: {message}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """That of a command takes its arguments from the command's module when it is about to parse."""

    command: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self.command:
            module_of(self.command).add_arguments(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        # argparse would print the usage as well; one line says what is wrong, --help says the rest.
        raise UsageError(f"{message} (see {self.prog} --help)")


if __name__ == "__main__":
    # Not as `__main__`, whose UsageError is not the one that commands raise.
    sys.exit(import_module("deepspeed_distca.cli").main())
