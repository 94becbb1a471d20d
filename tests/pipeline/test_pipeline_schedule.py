# SPDX-License-Identifier: Apache-2.0
"""Properties of the same-phase schedule, over 1-8 stages and 1-32 micro-batches, on a machine that runs its
instructions: one program for each stage, sends that block until they are received, ticks in which all stages meet."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe import schedule as ds

from deepspeed_distca.pipeline.schedule import (
    SamePhaseEvaluation,
    SamePhaseSchedule,
    ServeBackward,
    ServeForward,
)
from deepspeed_distca.scheduler.ticks import training_ticks

STAGES, MICRO_BATCHES = range(1, 9), range(1, 33)
COMPUTE = {
    ds.ForwardPass: "forward",
    ServeForward: "forward",
    ds.BackwardPass: "backward",
    ServeBackward: "backward",
}


class Stage:
    """One stage's engine, as far as buffers go. A slot is shared by all that DeepSpeed keeps under its number, and one
    receive buffer by activations and gradients."""

    def __init__(self, schedule, training: bool) -> None:
        self.schedule, self.training = schedule, training
        self.commands = [c for step in schedule.steps() for c in step]
        self.at = 0
        self.slots: dict[int, dict] = {}
        self.received_gradient: int | None = None  # in the receive buffer
        self.loaded = 0
        self.forwards: list[int] = []
        self.backwards: list[int] = []
        self.done: list[str] = []
        self.live_graphs = 0
        self.most_live_graphs = 0
        self.finished: list[str] = []

    @property
    def now(self):
        return self.commands[self.at] if self.at < len(self.commands) else None

    def begin(self, buffer: int, micro_batch: int) -> None:
        """A micro-batch takes a slot: nothing of another may still be needed there."""
        assert 0 <= buffer < self.schedule.num_pipe_buffers()
        old = self.slots.get(buffer)
        if old is not None and old["id"] != micro_batch and self.training:
            assert old["backward"], "a graph is overwritten"
            assert old["gradient sent"] or self.schedule.is_first_stage, "an input is overwritten"
        if old is None or old["id"] != micro_batch:
            self.slots[buffer] = {"id": micro_batch, "forward": False, "backward": False, "gradient sent": False}
            self.slots[buffer]["sent"] = old is None or old["sent"] or self.schedule.is_last_stage

    def compute(self, command) -> None:
        first, last = self.schedule.is_first_stage, self.schedule.is_last_stage
        kind = type(command)
        self.done.append(COMPUTE[kind])
        if kind is ds.ForwardPass:
            slot = self.slots[command.buffer_id]
            assert slot["id"] == len(self.forwards) and not slot["forward"]
            if first or last:
                assert self.loaded == slot["id"] + 1
            assert slot["sent"], "an output is overwritten that has not been sent"
            slot["forward"], slot["sent"] = True, self.schedule.is_last_stage
            self.forwards.append(slot["id"])
            self.live_graphs += 1
            self.most_live_graphs = max(self.most_live_graphs, self.live_graphs)
        elif kind is ds.BackwardPass:
            slot = self.slots[command.buffer_id]
            assert slot["id"] == len(self.backwards) and slot["forward"] and not slot["backward"]
            if not last:
                assert self.received_gradient == slot["id"], "another receive has overwritten the gradient"
            slot["backward"] = True
            self.backwards.append(slot["id"])
            self.live_graphs -= 1

    def load(self, command) -> None:
        if self.schedule.is_first_stage:
            self.begin(command.buffer_id, self.loaded)
        assert self.slots[command.buffer_id]["id"] == self.loaded
        self.loaded += 1


def transfer(sender: Stage, receiver: Stage) -> None:
    """The send and the receive that two neighbours have come to."""
    send, receive = sender.now, receiver.now
    slot = sender.slots[send.buffer_id]
    if isinstance(send, ds.SendActivation):
        assert isinstance(receive, ds.RecvActivation) and slot["forward"]
        assert slot["id"] == len(receiver.forwards)
        slot["sent"] = True
        receiver.begin(receive.buffer_id, slot["id"])
        receiver.received_gradient = None
    else:
        assert isinstance(receive, ds.RecvGrad) and slot["backward"]
        assert receiver.slots[receive.buffer_id]["id"] == slot["id"]
        slot["gradient sent"] = True
        receiver.received_gradient = slot["id"]
    sender.at += 1
    receiver.at += 1


def run(schedules: list, training: bool) -> list[Stage]:
    """Runs all stages to the end.

    A send needs its receiver to have come to the receive. A pass or a serve needs all stages to have come to theirs of
    the same tick: that is the exchange of attention.
    """
    stages = [Stage(s, training) for s in schedules]
    while any(s.now for s in stages):
        progress = False
        for index, stage in enumerate(stages):
            command = stage.now
            if isinstance(command, ds.LoadMicroBatch):
                stage.load(command)
            elif isinstance(command, ds.ReduceTiedGrads | ds.ReduceGrads | ds.OptimizerStep):
                stage.finished.append(type(command).__name__)
            elif isinstance(command, ds.SendActivation | ds.SendGrad):
                forward = isinstance(command, ds.SendActivation)
                peer = stages[index + 1 if forward else index - 1]
                if isinstance(peer.now, ds.RecvActivation if forward else ds.RecvGrad):
                    transfer(stage, peer)
                    progress = True
                continue
            else:
                continue
            stage.at += 1
            progress = True
        if all(type(s.now) in COMPUTE for s in stages):
            assert len({COMPUTE[type(s.now)] for s in stages}) == 1, "stages are in different phases"
            for stage in stages:
                stage.compute(stage.now)
                stage.at += 1
            progress = True
        assert progress, f"deadlock: {[s.now for s in stages]}"
    return stages


@pytest.mark.parametrize("stages", STAGES)
def test_training(stages):
    for m in MICRO_BATCHES:
        schedules = [SamePhaseSchedule(m, stages, s) for s in range(stages)]
        ticks = training_ticks(m, stages)
        ran = run(schedules, training=True)
        for s, stage in enumerate(ran):
            assert stage.forwards == list(range(m)) and stage.backwards == list(range(m))
            assert stage.done == [tick.phase for tick in ticks]
            assert stage.loaded == (m if s in (0, stages - 1) else 0)
            assert stage.finished == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
            # Buffers and live graphs as the docstring states them, not a bound that is never met.
            graphs = 2 * (stages - 1 - s) + 1
            assert stage.most_live_graphs == min(m, graphs)
            assert schedules[s].num_pipe_buffers() == min(m, graphs + (s > 0)) == len(stage.slots)
        assert len(ticks) == 2 * (m + stages - 1)
        assert all(any(i is not None for i in tick.micro_batches) for tick in ticks)


@pytest.mark.parametrize("stages", STAGES)
def test_evaluation(stages):
    for m in MICRO_BATCHES:
        schedules = [SamePhaseEvaluation(m, stages, s) for s in range(stages)]
        ran = run(schedules, training=False)
        for s, stage in enumerate(ran):
            assert stage.forwards == list(range(m)) and not stage.backwards and not stage.finished
            assert stage.done == ["forward"] * (m + stages - 1)
            assert stage.loaded == (m if s in (0, stages - 1) else 0)
        assert len(schedules[0].ticks()) == m + stages - 1


def test_one_stage_takes_turns():
    commands = [[type(c) for c in step] for step in SamePhaseSchedule(2, 1, 0).steps()]
    assert commands[:2] == [[ds.LoadMicroBatch, ds.ForwardPass], [ds.BackwardPass]]
    assert SamePhaseSchedule(2, 1, 0).num_pipe_buffers() == 1


@pytest.mark.parametrize("stage", range(4))
def test_fewer_buffers_than_stated_would_not_do(stage, monkeypatch):
    needed = SamePhaseSchedule(16, 4, stage).num_pipe_buffers()
    schedules = [SamePhaseSchedule(16, 4, s) for s in range(4)]
    monkeypatch.setattr(schedules[stage], "num_pipe_buffers", lambda: needed - 1, raising=False)
    with pytest.raises((AssertionError, ZeroDivisionError)):
        run(schedules, training=True)
