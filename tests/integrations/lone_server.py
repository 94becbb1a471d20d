# SPDX-License-Identifier: Apache-2.0
"""An attention server without a process group, for plans that are only looked at and layers without exchanges."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from deepspeed_distca.attention_server.runtime import AttentionServer, PlanOptions
from deepspeed_distca.scheduler.cost_model import CostModel


def lone_server(cost: CostModel, options: PlanOptions, exchange: Any = None, **more: Any) -> AttentionServer:
    """Server 0, of layers without a window."""
    return AttentionServer(
        agreement=None,
        exchange=exchange or SimpleNamespace(early=False),
        server=0,
        cost=cost,
        options=options,
        windows=[None],
        kernel="reference",
        local_first=True,
        check_plan=False,
        accumulation_steps=lambda: 1,
        ranks=1,
        step=lambda: 0,
        **more,
    )
