# SPDX-License-Identifier: Apache-2.0
"""`keep_attention` left out: attention of as many layers is kept as every rank has memory for, and results are the
same whatever is kept."""

from __future__ import annotations

from collections import UserList

import pytest
import torch

from deepspeed_distca.huggingface import kept_layers
from deepspeed_distca.huggingface.kept_layers import KeptLayers, Memory, memory_of
from tests.distributed.harness import run_ranks
from tests.huggingface import kept_layers_worker

#: Bytes that a layer keeps of a token.
ROW = 10
LAYERS = 4


class Kept(UserList):
    """Of so many layers."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __init__(self, layers: int) -> None:
        super().__init__(range(layers))


class Device:
    """Memory of 1000 bytes (of which the margin is nothing), and a step counter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kept_layers, "_MARGIN", 0.0)
        self.memory = Memory(1000, 0, 0)
        self.step = self.asked = 0
        self.layers = KeptLayers(LAYERS, ROW, lambda: self.step, self._asked)

    def _asked(self) -> Memory:
        self.asked += 1
        return self.memory

    def run(self, tokens: int, peak: int, kept: int | None = None, retries: int = 0, wanted: bool = True) -> int:
        """A step of one micro-batch, of which what was given is kept, or as much as may be; gives what may be."""
        layers = self.layers.affordable(tokens)
        self.layers.note(Kept(layers if kept is None else kept), wanted)
        self.memory = Memory(1000, max(peak, self.memory.peak), retries)
        self.step += 1
        return layers


@pytest.fixture
def device(monkeypatch) -> Device:
    return Device(monkeypatch)


def test_two_steps_keep_nothing_and_then_what_fits(device) -> None:
    assert [device.run(10, peak) for peak in (500, 780)] == [0, 0] and not device.layers.measured
    assert device.run(10, 780) == 2 and device.layers.measured  # 1000 - 780 = 220: two layers of 100


def test_steps_are_counted_from_where_training_begins(device) -> None:
    device.step = 1000  # of a checkpoint
    assert [device.run(10, 500) for _ in range(3)] == [0, 0, 4]


def test_micro_batches_of_a_step_are_no_steps(device) -> None:
    assert [device.layers.affordable(10) for _ in range(5)] == [0] * 5


def test_what_is_kept_is_no_reason_to_keep_less(device) -> None:
    for peak in (500, 700):
        device.run(10, peak)
    assert device.run(10, 1000) == 3  # the peak holds what was kept
    assert device.run(10, 1000) == 3


def test_training_that_comes_to_take_more_keeps_less(device) -> None:
    for _ in range(2):
        device.run(10, 500)
    assert device.run(10, 950) == 4  # 550 without what is kept
    assert device.run(10, 980) == 4
    device.run(10, 1000, kept=0)  # nothing was checkpointed: all of it is training's own
    assert device.run(10, 1000) == 0


def test_by_the_tokens_of_each_micro_batch(device) -> None:
    for _ in range(2):
        device.run(20, 600)
    assert [device.run(tokens, 600) for tokens in (20, 10, 5, 40)] == [2, 4, 4, 0]  # twice the tokens take 1200
    device.layers.affordable(0)  # a rank without tokens


def test_an_allocator_that_had_to_give_memory_back_halves_it(device) -> None:
    for _ in range(2):
        device.run(10, 500, retries=1)  # of the first step, which makes the optimizer's states
    assert [device.run(10, 500, retries=retries) for retries in (2, 2, 3, 3, 3)] == [4, 2, 2, 1, 1]


def test_nothing_is_kept_where_the_allocator_had_to_without(device) -> None:
    device.run(10, 500)
    device.run(10, 500, retries=1)
    assert [device.run(10, 500, retries=1) for _ in range(2)] == [0, 0]


def test_what_waits_for_its_backward_takes_room(device) -> None:
    for _ in range(2):
        device.run(10, 500)
    waiting = Kept(3)
    assert device.layers.affordable(10) == 4
    device.layers.note(waiting, True)
    assert device.layers.affordable(10) == 2  # 500 less 300
    waiting.pop()
    assert device.layers.affordable(10) == 3
    del waiting  # a graph that was dropped
    assert device.layers.affordable(10) == 4


def test_an_older_checkpoint_does_not_start_it_anew(device) -> None:
    device.step = 10
    assert [device.run(10, 500) for _ in range(3)] == [0, 0, 4]
    device.step = 1
    assert device.run(10, 500) == 4


def test_a_margin_is_left(monkeypatch) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(kept_layers, "_MARGIN", 0.25)
    assert [device.run(10, 500) for _ in range(3)][-1] == 2  # of 250


def test_all_where_memory_is_not_to_be_known() -> None:
    layers = KeptLayers(LAYERS, ROW, lambda: 0, None)
    layers.note(Kept(0), False)
    assert layers.affordable(10**9) == LAYERS and not layers.measured
    assert memory_of(torch.device("cpu")) is None


def test_nothing_is_asked_while_no_layer_is_checkpointed(device) -> None:
    assert [device.run(10, 500, kept=0, wanted=False) for _ in range(5)] == [0] * 5 and device.asked == 1
    assert [device.run(10, 500) for _ in range(2)] == [0, 4]  # checkpointing was switched on


@pytest.mark.gpu
def test_a_gpu_tells_its_memory() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    memory = memory_of(device)
    before = memory()
    block = torch.zeros(2**28, dtype=torch.uint8, device=device)
    after = memory()
    assert after.peak >= 2**28 and abs(after.limit - before.limit) < 2**28
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        total = torch.cuda.get_device_properties(device).total_memory
        assert memory().limit == pytest.approx(total / 4, rel=0.01)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        del block


@pytest.fixture(scope="module")
def ranks():
    return run_ranks("tests.huggingface.kept_layers_worker:run", 2)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_ranks_keep_the_smaller_number_and_results_are_the_same(ranks, checkpointing) -> None:
    layers = kept_layers_worker.LAYERS
    expected = [0, 0, *(min(layers, *room) for room in kept_layers_worker.ROOM[2:])]
    assert set(expected) == {0, 1, 2, 3}
    for rank in ranks:
        found, all_kept, none = (rank[f"{checkpointing}, {keep}"] for keep in (None, True, False))
        assert [step["kept"] for step in found] == expected
        assert [step["attention"] for step in found] == [2 * layers - kept for kept in expected]
        assert [step["kept"] for step in all_kept] == [layers] * len(found)
        assert [step["kept"] for step in none] == [0] * len(found)
        assert all(step["exchanges"] for step in found)
        results = [[(step["loss"], step["gradients"]) for step in steps] for steps in (found, all_kept, none)]
        assert results[0] == results[1] == results[2] == [(s["loss"], s["gradients"]) for s in rank["off, True"]]


def test_without_checkpointing_nothing_is_kept(ranks) -> None:
    for rank in ranks:
        assert all(step["kept"] == 0 for step in rank["off, None"])
