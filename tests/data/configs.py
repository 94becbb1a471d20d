# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed configs for loaders."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from deepspeed_distca.scheduler.cost_model import CostModel
from deepspeed_distca.scheduler.profiles import Profile, Setting


def config(accumulation: int = 1, **block: Any) -> dict[str, Any]:
    """A config with so many micro-batches a step and a ``distca`` block."""
    return {"gradient_accumulation_steps": accumulation, "distca": block}


@cache
def by_pairs() -> str:
    """The file of a cost model of query-key pairs alone: long documents are more work even where they are short."""
    path = Path(tempfile.mkdtemp(), "by_pairs.json")
    Profile(Setting("any", "any", "any", "bf16"), CostModel.area()).save(path)
    return str(path)
