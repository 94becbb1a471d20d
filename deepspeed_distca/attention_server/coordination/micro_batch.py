# SPDX-License-Identifier: Apache-2.0
"""A micro-batch, as one rank describes it and as all ranks know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from deepspeed_distca.layout import Layout

#: Below it are counts of targets, so that those of many ranks can be sent as they are.
_COUNTS_END = 2**62


@dataclass(frozen=True)
class MicroBatch:
    """One rank's part of a micro-batch.

    Attributes:
        layout: of this rank alone (whole documents), or of all servers of its group, the same on all of them.
        targets: target tokens on this rank in this micro-batch.
        step_targets: the same over the whole accumulation step, where known.
        tokens_digest: 63 bits of its tokens, by which ranks find that all of them have the same; 0: not known.
        ahead: its plan, where a loader has made it already; not told to the others.
        kept_layers: of how many checkpointed layers this rank can keep core attention for recomputation.
        in_two: this rank can run it as two nano-batches; with trees no rank can, in any group of servers.
    """

    layout: Layout
    targets: int
    step_targets: int | None = None
    tokens_digest: int = 0
    ahead: Any = None
    kept_layers: int = 0
    in_two: bool = False

    def problem(self) -> str:
        """Why it cannot be told to the others; or nothing."""
        for name, value in (("targets", self.targets), ("step_targets", self.step_targets)):
            is_count = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if value is not None and not (is_count and 0 <= value < _COUNTS_END):
                return f"`{name}` was given {value!r}; allowed: a whole number from 0 to {_COUNTS_END - 1}"
        return ""


@dataclass(frozen=True)
class GlobalMicroBatch:
    """What all ranks know after the gathering.

    Attributes:
        layout: of the servers of this rank's group.
        targets: target tokens of the micro-batch over all ranks.
        step_targets: the same over the accumulation step, where every rank knew it.
        kept_layers: of how many checkpointed layers every rank can keep core attention.
        in_two: every rank can run it as two nano-batches.
    """

    layout: Layout
    targets: int
    step_targets: int | None
    kept_layers: int = 0
    in_two: bool = False
