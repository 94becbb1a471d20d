# SPDX-License-Identifier: Apache-2.0
"""What is raised when ranks cannot go on together, and errors in words."""

from __future__ import annotations

import re

import torch.distributed as dist

#: By these words torch's errors of connections and collectives are known, which have no type of their own for gloo.
_CONNECTION = re.compile(
    r"\bgloo\b|\bNCCL\b|connection (closed|reset|refused)|broken pipe|pair closure|timed out waiting|wait timeout",
    re.I,
)


class AgreementError(RuntimeError):
    """The ranks cannot go on together; the message says which rank differs and how."""


class MicroBatchLeftError(AgreementError):
    """Another rank has left the micro-batch before its plan was made, and this one with it."""


class OutOfStepError(AgreementError):
    """Ranks are at different places: some have begun their next micro-batch."""


class RankFailedError(AgreementError):
    """Some rank has failed or is gone; the message says which, where and why."""


def is_connection_error(error: BaseException) -> bool:
    """Whether an error says no more than that another rank did not do its part."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, AgreementError)
        and _CONNECTION.search(str(error)) is not None
    )


def error_in_words(error: BaseException) -> str:
    """Its type and the beginning of its text, on one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:600]}" if words else type(error).__name__
