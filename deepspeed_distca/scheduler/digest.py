# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of a plan, by which ranks find out that they made the same one."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import Phase
from deepspeed_distca.scheduler.tasks import Tasks


def digest(layout: Layout, tasks: Tasks | np.ndarray, *, phase: Phase = "forward", window: int | None = None) -> int:
    """63 bits of all that decides what ranks exchange and compute: the layout, the tasks, their phase and window.

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
    return int.from_bytes(state.digest(), "little") >> 1
