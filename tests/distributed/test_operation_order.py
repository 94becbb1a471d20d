# SPDX-License-Identifier: Apache-2.0
"""Pipelines cannot block: all that their ranks issue over all communicators, in the order in which they issue it,
completes even if each operation holds its rank until its partners come to it."""

from __future__ import annotations

import numpy as np
import pytest
from deepspeed.runtime.pipe import schedule as ds

from deepspeed_distca.pipeline.schedule import (
    SamePhaseEvaluation,
    SamePhaseSchedule,
    ServeBackward,
    ServeForward,
)
from tests.distributed.harness import run_ranks
from tests.distributed.operation_order import RECEIVE, SEND, Blocked, Message, Operation, run

DEFAULT_GROUP = "0"


def message(direction: str, peer: int, content: str = "x", group: str = "world") -> Operation:
    return Operation(group, messages=(Message(direction, peer, content),))


def collective(name: str, *members: int, group: str = "world") -> Operation:
    return Operation(group, name, members)


def test_the_simulation_finds_what_blocks() -> None:
    send, receive = message(SEND, 1), message(RECEIVE, 1)
    other_send, other_receive = message(SEND, 0), message(RECEIVE, 0)
    assert run([[send, receive], [other_receive, other_send]]) == 4
    with pytest.raises(Blocked, match="wait for each other"):  # both send first
        run([[send, receive], [other_send, other_receive]])
    together = [Operation("g", messages=send.messages + receive.messages)]
    assert run([together, [Operation("g", messages=other_send.messages + other_receive.messages)]]) == 2
    with pytest.raises(Blocked, match="wait for each other"):  # two communicators in different orders
        a, b = collective("allreduce", 0, 1, group="a"), collective("allreduce", 0, 1, group="b")
        run([[a, b], [b, a]])
    with pytest.raises(Blocked, match="wait for each other"):  # a ring of three
        run([[message(SEND, (r + 1) % 3), message(RECEIVE, (r - 1) % 3)] for r in range(3)])
    with pytest.raises(Blocked, match="different collectives"):
        run([[collective("allreduce", 0, 1)], [collective("broadcast", 0, 1)]])
    with pytest.raises(Blocked, match="rank 0 would"):  # sizes that do not match
        run([[message(SEND, 1, "4 bf16")], [message(RECEIVE, 0, "8 bf16")]])
    with pytest.raises(Blocked, match="wait for each other"):  # a message that nobody receives
        run([[send], []])


def program(schedule: ds.PipeSchedule, exchanges: np.ndarray | None) -> list[Operation]:
    """What a stage (its rank has its number) issues in a training or evaluation batch.

    Args:
        exchanges: bool [ticks, layers, stages, stages], who sends rows to whom before a layer's attention, and gets
            results from there afterwards; None: nothing is shared.
    """
    stage, everyone, tick = schedule.stage_id, tuple(range(schedule.stages)), 0
    operations = [collective("documents", *everyone, group="cpu")]
    if exchanges is not None:
        operations.append(collective("plan", *everyone, group="cpu"))
    for command in (c for step in schedule.steps() for c in step):
        if isinstance(command, ds.SendActivation | ds.RecvActivation):
            sends = isinstance(command, ds.SendActivation)
            peer = schedule.next_stage if sends else schedule.prev_stage
            for part in ("shapes", "hidden states", "position ids"):
                operations.append(message(SEND if sends else RECEIVE, peer, part))
        elif isinstance(command, ds.SendGrad):
            operations.append(message(SEND, schedule.prev_stage, "gradient"))
        elif isinstance(command, ds.RecvGrad):
            operations.append(message(RECEIVE, schedule.next_stage, "gradient"))
        elif isinstance(command, ds.ReduceTiedGrads | ds.ReduceGrads | ds.OptimizerStep):
            operations.append(collective(type(command).__name__, *everyone))
        elif isinstance(command, ds.ForwardPass | ds.BackwardPass | ServeForward | ServeBackward):
            if exchanges is not None:
                for there in exchanges[tick]:
                    for moved in (there, there.T):
                        out = [Message(SEND, p, "rows") for p in everyone if moved[stage, p] and p != stage]
                        back = [Message(RECEIVE, p, "rows") for p in everyone if moved[p, stage] and p != stage]
                        if out + back:
                            operations.append(Operation("exchange", messages=(*out, *back)))
                if tick + 1 < len(exchanges):
                    operations.append(collective("plan", *everyone, group="cpu"))
            tick += 1
    return operations


