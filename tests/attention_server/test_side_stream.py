# SPDX-License-Identifier: Apache-2.0
"""Memory of another stream: what is made in it, what is not, how long it is kept; the caller's own turn on CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from deepspeed_distca.attention_server.side_stream import _MAKERS, BorrowedMemory, SideStream

LIKE = torch.ones(3, 2)
MAKERS = {
    "empty": lambda: torch.empty(3, 2, device="cpu"),
    "empty_like": lambda: torch.empty_like(LIKE, dtype=torch.float64),
    "new_empty": lambda: LIKE.new_empty((3, 2)),
    "zeros": lambda: torch.zeros((3, 2), dtype=torch.float64),
    "zeros_like": lambda: torch.zeros_like(LIKE),
    "new_zeros": lambda: LIKE.new_zeros((3, 2)),
}


class Owner:
    """Stands for the stream: counts how often it was current, and whether it is."""

    def __init__(self) -> None:
        self.entered, self.current = 0, False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.entered, self.current = self.entered + 1, True
        yield
        self.current = False


@pytest.mark.parametrize("name", MAKERS)
def test_tensors_are_made_by_the_owner_and_filled_by_the_borrower(name: str, monkeypatch) -> None:
    owner, filled = Owner(), []
    zero_ = torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "zero_", lambda t: filled.append(owner.current) or zero_(t))
    expected = MAKERS[name]()
    memory = BorrowedMemory(owner)
    with memory:
        tensor = MAKERS[name]()
    assert owner.entered == 1
    assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
    if "zeros" in name:
        assert not tensor.any() and filled == [False]


def test_a_tensor_is_kept_until_it_is_released() -> None:
    memory = BorrowedMemory(Owner())
    with memory:
        tensor = torch.empty(5)
    kept = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert kept() is not None
    memory.release()
    gc.collect()
    assert kept() is None


def test_within_an_autograd_function_and_not_outside() -> None:
    owner = Owner()

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with BorrowedMemory(owner):
                return x.new_empty(x.shape).copy_(x)

        @staticmethod
        def backward(ctx, gradient):
            with BorrowedMemory(owner):
                return torch.zeros_like(gradient) + 2 * gradient

    x = torch.ones(4, requires_grad=True)
    y = Function.apply(x)
    assert owner.entered == 1
    y.sum().backward()
    assert owner.entered == 2 and torch.equal(x.grad, torch.full((4,), 2.0))
    torch.empty(3)
    assert owner.entered == 2


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

    @contextmanager
    def stream(wanted: FakeStream) -> Iterator[None]:
        current.append(wanted)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: FakeStream("side", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    return log


def tasks(log: list[str], name: str, fails: bool = False):
    """Makes a tensor; where it came from is written down, as the stream that was current when it was made."""

    def make(size: int) -> torch.Tensor:
        log.append(f"memory of {_current()}")
        return LIKE.new_empty(size)

    def run() -> str:
        with mock.patch.dict(_MAKERS, {torch.empty: make}):
            torch.empty(3)
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
    expected = ["side waits for caller", "memory of caller", "away on side", "home on caller", "caller waits for side"]
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
    assert "memory of caller" not in log and "away on side" in log


def test_nothing_is_borrowed_of_another_allocator(log, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    SideStream().run(tasks(log, "home"), tasks(log, "away"), torch.device("cuda", 0))
    assert "memory of caller" not in log and "away on side" in log


def test_without_streams_the_tasks_at_home_come_first() -> None:
    done = []
    result = SideStream().run(lambda: done.append("home"), lambda: done.append("away") or 5, torch.device("cpu"))
    assert result == 5 and done == ["home", "away"]
