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


#: Of a layer, forward and backward.
LINEAR_SECONDS = nodes.cost_model().linear_seconds(3 * nodes.LINEAR * nodes.TOKENS)


def of(servers: int, placement: str = "in order") -> list[dict]:
    return [row for row in ROWS if row["servers"] == servers and row["placement"] == placement]


def mean(servers: int, key: str, placement: str = "in order") -> float:
    return float(np.mean([row[key] for row in of(servers, placement)]))


def check(row: dict[str, float]) -> None:
    for prefix in ("flat_", "levels_"):
        assert max(row[f"{prefix}balance_forward"], row[f"{prefix}balance_backward"]) <= 1.02
    if row.get("placement", "in order") == "in order":  # a granule of a long document may be more than the tolerance
        assert all(row[f"balance_{phase}"] <= 1.02 + row[f"granule_{phase}"] for phase in ("forward", "backward"))
    assert row["ideal_s"] <= row["local_first_s"] <= row["plain_s"]
    # The plan that knows no nodes must end sooner by a part of the layer.
    assert LINEAR_SECONDS + row["local_first_s"] <= 1.02 * (LINEAR_SECONDS + row["flat_s"])
    assert max(row["levels_across_mib"], row["across_mib"]) <= row["flat_across_mib"]
    for way in ("chosen", "local_first"):  # more pairs wait for each other
        assert row[f"{way}_even_s"] <= 1.01 * row[f"{way}_s"]


def test_a_row() -> None:
    wanted = dict(context=131072, servers=16, tokens=nodes.TOKENS, batches=1)
    row = nodes.row(next(nodes.layouts("pretrain", **wanted)), Topology.of_size(4, 16))
    check(row)
    about = {"workload", "context", "shuffled", "homes", "placement", "servers", "placing_ms"}
    assert set(nodes.COLUMNS) <= {*row, *about}


def test_placed_layouts_have_the_same_documents() -> None:
    layout = next(nodes.layouts("prolong", context=131072, servers=16, tokens=nodes.TOKENS, batches=1, shuffle=1))
    for topology in (None, Topology.of_size(nodes.NODE_SIZE, 16)):
        placed = nodes.placed(layout, topology).validate()
        assert placed.tokens.tolist() == layout.tokens.tolist()
        lengths = [
            np.bincount(of.segments[:, nodes.DOCUMENT], of.segments[:, nodes.LENGTH]) for of in (layout, placed)
        ]
        assert np.array_equal(*lengths)