@pytest.mark.parametrize("stages", range(1, 9))
def test_schedules_complete_with_random_exchanges(stages: int) -> None:
    rng = np.random.default_rng(stages)
    for m in (1, 2, 3, 4, 7, 8, 16, 32):
        own = [[kind(m, stages, s) for s in range(stages)] for kind in (ds.TrainSchedule, ds.InferenceSchedule)]
        for schedules in own:
            assert run([program(schedule, None) for schedule in schedules]) > 0
        for kind, ticks in ((SamePhaseSchedule, 2 * (m + stages - 1)), (SamePhaseEvaluation, m + stages - 1)):
            exchanges = rng.random((ticks, 2, stages, stages)) < rng.choice([0.1, 0.5])
            assert run([program(kind(m, stages, s), exchanges) for s in range(stages)]) > 0


def test_sharing_over_the_grid_under_the_ordinary_schedule_would_block() -> None:
    exchanges = np.ones((16, 1, 2, 2), dtype=bool)
    with pytest.raises(Blocked):
        run([program(ds.TrainSchedule(8, 2, s), exchanges) for s in range(2)])


def cases(ranks: int, zero: int = 1) -> list[dict]:
    common = {"zero": zero, "interval": 1, "reentrant": True, "steps": 2}
    return [
        # As benchmarks/pipeline.py runs it.
        {
            **common,
            "micro_batches": 8,
            "distca": {"servers": 1, "advanced": {"granularity": 8, "pipeline_scope": "stage"}},
        },
        {**common, "micro_batches": 8, "distca": {}},
        {**common, "micro_batches": 3, "distca": {}, "tied": True, "layers": 5},
        {**common, "micro_batches": 3, "distca": {"overlap": "none"}, "interval": 0, "static": True},
        {
            **common,
            "micro_batches": 4,
            "distca": {"advanced": {"granularity": 8, "pipeline_scope": "stage"}},
            "reentrant": False,
        },
        {**common, "micro_batches": 1, "distca": {"advanced": {"granularity": 1}}},
        {**common, "micro_batches": 3, "distca": {"advanced": {"granularity": 8, "node_size": 2}}},
        # In two nano-batches: over nodes, and within one.
        {
            **common,
            "micro_batches": 3,
            "distca": {"advanced": {"granularity": 8, "node_size": max(1, ranks // 2)}},
            "reentrant": False,
        },
        {
            **common,
            "micro_batches": 2,
            "distca": {"overlap": "ping_pong"},
            "interval": 0,
            "form": "shared",
        },
    ]


@pytest.mark.parametrize(("ranks", "stages"), [pytest.param(2, 2, marks=pytest.mark.quick), (4, 2), (4, 4)])
def test_what_pipelines_issue_completes_in_any_backend(ranks: int, stages: int) -> None:
    given = cases(ranks)
    records = run_ranks("tests.distributed.operation_order_worker:record", ranks, stages=stages, cases=given)
    for index, case in enumerate(given):
        programs = [[_operation(o) for o in record[index]] for record in records]
        activations = sum(len(o.messages) for p in programs for o in p if o.group == DEFAULT_GROUP)
        rows = sum(len(o.messages) for p in programs for o in p if o.group != DEFAULT_GROUP)
        # At least a gradient, hidden states and position ids, each sent and received, and as much in evaluation.
        passed = (ranks - ranks // stages) * case["micro_batches"]
        assert activations >= 2 * passed * (3 * case["steps"] + 2), case
        grid = case["distca"].get("advanced", {}).get("pipeline_scope", "grid") == "grid"
        alone = case["distca"].get("servers") == 1 or not (grid or ranks > stages)
        assert (rows == 0) == alone, case
        assert run(programs) == sum(map(len, programs))


def _operation(given: dict) -> Operation:
    messages = tuple(Message(**m) for m in given["messages"])
    return Operation(given["group"], given["collective"], tuple(given["members"]), messages)
