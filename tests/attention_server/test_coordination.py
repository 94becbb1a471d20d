# SPDX-License-Identifier: Apache-2.0
"""What a watch says of where its rank is, and what it makes of the signs of others, without any other process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from deepspeed_distca.attention_server.coordination import position as position_module
from deepspeed_distca.attention_server.coordination.errors import RankFailedError, is_connection_error
from deepspeed_distca.attention_server.coordination.messages import Messenger
from deepspeed_distca.attention_server.coordination.position import Position, Unchanged
from deepspeed_distca.attention_server.coordination.signs import Sign, reason_of_waiting
from deepspeed_distca.attention_server.coordination.watch import Watch

FORWARD = Sign(9, 3, unfinished=True, waits=True, place="in forward of micro-batch 3, layer 1 of 2")


def test_the_place_of_a_rank_in_words() -> None:
    watch, places = Watch("alone", 5.0), []
    steps: list[Callable[[], object]] = [
        lambda: None,
        watch.begin,
        lambda: watch.planned(2),
        watch.attending,
        watch.attending,
        watch.forward_over,
        watch.attending,  # recomputed
        watch.given_up,
    ]
    for step in steps:
        step()
        places.append(_place(watch))
    assert places == [
        "before its first micro-batch",
        "in forward of micro-batch 1, before its first attention layer",
        "in forward of micro-batch 1, before its first attention layer",
        "in forward of micro-batch 1, layer 1 of 2",
        "in forward of micro-batch 1, layer 2 of 2",
        "between forward and backward of micro-batch 1",
        "between forward and backward of micro-batch 1",
        "outside of forward, backward and step, after micro-batch 1",
    ]
    with watch.phase("backward"):
        for layer in (2, 1):
            with watch.backward_of_layer(last=False):
                assert _place(watch) == f"in backward of micro-batch 1, layer {layer} of 2"
            with watch.backward_of_layer():
                pass
        assert _place(watch) == "in backward of micro-batch 1"
    with watch.phase("optimizer step"):
        assert _place(watch) == "in optimizer step of micro-batch 1"
    assert "outside" in _place(watch)


def _place(watch: Watch) -> str:
    text = str(watch.explain(RuntimeError("gone")))
    return text.removeprefix("the connection to another rank was lost ").split(", and the store")[0]


def test_errors_of_connections_become_the_watchs_own() -> None:
    watch = Watch("alone", 5.0)
    with pytest.raises(RankFailedError, match="lost in attach"), watch.phase("attach"):
        raise RuntimeError("Connection reset by peer")
    with pytest.raises(ValueError, match="a made-up fault"), watch.phase("attach"):
        raise ValueError("a made-up fault")
    assert not is_connection_error(RankFailedError("connection reset"))


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (Sign(4, 3), "rank 1 gives no sign of life: killed, stopped or hung. When last seen, rank 1 was outside"),
        (Sign(4, 3, left=True, place="x"), "rank 1 has left (its script ended) after 3 micro-batches"),
        (Sign(4, 2, left=True, unfinished=True, place="in x"), "rank 1 has left (its script ended) in x"),
        (Sign(5, 3, unfinished=True, place="in backward of micro-batch 3"), "rank 1 is in backward of micro-batch 3"),
        (Sign(5, 3, unfinished=True, place=FORWARD.place), f"rank 1 is {FORWARD.place}"),  # and does not wait
        (Sign(5, 3, unfinished=True, waits=True, place=FORWARD.place), "all ranks are alive and at the same place"),
    ],
)
def test_whom_a_rank_has_waited_for(now: Sign, reason: str) -> None:
    mine = Sign(9, 4, unfinished=True, place="in forward of micro-batch 4") if now.left else FORWARD
    found = reason_of_waiting(mine, {1: Sign(4, 3)}, {1: now})
    assert found.startswith(reason)
    assert ("no sign of life" in found) != ("Every rank must run the same number" in found)


def test_nobody_waits_for_a_rank_that_was_detached() -> None:
    position = Position(1)
    assert FORWARD.waits_for(Sign(4, 3, left=True, unfinished=True)) and not FORWARD.waits_for(Sign(4, 3, left=True))
    position.number, position.phase = 3, "forward"
    position.detach()
    sign = Sign(4).following(position, left=True)
    assert sign.count == 5 and not sign.unfinished and not FORWARD.waits_for(sign)
    assert Sign.from_text(sign.to_text()) == sign


def test_no_garbage_is_collected_while_frames_are_looked_at(monkeypatch) -> None:
    """A finalizer that waits for a thread which looks, too, would wait forever."""
    looking, collected, looks = [False], [], []

    class Dropped:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            collected.append(looking[0])

    def current_frames() -> dict:
        looking[0] = True
        looks.append([[] for _ in range(2000)])  # allocates, as collecting frames does
        found = sys._current_frames()
        looking[0] = False
        return found

    monkeypatch.setattr(position_module, "sys", SimpleNamespace(_current_frames=current_frames))
    position = Position(0)
    for _ in range(3):
        Dropped()
        assert position.frame() is not None
    gc.collect()
    assert len(looks) == 3 and collected == [False] * 3 and gc.isenabled()


def test_for_how_long_a_value_has_been_the_same() -> None:
    same = Unchanged(0.5)
    assert [same.seconds(value) for value in "aaabbba"] == [0, 0.5, 1, 0, 0.5, 1, 0]


class Work:
    """A collective of torch's that takes some looks, and fails in the end or not. The last look is over just before it
    is."""

    def __init__(self, looks: int, failure: str | None) -> None:
        self.looks, self.failure = looks, failure

    def is_completed(self) -> bool:
        return self.looks <= 0

    def wait(self, limit: object = None) -> None:
        self.looks -= 1
        if limit is not None:
            raise RuntimeError("Operation timed out!")
        if self.failure:
            raise RuntimeError(self.failure)


@pytest.mark.parametrize("looks", [0, 1, 5])
def test_a_collective_that_is_over_right_after_a_look_has_not_failed(looks: int) -> None:
    messenger = Messenger(None, SimpleNamespace(left_by_others=lambda seconds: None))
    messenger._wait(Work(looks, None))
    with pytest.raises(RuntimeError, match="Connection closed"):
        messenger._wait(Work(looks, "Connection closed by peer"))
