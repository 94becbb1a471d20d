# SPDX-License-Identifier: Apache-2.0
"""Nodes and their links: what transfers take against one pair after another, plans of one node, and what is chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads.sampling import layouts as sampled
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler import CostModel, balance
from deepspeed_distca.scheduler.cost_model import PHASES
from deepspeed_distca.scheduler.levels import by_levels
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.scheduler.worth import _FLAT_GAIN, PlanOptions, Worth, phase_seconds, seconds_in_two
from tests.scheduler.checks import check_tasks

COST = replace(CostModel.fitted(), bytes_per_second=450 * 10**9, latency=78_000_000_000)
OPTIONS = PlanOptions(tolerance=0.02, granularity=128, min_gain=0.04, linear_flops=436_207_616)
CASES = {
    "pretrain": dict(name="pretrain", context=131072, servers=32),
    "pretrain-512K": dict(name="pretrain", context=524288, servers=32),
    "prolong-shuffled": dict(name="prolong", context=131072, servers=64, shuffle=1),
    "prolong-headtail": dict(name="prolong", context=262144, servers=32, head_tail=True),
}


def test_nodes_of_a_size() -> None:
    topology = Topology.of_size(3, 8)
    assert topology.nodes == (0, 0, 0, 1, 1, 1, 2, 2) and topology == Topology.of("aaabbbcc")
    assert topology.size == 3 and topology.servers == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert topology.across[2].tolist() == [False] * 3 + [True] * 5
    assert Topology((1, 0, 1)).servers == [[1], [0, 2]]
    # The servers of the first node, again and again, in the places of the others' servers.
    one, other = np.meshgrid([0, 1, 2], range(8), indexing="ij")
    assert topology.by_place(one, other).tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]] * 3
    assert topology.by_place(np.array([6, 6, 7]), np.array([1, 2, 5])).tolist() == [7, 6, 6]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology((0, 2)), "without gaps"),
        (lambda: Topology((1,)), "without gaps"),
        (lambda: Topology((0, -1)), "nodes must be at least 0"),
        (lambda: replace(COST, nic_bytes_per_second=0), "nic_bytes_per_second must be an integer >= 1"),
        (lambda: replace(COST, nic_latency=-1), "nic_latency must be an integer >= 0"),
        (lambda: Topology.of_size(0, 4), "node_size must be an integer >= 1"),
    ],
)
def test_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def slowly(cost: CostModel, topology: Topology, at_home, away, out, back, early: bool) -> float:
    """:func:`phase_seconds`, one pair after another."""
    ranks = range(len(at_home))

    def link(size, one: int, far: bool) -> float:
        others = [r for r in ranks if (topology.nodes[r] != topology.nodes[one]) == far]
        busiest = max(sum(size[one][r] for r in others), sum(size[r][one] for r in others))
        if far:
            return cost.nic_latency / 1e15 + busiest / cost.nic_bytes_per_second
        return cost.latency / 1e15 + busiest / cost.bytes_per_second

    def by_place(size, nic: int) -> float:
        """What a NIC takes where rows leave by the one of the receiver's place."""
        pairs = [(s, r) for s in ranks for r in ranks if topology.nodes[s] != topology.nodes[r]]
        sent = sum(size[s][r] for s, r in pairs if nic_of(s, r) == nic)
        received = sum(size[s][r] for s, r in pairs if r == nic)
        return cost.nic_latency / 1e15 + max(sent, received) / cost.nic_bytes_per_second

    def nic_of(sender: int, receiver: int) -> int:
        mine, others = (topology.servers[topology.nodes[rank]] for rank in (sender, receiver))
        return mine[others.index(receiver) % len(mine)]

    def transfer(size, a: int, b: int) -> float:
        if not size[a][b]:
            return 0.0
        far = topology.nodes[a] != topology.nodes[b]
        ways = [link(size, rank, far) for rank in (a, b)]
        return max(*ways, *(by_place(size, nic) for nic in ((nic_of(a, b), b) if far else ())))

    ready = [max(transfer(out, s, r) for s in ranks) + away[r] for r in ranks]
    done = [max(at_home[r] + away[r], ready[r] if away[r] else 0.0) for r in ranks]
    last = max(done)
    for s in ranks:
        for r in ranks:
            if back[s][r]:
                last = max(last, (ready[s] if early else max(done[s], done[r])) + transfer(back, s, r))
    return last


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.booleans())
def test_seconds_against_pair_after_pair(seed: int, ranks: int, early: bool) -> None:
    rng = np.random.default_rng(seed)
    _, nodes = np.unique(rng.integers(0, 3, ranks), return_inverse=True)
    topology = Topology(tuple(nodes.tolist()))
    cost = replace(COST, bytes_per_second=10**7, latency=10**10, nic_bytes_per_second=10**6, nic_latency=10**12)
    at_home, away = rng.uniform(0, 5, ranks), rng.uniform(0, 5, ranks) * rng.integers(0, 2, ranks)
    out = rng.integers(0, 10**6, (ranks, ranks)) * rng.integers(0, 2, (ranks, ranks)) * (away > 0)[None, :]
    np.fill_diagonal(out, 0)
    back = out.T // 2
    seconds = phase_seconds(cost, at_home, away, out, back, early=early, nodes=topology)
    expected = slowly(cost, topology, at_home, away, out.tolist(), back.tolist(), early)
    assert seconds == pytest.approx(expected, rel=1e-12)
    # Slower links between nodes never help, and one node has none.
    faster = replace(cost, nic_bytes_per_second=10**7, nic_latency=10**11)
    assert seconds >= phase_seconds(faster, at_home, away, out, back, early=early, nodes=topology)
    one = Topology((0,) * ranks)
    assert phase_seconds(cost, at_home, away, out, back, early=early, nodes=one) == phase_seconds(
        cost, at_home, away, out, back, early=early
    )


