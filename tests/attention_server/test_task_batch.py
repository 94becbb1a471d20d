# SPDX-License-Identifier: Apache-2.0
"""Which key rows a batch of tasks touches."""

from __future__ import annotations

import numpy as np
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
