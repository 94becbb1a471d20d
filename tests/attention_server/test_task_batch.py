# SPDX-License-Identifier: Apache-2.0
"""What a batch of tasks says of itself: which key rows it touches, how many pairs it has, what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_distca.attention_server.task_batch import TaskBatch

ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=6)


@given(ranges, st.integers(0, 5))
def test_key_spans_are_the_rows_with_a_task(ranges: list[tuple[int, int]], rest: int) -> None:
    start, length = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    one = np.ones_like(start)
    k_rows = int((start + length).max(initial=0)) + rest
    tasks = TaskBatch(np.cumsum(one) - one, one, start, length, len(start), k_rows)
    touched = np.zeros(k_rows, dtype=bool)
    for first, rows in ranges:
        touched[first : first + rows] = True
    found = np.zeros(k_rows, dtype=int)
    for span in tasks.key_spans:
        found[span] += 1
    assert np.array_equal(found, touched)
    # As few as there can be.
    edges = np.diff(np.concatenate([[0], found, [0]]))
    assert len(tasks.key_spans) == (edges == 1).sum()


def one_task(queries: int, keys: int, causal: bool) -> TaskBatch:
    return TaskBatch(*(np.array([x]) for x in (0, queries, 0, keys)), 9, 9, causal=causal)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 3), (1, 7), (4, 9)])
def test_area_is_the_number_of_visible_pairs(queries: int, keys: int) -> None:
    visible = np.arange(keys) <= np.arange(keys - queries, keys)[:, None]
    assert one_task(queries, keys, causal=True).area == visible.sum()
    assert one_task(queries, keys, causal=False).area == one_task(keys, queries, causal=False).area == queries * keys


def test_a_task_without_queries_or_keys_is_refused() -> None:
    for queries, keys in ((0, 3), (4, 3)):
        with pytest.raises(ValueError, match=f"task 0: {queries} queries against 3 keys; a task needs 1 <= q"):
            one_task(queries, keys, causal=True)
    for queries, keys in ((0, 3), (4, 0)):
        with pytest.raises(ValueError, match=f"task 0: {queries} queries against {keys} keys; a full tile needs at"):
            one_task(queries, keys, causal=False)
    with pytest.raises(ValueError, match="query ranges leave the buffer of 9 rows"):
        one_task(10, 3, causal=False)
    with pytest.raises(ValueError, match="key ranges leave the buffer of 9 rows"):
        one_task(3, 10, causal=False)
