# SPDX-License-Identifier: Apache-2.0
"""What a step takes: its matrix products and element-wise work, attention and its exchange as training's planner has
them, ZeRO's traffic and the optimizer.

A layer's phase is described by a :class:`Load`, whoever spreads attention; a step is so many of them, the output layer
and what comes at its end. One number in it was fitted to measured steps, :data:`OTHER`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

import numpy as np

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import PHASES, UNITS_PER_SECOND, CostModel, Phase
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import SERVER, home_tasks, task_costs
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.scheduler.worth import (
    IN_TWO,
    LINEAR_WORK,
    PLAIN_HOST,
    SEARCH,
    SEARCH_SEGMENT,
    PlanOptions,
    Worth,
    nic_seconds,
    seconds_in_two,
)
from deepspeed_distca.simulator.model import Model

#: Seconds for each of matrix products that are neither these, at their rate, nor element-wise work, the loss or
#: the optimizer. Fitted to the first of the runs in docs/predict.md, and to nothing else.
OTHER = 0.196
#: Bytes a second of an H200's memory, by its data sheet.
MEMORY_RATE = 4.8e12
#: Bytes of an H200's memory, by its data sheet, and the share that stays free where `keep_attention` is left out.
MEMORY, FREE = 141e9, 0.15
#: Bytes that the optimizer moves for each parameter that it keeps: torch's AdamW, tensor by tensor in fp32, and
#: DeepSpeed's casts, norm and scaling of gradients around it.
OPTIMIZER_BYTES = 104


@dataclass(frozen=True)
class Training:
    """What is trained on what.

    Attributes:
        model: see there.
        cost: for the model's heads.
        options: of planning, with the nodes of all ranks that train together.
        checkpointing: every layer's forward is computed a second time; by the plugin without its attention.
        liger: norms, rotary embeddings, SwiGLU and the loss are Liger's kernels.
        zero: stage of ZeRO, 0 to 3.
        stages: of the pipeline, each with as many layers.
    """

    model: Model
    cost: CostModel
    options: PlanOptions
    checkpointing: bool = False
    liger: bool = False
    zero: int = 1
    stages: int = 1

    @property
    def replica_nodes(self) -> Topology | None:
        """The nodes of a stage's ranks, where all stages have the same; None is one node."""
        if self.options.nodes is None or self.stages == 1:
            return self.options.nodes
        nodes = self.options.nodes.nodes
        size = len(nodes) // self.stages
        alike = {Topology.of(nodes[at : at + size]) for at in range(0, len(nodes), size)}
        return alike.pop() if len(alike) == 1 else None

    def linear(self, phase: Phase) -> float:
        """Seconds of a layer for a token, beside core attention; in backward with the forward that is repeated."""
        seconds = (1 + OTHER) * self.cost.linear_seconds(self.model.layer_flops * LINEAR_WORK[phase])
        seconds += self.model.element_bytes(phase, self.liger) / MEMORY_RATE
        return seconds + (self.linear("forward") if self.again(phase) else 0.0)

    def output(self) -> float:
        """Seconds of the output layer and the loss for a token, forward and backward."""
        flops = self.model.output_flops * sum(LINEAR_WORK.values())
        return (1 + OTHER) * self.cost.linear_seconds(flops) + self.model.loss_bytes(self.liger) / MEMORY_RATE

    def again(self, phase: Phase) -> bool:
        """Whether a layer's forward is part of the phase a second time."""
        return self.checkpointing and phase == "backward"

    def host(self, phase: Phase) -> float:
        """Seconds that the host takes for a phase of a layer in which nothing moves."""
        return PLAIN_HOST[phase] + (PLAIN_HOST["forward"] if self.again(phase) else 0.0)

    def node_size(self, ranks: int) -> int:
        """Ranks of a node."""
        return len(self.options.nodes.servers[0]) if self.options.nodes else ranks

    def gathered(self, size: float, ranks: int) -> float:
        """Seconds until each of so many consecutive ranks has `size` bytes, of which each held an equal part: links
        within a node carry all of it, and the NICs of a node together bring what others hold once. The same the other
        way, where parts are summed."""
        node = min(self.node_size(ranks), ranks)
        nodes = -(-ranks // node)
        near = self.cost.transfer_seconds(int(size * (ranks - 1) / ranks))
        far = self.cost.transfer_seconds(int(size * (nodes - 1) / nodes / node), between_nodes=True)
        return float(max(near, far))

    def zero_layer(self, phase: Phase, ranks: int) -> float:
        """Seconds of ZeRO-3's traffic under a layer's phase: parameters are gathered, gradients are scattered. (It is
        not for pipelines.)"""
        if self.zero < 3:
            return 0.0
        return (1 if phase == "forward" else 2) * self.gathered(2 * self.model.layer_parameters, ranks)

    def end(self, ranks: int) -> float:
        """Seconds of what comes at a step's end: gradients and parameters of ZeRO 0 to 2, and the optimizer."""
        replicas, mine = ranks // self.stages, self.model.parameters / self.stages
        moved = 0.0 if self.zero == 3 else 2 * self.gathered(2 * mine, replicas)
        return moved + OPTIMIZER_BYTES * mine / (replicas if self.zero else 1) / MEMORY_RATE

    @property
    def overlap(self) -> Literal["local_first", "ping_pong"]:
        """The plugin's `overlap`, where it is left out: two nano-batches over nodes, but not of hybrid models, where
        the second one would lack the first one's states."""
        return "local_first" if self.options.nodes is None or self.model.no_attention else "ping_pong"

    def kept(self, ranks: int, tokens: int) -> int:
        """Of how many layers the plugin keeps attention under checkpointing, where `keep_attention` is left out: as
        many as an H200 has memory for. Pipelines keep that of all.

        Args:
            tokens: of the rank with the most of them.
        """
        layers = self.model.attention_layers
        if not self.checkpointing or self.stages > 1:
            return layers
        room = (1 - FREE) * MEMORY - self.memory(ranks, tokens, kept=0)
        return max(0, min(layers, int(room // (tokens * self.model.heads.return_bytes))))

    def memory(self, ranks: int, tokens: int, *, kept: int, in_flight: int = 1) -> float:
        """Bytes of the fullest rank, an estimate: weights, gradients and the optimizer's states, what layers save for
        backward, and what one layer's backward or the logits need.

        Args:
            tokens: of a micro-batch.
            kept: of how many layers checkpointing keeps attention's results.
            in_flight: micro-batches whose layers wait for their backward.
        """
        model, mine, replicas = self.model, self.model.parameters / self.stages, ranks // self.stages
        parts = [2 / replicas if self.zero >= stage else 2 for stage in (3, 2)]  # weights and gradients, in bf16
        states = mine * (sum(parts) + 12 / (replicas if self.zero else 1))
        saved, heads = model.saved_bytes(self.liger), model.heads
        layer: float = saved
        if self.checkpointing:
            layer = heads.element_size * model.hidden + kept / model.layers * heads.return_bytes
        layers = model.layers / self.stages * layer * in_flight + (saved if self.checkpointing else 0)
        gathered = 4 * model.layer_parameters if self.zero == 3 else 0  # a layer's, and the next one's
        return states + gathered + tokens * (layers + model.workspace_bytes(self.liger))


@dataclass(frozen=True)
class Load:
    """One phase of one layer, or more of one kind, on all ranks.

    Attributes:
        linear, attention: seconds of each rank, float64 [num_ranks].
        exposed: seconds that a rank takes longer for the sake of rows: it waits, or works in two nano-batches, float64
            [num_ranks].
        host: seconds that the host takes.
        below: seconds of traffic under it that nothing shortens.
        sent: bytes of rows that each rank sends in a layer, float64 [num_ranks].
        meets: whether every rank waits for all others in the layer.
        extra: seconds beside the layers of the kind, once.
    """

    linear: np.ndarray
    attention: np.ndarray
    exposed: np.ndarray = field(default_factory=lambda: np.zeros(1))
    host: float = 0.0
    below: float = 0.0
    sent: np.ndarray = field(default_factory=lambda: np.zeros(1))
    meets: bool = False
    extra: float = 0.0

    @property
    def ranks(self) -> np.ndarray:
        """Seconds of each rank where it waits for nobody, float64 [num_ranks]."""
        return np.maximum(self.linear + self.attention + self.exposed, max(self.host, self.below))

    @property
    def seconds(self) -> float:
        """Of the slowest rank."""
        return float(self.ranks.max())


#: By kind of layer, as :attr:`Model.kinds` has them, and phase.
Loads = dict[tuple[int | None, Phase], Load]


def at_home(training: Training, layout: Layout, phase: Phase, kind: int | None) -> np.ndarray:
    """Seconds of each rank's attention where nothing moves, in forward or backward alone, float64 [num_ranks]."""
    loads = np.zeros(layout.num_ranks)
    if kind == 0:
        return loads
    rows = home_tasks(layout, kind)
    np.add.at(loads, rows[:, SERVER], task_costs(rows, training.cost, phase, kind) / UNITS_PER_SECOND)
    return loads


def plain(training: Training, layout: Layout) -> Loads:
    """Every rank computes the attention of its own documents, which are whole."""
    found: Loads = {}
    for kind, phase in product(training.model.kinds, PHASES):
        attention: np.ndarray = at_home(training, layout, phase, kind)
        if training.again(phase):
            attention = attention + at_home(training, layout, "forward", kind)
        found[kind, phase] = _at_rest(training, layout, phase, attention)
    return found


def _at_rest(training: Training, layout: Layout, phase: Phase, attention: np.ndarray, *, in_two: bool = False) -> Load:
    """A phase of a layer in which no rows move, in one or two nano-batches."""
    linear, host = training.linear(phase) * layout.tokens, training.host(phase)
    return Load(
        linear,
        attention,
        exposed=IN_TWO * (linear + attention) if in_two else np.zeros(1),
        host=2 * host if in_two else host,  # it goes through the layer twice
        below=training.zero_layer(phase, layout.num_ranks),
        meets=training.zero == 3,
    )


def planner(
    training: Training, layout: Layout, window: int | None, phase: Phase, *, in_two: bool | None = None
) -> Worth:
    """What plans a phase of the layers of one kind as training does by default.

    Args:
        in_two: whether the micro-batch runs as two nano-batches; None: as the default is.
    """
    # Peer copies, within a node, send results as soon as they are there; over pipelines NCCL carries rows.
    early = training.options.nodes is None and training.stages == 1
    if in_two is None:
        in_two = training.overlap == "ping_pong"
    layers = training.model.windows[window] // training.stages
    return Worth(layout, window, phase, training.cost, training.options, early=early, in_two=in_two, layers=layers)


def plugin(
    training: Training, layout: Layout, phases: tuple[Phase, ...] = PHASES, *, in_two: bool | None = None
) -> Loads:
    """As training plans it by default. Checkpointing repeats attention of layers of which it is not kept, without the
    other nano-batch to hide under.

    Args:
        in_two: whether the micro-batch runs as two nano-batches; None: as the default is, where any row moves.
    """
    found: Loads = {}
    cost, nodes = training.cost, training.options.nodes
    spread = {}
    for window, phase in product(training.model.windows, phases):
        worth = planner(training, layout, window, phase, in_two=in_two)
        spread[window, phase] = worth, *worth.spread(RouteCompiler(layout, worth.home.rows, nodes))
    if in_two is None:
        moves = any(compiler.moves_rows for _, _, compiler in spread.values())
        in_two = moves and training.overlap == "ping_pong"
    for phase in phases if training.model.no_attention else ():
        found[0, phase] = _at_rest(training, layout, phase, np.zeros(layout.num_ranks))
    for (window, phase), (worth, tasks, compiler) in spread.items():
        attention = tasks.loads / UNITS_PER_SECOND
        rest = found[window, phase] = _at_rest(training, layout, phase, attention, in_two=in_two)
        if not compiler.moves_rows:
            continue
        linear, below = rest.linear, rest.below
        flows, sizes = compiler.flows(cost.heads, phase), np.add(*compiler.bytes_between(cost.heads, phase))
        if nodes is not None and below:  # NICs carry ZeRO's traffic beside rows
            below += nic_seconds(cost, flows, layout.num_ranks, nodes)
        if in_two:  # by all of the linear work, of which plans know the layer's products
            waits = seconds_in_two(cost, linear, attention, *flows, nodes=nodes) - (linear + attention).max()
        else:
            linear = np.full_like(linear, linear.max())  # the last to finish it is waited for
            waits = max(worth.seconds(compiler) - attention.max(), 0.0)
        found[window, phase] = Load(
            linear,
            attention,
            exposed=np.full_like(linear, waits),
            host=rest.host + cost.moving_seconds(phase, int(compiler.messages(phase).max())),
            below=below,
            sent=sizes.sum(axis=1),
            meets=True,
            extra=SEARCH + SEARCH_SEGMENT * len(layout.segments),
        )
    layers = training.model.attention_layers
    again = 1 - training.kept(layout.num_ranks, int(layout.tokens.max())) / layers if "backward" in phases else 0.0
    for window in training.model.windows if again else ():
        _, tasks, compiler = spread[window, "forward"]
        load, attention = found[window, "backward"], tasks.loads / UNITS_PER_SECOND
        waits, sent, host = 0.0, np.zeros(1), 0.0
        if compiler.moves_rows:
            whole = planner(training, layout, window, "forward", in_two=False)
            waits = max(whole.seconds(compiler) - attention.max(), 0.0)
            sent = np.add(*compiler.bytes_between(cost.heads, "forward")).sum(axis=1)
            host = float(cost.moving_seconds("forward", int(compiler.messages("forward").max())))
        found[window, "backward"] = replace(
            load,
            attention=load.attention + again * attention,
            exposed=load.exposed + again * waits,
            host=load.host + again * host,
            sent=load.sent + again * sent,
            meets=load.meets or compiler.moves_rows,
        )
    return found


def evened(training: Training, layout: Layout) -> Loads:
    """Perfect balance for nothing: every rank has as many tokens and as much attention, and none travels."""
    found: Loads = {}
    for kind, phase in product(training.model.kinds, PHASES):
        each = np.full(layout.num_ranks, 1.0)
        linear = each * (training.linear(phase) * layout.tokens.mean())
        attention = each * at_home(training, layout, phase, kind).mean()
        found[kind, phase] = Load(
            linear, attention, host=training.host(phase), below=training.zero_layer(phase, layout.num_ranks)
        )
    return found


def seconds(training: Training, loads: Loads, tokens: float) -> float:
    """Of a micro-batch, forward and backward, without the step's end.

    Args:
        tokens: of the rank with the most of them.
    """
    kinds = training.model.kinds
    layers = sum(kinds[kind] * load.seconds + load.extra for (kind, _), load in loads.items())
    return layers + training.output() * tokens


@dataclass(frozen=True)
class Predicted:
    """Seconds of one micro-batch, forward and backward, without the step's end.

    Attributes:
        plain, plugin: of the slowest rank.
        ideal: with attention spread evenly for nothing; checkpointing does not repeat it, as with the plugin.
        balance: largest over mean attention of the ranks, as documents lie.
        moves: whether rows move.
    """

    plain: float
    plugin: float
    ideal: float
    balance: float
    moves: bool


def predict(training: Training, layout: Layout) -> Predicted:
    """A micro-batch without the plugin, with it, and with perfect balance."""
    before, after, ideal = plain(training, layout), plugin(training, layout), evened(training, layout)
    tokens, kinds = layout.tokens.max(), training.model.kinds
    most, mean = (
        sum(kinds[kind] * float(of(load.attention)) for (kind, _), load in before.items()) for of in (np.max, np.mean)
    )
    return Predicted(
        seconds(training, before, tokens),
        seconds(training, after, tokens),
        seconds(training, ideal, layout.tokens.mean()),
        most / mean if mean else 1.0,
        any(load.extra > 0 for load in after.values()),
    )