def chosen(
    layout: Layout, phase: str, options: PlanOptions, cost: CostModel = COST
) -> tuple[Worth, RouteCompiler, np.ndarray, RouteCompiler]:
    worth = Worth(layout, None, phase, cost, options, early=False)
    at_home = RouteCompiler(layout, worth.home.rows, options.topology)
    tasks, compiler = worth.spread(at_home)
    return worth, at_home, tasks.rows, compiler


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", sorted(CASES))
def test_one_node_is_as_without_nodes(case: str, phase: str) -> None:
    for layout in sampled(**CASES[case], tokens=65536, batches=1):
        one = Topology.of_size(layout.num_ranks, layout.num_ranks)
        _, _, rows, _ = chosen(layout, phase, OPTIONS)
        assert np.array_equal(chosen(layout, phase, replace(OPTIONS, topology=one))[2], rows)


@pytest.mark.parametrize("rate", [10**9, 10**10, 5 * 10**10])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", sorted(CASES))
def test_what_is_chosen_ends_first(case: str, phase: str, rate: int) -> None:
    """Never later than with everything at home, where documents continue on other ranks or not; nor than the plan that
    knows no nodes by more than it may be, and then fewer bytes cross."""
    for layout in sampled(**CASES[case], tokens=65536, batches=1):
        topology, cost = Topology.of_size(8, layout.num_ranks), replace(COST, nic_bytes_per_second=rate)
        worth, at_home, rows, compiler = chosen(layout, phase, replace(OPTIONS, topology=topology), cost)
        check_tasks(layout, rows, None)
        flat = RouteCompiler(layout, balance(layout, COST, phase=phase, tolerance=0.02).rows, topology)
        assert worth.takes(compiler) <= min(worth.takes(at_home), worth.takes(flat) / (1 - _FLAT_GAIN))
        own, other = (
            sum(int(size[topology.across].sum()) for size in of.bytes_between(COST.heads, phase))
            for of in (compiler, flat)
        )
        assert worth.takes(compiler) <= worth.takes(flat) or own < other


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", sorted(CASES))
def test_flows_take_what_their_bytes_take(case: str, phase: str) -> None:
    for layout in sampled(**CASES[case], tokens=65536, batches=1):
        topology = Topology.of_size(8, layout.num_ranks)
        worth, _, _, compiler = chosen(layout, phase, replace(OPTIONS, topology=topology))
        assert compiler.moves_rows
        loads = worth.home.loads / 1e15
        flows, sizes = (of(COST.heads, phase) for of in (compiler.flows, compiler.bytes_between))
        assert [flow.size.sum() for flow in flows] == [size.sum() for size in sizes]
        for early in (False, True):
            takes = [phase_seconds(COST, loads, loads, *x, early=early, nodes=topology) for x in (flows, sizes)]
            assert takes[0] == takes[1]
        takes = [seconds_in_two(COST, loads, loads, *x, nodes=topology) for x in (flows, sizes)]
        assert takes[0] == takes[1]


