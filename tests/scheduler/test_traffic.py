# SPDX-License-Identifier: Apache-2.0
"""Rows and bytes between ranks, and digests, against counting position by position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler import CostModel, Heads, balance, home_tasks
from deepspeed_distca.scheduler.digest import digest
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import task_costs
from deepspeed_distca.scheduler.traffic import homes_of, rows_between
from tests.scheduler.checks import documents_of, rows_sent
from tests.scheduler.strategies import COSTS, layouts, windows

SMALL = layouts(ranks=st.integers(1, 5), documents=st.integers(1, 8), lengths=st.integers(1, 400))


@settings(max_examples=80)
@given(layout=SMALL, cost=st.sampled_from(sorted(COSTS)), window=windows())
def test_rows_are_those_counted_one_by_one(layout, cost, window):
    model, phase = COSTS[cost]
    for rows in (balance(layout, model, phase=phase, window=window, granularity=16).rows, home_tasks(layout, window)):
        q, kv = rows_sent(layout, rows)
        counted = rows_between(layout, rows)
        assert np.array_equal(counted[0], q)
        assert np.array_equal(counted[1], kv)
        homes = documents_of(layout)
        expected = [sorted({int(r) for r in homes[d][a:b]}) for d, a, b, *_ in rows.tolist()]
        assert homes_of(layout, rows) == expected


def test_bytes_beyond_int64_are_refused():
    layout, heads = Layout.from_lengths([[800_000], []]), Heads(2**20, 2**20, 2**20, element_size=16)
    rows = np.array([[0, 0, 400_000, 0, 400_000, 0], [0, 400_000, 800_000, 0, 800_000, 1]])
    for phase in ("forward", "backward"):
        with pytest.raises(OverflowError, match="heads are too large"):
            RouteCompiler(layout, rows).bytes_between(heads, phase)


def check_bytes(layout, rows, compiler, heads, phase):
    """Those of the queries that are sent to other ranks, and of the keys, of which some may be relayed."""
    queries, keys = rows_sent(layout, rows)[0], compiler.key_rows()
    size = heads.moved(phase)
    out, back = compiler.bytes_between(heads, phase)
    assert np.array_equal(out, queries * size.query_out + keys * size.key_out)
    assert np.array_equal(back.T, queries * size.query_back + keys * size.key_back)


@settings(max_examples=40)
@given(layout=SMALL, cost=st.sampled_from(sorted(COSTS)), window=windows())
def test_bytes_of_the_compiled_plan_are_those_of_its_rows(layout, cost, window):
    model, phase = COSTS[cost]
    heads = Heads(6, 2, 32, value_dim=16, element_size=4)
    tasks = balance(layout, model, phase=phase, window=window, granularity=16)
    compiler = RouteCompiler(layout, tasks.rows)
    check_bytes(layout, tasks.rows, compiler, heads, phase)
    at_home, away = compiler.loads(lambda rows: task_costs(rows, model, phase, window))
    assert np.array_equal(at_home + away, tasks.loads)


def test_bytes_of_a_plan_with_relays():
    layout = Layout.from_lengths([[131072], *[[1024] * 16] * 15])
    heads = Heads(4, 1, 128)
    tasks = balance(layout, CostModel.area(heads))
    compiler, (_, keys) = RouteCompiler(layout, tasks.rows), rows_between(layout, tasks.rows)
    sent = compiler.key_rows()
    assert len(compiler.relayed())
    assert (sent.sum(axis=0) == keys.sum(axis=0)).all()
    assert sent[0].sum() < keys[0].sum() / 2
    for phase in ("forward", "backward"):
        check_bytes(layout, tasks.rows, compiler, heads, phase)


def test_bytes_by_hand():
    layout = Layout.from_ranks([[(0, 0, 10)], [(0, 10, 4), (1, 0, 3)]])
    heads = Heads(query=4, key_value=2, head_dim=8)
    rows = np.array([[0, 0, 10, 0, 10, 0], [0, 12, 14, 0, 14, 0], [0, 10, 12, 0, 12, 1], [1, 0, 3, 0, 3, 1]])
    q_rows, kv_rows = rows_between(layout, rows)
    # Rank 1 sends its last two queries and all four keys; rank 0 the ten keys that rank 1's own queries see.
    assert q_rows.tolist() == [[0, 0], [2, 0]]
    assert kv_rows.tolist() == [[0, 10], [4, 0]]
    q, kv, out, lse = 64, 64, 64, 16
    there, back = RouteCompiler(layout, rows).bytes_between(heads, "forward")
    assert there.tolist() == [[0, 10 * kv], [2 * q + 4 * kv, 0]]
    assert back.tolist() == [[0, 2 * (out + lse)], [0, 0]]
    there, back = RouteCompiler(layout, rows).bytes_between(heads, "backward")
    assert there.tolist() == [[0, 640], [2 * (q + out + 2 * lse) + 4 * kv, 0]]
    assert back.tolist() == [[0, 2 * q + 4 * kv], [10 * kv, 0]]


def test_digest_is_stable_and_depends_on_everything():
    layout = Layout.from_lengths([[300, 7], [5]])
    rows = home_tasks(layout)
    base = digest(layout, rows)
    assert 0 <= base < 2**63
    assert base == digest(Layout.from_lengths([[300, 7], [5]]), rows.copy())
    # Written down so that a change of the format is noticed: ranks of one job must agree on it.
    assert f"{base:016x}" == "6cd262146b3198a0"
    moved = rows.copy()
    moved[0, 4] = 1
    others = [
        digest(Layout.from_lengths([[7, 300], [5]]), rows),
        digest(Layout.from_lengths([[300, 7], [5], []]), rows),
        digest(layout, moved),
        digest(layout, rows[:-1]),
        digest(layout, rows, phase="backward"),
        digest(layout, rows, window=128),
    ]
    assert len({base, *others}) == 1 + len(others)


@pytest.mark.parametrize("order", ["<i8", ">i8"])
def test_digest_does_not_depend_on_byte_order(order):
    layout = Layout.from_lengths([[300, 7], [5]])
    rows = home_tasks(layout)
    assert digest(layout, rows.astype(order)) == digest(layout, rows)
