# SPDX-License-Identifier: Apache-2.0
"""What a phase takes with its transfers, by hand and within what must hold for any loads and bytes; weights of servers
whose linear work and attention are to end together, by hand and against a search in floats; and whether moving pays.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import PHASES, CostModel, MovingCost
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.profiles import Setting, choose
from deepspeed_distca.scheduler.routes import FEWEST_MESSAGES, NOTHING, Flow, RouteCompiler
from deepspeed_distca.scheduler.shares import MAX_WEIGHT, Shares
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.scheduler.weights import even_weights, finishing_weights
from deepspeed_distca.scheduler.worth import (
    IN_TWO,
    PlanOptions,
    Worth,
    phase_seconds,
    seconds_in_two,
    two_pay,
)

COST = replace(CostModel(), bytes_per_second=10**6, latency=0)
MB = 10**6


def two(out: float, back: float) -> tuple[np.ndarray, np.ndarray]:
    """Rank 0 sends to rank 1 and gets results back, in MB."""
    there, again = np.zeros((2, 2), dtype=np.int64), np.zeros((2, 2), dtype=np.int64)
    there[0, 1], again[1, 0] = out * MB, back * MB
    return there, again


@pytest.mark.parametrize(
    ("at_home", "away", "sizes", "early", "late"),
    [
        ([5, 1], [0, 3], (0, 0), 5, 5),
        ([5, 1], [0, 3], (2, 1), 6, 6),  # rows at 2, results at 5, back at 6
        ([5, 1], [0, 1], (2, 1), 5, 6),  # results at 3: on their way while rank 0 is busy, or after it
        ([5, 9], [0, 1], (2, 1), 10, 11),
        ([5, 4], [0, 1], (2, 3), 6, 8),
        ([0, 0], [0, 0], (0, 0), 0, 0),
    ],
)
def test_by_hand(at_home, away, sizes, early, late) -> None:
    loads = np.array(at_home, dtype=float), np.array(away, dtype=float)
    assert phase_seconds(COST, *loads, *two(*sizes), early=True) == pytest.approx(early)
    assert phase_seconds(COST, *loads, *two(*sizes), early=False) == pytest.approx(late)


def test_who_sends_on_between_nodes_waits_for_what_it_sends() -> None:
    cost, nodes = replace(COST, nic_bytes_per_second=MB, nic_latency=0), Topology.of_size(1, 3)
    chain = np.array([0, 1]), np.array([1, 2]), np.array([2 * MB, 3 * MB])
    loads = np.zeros(3), np.array([0.0, 0.0, 1.0])
    for late, takes in ((None, 3 + 1), (np.array([False, True]), 2 + 3 + 1)):
        out = Flow(*chain, late)
        assert phase_seconds(cost, *loads, out, NOTHING, early=False, nodes=nodes) == pytest.approx(takes)


@pytest.mark.parametrize(
    ("start", "at_home", "away", "sizes", "early", "late"),
    [
        ([4, 0], [5, 1], [0, 3], (0, 0), 9, 9),
        ([0, 4], [5, 1], [0, 3], (2, 1), 8, 9),  # rows are there at 2, but their server only begins at 4
        ([0, 4], [5, 0], [0, 3], (2, 1), 8, 8),  # results at 7
        ([0, 4], [5, 1], [0, 3], (6, 1), 10, 10),  # rows at 6
        ([4, 0], [0, 1], [0, 3], (2, 1), 10, 10),  # rows leave at 4 and are there at 6
        ([4, 0], [5, 1], [0, 3], (2, 1), 10, 10),
        ([4, 9], [0, 1], [0, 0], (0, 0), 10, 10),
        ([7, 2], [0, 0], [0, 0], (0, 0), 7, 7),  # linear work alone
    ],
)
def test_servers_that_begin_later_by_hand(start, at_home, away, sizes, early, late) -> None:
    start, *loads = (np.array(x, dtype=float) for x in (start, at_home, away))
    phase = phase_seconds(COST, *loads, *two(*sizes), early=True, start=start)
    assert phase == pytest.approx(early)
    assert phase_seconds(COST, *loads, *two(*sizes), early=False, start=start) == pytest.approx(late)


@pytest.mark.parametrize(
    ("linear", "attention", "sizes", "seconds"),
    [
        ([2, 2], [4, 4], (0, 0), 6),
        ([2, 2], [4, 4], (2, 2), 6),  # each half travels in 1, under 1 of linear work and 2 of tasks
        ([2, 2], [4, 4], (4, 0), 7),  # 2 under 1
        ([2, 2], [4, 4], (0, 6), 9),  # 3 under 1, and 3 under 2
        ([2, 2], [4, 1], (4, 0), 7),  # the other one, with 2 under 0.5, is through in 5.5
        ([2, 2], [4, 3.8], (4, 0), 7),
        ([0, 9], [0, 0], (4, 0), 11),  # its second half travels under tasks, of which there are none
    ],
)
def test_two_nano_batches_by_hand(linear, attention, sizes, seconds) -> None:
    linear, attention = (np.array(x, dtype=float) for x in (linear, attention))
    found = seconds_in_two(COST, linear, attention, *two(*sizes))
    assert found == pytest.approx((1 + IN_TWO) * seconds)


def test_two_nano_batches_are_planned_as_such() -> None:
    # All of the short ones' attention is nothing: with local_first servers wait for whatever comes, in two they have
    # their linear work meanwhile.
    layout = Layout.from_lengths([[65536], [64] * 1024])
    cost = replace(CostModel.fitted(), bytes_per_second=5 * 10**10)
    options = PlanOptions(0.02, 128, min_gain=0.04, linear_flops=436_207_616)
    found = {}
    for in_two in (False, True):
        worth = Worth(layout, None, "forward", cost, options, early=False, in_two=in_two)
        home = RouteCompiler(layout, worth.home.rows)
        assert worth.takes(home) == worth.whole
        tasks, compiler = worth.spread(home)
        found[in_two] = worth.takes(compiler)
        assert compiler.moves_rows and tasks.balance < 1.03
    assert found[True] < found[False]
    # Where linear work is not known nothing can be said of it.
    blind = [
        Worth(layout, None, "forward", cost, replace(options, linear_flops=0), early=False, in_two=in_two).seconds(
            home
        )
        for in_two in (False, True)
    ]
    assert blind[0] == blind[1]


def test_two_nano_batches_pay_at_most_what_their_least_says() -> None:
    heads = Heads(query=32, key_value=8, head_dim=128)
    cost, options = CostModel.fitted(heads), PlanOptions(0.01, 128, min_gain=0.02, linear_flops=4 * 10**8)
    pairs_of = {}
    for name, lengths in {
        "uneven": [[65536], *[[4096] * 16] * 3],
        "even": [[256] * 256] * 4,
        "pool": [[32768], [32768], [], []],
        "small": [[64], [32]],
    }.items():
        layout = Layout.from_lengths(lengths)
        pairs_of[name] = []
        for phase in PHASES:
            worth = Worth(layout, None, phase, cost, options, early=False, in_two=True, layers=8)
            _, compiler = worth.spread(RouteCompiler(layout, worth.home.rows))
            assert not compiler.moves_rows or worth.least_in_two() <= worth.takes(compiler) * (1 + 1e-12)
            pairs_of[name].append((worth, 8))
    assert {name: two_pay(phases, 0.02) for name, phases in pairs_of.items()} == {
        "uneven": True,
        "even": False,
        "pool": True,
        "small": False,
    }
    assert two_pay(pairs_of["even"], 0.0)  # rows move whatever it costs
    assert two_pay([*pairs_of["uneven"], *pairs_of["even"]], 0.02)


def test_a_busy_end_holds_up_all_that_it_sends() -> None:
    out, back = np.zeros((3, 3), dtype=np.int64), np.zeros((3, 3), dtype=np.int64)
    out[0, 1], out[0, 2] = 3 * MB, MB
    loads = np.zeros(3), np.array([0.0, 1.0, 2.0])
    assert phase_seconds(COST, *loads, out, back, early=True) == pytest.approx(4 + 2)


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_between_the_busiest_server_and_everything_in_turn(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    at_home, away = rng.uniform(0, 5, ranks), rng.uniform(0, 5, ranks) * rng.integers(0, 2, ranks)
    out = rng.integers(0, 3 * MB, (ranks, ranks)) * (away > 0)[None, :]
    np.fill_diagonal(out, 0)
    back = (out * rng.uniform(0, 2)).astype(np.int64).T
    early, late = (phase_seconds(COST, at_home, away, out, back, early=e) for e in (True, False))
    busiest = (at_home + away).max()
    slowest = [np.maximum(size.sum(0), size.sum(1)).max() / MB for size in (out, back)]
    assert busiest <= early <= late <= busiest + sum(slowest) + 1e-9
    fast = replace(COST, bytes_per_second=10**12)
    for e, seconds in ((True, early), (False, late)):
        faster = phase_seconds(fast, at_home, away, out, back, early=e)
        assert busiest <= faster <= seconds
    # Who begins at once is as before to the bit; whoever begins later, no more than that is added.
    start = rng.uniform(0, 3, ranks)
    for e, seconds in ((True, early), (False, late)):
        at_once = phase_seconds(COST, at_home, away, out, back, early=e, start=np.zeros(ranks))
        assert at_once == seconds
        later = phase_seconds(COST, at_home, away, out, back, early=e, start=start)
        own = (start + at_home + away).max()
        assert max(seconds, own) <= later <= seconds + start.max() + 1e-9
        together = phase_seconds(COST, at_home, away, out, back, early=e, start=np.full(ranks, 2.0))
        assert together == pytest.approx(seconds + 2)


@pytest.mark.parametrize(
    ("speeds", "linear", "home", "parts"),
    [
        ([1, 1], [100, 100], [60, 0], [1, 1]),
        ([1, 1], [100, 80], [30, 30], [20, 40]),  # both end at 120
        ([1, 1], [100, 80], [60, 0], [30, 30]),  # the second has nothing to do from 80 to 100
        ([1, 1], [100, 80], [50, 10], [25, 35]),  # something: until 90
        ([3, 2], [30, 30], [20, 20], [30, 10]),  # 60 / 3 = 40 / 2
        ([3, 2], [30, 30], [37, 3], [30, 10]),
        ([3, 2], [30, 30], [3, 37], [25.2, 14.8]),  # 3 before 15, and 37 from then on, 3 to 2
        ([1, 1, 1], [100, 100, 0], [60, 30, 0], [1, 1, 1]),  # a pool begins when rows are there
        ([1, 1, 3], [100, 100, 0], [60, 30, 0], [1, 1, 3]),
        ([1, 1], [100, 10], [2, 50], [0, 1]),  # the second is through with its own at 60, before any row comes
        ([0, 1, 1], [500, 10, 10], [20, 20, 20], [0, 1, 1]),
        ([0, 1, 3], [20, 10, 30], [40, 0, 0], [0, 1, 3]),  # rows are there at 10: the others' average speed is 2
        ([0, 1, 3], [40, 10, 30], [40, 40, 0], [0, 10 + 70 / 4, 210 / 4]),
        ([2, 0, 1], [0, 0, 0], [60, 1, 2], [2, 0, 1]),  # attention alone: in proportion
        ([5, 7, 0], [1, 2, 3], [0, 0, 0], None),
        ([0, 0], [1, 2], [2, 3], None),
    ],
)
def test_weights_by_hand(speeds, linear, home, parts) -> None:
    weights = finishing_weights(speeds, linear, home)
    assert all(type(weight) is int for weight in weights)
    if parts is None:
        assert list(weights) == speeds
    elif parts == [0, 1]:
        # What is left for later is spread by speed: 2 of the first.
        assert weights == (round(MAX_WEIGHT * 1 / 51), MAX_WEIGHT)
    else:
        assert max(weights) == MAX_WEIGHT
        assert weights == pytest.approx([MAX_WEIGHT * part / max(parts) for part in parts], abs=0.51)


@pytest.mark.parametrize(
    ("speeds", "linear", "home", "parts"),
    [
        ([1, 1], [30, 30], [40, 8], [1, 1]),
        ([1, 1, 1], [10, 10, 0], [20, 20, 0], [10, 10, 20]),  # a pool has attention all the time
        ([1, 1, 2], [10, 10, 0], [20, 20, 0], [5, 5, 30]),
        ([1, 1, 1], [10, 10, 0], [2, 2, 0], [0, 0, 4]),  # and all of it, where it can
        ([2, 1], [10, 50], [30, 0], [1, 0]),
        ([1, 1, 0], [20, 10, 90], [10, 20, 30], [25, 35, 0]),
        ([3, 1], [0, 0], [0, 5], [3, 1]),
        ([5, 7], [1, 2], [0, 0], None),
    ],
)
def test_weights_in_two_by_hand(speeds, linear, home, parts) -> None:
    weights = even_weights(speeds, linear, home)
    if parts is None:
        assert list(weights) == speeds
    else:
        assert weights == pytest.approx([MAX_WEIGHT * part / max(parts) for part in parts], abs=0.51)


@settings(max_examples=200)
@given(st.data(), st.integers(1, 8))
def test_in_two_no_server_with_attention_ends_later_than_another(data, servers: int) -> None:
    several = dict(min_size=servers, max_size=servers)
    speeds = data.draw(st.lists(st.integers(0, 100), **several))
    linear, home = (data.draw(st.lists(st.integers(0, 10**6), **several)) for _ in range(2))
    assume(any(speeds) and any(home))
    weights = even_weights(speeds, linear, home)
    attention = [sum(home) * weight / sum(weights) for weight in weights]
    ends = [(load + a) / s for load, a, s in zip(linear, attention, speeds, strict=True) if s and a]
    assert all(a == 0 for a, s in zip(attention, speeds, strict=True) if not s)
    assert max(ends) - min(ends) <= 1e-4 * max(ends) + 1e-3 * sum(home)
    others = [load / s for load, a, s in zip(linear, attention, speeds, strict=True) if s and not a]
    assert not others or min(others) >= max(ends) * (1 - 1e-4) - 1e-3 * sum(home)


def test_a_pool_has_more_than_its_part_in_two() -> None:
    """Where it has linear work of others to hide behind; over slow links equal parts, or nothing."""
    layout = Layout.from_lengths([[65536], [4096] * 16, []])
    options = PlanOptions(0.005, 128, min_gain=0.04, linear_flops=436_207_616)
    for phase in PHASES:
        took = {}
        for in_two, rate in ((False, 4.5e11), (True, 4.5e11), (True, 5e9)):
            cost = replace(CostModel.fitted(), bytes_per_second=int(rate), latency=78_000_000_000)
            worth = Worth(layout, None, phase, cost, options, early=True, in_two=in_two)
            tasks, compiler = worth.spread(RouteCompiler(layout, worth.home.rows))
            part = tasks.loads / tasks.loads.sum()
            took[in_two, rate] = worth.takes(compiler)
            if not in_two:
                assert part == pytest.approx([1 / 3] * 3, rel=0.01)
            elif rate > 1e11:
                assert part[2] > 0.6 and part[0] == pytest.approx(part[1], rel=0.05)
                assert worth.least() <= worth.seconds(compiler)
            assert took[in_two, rate] <= worth.whole
        assert took[True, 4.5e11] < 0.87 * took[False, 4.5e11]


SERVERS = st.integers(1, 8)
WORK = st.sampled_from([0, 0, 10**15]) | st.integers(0, 2**60)


@settings(max_examples=300)
@given(st.data(), SERVERS)
def test_ends_together_as_a_search_in_floats_does(data, servers: int) -> None:
    several = dict(min_size=servers, max_size=servers)
    speeds = data.draw(st.lists(st.integers(0, 10**6), **several))
    linear, home = (data.draw(st.lists(WORK, **several)) for _ in range(2))
    assume(any(speeds) and any(home))
    weights = finishing_weights(speeds, linear, home)
    Shares(weights, servers, 0.0)  # in the range that balance takes

    s, done, own = (np.array(x, dtype=float) for x in (speeds, linear, home))
    there = (done / np.where(s > 0, s, s[s > 0].mean())).max()  # all rows
    assume(own.sum() > 1e-6 * there * s.sum())  # else the search has too few digits
    # Busy with linear work, or without anything to do, until its own attention fills the time until then.
    free = np.where(s > 0, np.maximum(done / np.maximum(s, 1), there - own / np.maximum(s, 1)), 0.0)
    low, high = there, there + own.sum() / s[s > 0].min()
    for _ in range(200):
        end = (low + high) / 2
        low, high = (end, high) if (s * (end - free)).sum() < own.sum() else (low, end)
    parts = s * (high - free)
    # Weights are rounded, and the search ends with the floats of the larger work.
    exact = 1e-6 + 1e-12 * s.sum() * high / parts.max()
    assert np.abs(np.array(weights) / MAX_WEIGHT - parts / parts.max()).max() < exact
    assert all(weight == 0 for weight, speed in zip(weights, speeds, strict=True) if speed == 0)


@settings(max_examples=200)
@given(st.data(), SERVERS)
def test_linear_work_and_attention_by_speed_are_the_same_where_nobody_waits(data, servers: int) -> None:
    several = dict(min_size=servers, max_size=servers)
    speeds = np.array(data.draw(st.lists(st.integers(900, 1000), **several)))
    linear = np.array(data.draw(st.lists(st.integers(10**12, 12 * 10**11), **several)))
    home = np.array(data.draw(st.lists(st.integers(10**12, 10**13), **several)))  # more than linear work differs
    weights = np.array(finishing_weights(speeds.tolist(), linear.tolist(), home.tolist()))
    ends = (linear + home.sum() * (weights / weights.sum())) / speeds
    assert ends == pytest.approx((linear.sum() + home.sum()) / speeds.sum(), rel=1e-4)


H200 = Setting("NVIDIA H200", "sm90", "flash_attn_4", "bf16")
#: Heads and a layer's linear work in forward for a token, of models 2048 (1B) and 4096 wide (8B).
SIZES = {2048: (Heads(32, 8, 64), 121_634_816), 4096: (Heads(32, 8, 128), 436_207_616)}


def moves(
    width: int,
    lengths: list[list[int]],
    phase: str,
    *,
    layer: int | None = None,
    layers: int | None = None,
    **options,
) -> bool:
    """Whether rows move on H200s, as shipped or where a moved layer costs the host so many more milliseconds."""
    heads, flops = SIZES[width]
    cost = choose(H200, heads, folder=None).cost
    if layer is not None:
        moving = MovingCost(layer * 10**12)
        cost = replace(cost, moving_forward=moving, moving_backward=moving)
    layout = Layout.from_lengths(lengths)
    given = PlanOptions(0.005, 128, **{"min_gain": 0.04, "linear_flops": flops, **options})
    worth = Worth(layout, None, phase, cost, given, early=True, layers=layers)
    _, compiler = worth.spread(RouteCompiler(layout, worth.home.rows))
    return compiler.moves_rows


@pytest.mark.parametrize(
    ("width", "tokens", "forward", "backward"),
    [
        (2048, 4096, False, False),
        (2048, 8192, False, False),
        (2048, 16384, True, True),
        (4096, 4096, False, False),
        (4096, 16384, True, True),
        (4096, 65536, True, True),
    ],
)
def test_small_steps_stay_at_home_and_long_ones_do_not(width, tokens, forward, backward) -> None:
    lengths = [[tokens], [tokens // 16] * 16]
    assert [moves(width, lengths, phase) for phase in PHASES] == [forward, backward]


def test_the_host_decides_where_it_is_later_than_the_device() -> None:
    lengths = [[8192], [512] * 16]  # measured: 184 ms with the rows moved, 163 without
    assert moves(2048, lengths, "backward", min_gain=0.0)  # whatever it costs
    lengths = [[16384], [1024] * 16]  # backward: 10.8 ms at home, 8.7 moved
    assert moves(2048, lengths, "backward", layer=3) and not moves(2048, lengths, "backward", layer=6)
    even = [[8192], [8192]]
    assert not any(moves(2048, even, phase, layer=0) for phase in PHASES)


def test_a_search_pays_in_models_of_many_layers() -> None:
    lengths = [[8192], [512] * 16]  # backward saves 0.95 ms; measured with 4 layers: as long as plain
    assert [moves(4096, lengths, "backward", layers=layers) for layers in (4, 32, None)] == [False, True, True]
    assert moves(4096, lengths, "backward", layers=1, min_gain=0.0)  # whatever it costs


def test_of_unknown_linear_work_the_price_counts_in_full() -> None:
    lengths = [[16384], [1024] * 16]  # backward saves 2.1 ms
    assert moves(2048, lengths, "backward", linear_flops=0, layer=1)
    assert not moves(2048, lengths, "backward", linear_flops=0, layer=3)


@pytest.mark.parametrize("phase", PHASES)
def test_small_steps_are_balanced_by_one_cut(phase) -> None:
    layout = Layout.from_lengths([[8192], [512] * 16])
    heads, flops = SIZES[4096]
    cost = choose(H200, heads, folder=None).cost
    for min_gain, ranges in ((1e-6, 2), (0.0, 3)):  # to pay, and at any price
        options = PlanOptions(0.005, 128, min_gain=min_gain, linear_flops=flops)
        worth = Worth(layout, None, phase, cost, options, early=True)
        tasks, _ = worth.spread(RouteCompiler(layout, worth.home.rows))
        assert (tasks.rows[:, 0] == 0).sum() == ranges
        assert tasks.loads.max() < 1.02 * tasks.loads.mean()


@pytest.mark.parametrize("short", [[4096] * 16, [32768] + [4096] * 8, [65536]])
@pytest.mark.parametrize("phase", PHASES)
def test_the_host_changes_nothing_of_long_layers(short, phase) -> None:
    lengths = [[65536], short]
    assert moves(4096, lengths, phase) == moves(4096, lengths, phase, layer=0)


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(1, 20000), max_size=5), min_size=2, max_size=6), st.sampled_from(PHASES))
def test_rows_that_move_take_that_many_messages(lengths, phase) -> None:
    layout = Layout.from_lengths(lengths)
    worth = Worth(layout, None, phase, CostModel(), PlanOptions(0.0, 1), early=True)
    _, compiler = worth.spread(RouteCompiler(layout, worth.home.rows))
    assert compiler.moves_rows == (compiler.messages(phase).max() >= FEWEST_MESSAGES[phase])
    assert compiler.moves_rows or not compiler.messages(phase).any()
