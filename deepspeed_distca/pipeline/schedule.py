# SPDX-License-Identifier: Apache-2.0
"""The same-phase pipeline schedule: in every tick all stages do forward, or all do backward.

DeepSpeed's 1F1B schedule lets odd stages do backward while even ones do forward, so that there is no moment at which
the attention of all stages could be shared. Here time is cut into ticks that all stages go through together. A stage
without a micro-batch in a tick (while the pipeline fills and drains) has a *serve* instruction in the place of its
forward or backward: its rank takes part in the exchange of every layer with no rows of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule as ds

from deepspeed_distca.compat.deepspeed import buffer_of, has_stage
from deepspeed_distca.scheduler.cost_model import Phase
from deepspeed_distca.scheduler.ticks import Tick, training_ticks


class ServeForward(ds.PipeInstruction):
    """Compute attention of other stages' forward passes; this stage has no micro-batch in the tick."""


class ServeBackward(ds.PipeInstruction):
    """Compute attention of other stages' backward passes; this stage has no micro-batch in the tick."""


def passes(schedule: ds.PipeSchedule) -> list[Tick]:
    """The forward and backward passes of one stage under any schedule that takes micro-batches in order, as ticks of
    that stage alone."""
    phases: dict[type, Phase] = {ds.ForwardPass: "forward", ds.BackwardPass: "backward"}
    count = dict.fromkeys(phases.values(), 0)
    ticks = []
    for step in schedule.steps():
        for command in step:
            phase = phases.get(type(command))
            if phase is not None:
                ticks.append(Tick(phase, (count[phase],)))
                count[phase] += 1
    return ticks


class _TickSchedule(ds.PipeSchedule):
    """Instructions of one stage for a list of ticks.

    Activations and gradients travel at the beginning of a tick, before anything is computed: what was made in the
    last tick of that phase. Even stages send first and odd ones receive first, so that blocking sends always meet
    their receive.
    """

    def ticks(self) -> list[Tick]:
        raise NotImplementedError

    def steps(self) -> Iterator[list[ds.PipeInstruction]]:
        before: dict[str, int | None] = {"forward": None, "backward": None}
        ticks = self.ticks()
        for index, tick in enumerate(ticks):
            now = tick.micro_batches[self.stage_id]
            commands = self._exchange(tick.phase, before[tick.phase], now)
            if tick.phase == "forward":
                if now is not None and (self.is_first_stage or self.is_last_stage):
                    commands.append(ds.LoadMicroBatch(buffer_of(self, now)))
                commands.append(ServeForward() if now is None else ds.ForwardPass(buffer_of(self, now)))
            else:
                commands.append(ServeBackward() if now is None else ds.BackwardPass(buffer_of(self, now)))
            before[tick.phase] = now
            yield commands + (self.finish() if index == len(ticks) - 1 else [])

    def finish(self) -> list[ds.PipeInstruction]:
        """What comes after the last tick."""
        return []

    def _exchange(self, phase: Phase, before: int | None, now: int | None) -> list[ds.PipeInstruction]:
        if phase == "forward":
            send, receive, to, source = ds.SendActivation, ds.RecvActivation, self.next_stage, self.prev_stage
        else:
            send, receive, to, source = ds.SendGrad, ds.RecvGrad, self.prev_stage, self.next_stage
        sends = [send(buffer_of(self, before))] if before is not None and has_stage(self, to) else []
        receives = [receive(buffer_of(self, now))] if now is not None and has_stage(self, source) else []
        return sends + receives if self.stage_id % 2 == 0 else receives + sends


class SamePhaseSchedule(_TickSchedule):
    """A training batch.

    Stage s holds the graphs of at most min(m, 2 (S - 1 - s) + 1) micro-batches at a time, against S - s of 1F1B. It
    has one buffer more where there is a stage before it: a micro-batch's input must stay until its gradient has been
    sent, which is after the next forward tick.
    """

    def ticks(self) -> list[Tick]:
        return training_ticks(self.micro_batches, self.stages)

    def finish(self) -> list[ds.PipeInstruction]:
        return [ds.ReduceTiedGrads(), ds.ReduceGrads(), ds.OptimizerStep()]

    def num_pipe_buffers(self) -> int:
        """min(m, 2 (S - 1 - s) + 1), plus one for stages other than the first."""
        graphs = 2 * (self.stages - 1 - self.stage_id) + 1
        return min(self.micro_batches, graphs + (not self.is_first_stage))


class SamePhaseEvaluation(_TickSchedule):
    """An evaluation batch: forward ticks only, in which all stages take part from the first to the last."""

    def ticks(self) -> list[Tick]:
        return [tick for tick in training_ticks(self.micro_batches, self.stages) if tick.phase == "forward"]

    def num_pipe_buffers(self) -> int:
        """Two, as in DeepSpeed's own."""
        return 2