def test_what_cannot_end_first_is_not_planned(monkeypatch) -> None:
    tried = []

    def count(name: str) -> None:
        plan = getattr(Worth, name)

        def planned(self, tolerance, *rest):
            tried.append((name, tolerance))
            return plan(self, tolerance, *rest)

        monkeypatch.setattr(Worth, name, planned)

    count("_by_levels")
    count("_balanced")
    unlike = next(sampled(**CASES["prolong-shuffled"], tokens=65536, batches=1))
    alike = Layout.from_lengths([[65536], [4096] * 16] * 32)
    # Where nodes have equal work, and links within them are hidden, nothing else could end sooner.
    expected = [("_by_levels", 0.02)], [("_by_levels", 0.02), ("_balanced", 0.02), ("_by_levels", 0.1)]
    for layout, in_two, wanted in ((alike, True, expected[0]), (unlike, False, expected[1])):
        tried.clear()
        options = replace(OPTIONS, topology=Topology.of_size(8, layout.num_ranks))
        worth = Worth(layout, None, "forward", COST, options, early=False, in_two=in_two)
        worth.spread(RouteCompiler(layout, worth.home.rows, options.topology))
        assert tried == wanted


def test_a_granule_of_a_long_document_may_be_left() -> None:
    """Levels cannot keep a tolerance that is less than what one cut leaves."""
    long = [[rank, 0, rank * 16384, 16384] for rank in range(8)]
    short = [[rank, 1 + 4 * rank + i, 0, 4096] for rank in range(8, 32) for i in range(4)]
    layout, topology = Layout(np.array(long + short), 32), Topology.of_size(8, 32)
    options = replace(OPTIONS, topology=topology, tolerance=0.005)
    worth, _, _, compiler = chosen(layout, "backward", options)
    assert by_levels(layout, COST, topology, phase="backward", tolerance=0.005, granularity=128) is None
    left = 0.005 + 128 * 131072 / ((131072**2 + 96 * 4096**2) / 2 / 32)
    levels = by_levels(layout, COST, topology, phase="backward", tolerance=left, granularity=128)
    assert levels is not None and 1.005 < levels.balance < 1.07
    assert worth.takes(compiler) <= worth.takes(RouteCompiler(layout, levels.rows, topology))


def test_rows_stay_where_links_between_nodes_are_slow() -> None:
    layout = Layout.from_lengths([[65536], [4096] * 16])
    for rate, moves in ((5 * 10**10, True), (10**8, False)):
        options, cost = replace(OPTIONS, topology=Topology.of_size(1, 2)), replace(COST, nic_bytes_per_second=rate)
        _, _, _, compiler = chosen(layout, "forward", options, cost)
        assert compiler.moves_rows == moves


def test_a_plan_whatever_it_costs_is_balanced() -> None:
    layout = Layout.from_lengths([[65536], [4096] * 16, [4096] * 16, [4096] * 16])
    topology = Topology.of_size(2, 4)
    for options in (
        replace(OPTIONS, topology=topology, min_gain=0.0),
        replace(OPTIONS, topology=topology, server_weights=(0, 1, 1, 2)),
        replace(OPTIONS, topology=topology, min_gain=0.0, max_received_rows=10**6),
    ):
        worth = Worth(layout, None, "forward", replace(COST, nic_bytes_per_second=10**8), options, early=False)
        tasks, _ = worth.spread(RouteCompiler(layout, worth.home.rows))
        shares = tasks.loads / np.array(worth.weights or (1, 1, 1, 1)).clip(1)
        busy = np.array(worth.weights or (1, 1, 1, 1)) > 0
        assert shares[busy].max() <= 1.03 * tasks.loads.sum() / np.array(worth.weights or (1, 1, 1, 1)).sum()
        assert not tasks.loads[~busy].any()


def test_a_topology_of_other_servers_is_refused() -> None:
    layout = Layout.from_lengths([[100], [100], [100]])
    with pytest.raises(ValueError, match="each of the layout's 3 servers, got 4"):
        Worth(layout, None, "forward", COST, replace(OPTIONS, topology=Topology.of_size(2, 4)), early=False)
