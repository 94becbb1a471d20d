# SPDX-License-Identifier: Apache-2.0
"""Exchange by peer copies over simulated devices: every byte arrives, nothing is read or written too early or too
late, and no order of waits ends in a deadlock, however small the slots and even if each device has a single queue."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_distca.attention_server.exchange.peer_copy.copies import SLOTS, PeerCopyExchange, _Watch, header_bytes
from deepspeed_distca.attention_server.exchange.peer_copy.rings import ALIGNMENT, Rings, divide
from deepspeed_distca.attention_server.exchange.peer_copy.slots import PeerSlots, cut
from tests.attention_server.simulated_streams import SimulatedStreams, run_all


class Group:
    """Devices that share memory, each with an exchange."""

    def __init__(self, world: int, size: int, single: bool) -> None:
        self.devices = [SimulatedStreams(single) for _ in range(world)]
        self.memory = [torch.full((size,), 0x55, dtype=torch.uint8) for _ in range(world)]
        for memory in self.memory:
            memory[: header_bytes(world)] = 0
        addresses = [memory.data_ptr() for memory in self.memory]
        self.exchanges = [
            PeerCopyExchange(device, rank, addresses, size, timeout=None) for rank, device in enumerate(self.devices)
        ]
        self.alive: list = []

    def for_sizes(self, sizes: np.ndarray) -> None:
        """What follows is a plan that moves so much."""
        self.exchanges = [exchange.for_sizes(sizes) for exchange in self.exchanges]


def staging(world: int, slot: int) -> int:
    return header_bytes(world) + max(1, world - 1) * SLOTS * slot


def random_messages(rng: random.Random, world: int, most: int, density: float) -> list[tuple[int, int, torch.Tensor]]:
    """(sender, receiver, bytes), bytes being what is sent."""
    messages = []
    for _ in range(rng.randint(0, 3 * world)):
        sender, receiver = rng.sample(range(world), 2) if world > 1 else (0, 0)
        if rng.random() < density:
            size = rng.choice([0, 1, 3, ALIGNMENT, rng.randint(1, most)])
            messages.append((sender, receiver, torch.randint(0, 256, (size,), dtype=torch.uint8)))
    return messages


def play(group: Group, messages: list, *, relayed: list = (), early: bool = False) -> list:
    """One exchange on all ranks. Sources are filled by computation queued just before it and destroyed after
    ``wait()``; destinations are spoilt by computation queued before they are named. Returns what was wrong, once it
    has run."""
    wrong: list[str] = []
    started = []
    for rank, (device, exchange) in enumerate(zip(group.devices, group.exchanges, strict=True)):
        checks, sends, receives = [], [], []
        for sender, receiver, data in messages:
            if rank == receiver:
                into = torch.zeros_like(data)
                device.call(device.compute, lambda into=into: into.fill_(0xEE))
                receives.append((sender, into))
                checks.append((into, data))
        then = ([], [])
        for first, over, last in relayed:
            data = messages[first][2]
            if rank == messages[first][1] == over:
                place = [m for m in range(len(messages)) if messages[m][1] == rank].index(first)
                then[0].append((last, receives[place][1]))
            if rank == last:
                into = torch.zeros_like(data)
                device.call(device.compute, lambda into=into: into.fill_(0xDD))
                then[1].append((over, into))
                checks.append((into, data))
        expected = None
        sends_any = any(sender == rank and len(data) for sender, _, data in messages)
        if early:
            expected = exchange.expect(receives, sends=sends_any)
            other = torch.zeros(100)
            device.call(device.compute, lambda other=other: other.add_(1))  # tasks at home
        for sender, receiver, data in messages:
            if rank == sender:
                source = torch.full_like(data, 0xAA)
                device.call(device.compute, lambda source=source, data=data: source.copy_(data))
                sends.append((receiver, source))
        if expected is not None:
            pending = expected.start(sends)
        else:
            pending = exchange.start(sends, receives, then if relayed else None)
        started.append((device, pending, sends, checks, rank))
        group.alive.append((sends, receives, then, checks))
    for device, pending, sends, checks, rank in started:
        pending.wait()

        def look(checks=checks, sends=sends, rank=rank) -> None:
            for into, data in checks:
                if not torch.equal(into, data):
                    wrong.append(f"rank {rank}: {int((into != data).sum())} of {len(data)} bytes differ")
            for _, source in sends:
                source.fill_(0x77)

        device.call(device.compute, look)
        pending.wait()  # again: nothing
    return wrong


def random_sizes(rng: random.Random, world: int) -> np.ndarray:
    """Bytes from each rank to each, as a plan may have them, far apart from each other."""
    sizes = [[rng.choice([0, 1, 1000, 10**9]) for _ in range(world)] for _ in range(world)]
    return np.array(sizes, dtype=np.int64)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_random_exchanges(seed: int, single: bool) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    world = rng.randint(2, 6)
    slot = ALIGNMENT * rng.choice([1, 2, 7])
    group = Group(world, staging(world, slot), single)
    wrong = []
    plans = [random_sizes(rng, world) for _ in range(3)]
    for _ in range(25):
        if rng.random() < 0.3:
            group.for_sizes(rng.choice(plans))
        messages = random_messages(rng, world, 25 * slot, rng.choice([0.3, 1.0]))
        relayed = []
        if rng.random() < 0.5:
            for first, (_, over, _) in enumerate(messages):
                others = [r for r in range(world) if r != over]
                if rng.random() < 0.4:
                    relayed.append((first, over, rng.choice(others)))
        early = not relayed and rng.random() < 0.5
        wrong.append(play(group, messages, relayed=relayed, early=early))
        if rng.random() < 0.3:
            run_all(group.devices, rng)
    run_all(group.devices, rng)
    assert [w for w in wrong if w] == []


def test_counts_wrap_around() -> None:
    group = Group(2, staging(2, ALIGNMENT), single=False)
    near = 2**32 - 5
    for rank, exchange in enumerate(group.exchanges):
        other = 1 - rank
        exchange._slots._packed[other] = exchange._slots._pulled[other] = near
        for which in (0, 1):
            group.devices[rank].write(group.devices[rank].compute, exchange._flag(rank, which, other), near)
    rng = random.Random(0)
    run_all(group.devices, rng)
    wrong = []
    for _ in range(6):
        messages = [(0, 1, torch.randint(0, 256, (5 * ALIGNMENT,), dtype=torch.uint8))]
        messages += [(1, 0, torch.randint(0, 256, (3 * ALIGNMENT,), dtype=torch.uint8))]
        wrong += play(group, messages)
    run_all(group.devices, rng)
    assert wrong == [] and group.exchanges[0]._slots._packed[1] > 2**32


def test_pull_does_not_wait_for_what_is_queued_after_the_destinations_were_named() -> None:
    group = Group(2, staging(2, 4 * ALIGNMENT), single=False)
    giver, server = group.devices
    into, data = torch.zeros(700, dtype=torch.uint8), torch.randint(1, 256, (700,), dtype=torch.uint8)
    expected = group.exchanges[0].expect([(1, into)], sends=False)
    giver.compute.queue.append(lambda: False)  # a task at home that does not end
    pending = expected.start([])
    group.exchanges[1].start([(0, data)], []).wait()
    with pytest.raises(AssertionError, match="deadlock"):
        run_all(group.devices, random.Random(0))
    assert torch.equal(into, data)
    del pending, server


def test_other_rings_wait_until_the_former_are_empty() -> None:
    """Rank 1 has not pulled yet what lies in its ring, where rank 2's ring of the next plan begins."""
    group = Group(3, staging(3, 4 * ALIGNMENT), single=False)
    first = torch.full((SLOTS * 7 * ALIGNMENT,), 1, dtype=torch.uint8)  # all of its ring
    second = torch.full((64,), 2, dtype=torch.uint8)
    into = [torch.zeros_like(first), torch.zeros_like(second)]
    to_1, to_2 = (
        [exchange.for_sizes(np.array([row, [0, 0, 0], [0, 0, 0]])) for exchange in group.exchanges]
        for row in ([0, 1000, 0], [0, 0, 1000])
    )
    to_1[0].start([(1, first)], []).wait()
    to_2[0].start([(2, second)], []).wait()
    to_2[2].start([], [(0, into[1])]).wait()
    with pytest.raises(AssertionError, match="deadlock"):
        run_all(group.devices, random.Random(0))
    assert not into[1].any()
    to_1[1].start([], [(0, into[0])]).wait()
    run_all(group.devices, random.Random(0))
    assert torch.equal(into[0], first) and torch.equal(into[1], second)


