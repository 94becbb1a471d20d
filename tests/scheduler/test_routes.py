# SPDX-License-Identifier: Apache-2.0
"""Compiled plans: every task finds its rows, senders and receivers agree, nothing travels that need not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import PHASES
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.relays import RelayRule
from deepspeed_distca.scheduler.routes import (
    HOME_ROW,
    PEER,
    ROWS,
    WORK_ROW,
    RouteCompiler,
    Routes,
    TaskRanges,
    home_routes,
)
from deepspeed_distca.scheduler.tasks import home_tasks
from deepspeed_distca.scheduler.topology import Topology
from tests.distributed.random_plans import random_layout, random_tasks

cases = st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([None, 1, 3, 40]))


def compiled(seed: int, world: int, window: int | None) -> tuple[Layout, np.ndarray, list[Routes]]:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, world, documents=int(rng.integers(1, 8)), longest=int(rng.integers(1, 60)))
    tasks = random_tasks(rng, layout, window, stay=float(rng.choice([0.0, 0.5, 1.0])))
    rule = RelayRule(1, int(rng.integers(0, 3)), int(rng.choice([1, 8, 4096])))
    nodes = Topology.of(rng.integers(0, 2, world).tolist()) if rng.random() < 0.5 else None
    compiler = RouteCompiler(layout, tasks, nodes, rule)
    return layout, tasks, [compiler.rank(r) for r in range(world)]


def tokens_of(layout: Layout, rank: int) -> np.ndarray:
    """(document, position) of every home row, int64 [rows, 2]."""
    parts = [np.stack([np.full(n, d), np.arange(a, a + n)], axis=1) for d, a, n in layout.rank(rank)]
    return np.concatenate(parts) if parts else np.zeros((0, 2), dtype=np.int64)


def workspace(layout: Layout, plan: Routes, kind: str) -> np.ndarray:
    """(document, position) of every workspace row as the incoming runs fill it; each row is filled exactly once."""
    runs = plan.q_in if kind == "q" else plan.kv_in
    rows = plan.work_q_rows if kind == "q" else plan.work_kv_rows
    work = np.full((rows, 2), -1, dtype=np.int64)
    for run in runs:
        target = slice(run[WORK_ROW], run[WORK_ROW] + run[ROWS])
        assert (work[target] == -1).all()
        work[target] = tokens_of(layout, run[PEER])[run[HOME_ROW] : run[HOME_ROW] + run[ROWS]]
    assert (work >= 0).all()
    return work


@settings(max_examples=150)
@given(cases)
def test_tasks_find_the_rows_they_ask_for(case: tuple) -> None:
    layout, tasks, plans = compiled(*case)
    found = []
    for server, plan in enumerate(plans):
        home = tokens_of(layout, server)
        buffers = [(plan.local, home, home)]
        buffers.append((plan.remote, workspace(layout, plan, "q"), workspace(layout, plan, "kv")))
        for ranges, q, k in buffers:
            for i in range(len(ranges)):
                queries = q[ranges.q_start[i] : ranges.q_start[i] + ranges.q_len[i]]
                keys = k[ranges.k_start[i] : ranges.k_start[i] + ranges.k_len[i]]
                assert len(queries) == ranges.q_len[i] and len(keys) == ranges.k_len[i]
                document, start = queries[0]
                for rows in (queries, keys):  # contiguous positions of one document, the last query sees the last key
                    assert (rows[:, 0] == document).all() and (np.diff(rows[:, 1]) == 1).all()
                assert queries[-1, 1] == keys[-1, 1]
                found.append((document, start, queries[-1, 1] + 1, keys[0, 1], keys[-1, 1] + 1, server))
    assert sorted(found) == sorted(map(tuple, tasks.tolist()))


@settings(max_examples=150)
@given(cases)
def test_senders_and_receivers_list_the_same_runs_in_the_same_order(case: tuple) -> None:
    _, _, plans = compiled(*case)
    for home, sender in enumerate(plans):
        for server, receiver in enumerate(plans):
            if home == server:
                continue
            relayed = receiver.kv_in_direct & receiver.kv_in_relayed
            alone = receiver.kv_in_direct & ~receiver.kv_in_relayed
            for out, into in (
                (sender.q_out, receiver.q_in),
                (sender.kv_out, receiver.kv_in[receiver.kv_in_direct]),
                (sender.kv_out[sender.kv_out_relayed], receiver.kv_in[relayed]),
                (sender.kv_out[~sender.kv_out_relayed], receiver.kv_in[alone]),
                (sender.relay_out, receiver.relay_in),
            ):
                sent, received = out[out[:, PEER] == server][:, 1:], into[into[:, PEER] == home][:, 1:]
                assert np.array_equal(sent, received)


@settings(max_examples=300)
@given(st.integers(0, 2**32 - 1), st.integers(3, 6), st.sampled_from([None, 3, 40]))
def test_relayed_rows_are_the_rows_of_the_home(seed: int, world: int, window: int | None) -> None:
    layout, _, plans = compiled(seed, world, window)
    keys = [workspace(layout, plan, "kv") for plan in plans]
    for server, plan in enumerate(plans):
        own = plan.kv_in[:, PEER] == server
        assert plan.kv_in_direct[own].all()
        # Every run that its home does not send comes from a relay, and nothing else does.
        missing = plan.kv_in[~plan.kv_in_direct]
        assert sorted(plan.relay_in[:, [WORK_ROW, ROWS]].tolist()) == sorted(missing[:, [WORK_ROW, ROWS]].tolist())
        for relay, row, target, rows in plan.relay_in.tolist():
            assert relay != server
            assert np.array_equal(keys[relay][row : row + rows], keys[server][target : target + rows])
            # The relay has them from their home, in the first round.
            first = plans[relay].kv_in[plans[relay].kv_in_direct & (plans[relay].kv_in[:, PEER] != relay)]
            assert any(w <= row and row + rows <= w + n for _, _, w, n in first.tolist())


def test_a_document_for_many_servers_is_relayed() -> None:
    # Rank 0 stores 1600 rows of which each of 15 others computes 100.
    layout = Layout.from_lengths([[1600]] + [[10]] * 15)
    tasks = np.array(
        [[0, 100 * s, 100 * s + 100, 0, 100 * s + 100, s] for s in range(16)]
        + [[s, 0, 10, 0, 10, s] for s in range(1, 16)]
    )
    plain = RouteCompiler(layout, tasks)
    assert not len(plain.relayed())
    heads = Heads(query=1, key_value=1, head_dim=64)  # q row 128 bytes, k and v 256, out 128, lse 4
    relayed = RouteCompiler(layout, tasks, rule=RelayRule(least_rows=1, factor=0))
    before, after = (sum(c.bytes_between(heads, "forward")).sum(axis=1) for c in (plain, relayed))
    assert before.sum() == after.sum() and before[0] == sum(range(200, 1601, 100)) * 256 + 1500 * 128
    # The home sends the 3 largest prefixes, all their sums beyond that were relayed by them in turn.
    assert after[0] == (1600 + 1500 + 1400) * 256 + 1500 * 128
    assert after[1:].max() < after[0]
    assert (after[1:13] == before[1:13]).all()
    # The same where every server is a node; there it counts that who sends on waits for what it sends.
    over_nodes = RouteCompiler(layout, tasks, Topology.of_size(1, 16), rule=RelayRule(least_rows=1, factor=0))
    assert np.array_equal(over_nodes.relayed(), relayed.relayed())
    for phase in PHASES:
        near, far = (c.flows(heads, phase) for c in (relayed, over_nodes))
        for there, found in zip(near, far, strict=True):
            assert there.late is None
            assert all(np.array_equal(a, b) for a, b in zip(there[:3], found[:3], strict=True))
        late, (sender, receiver, *_) = far[0].late, far[0]
        assert sender[late].tolist() == sender[(sender > 0) & (receiver > 0)].tolist()
        if phase == "forward":
            assert far[1].late is None  # only results return
            continue
        assert set(far[1].sender[far[1].late]) == set(sender[late]) and set(far[1].receiver[far[1].late]) == {0}


def test_the_servers_of_a_node_carry_what_one_of_them_needs() -> None:
    # Of 8000 rows on the first node one server of the other needs all, another one 5000 of them.
    layout = Layout.from_lengths([[8000], [10], [10], [10], [10], [10], [10]])
    nodes, needs = Topology.of((0, 0, 1, 1, 1, 1, 0)), {5: 8000, 4: 5000}
    tasks = [[0, 0, 3000, 0, 3000, 0], [0, 3000, 5000, 0, 5000, 4], [0, 5000, 8000, 0, 8000, 5]]
    tasks = np.array(tasks + [[s, 0, 10, 0, 10, s] for s in range(1, 7)])
    apart = RouteCompiler(layout, tasks, nodes, RelayRule(carried_rows=4001))
    assert apart.key_rows()[0].tolist() == [0] * 5 + [8000, 0] and apart.key_rows()[5, 4] == 5000
    shared = RouteCompiler(layout, tasks, nodes, RelayRule(carried_rows=2000))
    rows = shared.key_rows()
    # A NIC of its own for each part, but for the third, of which server 4 has a half for itself.
    assert rows[0].tolist() == [0, 0, 2000, 2000, 0, 4000, 0]
    assert rows[2:6, 5].tolist() == [2000, 2000, 0, 0] and rows[2:6, 4].tolist() == [2000, 2000, 0, 1000]
    for server in (4, 5):
        assert rows[:, server].sum() == needs[server]
    assert [shared.rank(s).work_kv_rows for s in (2, 3)] == [2000, 2000]
    three = RouteCompiler(layout, tasks, nodes, RelayRule(carried_rows=2500)).key_rows()
    assert three[0].tolist() == [0, 0, 2667, 2667, 2666, 0, 0]  # in as many parts as have enough rows


def test_relays_wait_for_enough_rows() -> None:
    layout = Layout.from_lengths([[1600]] + [[10]] * 15)
    tasks = np.array(
        [[0, 100 * s, 100 * s + 100, 0, 100 * s + 100, s] for s in range(16)]
        + [[s, 0, 10, 0, 10, s] for s in range(1, 16)]
    )
    total = sum(range(200, 1601, 100))
    assert len(RouteCompiler(layout, tasks, rule=RelayRule(total, 4)).relayed())
    assert not len(RouteCompiler(layout, tasks, rule=RelayRule(total + 1, 4)).relayed())
    assert not len(RouteCompiler(layout, tasks, rule=RelayRule(total, 16)).relayed())


@settings(max_examples=150)
@given(cases)
def test_waves_partition_the_tasks_and_share_no_key_row(case: tuple) -> None:
    _, _, plans = compiled(*case)
    for plan in plans:
        assert sorted(np.concatenate([*plan.waves, np.zeros(0, dtype=int)]).tolist()) == list(range(len(plan.remote)))
        for ranges in [plan.local, *(plan.remote.take(w) for w in plan.waves)]:
            order = np.argsort(ranges.k_start)
            ends = (ranges.k_start + ranges.k_len)[order]
            assert (ranges.k_start[order][1:] >= ends[:-1]).all()


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_the_first_wave_covers_all_keys(seed: int, world: int) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, world, documents=4, longest=60)
    compiler = RouteCompiler(layout, random_tasks(rng, layout, None, stay=0.3))
    for plan in map(compiler.rank, range(world)):
        assert sum(plan.remote.take(wave).k_len.sum() for wave in plan.waves[:1]) == plan.work_kv_rows


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_whole_documents_at_home_move_nothing(seed: int, world: int) -> None:
    rng = np.random.default_rng(seed)
    layout = Layout.from_lengths([rng.integers(1, 50, size=int(rng.integers(0, 5))).tolist() for _ in range(world)])
    compiler = RouteCompiler(layout, home_tasks(layout))
    assert not compiler.moves_rows and not np.any(compiler.bytes_between(Heads(), "forward"))
    at_home, away = compiler.loads(lambda rows: rows[:, 2] - rows[:, 1])
    assert at_home.tolist() == layout.tokens.tolist() and not away.any()
    for rank in range(world):
        plan = compiler.rank(rank)
        assert plan.is_local and int(plan.local.q_len.sum()) == plan.home_rows


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_document_ids_may_be_any_int64(seed: int, world: int) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, world, documents=5, longest=60)
    tasks = random_tasks(rng, layout, None)
    ids = np.sort(rng.integers(0, 2**63 - 1, size=int(layout.segments[:, 1].max()) + 1))
    segments, renamed = layout.segments.copy(), tasks.copy()
    segments[:, 1], renamed[:, 0] = ids[segments[:, 1]], ids[renamed[:, 0]]
    small = RouteCompiler(layout, tasks)
    large = RouteCompiler(Layout(segments, world).validate(), renamed)
    for rank in range(world):
        a, b = small.rank(rank), large.rank(rank)
        for name in ("q_in", "kv_in", "q_out", "kv_out"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
        for one, other in ((a.local, b.local), (a.remote, b.remote)):
            assert [x.tolist() for x in vars(one).values()] == [x.tolist() for x in vars(other).values()]


def test_bytes_of_one_moved_tail() -> None:
    layout = Layout.from_lengths([[100], [10]])
    tasks = np.array([[0, 0, 60, 0, 60, 0], [0, 60, 100, 0, 100, 1], [1, 0, 10, 0, 10, 1]])
    compiler = RouteCompiler(layout, tasks)
    heads = Heads(query=4, key_value=1, head_dim=8)  # q row 64 bytes, k and v rows 32, lse 16
    out, back = compiler.bytes_between(heads, "forward")
    assert out.tolist() == [[0, 40 * 64 + 100 * 32], [0, 0]] and back.tolist() == [[0, 0], [40 * (64 + 16), 0]]
    out, back = compiler.bytes_between(heads, "backward")
    assert out.tolist() == [[0, 40 * (128 + 32) + 100 * 32], [0, 0]]
    assert back.tolist() == [[0, 0], [40 * 64 + 100 * 32, 0]]
    assert compiler.rank(1).received_rows == (40, 100)


@pytest.mark.parametrize("world", [1, 4])
def test_empty_layout(world: int) -> None:
    layout = Layout.from_lengths([[] for _ in range(world)])
    plan = RouteCompiler(layout, np.zeros((0, 6), dtype=np.int64)).rank(world - 1)
    assert plan.is_local and not len(plan.local) and plan.home_rows == 0


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(1, 300), max_size=5), min_size=1, max_size=4), st.sampled_from([None, 1, 64]))
def test_whole_documents_at_home_need_no_compiler(lengths, window) -> None:
    layout = Layout.from_lengths(lengths)
    assert layout.is_whole
    compiler = RouteCompiler(layout, home_tasks(layout, window))
    for rank in range(layout.num_ranks):
        for name, value in vars(compiler.rank(rank)).items():
            mine = getattr(home_routes(layout, rank), name)
            if isinstance(value, TaskRanges):
                assert all(
                    np.array_equal(a, b) for a, b in zip(vars(mine).values(), vars(value).values(), strict=True)
                )
            else:
                assert np.array_equal(mine, value) and np.shape(mine) == np.shape(value), name


def test_a_document_in_two_segments_is_not_whole() -> None:
    assert not Layout.from_ranks([[(0, 0, 5)], [(0, 5, 3)]]).is_whole
    assert not Layout.from_ranks([[(0, 0, 5), (1, 0, 2), (0, 5, 3)]]).is_whole
    assert Layout.from_ranks([[(7, 0, 5)], [(3, 0, 3)]]).is_whole
