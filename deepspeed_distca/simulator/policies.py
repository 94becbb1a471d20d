# SPDX-License-Identifier: Apache-2.0
"""Who attends what, by the ways that there are: the same documents, and what a step of each takes.

Documents lie in contexts, which lie on one rank or on several that follow on each other. Plain data parallelism shares
a context's documents among its ranks, if they are several; the others choose the best degree, once for all
micro-batches, as a run does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from deepspeed_distca.layout import DOCUMENT, LENGTH, RANK, Layout
from deepspeed_distca.scheduler.cost_model import PHASES, UNITS_PER_SECOND, Phase, pairs
from deepspeed_distca.simulator.pipeline import one_forward_one_backward, same_phase
from deepspeed_distca.simulator.step import Load, Loads, Training, evened, plugin

PLAIN, DEALT, IDEAL = "packed, plain", "dealt by work", "ideal"
OURS, PLACED = "this plugin", "this plugin, placed"
#: The most tokens of a rank where documents are dealt by work, of the mean: memory for them is the price.
ROOM = 2.0
#: Tokens of a document for each rank below which it is left whole, on one of them.
_LEAST_PART = 256


@dataclass(frozen=True)
class Outcome:
    """What a policy makes of the micro-batches.

    Attributes:
        name: for people to read.
        degree: ranks that share a document, or its heads.
        seconds: of a step; the mean where each micro-batch is one.
        parts: of these, by what they go for; they sum up to it.
        sent: bytes of rows that the mean rank sends in a micro-batch, all layers.
        tokens: of the rank with the most of them.
        memory: of that rank, bytes; an estimate.
        loads: of the first micro-batch.
    """

    name: str
    degree: int
    seconds: float
    parts: dict[str, float]
    sent: float
    tokens: int
    memory: float
    loads: Loads


#: A policy's micro-batches: loads, and the most tokens of a rank.
Made = list[tuple[Loads, int]]


def outcomes(
    training: Training, batches: Sequence[Layout], context: int, *, hidden: bool = False, placed: bool = False
) -> list[Outcome]:
    """All policies over some micro-batches, the ideal last.

    Args:
        batches: layouts of equal tokens on all ranks of a stage.
        context: tokens of a context.
        hidden: whether gathered keys travel under attention, where that is possible; frameworks wait for them.
        placed: the plugin a second time, with documents where its loader would store them.
    """
    ranks, tokens, heads = batches[0].num_ranks, int(batches[0].tokens.max()), training.model.heads.query
    degrees = degrees_of(ranks, tokens, context)
    lie, dealt = partial(in_order, batches), partial(by_work, training, batches)

    def best(
        name: str, divided: Callable[[int], list[Groups] | None], degrees: list[int], *, ulysses: bool = False
    ) -> list[Outcome]:
        """Of a policy that shares documents within groups, with the number of ranks that is best; none where there is
        none."""
        found = []
        for degree in degrees:
            made = [
                (shared(training, groups, degree, ulysses=ulysses, hidden=hidden), _most(groups, degree))
                for groups in divided(degree) or ()
            ]
            if made:
                found.append(outcome(training, name, degree, made, ranks))
        return sorted(found, key=lambda one: one.seconds)[:1]

    return [
        *best(PLAIN, lie, degrees[:1]),
        *best(DEALT, dealt, degrees),
        *best("context parallel", lie, degrees),
        *best("Ulysses", lie, [d for d in degrees if d > 1 and heads % d == 0], ulysses=True),
        _ours(training, OURS, batches),
        *([placed_step(training, batches)] if placed else []),
        outcome(
            training,
            IDEAL,
            1,
            [(evened(training, batch), tokens) for batch in batches],
            ranks,
            kept=training.model.attention_layers,
        ),
    ]


def degrees_of(ranks: int, tokens: int, context: int) -> list[int]:
    """How many ranks may share documents: so many that they hold whole contexts."""
    least = max(1, context // tokens)
    return [d for d in range(least, ranks + 1) if ranks % d == 0 and d % least == 0]


def _ours(training: Training, name: str, batches: Sequence[Layout]) -> Outcome:
    if training.stages > 1:
        return _shared_by_all(training, name, batches)
    made = [(plugin(training, batch), int(batch.tokens.max())) for batch in batches]
    ranks = batches[0].num_ranks
    return outcome(training, name, 1, made, ranks, kept=training.kept(ranks, max(most for _, most in made)))


def placed_step(training: Training, batches: Sequence[Layout]) -> Outcome:
    """The plugin's step of the same documents, where its loader would store them."""
    return _ours(training, PLACED, [_placed(training, batch) for batch in batches])


def _placed(training: Training, batch: Layout) -> Layout:
    """A micro-batch's documents as `GlobalPackedLoader` stores them by default. Over pipelines its ranks are
    replicas, each on several nodes: they are told apart where every stage divides them alike."""
    from deepspeed_distca.data.global_loader.placement import place  # with the loader, which takes torch

    options, windows = training.options, training.model.windows
    return place(
        lengths_of(batch)[0],
        batch.tokens,
        cost=training.cost,
        tolerance=options.tolerance,
        window=max(windows, key=windows.__getitem__),
        min_gain=options.min_gain,
        nodes=training.replica_nodes,
    )