def test_a_missing_peer_can_be_given_up() -> None:
    group = Group(3, staging(3, ALIGNMENT), single=False)
    into = torch.zeros(100, dtype=torch.uint8)
    group.exchanges[0].start([(1, torch.zeros(20 * ALIGNMENT))], [(2, into)]).wait()
    with pytest.raises(AssertionError, match="deadlock"):
        run_all(group.devices, random.Random(0))
    group.exchanges[0].release()
    run_all(group.devices, random.Random(0))


def test_nothing_to_do_queues_nothing() -> None:
    group = Group(2, staging(2, ALIGNMENT), single=False)
    group.exchanges[0].start([(1, torch.zeros(0))], []).wait()
    group.exchanges[0].expect([], sends=False).start([]).wait()
    assert all(len(stream.queue) <= 1 for stream in group.devices[0].all)  # an event at most


def queued(group: Group, run) -> list[tuple[int, int]]:
    """What is queued by `run`: operations and events of each device."""
    events = [0] * len(group.devices)
    for rank, device in enumerate(group.devices):

        def record(stream, rank=rank, own=device.record):
            events[rank] += 1
            return own(stream)

        device.record = record
    before = [sum(len(s.queue) for s in device.all) for device in group.devices]
    run()
    after = [sum(len(s.queue) for s in device.all) for device in group.devices]
    return [(b - a, e) for a, b, e in zip(before, after, events, strict=True)]


