# SPDX-License-Identifier: Apache-2.0
"""The batches that are measured: within their limits, of every kind, and apart from those held out."""

from __future__ import annotations

import numpy as np
import pytest

from deepspeed_distca.profiling.shapes import Limits, fitting_shapes, held_out_shapes, smallest_shape
from tests.scheduler.checks import tile, visible_pairs


@pytest.mark.parametrize("limits", [Limits(65536, 128, 8 * 65536), Limits(4096, 128, 4096), Limits(256, 16, 2048)])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_limits_are_kept(limits, window):
    fitting, unseen = fitting_shapes(limits, window), held_out_shapes(limits, window)
    for shape in [*fitting, *unseen, *([smallest_shape(limits)] if window is None else [])]:
        tasks = shape.tasks  # which checks the ranges
        assert tile(tasks.q_start, tasks.q_len, tasks.q_rows) and tile(tasks.k_start, tasks.k_len, tasks.k_rows)
        assert tasks.q_rows <= limits.longest and tasks.k_rows <= max(limits.key_rows, limits.longest)
        assert shape.features[0] <= limits.pairs and shape.window == window
        if window is not None:
            assert (tasks.k_len <= tasks.q_len + window - 1).all()
    names = [shape.name for shape in (*fitting, *unseen)]
    assert len(set(names)) == len(names)


def test_every_kind_of_task_is_in_the_fit():
    limits = Limits(65536, 128, 8 * 65536)
    shapes = fitting_shapes(limits)
    kinds = {(int(s.q_len[0]), int(s.k_len[0])) for s in shapes if len(set(s.q_len.tolist())) == 1}
    for kind in [(65536, 65536), (4096, 4096), (128, 128), (32768, 65536), (128, 65536), (512, 16384), (128, 4096)]:
        assert kind in kinds, kind
    ragged = [s for s in shapes if len(set(s.q_len.tolist())) > 1]
    assert len(ragged) >= 6 and all(len(s.q_len) >= 10 for s in ragged)
    # What is held out is another batch every time.
    taken = {(tuple(s.q_len), tuple(s.k_len)) for s in shapes}
    assert not taken & {(tuple(s.q_len), tuple(s.k_len)) for s in held_out_shapes(limits)}


def test_the_same_every_time():
    limits = Limits(4096, 128, 32768)
    for make in (fitting_shapes, held_out_shapes):
        for a, b in zip(make(limits), make(limits), strict=True):
            assert a.name == b.name and np.array_equal(a.q_len, b.q_len) and np.array_equal(a.k_len, b.k_len)


def test_pairs_of_a_shape_are_counted_one_by_one():
    limits = Limits(256, 16, 1024)
    for window in (None, 40):
        for shape in held_out_shapes(limits, window):
            counted = sum(visible_pairs(k - q, k, window) for q, k in zip(shape.q_len, shape.k_len, strict=True))
            assert shape.features[0] == counted
