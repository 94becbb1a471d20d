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
from typing import Any, NamedTuple, NoReturn

_MESSAGE_LENGTH = 400


class UsageError(Exception):
    """The command line or its input is wrong; the message says what was given and what is allowed."""


class Command(NamedTuple):
    """A subcommand: what it does, and the module that has `add_arguments(parser)` and `run(arguments)`, which returns
    the exit status. The module is imported when the command is asked for, so that none pays for, or fails by, what
    others need."""

    help: str
    module: str


COMMANDS = {
    "plan": Command("Balance the core attention of a layout.", "deepspeed_distca.commands.plan"),
    "advise": Command(
        "Predict from the lengths of documents what the plugin would gain, by what training plans with.",
        "deepspeed_distca.commands.advise",
    ),
    "simulate": Command(
        "Predict a training step of any number of GPUs by every way to share attention, side by side.",
        "deepspeed_distca.commands.simulate",
    ),
    "doctor": Command(
        "Look at versions, the attention kernel, a DeepSpeed config and a model: can the plugin run here?",
        "deepspeed_distca.commands.doctor",
    ),
    "profile": Command(
        "Measure the attention kernel of this device, and under torchrun the exchange between ranks, for the cost "
        "model of training.",
        "deepspeed_distca.commands.profile",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, or `argv` in its place, and returns the exit status."""
    parser = _Parser(prog="ds_distca", description="Tools for core attention disaggregation.")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher `deepspeed`
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        subparsers.add_parser(name, help=command.help, description=command.help).module = command.module
    try:
        arguments = parser.parse_args(argv)
        return import_module(COMMANDS[arguments.command].module).run(arguments)
    except UsageError as error:
        message = " ".join(str(error).split())
        if len(message) > _MESSAGE_LENGTH:
            message = message[: _MESSAGE_LENGTH - 4] + " ..."
        print(f"ds_distca: error: {message}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """That of a command takes its arguments from `module` when it is about to parse."""

    module: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self.module:
            import_module(self.module).add_arguments(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        # argparse would print the usage as well; one line says what is wrong, --help says the rest.
        raise UsageError(f"{message} (see {self.prog} --help)")


if __name__ == "__main__":
    # Not as `__main__`, whose UsageError is not the one that commands raise.
    sys.exit(import_module("deepspeed_distca.cli").main())
