# SPDX-License-Identifier: Apache-2.0
"""From times to a profile: times made of a known cost model give it back, and errors are what was put in."""

from __future__ import annotations

import pytest

from deepspeed_distca.profiling.link import partners_of
from deepspeed_distca.profiling.measure import Measured
from deepspeed_distca.profiling.moving import Moves
from deepspeed_distca.profiling.result import Link, build
from deepspeed_distca.profiling.shapes import Limits, fitting_shapes, held_out_shapes, smallest_shape
from deepspeed_distca.scheduler import CostModel, Heads
from deepspeed_distca.scheduler.cost_model import PHASES, MovingCost
from deepspeed_distca.scheduler.fit import predict
from deepspeed_distca.scheduler.profiles import Profile, Setting

LIMITS = Limits(65536, 128, 8 * 65536)
SETTING = Setting("a card", "sm90", "flash_attn_4", "bf16")
TRUE = CostModel.fitted(Heads(24, 6, 96))
FLOOR = {"forward": 15e-6, "backward": 40e-6}
RATE, LATENCY = 40 * 10**9, 25e-6


def times(shapes, factor: float = 1.0) -> Measured:
    seconds = {
        phase: [
            factor * max(FLOOR[phase], float(predict(TRUE.phase(phase), shape.features[None])[0])) for shape in shapes
        ]
        for phase in PHASES
    }
    return Measured(tuple(shapes), seconds, 5, 10**12)


def result(factor: float = 1.0, links: dict | None = None, moves: Moves | None = None):
    smallest = {phase: times([smallest_shape(LIMITS)]).seconds[phase][0] for phase in PHASES}
    fitting, unseen = times(fitting_shapes(LIMITS)), times(held_out_shapes(LIMITS), factor)
    return build(SETTING, TRUE.heads, fitting, unseen, smallest, links or {}, moves, {"date": "today"})


def link(off: float = 1.0, slower: float = 1.0) -> Link:
    sizes, unseen = [2**16, 2**20, 2**24, 2**28], [3 * 2**16, 3 * 2**22]
    fitted, held_out = ([slower * (LATENCY + size / RATE) for size in given] for given in (sizes, unseen))
    return Link(4, sizes, fitted, unseen, [off * seconds for seconds in held_out])


def test_the_model_behind_the_times_comes_back():
    made = result(links={"within a node": link()})
    cost = made.profile.cost
    assert cost.heads == TRUE.heads and made.profile.setting == SETTING
    for phase in PHASES:
        for term in ("pair", "query_row", "key_row", "task"):
            expected = getattr(TRUE.phase(phase), term)
            assert getattr(cost.phase(phase), term) == pytest.approx(expected, rel=0.01, abs=1e4), (phase, term)
        assert made.held_out[phase].worst < 1e-3 and made.fitted[phase].worst < 1e-3
    assert cost.launch == 15 * 10**9
    assert cost.bytes_per_second == pytest.approx(RATE, rel=1e-3)
    assert cost.latency == pytest.approx(LATENCY * 1e15, rel=1e-3)
    assert "worst 0.0% over 2" in made.profile.about["exchange within a node"]
    assert Profile.from_dict(made.profile.to_dict()) == made.profile


@pytest.mark.parametrize("kinds", [["within a node"], ["within a node", "between nodes"]])
def test_what_moving_rows_costs_is_what_is_left_of_the_transfers(kinds):
    """Over several nodes the rows that were moved went between them, whose links are four times as slow here."""
    slower = 4 if "between nodes" in kinds else 1
    links = {kind: link(slower=slower if kind == kinds[-1] else 1) for kind in kinds}
    true = {"forward": MovingCost(300 * 10**9, 10**9), "backward": MovingCost(500 * 10**9, 2 * 10**9)}
    counts = {"forward": [10, 40, 120], "backward": [16, 64, 192]}
    sizes = {phase: [(2**16 * m, 2**15 * m) for m in counts[phase]] for phase in PHASES}
    seconds = {
        phase: [
            (true[phase].layer + true[phase].message * m) / 1e15 + slower * (2 * LATENCY + (out + back) / RATE)
            for m, (out, back) in zip(counts[phase], sizes[phase], strict=True)
        ]
        for phase in PHASES
    }
    made = result(links=links, moves=Moves(4, counts, sizes, seconds)).profile
    for phase in PHASES:
        cost = getattr(made.cost, f"moving_{phase}")
        assert cost.layer == pytest.approx(true[phase].layer, rel=0.01)
        assert cost.message == pytest.approx(true[phase].message, rel=0.01)
    assert made.about["moving rows"] == "measured over 4 ranks"
    assert Profile.from_dict(made.to_dict()) == made


def test_errors_are_of_the_calls_held_out():
    made = result(factor=1.25, links={"between nodes": link(off=2.0)})
    for phase in PHASES:
        assert made.held_out[phase].median == pytest.approx(0.2, abs=1e-3)
        assert made.fitted[phase].worst < 1e-3
        assert (made.predicted[phase] < made.unseen.seconds[phase]).all()
    assert "worst 50.0%" in made.profile.about["exchange between nodes"]
    assert "median 20.0%" in made.profile.about["error of calls held out"]["forward"]


def test_an_exchange_that_was_not_measured_keeps_the_defaults_and_says_so():
    made = result()
    assert "not measured" in made.profile.about["exchange within a node"]
    assert "NIC" in made.profile.about["exchange between nodes"]
    assert made.profile.cost.bytes_per_second == CostModel().bytes_per_second
    assert made.profile.cost.moving_backward == CostModel().moving_backward
    assert "not measured" in made.profile.about["moving rows"]


def test_a_link_that_shows_no_rate_does_not_spoil_the_profile():
    odd = Link(2, [2**16, 2**20, 2**24], [3e-3, 2e-3, 1e-3], [2**18], [1e-3])
    made = result(links={"within a node": odd, "between nodes": link()})
    assert "not usable" in made.profile.about["exchange within a node"]
    assert made.profile.about["exchange between nodes"].startswith("measured over 4 ranks")
    assert made.profile.cost.bytes_per_second == CostModel().bytes_per_second


@pytest.mark.parametrize(
    ("machines", "within", "between"),
    [
        ("aaaa", {0: 2, 1: 3, 2: 0, 3: 1}, {}),
        ("ab", {}, {0: 1, 1: 0}),
        ("aabb", {0: 1, 1: 0, 2: 3, 3: 2}, {0: 2, 1: 3, 2: 0, 3: 1}),
        ("abcabc", {0: 3, 1: 4, 2: 5, 3: 0, 4: 1, 5: 2}, {0: 1, 3: 4, 1: 2, 4: 5, 2: 0, 5: 3}),
        ("aab", {0: 1, 1: 0}, {}),
        ("aaa", {0: 1, 1: 2, 2: 0}, {}),
    ],
)
def test_partners_of_each_kind_of_links(machines, within, between):
    found = partners_of(machines)
    assert found == (within, between)
    for partners in found:  # whoever sends receives
        assert sorted(partners) == sorted(partners.values())