def test_an_exchange_records_no_event_that_nobody_waits_for() -> None:
    group = Group(2, staging(2, 4 * ALIGNMENT), single=False)
    giver, server = group.exchanges
    rows = [torch.ones(200, dtype=torch.uint8) for _ in range(3)]

    def there() -> None:
        giver.start([(1, x) for x in rows], []).wait()
        server.start([], [(0, x) for x in rows]).wait()

    # Giver: 3 copies, an event that the outbox waits for, a count. Server: an event that the inbox waits for, a wait
    # for the count, 3 copies, a count, an event that the caller waits for.
    assert queued(group, there) == [(3 + 2 + 1, 1), (2 + 1 + 3 + 1 + 2, 2)]

    def back() -> None:
        pending = giver.expect([(1, x) for x in rows], sends=False)
        server.expect([], sends=True).start([(0, x) for x in rows]).wait()
        pending.start([]).wait()

    assert queued(group, back) == [(2 + 1 + 3 + 1 + 2, 2), (3 + 2 + 1, 1)]
    run_all(group.devices, random.Random(0))


def test_rows_side_by_side_in_one_buffer_are_one_copy() -> None:
    group = Group(2, staging(2, 16 * ALIGNMENT), single=False)
    n = ALIGNMENT
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (n, 2 * n, n - 1, n, n, n)]
    buffer = torch.zeros(9 * n, dtype=torch.uint8)
    # Five neighbours, but in the slot there is a byte between the third and the fourth; and one apart.
    ends = np.cumsum([0, *map(len, data[:5])]).tolist()
    into = [*(buffer[start:end] for start, end in pairwise(ends)), buffer[8 * n :]]
    group.exchanges[0].start([(1, x) for x in data], []).wait()
    group.exchanges[1].start([], [(0, x) for x in into]).wait()
    assert len(group.devices[1].inbox.queue) == 4 + 3  # an event, a wait, a count, an event; copies
    run_all(group.devices, random.Random(0))
    assert all(torch.equal(x, y) for x, y in zip(into, data, strict=True))


def test_buffers_that_happen_to_touch_are_two_copies(monkeypatch) -> None:
    """The device allocates them apart, and refuses a copy that passes from one to the other."""
    buffer = torch.arange(4 * ALIGNMENT).to(torch.uint8)
    halves = [torch.frombuffer(memoryview(buffer.numpy())[i * 2 * ALIGNMENT :][: 2 * ALIGNMENT], dtype=torch.uint8)
              for i in range(2)]  # fmt: skip
    assert halves[1].data_ptr() == halves[0].data_ptr() + 2 * ALIGNMENT
    group = Group(2, staging(2, 16 * ALIGNMENT), single=False)
    group.exchanges[0].start([(1, x) for x in halves], []).wait()
    assert len(group.devices[0].compute.queue) == 2 + 1  # copies and an event


class Counted:
    """An exchange under way that counts how often it is asked."""

    def __init__(self, over: bool) -> None:
        self.is_over, self.asked = over, 0

    def over(self) -> bool:
        self.asked += 1
        return self.is_over