@pytest.mark.parametrize("servers", [64, 128, 256, 512])
def test_the_pages_table_is_the_results(servers: int) -> None:
    assert len(of(servers)) == 24
    for row in of(servers):
        check(row)

    kinds = ("flat_", "levels_", "local_first_", "")
    bytes_of = [f"{prefix}{what}" for what in ("across_mib", "worst_nic_mib") for prefix in kinds]
    seconds = [f"{name}_s" for name in ("plain", "flat", "levels", "local_first", "chosen", "ideal")]
    cells = [str(servers), *(f"{mean(servers, key):,.0f}" for key in bytes_of)]
    cells += [f"{mean(servers, key):.3f}" for key in seconds]
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs" / "nodes.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("servers", [64, 128, 256, 512])
def test_what_the_page_says_of_placement(servers: int) -> None:
    placements = ("in order", "no nodes", "by nodes")
    assert all(len(of(servers, placement)) == 12 for placement in placements[1:])
    for row in of(servers, "by nodes"):
        check(row)
    cells = [str(servers)]
    for key in ("local_first_across_mib", "local_first_worst_nic_mib"):
        cells += [f"{mean(servers, key, placement):,.0f}" for placement in placements]
    for key in ("local_first_s", "chosen_s"):
        cells += [f"{mean(servers, key, placement):.3f}" for placement in placements]
    one = {  # in order: contiguous
        row["placement"]: row["local_first_across_mib"]
        for row in ROWS
        if (row["servers"], row["workload"], row["context"]) == (servers, "pretrain", 131072)
        and row["shuffled"]
        and row["homes"] != "head-tail"
    }
    assert one["by nodes"] <= 80  # what was asked for with 64 GPUs
    if servers == 64:
        said = f"{one['by nodes']:.0f} MiB a GPU and layer cross between 8 nodes, where {one['no nodes']:.0f} did"
        assert said in (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    cells += [f"{one[placement]:.0f}" for placement in placements]
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs" / "nodes.md").read_text(encoding="utf-8")


def test_what_the_page_says_of_the_table() -> None:
    page = " ".join((ROOT / "docs" / "nodes.md").read_text(encoding="utf-8").split())
    linear = LINEAR_SECONDS
    of_ideal = {
        (servers, way): [(linear + row[f"{way}_s"]) / (linear + row["ideal_s"]) for row in of(servers)]
        for servers in (64, 128, 256, 512)
        for way in ("chosen", "local_first")
    }
    average = {key: sum(ratios) / len(ratios) for key, ratios in of_ideal.items()}
    most = {way: max(max(r) for (_, w), r in of_ideal.items() if w == way) for way in ("chosen", "local_first")}
    short = {n: [row["across_mib"] for row in of(n) if row["context"] == 131072] for n in (64, 128, 256, 512)}
    asked = {64: 192, 128: 185, 256: 182, 512: 224}
    assert all(np.mean(across) <= asked[n] for n, across in short.items())
    few, many = ({key: mean(servers, key) for key in ROWS[0] if key.endswith(("_s", "_ms"))} for servers in (64, 512))
    ways = ("worst", "own", "alone")
    mean_nic = {(n, way): mean(n, f"{way}_nic_mib") for n in short for way in ways}
    most_nic = {way: max(row[f"{way}_nic_mib"] for n in short for row in of(n)) for way in ways}
    for sentence in (
        f"carry {mean_nic[64, 'alone']:,.0f} MiB of a layer on average at 64 GPUs and {mean_nic[512, 'alone']:,.0f} "
        f"at 512, and {most_nic['alone']:,.0f} at most; in equal parts it carries {mean_nic[64, 'worst']:,.0f}, "
        f"{mean_nic[512, 'worst']:,.0f} and {most_nic['worst']:,.0f}.",
        f"own NIC: {mean_nic[64, 'own']:,.0f} and {mean_nic[512, 'own']:,.0f}.",
        "with contexts of 128K " + ", ".join(f"{np.mean(across):.0f}" for across in short.values()) + " MiB",
        f"a layer takes {average[64, 'chosen']:.2f} of the ideal on average at 64 GPUs",
        f"and {average[512, 'chosen']:.2f} at 512, {most['chosen']:.2f} at most",
        f"`local_first` takes {average[64, 'local_first']:.2f} and {average[512, 'local_first']:.2f}",
        f"{average[512, 'local_first']:.2f}, {most['local_first']:.2f} at most",
        f"with `local_first` {few['local_first_even_s']:.3f} s in place of {few['local_first_s']:.3f} at 64 GPUs",
        f"and {many['local_first_even_s']:.3f} of {many['local_first_s']:.3f} at 512",
        f"with `ping_pong` {few['chosen_even_s']:.3f} of {few['chosen_s']:.3f} s at 64 GPUs",
        f"and {many['chosen_even_s']:.3f} of {many['chosen_s']:.3f} at 512: two",
        f"Planning flat takes {few['flat_planning_ms']:.0f} ms of a core for both phases at 64 GPUs",
        f"and {many['flat_planning_ms']:.0f} at 512",
        f"the choice {few['planning_ms']:.0f} and {many['planning_ms']:.0f} ms",
        f"{few['local_first_planning_ms']:.0f} and {many['local_first_planning_ms']:.0f} with `local_first`",
    ):
        assert sentence in page


def test_what_the_page_says_of_placed_layers() -> None:
    page = " ".join((ROOT / "docs" / "nodes.md").read_text(encoding="utf-8").split())
    linear = LINEAR_SECONDS

    def of_ideal(way: str, servers: int) -> list[float]:
        return [(linear + row[way]) / (linear + row["ideal_s"]) for row in of(servers, "by nodes")]

    all_in_two = [ratio for servers in (64, 128, 256, 512) for ratio in of_ideal("chosen_s", servers)]
    assert {f"{np.mean(of_ideal('chosen_s', servers)):.2f}" for servers in (64, 128, 256, 512)} == {"1.04", "1.05"}
    in_order = [row for n in (64, 128, 256, 512) for row in of(n) if row["homes"] == "contiguous"]
    placed = [row for n in (64, 128, 256, 512) for row in of(n, "by nodes")]
    both = [[linear + row["local_first_s"] for row in rows] for rows in (placed, in_order)]
    assert all(a <= b for a, b in zip(*both, strict=True))
    for sentence in (
        f"{np.mean(of_ideal('local_first_s', 64)):.2f} of the ideal on average at 64 GPUs and "
        f"{np.mean(of_ideal('local_first_s', 512)):.2f} at 512, with `ping_pong` 1.04 to 1.05, "
        f"{max(all_in_two):.2f} at most",
        "No batch takes longer with `local_first` than in order",
        f"{mean(64, 'placing_ms', 'by nodes'):.0f} ms of a core with 64 GPUs, "
        f"{mean(64, 'placing_ms', 'no nodes'):.0f} without nodes",
        f"{mean(512, 'placing_ms', 'by nodes'):.0f} ms of a core with 512, "
        f"{mean(512, 'placing_ms', 'no nodes'):.0f} without",
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
