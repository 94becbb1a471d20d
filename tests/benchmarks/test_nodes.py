# SPDX-License-Identifier: Apache-2.0
"""benchmarks/nodes.py, and what docs/nodes.md says of its results."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from deepspeed_distca.scheduler.topology import Topology
from tests.distributed.harness import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import nodes

ROWS = json.loads((ROOT / "benchmarks" / "results" / "nodes.json").read_text(encoding="utf-8"))["rows"]


def check(row: dict[str, float]) -> None:
    for prefix in ("flat_", "levels_"):
        assert max(row[f"{prefix}balance_forward"], row[f"{prefix}balance_backward"]) <= 1.02
    assert row["ideal_s"] <= row["chosen_s"] <= min(row["plain_s"], row["flat_s"])
    assert row["levels_across_mib"] <= row["flat_across_mib"]


def test_a_row() -> None:
    wanted = dict(context=131072, servers=16, tokens=nodes.TOKENS, batches=1)
    row = nodes.row(next(nodes.layouts("pretrain", **wanted)), Topology.of_size(4, 16))
    check(row)
    assert set(nodes.COLUMNS) <= {*row, "workload", "context", "shuffled", "homes", "servers"}


@pytest.mark.parametrize("servers", [64, 128, 256, 512])
def test_the_pages_table_is_the_results(servers: int) -> None:
    rows = [row for row in ROWS if row["servers"] == servers]
    assert len(rows) == 24
    for row in rows:
        check(row)

    def mean(key: str) -> float:
        return float(np.mean([row[key] for row in rows]))

    bytes_of = [f"{prefix}{what}" for what in ("across_mib", "worst_nic_mib") for prefix in ("flat_", "levels_", "")]
    seconds = [f"{name}_s" for name in ("plain", "flat", "levels", "chosen", "in_two", "ideal")]
    cells = [str(servers), *(f"{mean(key):,.0f}" for key in bytes_of), *(f"{mean(key):.3f}" for key in seconds)]
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs" / "nodes.md").read_text(encoding="utf-8")
