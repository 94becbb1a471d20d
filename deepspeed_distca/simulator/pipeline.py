# SPDX-License-Identifier: Apache-2.0
"""A step over pipeline stages: DeepSpeed's 1F1B, in which ranks wait for the stages beside theirs, and the plugin's
same-phase schedule (docs/pipeline.md), in whose ticks all ranks share attention.

All stages have as many layers of each kind; the last one has the output layer too. Rank `stage * replicas + replica`
is where DeepSpeed's grid has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepspeed_distca.layout import DOCUMENT, RANK, Layout
from deepspeed_distca.scheduler.cost_model import PHASES, Phase
from deepspeed_distca.scheduler.ticks import training_ticks
from deepspeed_distca.scheduler.worth import two_pay
from deepspeed_distca.simulator.step import Loads, Training, planner, plugin

#: Of the output layer's time, what belongs to each phase: backward has twice the products.
_OUTPUT = {"forward": 1 / 3, "backward": 2 / 3}


def one_forward_one_backward(training: Training, made: Sequence[tuple[Loads, int]]) -> float:
    """Seconds of a step under 1F1B, each replica on its own, until the last one is done.

    Args:
        made: of each micro-batch its loads on the ranks of a stage, and the most tokens of a rank.
    """
    stages, count = training.stages, len(made)
    hop = _hop(training, max(tokens for _, tokens in made))
    times = {
        (phase, last): [_times(training, loads, tokens, phase, last=last) for loads, tokens in made]
        for phase in PHASES
        for last in (False, True)
    }
    orders = [_order(count, stages, stage) for stage in range(stages)]
    done: dict[tuple[Phase, int, int], np.ndarray] = {}
    free = [np.zeros_like(times["forward", False][0]) for _ in range(stages)]
    position = [0] * stages
    while any(at < len(orders[s]) for s, at in enumerate(position)):
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                phase, batch = orders[stage][position[stage]]
                before = stage - 1 if phase == "forward" else stage + 1
                start = free[stage]
                if 0 <= before < stages:
                    if (phase, before, batch) not in done:
                        break
                    start = np.maximum(start, done[phase, before, batch] + hop)
                free[stage] = done[phase, stage, batch] = start + times[phase, stage == stages - 1][batch]
                position[stage] += 1
    return float(max(one.max() for one in free))


def same_phase(training: Training, batches: Sequence[Layout]) -> tuple[float, dict[str, float], float, Loads]:
    """The plugin's step: its seconds, what of them attention and the exchange are, the bytes that the mean rank sends
    for a micro-batch, and the loads of a tick in the middle. In a tick in which rows move all ranks wait for each
    other, in others only for what the stage beside theirs sends."""
    tokens, stages, replicas = int(batches[0].tokens.max()), training.stages, batches[0].num_ranks
    windows, kinds = training.model.windows, training.model.kinds
    hop, output = _hop(training, tokens), training.output() * tokens
    every = [
        (tick, _side_by_side([None if i is None else batches[i] for i in tick.micro_batches]))
        for tick in training_ticks(len(batches), stages)
    ]
    in_two = training.overlap == "ping_pong" and two_pay(
        (
            (planner(training, layout, window, tick.phase, in_two=True), windows[window] // stages)
            for tick, layout in every
            for window in windows
        ),
        training.options.min_gain,
    )
    clock = np.zeros((stages, replicas))
    done: dict[tuple[Phase, int, int], np.ndarray] = {}
    sent, parts, middle = 0.0, {"attention": 0.0, "exchange": 0.0}, Loads()
    for tick, layout in every:
        phase, has = tick.phase, tick.micro_batches
        loads = plugin(training, layout, (phase,), in_two=in_two)
        takes = np.zeros((stages, replicas))
        for (kind, _), load in loads.items():
            layers = kinds[kind] / stages
            takes += layers * (load.seconds if load.meets else load.ranks.reshape(stages, replicas))
            parts["attention"] += layers * float(load.attention.mean())
            parts["exchange"] += layers * float(load.exposed.max())
            sent += layers * float(load.sent.mean()) / len(batches)
        works = [stage for stage, batch in enumerate(has) if batch is not None]
        for stage in works:
            before = (phase, stage - 1 if phase == "forward" else stage + 1, has[stage])
            clock[stage] = np.maximum(clock[stage], done[before] + hop) if before in done else clock[stage]
        if any(load.meets for load in loads.values()):
            clock[:] = clock.max()
            works = list(range(stages))
        clock[works] += takes[works]
        clock[-1] += output * _OUTPUT[phase] if has[-1] is not None else 0.0
        done |= {(phase, stage, batch): clock[stage].copy() for stage, batch in enumerate(has) if batch is not None}
        if all(batch is not None for batch in has) or not middle:
            middle = {**middle, **loads}
    return float(clock.max()), parts, sent, middle


def _order(count: int, stages: int, stage: int) -> list[tuple[Phase, int]]:
    """What a stage does under 1F1B."""
    ahead = min(stages - 1 - stage, count)
    order: list[tuple[Phase, int]] = [("forward", batch) for batch in range(ahead)]
    for batch in range(count):
        if ahead + batch < count:
            order.append(("forward", ahead + batch))
        order.append(("backward", batch))
    return order


def _times(training: Training, loads: Loads, tokens: int, phase: Phase, *, last: bool) -> np.ndarray:
    """Seconds of each rank of a stage for a micro-batch's phase, float64 [ranks of a stage]."""
    kinds, stages = training.model.kinds, training.stages
    times = np.array([kinds[kind] / stages * load.ranks for (kind, of), load in loads.items() if of == phase])
    return times.sum(axis=0) + last * training.output() * tokens * _OUTPUT[phase]


def _hop(training: Training, tokens: int) -> float:
    """Seconds in which activations go to the next stage; on another node, where there are several."""
    size = tokens * training.model.hidden * training.model.heads.element_size
    nodes = training.options.nodes is not None
    return float(training.cost.transfer_seconds(size, between_nodes=nodes))


def _side_by_side(stages: Sequence[Layout | None]) -> Layout:
    """Micro-batches of all stages as one layout; a stage without one has no tokens."""
    replicas = next(layout.num_ranks for layout in stages if layout is not None)
    rows, documents = [np.zeros((0, 4), dtype=np.int64)], 0
    for stage, layout in enumerate(stages):
        if layout is None:
            continue
        segments = layout.segments.copy()
        segments[:, RANK] += stage * replicas
        segments[:, DOCUMENT] += documents
        documents = int(segments[:, DOCUMENT].max()) + 1
        rows.append(segments)
    return Layout(np.concatenate(rows), replicas * len(stages))
