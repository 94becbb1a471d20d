# SPDX-License-Identifier: Apache-2.0
"""Which batches of CA-tasks are measured: those that a cost model is fitted to, and others to try it on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deepspeed_distca.attention_server.task_batch import TaskBatch
from deepspeed_distca.scheduler.cost_model import pairs
from deepspeed_distca.scheduler.fit import features

_MIXES = 6  # ragged batches in the fit, and two more to try it on
_DRAWS = 100  # documents tried for a mix; those that no longer fit are left out
_UNEVEN = 8  # batches of equal tasks with sizes of no particular kind, to try the fit on


@dataclass(frozen=True)
class Limits:
    """How large batches may be.

    Attributes:
        longest: keys of the longest document; query rows of any batch.
        shortest: the fewest keys, and mostly queries, of a task.
        key_rows: key rows of any batch.
    """

    longest: int
    shortest: int
    key_rows: int

    @property
    def pairs(self) -> int:
        """Query-key pairs of any batch: those of the longest document."""
        return self.longest * (self.longest + 1) // 2


@dataclass(frozen=True)
class Shape:
    """One kernel call: tasks one behind the other in the query and the key buffer.

    Attributes:
        name: for people.
        q_len, k_len: int64 [num_tasks]; see ``scheduler.fit.features``.
        window: keys a query sees, or None.
    """

    name: str
    q_len: np.ndarray
    k_len: np.ndarray
    window: int | None = None

    @cached_property
    def features(self) -> np.ndarray:
        """float64 [4]: pairs, query rows, key rows, tasks."""
        return features(self.q_len, self.k_len, self.window)

    @cached_property
    def tasks(self) -> TaskBatch:
        starts = (np.cumsum(length) - length for length in (self.q_len, self.k_len))
        q_start, k_start = starts
        return TaskBatch(q_start, self.q_len, k_start, self.k_len, int(self.q_len.sum()), int(self.k_len.sum()))


def fitting_shapes(limits: Limits, window: int | None = None) -> list[Shape]:
    """Whole documents, tails of documents down to few queries, and ragged mixes of both."""
    shapes = []
    keys = limits.longest
    while keys >= limits.shortest:
        shapes.append(_equal(keys, keys, limits, window))
        keys //= 2
    for keys in (limits.longest, limits.longest // 4, limits.longest // 16):
        queries = {keys // 2, keys // 8, *(n * limits.shortest for n in (8, 4, 2, 1))}
        for q in sorted(queries, reverse=True):
            if limits.shortest <= q <= keys // 2:
                shapes.append(_equal(q, keys, limits, window))
    rng = np.random.default_rng(0)
    shapes += [_mix(f"mix {i}", limits, window, rng) for i in range(_MIXES)]
    return _different(shapes)


def held_out_shapes(limits: Limits, window: int | None = None) -> list[Shape]:
    """Sizes that the fit has not seen: equal tasks of no round size, and ragged mixes."""
    rng = np.random.default_rng(1)
    shapes = []
    for i in range(_UNEVEN):
        keys = _length(limits.shortest, limits.longest, rng)
        queries = keys if i % 2 == 0 else _length(limits.shortest, keys, rng)
        shapes.append(_equal(queries, keys, limits, window))
    shapes += [_mix(f"mix {_MIXES + i}", limits, window, rng) for i in range(_MIXES + 2)]
    return _different(shapes)


def smallest_shape(limits: Limits) -> Shape:
    """One short document: what a call takes at least."""
    length = np.array([limits.shortest])
    return Shape(f"{limits.shortest} x {limits.shortest} x 1", length, length)


def _equal(queries: int, keys: int, limits: Limits, window: int | None) -> Shape:
    """As many equal tasks as the limits allow: a call must fill the device."""
    keys = _needed(queries, keys, window)
    area = int(pairs(keys - queries, keys, window))
    count = max(1, min(limits.longest // queries, limits.key_rows // keys, limits.pairs // area))
    name = f"{queries} x {keys} x {count}" + ("" if window is None else f", window {window}")
    return Shape(name, np.full(count, queries), np.full(count, keys), window)


def _mix(name: str, limits: Limits, window: int | None, rng: np.random.Generator) -> Shape:
    """What a server gets: documents of any length, half of them whole and half of them tails."""
    area_left = int(limits.pairs * rng.uniform(0.1, 0.5))
    q_left, k_left = limits.longest, limits.key_rows
    q_len, k_len = [], []
    for _ in range(_DRAWS):
        keys = _length(limits.shortest, limits.longest, rng)
        queries = keys if rng.random() < 0.5 else _length(limits.shortest, keys, rng)
        keys = _needed(queries, keys, window)
        area = int(pairs(keys - queries, keys, window))
        if queries > q_left or keys > k_left or area > area_left:
            continue
        q_left, k_left, area_left = q_left - queries, k_left - keys, area_left - area
        q_len.append(queries)
        k_len.append(keys)
    name = f"{name}: {sum(q_len)} queries, {sum(k_len)} keys, {len(q_len)} tasks"
    return Shape(name + ("" if window is None else f", window {window}"), np.array(q_len), np.array(k_len), window)


def _needed(queries: int, keys: int, window: int | None) -> int:
    """Keys that the last `queries` of a document of `keys` positions see."""
    return keys if window is None else min(keys, queries + window - 1)


def _length(low: int, high: int, rng: np.random.Generator) -> int:
    """Between the two, every order of magnitude as likely as another."""
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))


def _different(shapes: list[Shape]) -> list[Shape]:
    return list({shape.name: shape for shape in shapes}.values())
