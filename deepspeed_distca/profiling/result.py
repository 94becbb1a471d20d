# SPDX-License-Identifier: Apache-2.0
"""From measured times to a profile: the fit, and how well it predicts what it was not fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deepspeed_distca.profiling.measure import Measured
from deepspeed_distca.profiling.moving import Moves
from deepspeed_distca.scheduler.cost_model import PHASES, UNITS_PER_SECOND, CostModel, MovingCost, Phase
from deepspeed_distca.scheduler.fit import PredictionError, fit_moving, fit_phase, fit_transfer, predict
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.profiles import Profile, Setting

# Calls that take less than so many times the shortest call are its latency more than their own work.
_ABOVE_LATENCY = 1.5
_FEWEST_CALLS = 12
#: Kinds of links, and the names of the model's terms for their rate and latency.
_WITHIN, _BETWEEN = "within a node", "between nodes"
LINKS = {_WITHIN: ("bytes_per_second", "latency"), _BETWEEN: ("nic_bytes_per_second", "nic_latency")}
_TO_MEASURE = {
    _WITHIN: "start the command by torchrun with 2 ranks or more",
    _BETWEEN: "start it on two nodes or more, with equally many ranks",
}
_DEFAULT_LINKS = {
    _WITHIN: "the rate and the latency are the default ones, of two H200s over NVLink",
    _BETWEEN: "the rate and the latency are the default ones, of a NIC of 50 GB/s",
}
_NOT_MOVED = "not measured (see exchange); the terms are the default ones, of two H200s"


@dataclass(frozen=True)
class Link:
    """A measured exchange.

    Attributes:
        ranks: how many took part.
        sizes, seconds: bytes each way and the time of each, to which rate and latency were fitted.
        held_out_sizes, held_out_seconds: the same of those that they were not fitted to.
    """

    ranks: int
    sizes: Sequence[int]
    seconds: Sequence[float]
    held_out_sizes: Sequence[int]
    held_out_seconds: Sequence[float]


#: What is measured of each kind of links that there are.
Links = dict[str, Link]


@dataclass(frozen=True)
class Result:
    """A profile with what it was made of.

    Attributes:
        fitted, held_out: errors by phase.
        unseen: the calls held out.
        predicted: seconds of them, by phase.
    """

    profile: Profile
    fitted: dict[Phase, PredictionError]
    held_out: dict[Phase, PredictionError]
    unseen: Measured
    predicted: dict[Phase, np.ndarray]


def build(
    setting: Setting,
    heads: Heads,
    fitting: Measured,
    held_out: Measured,
    smallest: Mapping[Phase, float],
    links: Links,
    moves: Moves | None,
    about: Mapping[str, Any],
) -> Result:
    """Fits a cost model. Without links or moves it has the default terms.

    Args:
        smallest: seconds of the smallest call in each phase.
        about: what the profile says of itself, beside the errors.

    Raises:
        ValueError: times that make no cost model.
    """
    phases, fitted, errors, predicted = {}, {}, {}, {}
    floors = {phase: round(smallest[phase] * UNITS_PER_SECOND) for phase in PHASES}
    for phase in PHASES:
        rows = np.stack([shape.features for shape in fitting.shapes])
        seconds = np.array(fitting.seconds[phase])
        own = seconds > _ABOVE_LATENCY * smallest[phase]
        if own.sum() < _FEWEST_CALLS:
            own[:] = True
        cost = phases[phase] = fit_phase(rows[own], seconds[own])
        fitted[phase] = PredictionError.of(predict(cost, rows, floors[phase]), seconds)
        rows = np.stack([shape.features for shape in held_out.shapes])
        predicted[phase] = predict(cost, rows, floors[phase])
        errors[phase] = PredictionError.of(predicted[phase], np.array(held_out.seconds[phase]))
    # One floor for both phases; the smaller keeps its promise in each.
    model = CostModel(heads, phases["forward"], phases["backward"], launch=min(floors.values()))
    model = replace(model, linear_rate=fitting.linear_rate)
    exchange = {}
    for kind, link in links.items():
        try:
            fitted_link = fit_transfer(np.array(link.sizes), np.array(link.seconds))
        except ValueError as error:  # a link that others use too
            exchange[kind] = f"not usable: {error}; {_DEFAULT_LINKS[kind]}"
            continue
        terms: dict[str, Any] = dict(zip(LINKS[kind], fitted_link, strict=True))
        model = replace(model, **terms)
        predictions = model.transfer_seconds(link.held_out_sizes, between_nodes=kind == _BETWEEN)
        off = PredictionError.of(predictions, np.array(link.held_out_seconds))
        exchange[kind] = f"measured over {link.ranks} ranks; error of sizes held out: {off}"
    for kind in LINKS:
        exchange.setdefault(kind, f"not measured ({_TO_MEASURE[kind]}); {_DEFAULT_LINKS[kind]}")
    if moves is not None:
        # Rows went half of all ranks further: to other nodes, where there are as many ranks on each.
        forward, backward = (_moving(model, moves, phase, between_nodes=_BETWEEN in links) for phase in PHASES)
        model = replace(model, moving_forward=forward, moving_backward=backward)
    about = {
        **about,
        "rounds": fitting.rounds,
        "error of calls held out": {phase: str(errors[phase]) for phase in PHASES},
        "error of calls fitted": {phase: str(fitted[phase]) for phase in PHASES},
        **{f"exchange {kind}": text for kind, text in exchange.items()},
        "moving rows": _NOT_MOVED if moves is None else f"measured over {moves.ranks} ranks",
        "ms of shapes, forward and backward": _rows(fitting),
        "ms of shapes held out": _rows(held_out),
    }
    if moves is not None:
        layers = zip(
            *(moves.messages[phase] for phase in PHASES), *(moves.seconds[phase] for phase in PHASES), strict=True
        )
        about["ms more of layers whose rows move, forward and backward"] = [
            f"{m}, {n} messages: {forward * 1e3:.4f} {backward * 1e3:.4f}" for m, n, forward, backward in layers
        ]
    for kind, link in links.items():
        pairs = zip((*link.sizes, *link.held_out_sizes), (*link.seconds, *link.held_out_seconds), strict=True)
        about[f"ms of bytes each way {kind}"] = [f"{size}: {seconds * 1e3:.4f}" for size, seconds in sorted(pairs)]
    return Result(Profile(setting, model, about), fitted, errors, held_out, predicted)


def _moving(model: CostModel, moves: Moves, phase: Phase, *, between_nodes: bool) -> MovingCost:
    """What moving rows costs beside the transfers, which nothing covers in layers as short as these."""
    transfers = [
        sum(model.transfer_seconds(size, between_nodes=between_nodes) for size in both) for both in moves.sizes[phase]
    ]
    return fit_moving(moves.messages[phase], np.array(moves.seconds[phase]) - transfers)


def _rows(measured: Measured) -> list[str]:
    columns = zip(measured.shapes, *(measured.seconds[phase] for phase in PHASES), strict=True)
    return [f"{s.name}: {forward * 1e3:.4f} {backward * 1e3:.4f}" for s, forward, backward in columns]
