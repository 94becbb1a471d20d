# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of a plan, by which ranks find out that they made the same one."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import Phase
from deepspeed_distca.scheduler.tasks import Tasks


class Digest(NamedTuple):
    """The same 63 bits twice: as an integer that an int64 tensor holds, and as 16 hexadecimal digits."""

    value: int
    hex: str


def digest(
    layout: Layout, tasks: Tasks | np.ndarray, *, phase: Phase = "forward", window: int | None = None
) -> Digest:
    """Of everything that decides what ranks exchange and compute: the layout, the tasks, their phase and window.

    Args:
        layout: where the tokens live, in storage order.
        tasks: the tasks or their rows.
    """
    rows = tasks.rows if isinstance(tasks, Tasks) else tasks
    state = blake2b(f"distca 1 {phase} {window} {layout.num_ranks}".encode(), digest_size=8)
    for array in (layout.segments, layout.branches, layout.contexts, rows):
        state.update(f" {array.shape} ".encode())
        # Little-endian whatever the machine, so that unlike hosts agree.
        state.update(np.ascontiguousarray(array).astype("<i8").tobytes())
    value = int.from_bytes(state.digest(), "little") >> 1
    return Digest(value, f"{value:016x}")
