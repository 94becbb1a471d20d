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
from deepspeed_distca.scheduler.traffic import homes_of, traffic
from tests.scheduler.checks import documents_of, rows_sent
from tests.scheduler.strategies import COSTS, layouts, windows

SMALL = layouts(ranks=st.integers(1, 5), documents=st.integers(1, 8), lengths=st.integers(1, 400))


@settings(max_examples=80)
@given(layout=SMALL, cost=st.sampled_from(sorted(COSTS)), window=windows())
def test_rows_are_those_counted_one_by_one(layout, cost, window):
    model, phase = COSTS[cost]
    for rows in (balance(layout, model, phase=phase, window=window, granularity=16).rows, home_tasks(layout, window)):
        q, kv = rows_sent(layout, rows)
        counted = traffic(layout, rows)
        assert np.array_equal(counted.q_rows, q)
        assert np.array_equal(counted.kv_rows, kv)
        homes = documents_of(layout)
        expected = [sorted({int(r) for r in homes[d][a:b]}) for d, a, b, *_ in rows.tolist()]
        assert homes_of(layout, rows) == expected


def test_bytes_beyond_int64_are_refused():
    layout, heads = Layout.from_lengths([[800_000], []]), Heads(2**20, 2**20, 2**20, element_size=16)
    rows = np.array([[0, 0, 400_000, 0, 400_000, 0], [0, 400_000, 800_000, 0, 800_000, 1]])
    moved = traffic(layout, rows)
    for phase in ("forward", "backward"):
        for size in (moved.dispatch_bytes, moved.return_bytes, RouteCompiler(layout, rows).bytes_between):
            with pytest.raises(OverflowError, match="heads are too large"):
                size(heads, phase)


@settings(max_examples=40)
@given(layout=SMALL, cost=st.sampled_from(sorted(COSTS)), window=windows())
def test_bytes_are_those_of_the_compiled_plan(layout, cost, window):
    model, phase = COSTS[cost]
    heads = Heads(6, 2, 32, value_dim=16, element_size=4)
    tasks = balance(layout, model, phase=phase, window=window, granularity=16)
    counted = traffic(layout, tasks)
    compiler = RouteCompiler(layout, tasks.rows)
    out, back = compiler.bytes_between(heads, phase)
    assert np.array_equal(out, counted.dispatch_bytes(heads, phase))
    assert np.array_equal(back, counted.return_bytes(heads, phase))
    at_home, away = compiler.loads(lambda rows: task_costs(rows, model, phase, window))
    assert np.array_equal(at_home + away, tasks.loads)


def test_bytes_of_a_plan_with_relays():
    layout = Layout.from_lengths([[131072], *[[1024] * 16] * 15])
    heads = Heads(4, 1, 128)
    tasks = balance(layout, CostModel.area(heads))
    compiler, counted = RouteCompiler(layout, tasks.rows), traffic(layout, tasks)
    assert len(compiler.relayed())
    assert counted.dispatched_kv_rows.sum() == counted.kv_rows.sum()
    assert (counted.dispatched_kv_rows.sum(axis=0) == counted.kv_rows.sum(axis=0)).all()
    assert counted.dispatched_kv_rows[0].sum() < counted.kv_rows[0].sum() / 2
    for phase in ("forward", "backward"):
        out, back = compiler.bytes_between(heads, phase)
        assert np.array_equal(out, counted.dispatch_bytes(heads, phase))
        assert np.array_equal(back, counted.return_bytes(heads, phase))


def test_bytes_by_hand():
    layout = Layout.from_ranks([[(0, 0, 10)], [(0, 10, 4), (1, 0, 3)]])
    heads = Heads(query=4, key_value=2, head_dim=8)
    rows = np.array([[0, 0, 10, 0, 10, 0], [0, 12, 14, 0, 14, 0], [0, 10, 12, 0, 12, 1], [1, 0, 3, 0, 3, 1]])
    counted = traffic(layout, rows)
    # Rank 1 sends its last two queries and all four keys; rank 0 the ten keys that rank 1's own queries see.
    assert counted.q_rows.tolist() == [[0, 0], [2, 0]]
    assert counted.kv_rows.tolist() == [[0, 10], [4, 0]]
    q, kv, out, lse = 64, 64, 64, 16
    assert counted.dispatch_bytes(heads).tolist() == [[0, 10 * kv], [2 * q + 4 * kv, 0]]
    assert counted.return_bytes(heads).tolist() == [[0, 2 * (out + lse)], [0, 0]]
    assert counted.dispatch_bytes(heads, "backward").tolist() == [[0, 640], [2 * (q + out + 2 * lse) + 4 * kv, 0]]
    assert counted.return_bytes(heads, "backward").tolist() == [[0, 2 * q + 4 * kv], [10 * kv, 0]]


def test_digest_is_stable_and_depends_on_everything():
    layout = Layout.from_lengths([[300, 7], [5]])
    rows = home_tasks(layout)
    base = digest(layout, rows)
    assert 0 <= base.value < 2**63 and base.hex == f"{base.value:016x}"
    assert base == digest(Layout.from_lengths([[300, 7], [5]]), rows.copy())
    # Written down so that a change of the format is noticed: ranks of one job must agree on it.
    assert base.hex == "6cd262146b3198a0"
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
    assert len({d.value for d in [base, *others]}) == 1 + len(others)


@pytest.mark.parametrize("order", ["<i8", ">i8"])
def test_digest_does_not_depend_on_byte_order(order):
    layout = Layout.from_lengths([[300, 7], [5]])
    rows = home_tasks(layout)
    assert digest(layout, rows.astype(order)) == digest(layout, rows)
