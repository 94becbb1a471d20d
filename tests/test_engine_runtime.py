# SPDX-License-Identifier: Apache-2.0
"""An engine's methods are followed, and are what they were when that ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from deepspeed_distca.attention_server.statistics import StepStatistics
from deepspeed_distca.engine_runtime import _follow
from deepspeed_distca.monitor import PREFIX, StepMonitor


class Engine:
    """What is followed of one."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self) -> str:
        self.calls.append("own")
        return "done"

    @contextmanager
    def around(self) -> Iterator[None]:
        self.calls.append("in")
        yield
        self.calls.append("out")

    def wrap(self, name: str) -> None:
        """As any other library does."""
        inner = self.step

        def wrapped() -> str:
            self.calls.append(name)
            return inner()

        self.step = wrapped


@pytest.mark.parametrize("before", [False, True], ids=["own", "wrapped before"])
def test_what_was_there_is_put_back(before: bool) -> None:
    engine = Engine()
    if before:
        engine.wrap("theirs")
    theirs = vars(engine).get("step")
    end = _follow(engine, "step", engine.around)
    assert engine.step() == "done" and engine.calls == ["in", *["theirs"] * before, "own", "out"]
    end()
    assert vars(engine).get("step") is theirs and ("step" in vars(engine)) == before
    assert engine.step() == "done" and engine.calls[-1 - before :] == [*["theirs"] * before, "own"]


def test_who_wrapped_a_method_since_keeps_his_wrapper() -> None:
    engine = Engine()
    end = _follow(engine, "step", engine.around)
    engine.wrap("theirs")
    theirs = vars(engine)["step"]
    end()
    assert vars(engine)["step"] is theirs
    assert engine.step() == "done" and engine.calls == ["theirs", "own"]
    again = _follow(engine, "step", engine.around)
    engine.step()
    assert engine.calls[2:] == ["in", "theirs", "own", "out"]
    again()
    assert vars(engine)["step"] is theirs


@pytest.mark.parametrize("rank", [0, 1])
def test_events_are_of_steps_that_are_taken(rank: int) -> None:
    written: list[list[tuple[str, float, int]]] = []
    monitor = SimpleNamespace(enabled=True, write_events=written.append)
    engine = SimpleNamespace(global_steps=0, global_samples=4, monitor=monitor)
    steps = StepMonitor(engine, StepStatistics, rank)
    with steps.step():
        pass  # one of several micro-batches
    assert not written
    for _ in range(2):
        with steps.step():
            engine.global_steps += 1
    with pytest.raises(RuntimeError), steps.step():
        engine.global_steps += 1
        raise RuntimeError
    assert len(written) == (2 if rank == 0 else 0)
    names = [{name.removeprefix(PREFIX) for name, *_ in events} for events in written]
    assert not names or ("tokens_per_second" not in names[0] and names[0] < names[1])
