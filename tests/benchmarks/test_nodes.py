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


def mean(servers: int, key: str) -> float:
    return float(np.mean([row[key] for row in ROWS if row["servers"] == servers]))


def check(row: dict[str, float]) -> None:
    for prefix in ("flat_", "levels_"):
        assert max(row[f"{prefix}balance_forward"], row[f"{prefix}balance_backward"]) <= 1.02
    assert row["ideal_s"] <= row["chosen_s"] <= min(row["plain_s"], row["flat_s"])
    assert row["levels_across_mib"] <= row["flat_across_mib"]
    # More pairs wait for each other.
    assert row["chosen_even_s"] <= 1.01 * row["chosen_s"] and row["in_two_even_s"] <= 1.01 * row["in_two_s"]


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

    bytes_of = [f"{prefix}{what}" for what in ("across_mib", "worst_nic_mib") for prefix in ("flat_", "levels_", "")]
    seconds = [f"{name}_s" for name in ("plain", "flat", "levels", "chosen", "in_two", "ideal")]
    cells = [str(servers), *(f"{mean(servers, key):,.0f}" for key in bytes_of)]
    cells += [f"{mean(servers, key):.3f}" for key in seconds]
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs" / "nodes.md").read_text(encoding="utf-8")


def test_what_the_page_says_of_the_table() -> None:
    page = " ".join((ROOT / "docs" / "nodes.md").read_text(encoding="utf-8").split())
    linear = nodes.cost_model().linear_seconds(3 * nodes.LINEAR * nodes.TOKENS)
    of_ideal = {
        (servers, way): [
            (linear + row[f"{way}_s"]) / (linear + row["ideal_s"]) for row in ROWS if row["servers"] == servers
        ]
        for servers in (64, 128, 256, 512)
        for way in ("in_two", "chosen")
    }
    average = {key: sum(ratios) / len(ratios) for key, ratios in of_ideal.items()}
    most = {way: max(max(r) for (_, w), r in of_ideal.items() if w == way) for way in ("in_two", "chosen")}
    few, many = ({key: mean(servers, key) for key in ROWS[0] if key.endswith(("_s", "_ms"))} for servers in (64, 512))
    for sentence in (
        f"a layer takes {average[64, 'in_two']:.2f} of the ideal on average at 64 GPUs",
        f"and {average[512, 'in_two']:.2f} at 512, {most['in_two']:.2f} at most",
        f"`local_first` takes {average[64, 'chosen']:.2f} and {average[512, 'chosen']:.2f}",
        f"{average[512, 'chosen']:.2f}, {most['chosen']:.2f} at most",
        f"with `local_first` {few['chosen_even_s']:.3f} s in place of {few['chosen_s']:.3f} at 64 GPUs",
        f"and {many['chosen_even_s']:.3f} of {many['chosen_s']:.3f} at 512",
        f"with `ping_pong` {few['in_two_even_s']:.3f} of {few['in_two_s']:.3f} s at 64 GPUs",
        f"and {many['in_two_even_s']:.3f} of {many['in_two_s']:.3f} at 512: two",
        f"Planning flat takes {few['flat_planning_ms']:.0f} ms of a core for both phases at 64 GPUs",
        f"and {many['flat_planning_ms']:.0f} at 512",
        f"the choice {few['in_two_planning_ms']:.0f} and {many['in_two_planning_ms']:.0f} ms in two",
        f"{few['planning_ms']:.0f} and {many['planning_ms']:.0f} with `local_first`",
    ):
        assert sentence in page


def test_even_nics_carry_equal_parts_of_the_same_bytes() -> None:
    layout = next(nodes.layouts("prolong", context=131072, servers=16, tokens=nodes.TOKENS, batches=1, shuffle=1))
    topology, cost = Topology.of_size(nodes.NODE_SIZE, 16), nodes.cost_model()
    tasks = nodes.balance(layout, cost, phase="backward", tolerance=0.02)
    plain, even = (kind(layout, tasks.rows, topology) for kind in (nodes.RouteCompiler, nodes.EvenNics))
    for before, after in zip(*(c.flows(cost.heads, "backward") for c in (plain, even)), strict=True):
        sizes = np.zeros((2, 16, 16), dtype=np.int64)
        for size, flow in zip(sizes, (before, after), strict=True):
            np.add.at(size, (flow.sender, flow.receiver), flow.size)
        far = topology.across
        assert np.array_equal(*np.where(far, 0, sizes)) and sizes[0][far].any()
        for a, b in ((0, 1), (1, 0)):
            ends = np.ix_(topology.servers[a], topology.servers[b])
            crossing = sizes[1][ends]
            assert (crossing == crossing[0, 0]).all()
            assert 0 <= sizes[0][ends].sum() - crossing.sum() < 64
