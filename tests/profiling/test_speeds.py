# SPDX-License-Identifier: Apache-2.0
"""Speeds of devices: what of the time counts, whole weights, and what measuring leaves behind."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepspeed_distca.profiling import speeds
from deepspeed_distca.profiling.speeds import device_speed, settled_rate, weights_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("measured", "weights"),
    [
        ([640.0, 622.0], [1000, 972]),
        ([622.0, 640.0, 640.0], [972, 1000, 1000]),
        ([300.0, 300.1], [1000, 1000]),
        ([100.0, 100.49], [1000, 1000]),
        ([100.0, 100.51], [995, 1000]),
        ([100.0, 100.3, 100.6], [994, 997, 1000]),  # neighbours are equal, the ends are not
        ([7.0], [1000]),
        ([1.0, 1e6], [1, 1000]),  # no device is left without work
    ],
)
def test_whole_weights_of_speeds(measured, weights) -> None:
    assert weights_of(measured) == weights


def test_only_settled_time_counts(monkeypatch) -> None:
    monkeypatch.setattr(speeds, "_AT_ONCE", 10)
    slowly_then_fast = [0.0, 0.4, 0.8, 1.2, 1.3, 1.4, 1.5]
    assert settled_rate(slowly_then_fast, 1.0) == pytest.approx(100)
    assert settled_rate([100 + t for t in slowly_then_fast], 1.0) == pytest.approx(100)
    assert settled_rate([0.0, 2.0], 1.0) == pytest.approx(5)  # all that there is
    assert settled_rate([0.0, 0.1, 0.3], 1.0) == pytest.approx(50)


def test_measuring_takes_no_random_number() -> None:
    state = torch.get_rng_state()
    assert device_speed(CPU) > 0 and torch.equal(torch.get_rng_state(), state)


def test_a_gpus_queue_is_never_empty(monkeypatch) -> None:
    """On a device that takes 20 ms for the products between two events, and is waited for two of them behind."""
    launched, waited = itertools.count(), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = len(launched_so_far)

        def synchronize(self) -> None:
            waited.append(len(launched_so_far) - self.at)

        def elapsed_time(self, end: Event) -> float:
            return 20.0 * (end.at - self.at)

    launched_so_far: list[int] = []
    monkeypatch.setattr(speeds.torch.cuda, "Event", Event)
    monkeypatch.setattr(speeds.torch.cuda, "synchronize", lambda: None)
    times = speeds._on_gpu(lambda: launched_so_far.append(next(launched)))
    assert times == pytest.approx([0.02 * i for i in range(151)])  # 3 s
    assert set(waited) == {2}
    assert settled_rate(times, speeds.GPU_SETTLING) == pytest.approx(speeds._AT_ONCE / 0.02)
