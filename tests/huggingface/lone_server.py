# SPDX-License-Identifier: Apache-2.0
"""An attention server without a process group, for plans that are only looked at and layers without exchanges."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepspeed_distca.attention_server.server import AttentionServer, PlanOptions
from deepspeed_distca.scheduler.cost_model import CostModel


class NoExchange:
    """Moves nothing. Keeps what it was asked to get ready for."""

    def __init__(self, early: bool = False) -> None:
        self.early, self.sizes = early, []

    def for_sizes(self, sizes: np.ndarray) -> NoExchange:
        self.sizes.append(sizes)
        return self


def lone_server(
    cost: CostModel, options: PlanOptions, exchange: NoExchange | None = None, **more: Any
) -> AttentionServer:
    """Server 0, of layers without a window."""
    given: dict[str, Any] = {
        "agreement": None,
        "exchange": exchange or NoExchange(),
        "server": 0,
        "cost": cost,
        "options": options,
        "windows": [None],
        "kernel": "reference",
        "local_first": True,
        "accumulation_steps": lambda: 1,
        "ranks": 1,
        "step": lambda: 0,
    }
    return AttentionServer(**given | more)