def test_the_device_is_not_asked_at_every_exchange() -> None:
    watch, many = _Watch(None, "rank 0"), [Counted(over=i != 70) for i in range(90)]
    for pending in many:
        watch.add(pending)
    assert max(pending.asked for pending in many) == 1 and len(watch._under_way) < 90
    for _ in range(2 * len(many)):
        watch.add(Counted(over=True))
    # What is not over is kept, and what came after it.
    assert watch._under_way[0][1] is many[70]


def test_an_exchange_is_late_if_it_is_not_over_in_time() -> None:
    watch = _Watch(None, "rank 0")
    over, not_over = Counted(over=True), Counted(over=False)
    for pending in (over, not_over):
        watch.add(pending)
    assert not watch.late(1000.0) and over.asked == 0
    assert watch.late(-1.0) and watch.late(-1.0)
    not_over.is_over = True
    assert not watch.late(-1.0) and not watch._under_way


def test_errors_name_what_was_given() -> None:
    group = Group(2, staging(2, ALIGNMENT), single=False)
    with pytest.raises(ValueError, match="contiguous"):
        group.exchanges[0].start([(1, torch.zeros(4, 4).t())], [])
    with pytest.raises(ValueError, match="sends=True"):
        group.exchanges[0].expect([], sends=False).start([(1, torch.zeros(4))])
    with pytest.raises(ValueError, match="too small for 2 ranks"):
        PeerCopyExchange(group.devices[0], 0, [0, 0], header_bytes(2) + 100, timeout=None)


@given(
    world=st.integers(1, 6),
    slots=st.integers(1, 9),
    spare=st.integers(0, 10**7),
    data=st.data(),
)
def test_rings_lie_beside_each_other_and_in_proportion(
    world: int, slots: int, spare: int, data: st.DataObject
) -> None:
    area = max(1, world - 1) * slots * ALIGNMENT + spare
    sizes = data.draw(st.lists(st.lists(st.sampled_from([0, 1, 70, 10**6, 3 * 10**9]), min_size=world, max_size=world),
                               min_size=world, max_size=world))  # fmt: skip
    rings = divide(area, slots, sizes)
    for sender, row in enumerate(sizes):
        others = [r for r in range(world) if r != sender]
        total = sum(row[r] for r in others)
        taken = sorted(
            (rings.slot(sender, r, n), rings.slot(sender, r, n) + rings.slot_bytes[sender][r])
            for r in others
            for n in range(7 * slots, 8 * slots)
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))
        assert not taken or (taken[0][0] >= 0 and taken[-1][1] <= area)
        for r in others:
            slot = rings.slot_bytes[sender][r]
            share = row[r] / total if total else 1 / len(others)
            assert slot % ALIGNMENT == 0 and slot >= ALIGNMENT
            assert abs(slots * slot - spare * share) <= 2 * slots * ALIGNMENT


@pytest.mark.parametrize("seed", range(20))
def test_chunks_hold_every_byte_once(seed: int) -> None:
    rng = random.Random(seed)
    slot = ALIGNMENT * rng.randint(1, 5)
    messages = [(i, rng.randint(1, 6 * slot)) for i in range(rng.randint(0, 8))]
    covered = {i: 0 for i, _ in messages}
    for chunk in cut(messages, slot):
        at = 0
        for piece in chunk:
            assert piece.start == covered[piece.message] and piece.size > 0
            assert piece.at >= at and piece.at % ALIGNMENT == 0 and piece.at + piece.size <= slot
            at = piece.at + piece.size
            covered[piece.message] += piece.size
    assert covered == dict(messages)


def test_both_sides_number_chunks_alike() -> None:
    rng = random.Random(3)
    rings = [Rings(2, ((0, 0), (0, 0)), ((0, there), (back, 0))) for there, back in ((256, 512), (768, 256))]
    here, there = PeerSlots(0, rings[0]), PeerSlots(1, rings[0])
    for _ in range(20):
        sizes, ring = [rng.randint(0, 900) for _ in range(3)], rng.choice(rings)
        packs = here.operations(ring, [(1, s) for s in sizes], [])
        pulls = there.operations(ring, [], [(0, s) for s in sizes])
        assert [(op.number, op.round, op.pieces) for op in packs] == [(op.number, op.round, op.pieces) for op in pulls]
