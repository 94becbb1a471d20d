# SPDX-License-Identifier: Apache-2.0
"""Which stream does what, and in whose memory; the caller's own turn on CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from deepspeed_distca.attention_server import borrowed
from deepspeed_distca.attention_server.side_stream import SideStream


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """torch.cuda's streams, as far as they are used; what happens to them is written down."""
    log: list[str] = []
    current = [FakeStream("caller", log)]

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: FakeStream("side", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda wanted: current.append(wanted))
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    return log


def tasks(log: list[str], name: str, fails: bool = False):
    """Makes a tensor; where it came from is written down, as the stream that was current when it was made."""

    def make(size: int) -> torch.Tensor:
        log.append(f"memory of {_current()}")
        return torch.ones(size)

    def run() -> str:
        with mock.patch.object(torch, "empty", make):
            borrowed.empty(3)
        log.append(f"{name} on {_current()}")
        if fails:
            raise RuntimeError(name)
        return name

    return run


def _current() -> str:
    return torch.cuda.current_stream().name


def test_tasks_aside_are_queued_first_in_the_callers_memory_and_joined(log) -> None:
    device = torch.device("cuda", 0)
    side = SideStream()
    assert side.run(tasks(log, "home"), tasks(log, "away"), device) == "away"
    expected = ["side waits for caller", "memory of caller", "away on side", "memory of caller", "home on caller"]
    expected += ["caller waits for side"]
    assert log == expected
    side.run(tasks(log, "home"), tasks(log, "away"), device)
    assert log == 2 * expected


@pytest.mark.parametrize("which", ["home", "away"])
def test_an_error_leaves_nothing_running_aside(log, which: str) -> None:
    with pytest.raises(RuntimeError, match=which):
        SideStream().run(
            tasks(log, "home", which == "home"), tasks(log, "away", which == "away"), torch.device("cuda", 0)
        )
    assert log[-1] == "caller waits for side" and _current() == "caller"


def test_nothing_is_borrowed_where_torch_fills_new_tensors(log) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        SideStream().run(tasks(log, "home"), tasks(log, "away"), torch.device("cuda", 0))
    finally:
        torch.use_deterministic_algorithms(False)
    assert log[1:3] == ["memory of side", "away on side"]


def test_nothing_is_borrowed_of_another_allocator(log, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    SideStream().run(tasks(log, "home"), tasks(log, "away"), torch.device("cuda", 0))
    assert log[1:3] == ["memory of side", "away on side"]


def test_without_streams_the_tasks_at_home_come_first() -> None:
    done = []
    result = SideStream().run(lambda: done.append("home"), lambda: done.append("away") or 5, torch.device("cpu"))
    assert result == 5 and done == ["home", "away"]