# -- groups of documents ----------------------------------------------------------------------------------------------

#: Lengths of the documents of each.
Groups = list[np.ndarray]


def lengths_of(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of a layout's documents in order, and the rank that has the first token of each, int64 [n] each."""
    lengths = np.bincount(layout.segments[:, DOCUMENT], weights=layout.segments[:, LENGTH]).astype(np.int64)
    _, first = np.unique(layout.segments[:, DOCUMENT], return_index=True)
    return lengths, layout.segments[first, RANK]


def in_order(batches: Sequence[Layout], degree: int) -> list[Groups]:
    """Groups of so many ranks that follow on each other have the documents that lie there."""
    found = []
    for batch in batches:
        lengths, first = lengths_of(batch)
        found.append(np.split(lengths, np.searchsorted(first // degree, np.arange(1, batch.num_ranks // degree))))
    return found


def by_work(training: Training, batches: Sequence[Layout], degree: int) -> list[Groups] | None:
    """Documents whole, by work, to groups of so many ranks; None where a document finds no room. Over a pipeline those
    of all micro-batches of a step, so that micro-batches have groups of like work."""
    documents, groups = [lengths_of(batch)[0] for batch in batches], batches[0].num_ranks // degree
    room = int(ROOM * int(batches[0].tokens.max())) * degree
    if training.stages > 1:
        every = _dealt(training, np.concatenate(documents), groups * len(batches), room, degree)
        return None if every is None else [every[i : i + groups] for i in range(0, len(every), groups)]
    found = [_dealt(training, lengths, groups, room, degree) for lengths in documents]
    whole = [dealt for dealt in found if dealt is not None]
    return whole if len(whole) == len(found) else None


def _dealt(training: Training, lengths: np.ndarray, groups: int, room: int, degree: int) -> Groups | None:
    """The document with the most work next, to the group with the least that has room, groups of the most work
    first."""
    linear = sum(training.linear(phase) for phase in PHASES) * lengths / degree
    attention = sum(
        attended(training, lengths, phase, window, degree) for window, phase in product(training.model.windows, PHASES)
    )
    model = training.model
    work = linear * len(model.windows) * (model.layers / model.attention_layers) + attention
    load, held = np.zeros(groups), np.zeros(groups, dtype=np.int64)
    found: list[list[int]] = [[] for _ in range(groups)]
    for document in np.argsort(-work, kind="stable").tolist():
        length = int(lengths[document])
        group = int(load.argmin())
        if held[group] + length > room:
            fits = held + length <= room
            if not fits.any():
                return None
            group = int(np.where(fits, load, np.inf).argmin())
        found[group].append(length)
        load[group] += work[document]
        held[group] += length
    return [np.array(found[group], dtype=np.int64) for group in np.argsort(-load, kind="stable")]


def _most(groups: Groups, degree: int) -> int:
    return max(-(-int(group.sum()) // degree) for group in groups)


# -- loads of groups --------------------------------------------------------------------------------------------------


def attended(training: Training, lengths: np.ndarray, phase: Phase, window: int | None, degree: int) -> np.ndarray:
    """Seconds of each document's attention on each of the ranks that share it, a head and a mirrored tail on each;
    short documents are whole on one of them, and as many on all."""
    cost = training.cost
    whole = cost.cost(np.zeros_like(lengths), lengths, np.zeros_like(lengths), window, phase) / degree
    if degree == 1:
        return whole / UNITS_PER_SECOND
    terms = cost.phase(phase)
    keys = lengths * (1 + 1 / (2 * degree))
    if window is not None:
        keys = np.minimum(keys, lengths / degree + 2 * window)
    area = 1.0 * terms.pair * pairs(np.zeros_like(lengths), lengths, window)
    parts = (area + terms.query_row * lengths) / degree + terms.key_row * keys + 2 * terms.task
    return np.where(lengths < _LEAST_PART * degree, whole, parts) / UNITS_PER_SECOND


def shared(training: Training, groups: Groups, degree: int, *, ulysses: bool = False, hidden: bool = False) -> Loads:
    """Groups of so many ranks that share each of their documents evenly.

    Args:
        groups: lengths of the documents of each.
        ulysses: by heads, which all travel before and after attention; else by queries, for which keys are gathered,
            and their gradients summed.
    """
    found: Loads = {}
    ranks, heads = len(groups) * degree, training.model.heads
    rows = np.array([int(group.sum()) for group in groups])  # of each group
    kv_bytes = heads.kv_bytes * max(1, degree // heads.key_value)  # every rank has a key head at least
    for window, phase in product(training.model.kinds, PHASES):
        passes: list[Phase] = ["forward", phase] if training.again(phase) else [phase]
        if window == 0:  # without attention
            passes = []
        attention, exposed, sent = (np.zeros(len(groups)) for _ in range(3))
        for one in passes:
            work = np.array([attended(training, g, one, window, 1 if ulysses else degree).sum() for g in groups])
            attention += work / degree if ulysses else work
            if degree == 1:
                continue
            if ulysses:
                sizes = [heads.q_bytes + kv_bytes, heads.out_bytes]
                exposed += [sum(_all_to_all(training, r / degree * size, degree) for size in sizes) for r in rows]
                sent += rows / degree * sum(sizes) * (degree - 1) / degree
            else:
                times = 1 if one == "forward" else 2
                gathered = np.array([times * training.gathered(r * heads.kv_bytes, degree) for r in rows])
                exposed += np.maximum(gathered - work, 0) if hidden else gathered
                sent += times * rows / degree * heads.kv_bytes * (degree - 1)
        found[window, phase] = Load(
            np.repeat(training.linear(phase) * rows / degree, degree),
            np.repeat(attention, degree),
            np.repeat(exposed, degree),
            host=training.host(phase),
            below=training.zero_layer(phase, ranks),
            sent=np.repeat(sent, degree),
            meets=training.zero == 3,
        )
    return found


def _all_to_all(training: Training, size: float, degree: int) -> float:
    """Seconds in which each of so many consecutive ranks sends `size` bytes, a part to each."""
    node = min(training.node_size(degree), degree)
    near = training.cost.transfer_seconds(int(size * (node - 1) / degree))
    far = training.cost.transfer_seconds(int(size * (degree - node) / degree), between_nodes=True)
    return float(max(near, far))


# -- steps ------------------------------------------------------------------------------------------------------------

#: What a step's seconds go for.
PARTS = ("linear layers", "attention", "uneven work", "exchange", "host, ZeRO", "pipeline", "output", "optimizer")


def outcome(training: Training, name: str, degree: int, made: Made, ranks: int, *, kept: int = 0) -> Outcome:
    """A policy's step from its micro-batches.

    Args:
        ranks: of a stage.
        kept: of how many layers checkpointing keeps attention's results.
    """
    stages, count = training.stages, len(made)
    tokens, end = max(most for _, most in made), training.end(ranks * stages)
    split = [_parts_of(training, loads, most) for loads, most in made]
    parts = {key: sum(one[key] for one in split) / (count if stages == 1 else stages) for key in PARTS}
    if stages > 1:
        parts |= {"uneven work": 0.0, "host, ZeRO": 0.0}
        # The ideal has ticks in which some stages have no linear layers, but all of them attention.
        idle = (stages - 1) * (parts["linear layers"] / count + parts["output"])
        parts["pipeline"] = idle if name == IDEAL else one_forward_one_backward(training, made) - sum(parts.values())
    parts["optimizer"] = end
    kinds = training.model.kinds
    sent = sum(float(load.sent.mean()) * kinds[kind] for loads, _ in made for (kind, _), load in loads.items())
    memory = training.memory(ranks * stages, tokens, kept=kept, in_flight=min(count, stages))
    return Outcome(name, degree, sum(parts.values()), parts, sent / count / stages, tokens, memory, made[0][0])


def _parts_of(training: Training, loads: Loads, tokens: int) -> dict[str, float]:
    """Seconds of a micro-batch by what they go for: the mean rank's work, the busiest one's beside it, rows, and what
    host or ZeRO's traffic take longer."""
    parts = dict.fromkeys(PARTS, 0.0)
    kinds = training.model.kinds
    for (kind, _), load in loads.items():
        layers, work = kinds[kind], load.linear + load.attention
        busy = float((work + load.exposed).max())
        parts["linear layers"] += layers * float(load.linear.mean())
        parts["attention"] += layers * float(load.attention.mean())
        parts["uneven work"] += layers * float(work.max() - work.mean())
        parts["exchange"] += layers * (busy - float(work.max())) + load.extra
        parts["host, ZeRO"] += layers * (load.seconds - busy)
    parts["output"] = training.output() * tokens
    return parts


def _shared_by_all(training: Training, name: str, batches: Sequence[Layout]) -> Outcome:
    """The plugin's step over a pipeline."""
    ranks, tokens, stages = batches[0].num_ranks, int(batches[0].tokens.max()), training.stages
    total, found, sent, loads = same_phase(training, batches)
    layers = training.model.layers * sum(map(training.linear, PHASES))
    own = {
        "linear layers": layers * tokens * len(batches) / stages,
        "output": training.output() * tokens * len(batches),
    }
    parts = {**dict.fromkeys(PARTS, 0.0), **found, **own, "optimizer": training.end(ranks * stages)}
    parts["output"] /= stages
    parts["pipeline"] = total + parts["optimizer"] - sum(parts.values())
    memory = training.memory(
        ranks * stages, tokens, kept=training.model.attention_layers, in_flight=min(len(batches), 2 * stages - 1)
    )
    return Outcome(name, 1, sum(parts.values()), parts, sent, tokens, memory, loads)
