# SPDX-License-Identifier: Apache-2.0
"""What a phase of a layer takes, over the links and on the servers there are, and whether moving rows pays.

Everything follows from layout, cost model, options and the kind of exchange, the same on every rank: predicted times
are compared in float64, but with sums and maxima of single numbers only, which every CPU rounds alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.balance import balance
from deepspeed_distca.scheduler.cost_model import UNITS_PER_SECOND, CostModel, Phase, pairs
from deepspeed_distca.scheduler.levels import by_levels
from deepspeed_distca.scheduler.routes import FEWEST_MESSAGES, NOTHING, Flow, RouteCompiler
from deepspeed_distca.scheduler.shares import Shares
from deepspeed_distca.scheduler.tasks import K_END, K_START, Q_END, SERVER, Tasks, home_tasks, task_costs
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.scheduler.weights import even_weights, finishing_weights

#: A layer's linear work in a phase, in forwards of it: backward has gradients of inputs and of weights.
LINEAR_WORK = {"forward": 1, "backward": 2}


#: Seconds that a host takes for a phase of a layer in which nothing moves: the model's code, autograd's, DeepSpeed's.
#: Derived from whole steps: see docs/cost_model.md, "What moving rows costs".
PLAIN_HOST: dict[Phase, float] = {"forward": 2.4e-3, "backward": 4.8e-3}

#: Seconds in which a phase's plan is searched, once for all its layers, and those for each segment: see there.
SEARCH, SEARCH_SEGMENT = 2.2e-3, 8e-6

#: What two nano-batches take more than one micro-batch, as a share of it: twice the launches, matrices of half as many
#: rows. Measured over two H200s: see docs/design.md, "Two nano-batches".
IN_TWO = 0.027

#: Tolerances that are tried where nodes have links of their own, one after another as long as that ends sooner.
_LOOSER = (0.1, 0.4, 0.8)

#: The share of a layer by which the plan that knows no nodes must end sooner than others. It sends a multiple of the
#: bytes over NICs, which others use, too.
_FLAT_GAIN = 0.015

#: And where a looser one would end sooner by this share at least if its transfers took no time. They do: of what that
#: would gain, no more than half came true over the layouts of benchmarks/nodes.py. Two nano-batches hide them.
_PROSPECT = 1 / 16


@dataclass(frozen=True)
class PlanOptions:
    """What planning depends on beside the layout; the same on every rank. See ``DistCAConfig`` for the meanings."""

    tolerance: float
    granularity: int
    max_received_rows: int | None = None
    server_weights: tuple[int, ...] | None = None  # speeds of this rank's servers
    min_gain: float = 0.0  # 0: rows move whatever it costs
    linear_flops: int = 0  # of a layer's forward, for a token
    topology: Topology | None = None  # of this rank's servers; None is one node

    @property
    def nodes(self) -> Topology | None:
        """The topology, where it has several nodes."""
        return None if self.topology is None or self.topology.size <= 1 else self.topology

    def speeds(self, servers: int) -> np.ndarray:
        """Relative speeds of the servers, 1 on average, and 1 where nothing is known: no weights, or a weight of 0."""
        if self.server_weights is None:
            return np.ones(servers)
        weights = np.array(self.server_weights, dtype=np.float64)
        known = weights > 0
        return np.where(known, weights / weights[known].mean(), 1.0)


class Worth:
    """One phase of the layers of one kind, with everything at home and as it may be spread.

    Args:
        layout: where the tokens live.
        window: of the layers.
        phase: which one.
        cost: predicts the seconds of tasks and transfers, and of moving rows at all.
        options: how to plan.
        early: whether results leave as soon as they are there; otherwise once either end has done all its tasks.
        in_two: whether the micro-batch runs as two nano-batches, so that transfers are hidden under the other one's
            work, the layer's linear work with it. Where that is not known it makes no difference here.
        layers: how many there are, over which the time of the search is spread; None: it is not counted.
        rows: ``home_tasks`` of the layout, where they are known.

    Attributes:
        home: the tasks at home.
        weights: by which attention is to be spread over the servers; None is equal parts.
        before: seconds of :meth:`seconds` with everything at home.
        whole: the same with the layer's linear work.
    """

    def __init__(
        self,
        layout: Layout,
        window: int | None,
        phase: Phase,
        cost: CostModel,
        options: PlanOptions,
        *,
        early: bool,
        in_two: bool = False,
        layers: int | None = None,
        rows: np.ndarray | None = None,
    ) -> None:
        self._layout, self._window, self._phase = layout, window, phase
        self._cost, self._options, self._early = cost, options, early
        self._in_two = in_two and options.linear_flops > 0
        if options.nodes is not None and len(options.nodes.nodes) != layout.num_ranks:
            raise ValueError(
                f"topology: must say the node of each of the layout's {layout.num_ranks} servers, got "
                f"{len(options.nodes.nodes)}"
            )
        self._search = (SEARCH + SEARCH_SEGMENT * len(layout.segments)) / layers if layers else 0.0
        rows = home_tasks(layout, window) if rows is None else rows
        loads = np.zeros(layout.num_ranks, dtype=np.int64)
        np.add.at(loads, rows[:, SERVER], self._task_cost(rows))
        self.home = Tasks(rows, loads, loads)
        speeds, passes = options.server_weights, layout.tokens * LINEAR_WORK[phase]
        flops = [options.linear_flops * tokens for tokens in passes.tolist()]
        # With speeds linear work of known size and attention are to end together, and the phase begins with the
        # former. Without, servers are taken to begin attention together; in two they have it all the time, which
        # matters where their linear work differs by more than their attention may.
        linear, equal = [cost.linear_cost(x) for x in flops], (1,) * layout.num_ranks
        uneven = (max(linear) - min(linear)) * layout.num_ranks > options.tolerance * int(loads.sum())
        self._unlike = self._in_two and speeds is None and uneven
        self.weights = speeds
        if self._unlike or (speeds is not None and options.linear_flops):
            rule = even_weights if self._in_two else finishing_weights
            self.weights = rule(speeds or equal, linear, loads.tolist())
        self._speeds = options.speeds(layout.num_ranks)
        self._linear = np.array([cost.linear_seconds(x) for x in flops])  # at speed 1
        self._start = None if speeds is None else self._linear / self._speeds
        attention = loads / UNITS_PER_SECOND / self._speeds
        if self._start is None:
            self.before = float(attention.max())
            self.whole = float(self._linear.max()) + self.before
        else:
            self.before = self.whole = float((self._start + attention).max())

    def spread(self, at_home: RouteCompiler) -> tuple[Tasks, RouteCompiler]:
        """The tasks as they are to be computed, compiled: :attr:`home` itself where moving rows does not pay.

        Args:
            at_home: compiled from the tasks at home.
        """
        # Where documents continue on other ranks rows are exchanged anyway.
        frugal = self._frugal and not at_home.moves_rows
        if frugal and self.stays():
            return self.home, at_home
        tolerance = self.tolerance() if frugal else self._options.tolerance
        tasks, compiler = self._spread(tolerance, at_home)
        if self._unlike and self.takes(compiler) > self._without_transfers(tolerance):
            # Links may carry less than goes to a server with little linear work.
            weights, self.weights = self.weights, None
            other = self._spread(tolerance, at_home)
            if self.takes(other[1]) < self.takes(compiler):
                tasks, compiler = other
            else:
                self.weights = weights
        if not frugal or not compiler.moves_rows:
            return tasks, compiler
        messages = int(compiler.messages(self._phase).max())
        return (tasks, compiler) if self.pays(self.seconds(compiler), messages) else (self.home, at_home)

    def _spread(self, tolerance: float, at_home: RouteCompiler) -> tuple[Tasks, RouteCompiler]:
        if self._options.nodes is not None:
            return self._over_nodes(self._options.nodes, tolerance, at_home)
        tasks = self._balanced(tolerance)
        return tasks, RouteCompiler(self._layout, tasks.rows)

    def _over_nodes(self, nodes: Topology, tolerance: float, at_home: RouteCompiler) -> tuple[Tasks, RouteCompiler]:
        """Of some ways to balance, the one that ends first; or all at home, where that does and rows have to be worth
        it. Links between nodes may carry less than balance asks for: then less of it is tried, too."""
        best: list[tuple[float, Tasks, RouteCompiler]] = []

        def weigh(tasks: Tasks | None, gain: float = 0.0) -> float:
            if tasks is None:
                return math.inf
            compiler = at_home if tasks is self.home else RouteCompiler(self._layout, tasks.rows, nodes)
            takes = self.takes(compiler)
            if not best or takes < (1 - gain) * best[0][0]:
                best[:] = [(takes, tasks, compiler)]
            return takes

        def has_prospects(allowed: float, gain: float = 0.0) -> bool:
            return not best or self._without_transfers(allowed) < (1 - gain) * best[0][0]

        if self._frugal:
            weigh(self.home)
        allowed = tolerance
        found = weigh(self._by_levels(allowed, nodes))
        for granules in (1, 2) if self._frugal else ():
            # A granule of a long document may be more than the tolerance, and each level may leave one.
            if found == math.inf:
                allowed = tolerance + granules * self.granule()
                found = weigh(self._by_levels(allowed, nodes))
        if has_prospects(tolerance, _FLAT_GAIN):
            weigh(self._balanced(tolerance), _FLAT_GAIN)
        prospect = 0.0 if self._in_two else _PROSPECT
        for looser in _LOOSER if self._frugal else ():
            if looser > allowed and has_prospects(looser, prospect):
                before, found = found, weigh(self._by_levels(looser, nodes))
                if found >= before < math.inf:
                    break
        _, tasks, compiler = best[0]
        return tasks, compiler

    def _by_levels(self, tolerance: float, nodes: Topology) -> Tasks | None:
        if self._options.max_received_rows is not None or self._layout.has_trees or len(self._layout.contexts):
            return None
        return by_levels(
            self._layout,
            self._cost,
            nodes,
            phase=self._phase,
            tolerance=tolerance,
            granularity=self._options.granularity,
            window=self._window,
            server_weights=self.weights,
        )

    def _balanced(self, tolerance: float) -> Tasks:
        return balance(
            self._layout,
            self._cost,
            phase=self._phase,
            window=self._window,
            tolerance=tolerance,
            granularity=self._options.granularity,
            max_received_rows=self._options.max_received_rows,
            server_weights=self.weights,
        )

    @property
    def _frugal(self) -> bool:
        """Whether rows have to be worth it. A server of weight 0 computes nothing, whatever that costs."""
        return self._options.min_gain > 0 and 0 not in (self._options.server_weights or ())

    def stays(self) -> bool:
        """Whether the sums alone say that moving rows does not pay, where none has to travel: nothing is searched."""
        return self._frugal and not self.pays(self.least(), FEWEST_MESSAGES[self._phase])

    def tolerance(self) -> float:
        """Of a balance that is to pay: the one given, or half a granule of the longest document where that is more
        than twice as much, in small micro-batches. There one cut comes as near as any, and further ranges that make up
        for what is left cost more, in messages and calls of the kernel, than they save. A tolerance of 0 is kept.
        """
        half = self.granule() / 2
        return half if half > 2 * self._options.tolerance > 0 else self._options.tolerance

    def granule(self) -> float:
        """What the last granule of the longest document takes, as a share of the mean load: no plan by levels can be
        relied on to come nearer to balance."""
        rows = self.home.rows
        ends = rows[:, K_END] - rows[:, K_START] if self._layout.has_trees else rows[:, Q_END]
        last = int(ends.max(initial=0))
        terms, granule = self._cost.phase(self._phase), min(last, self._options.granularity)
        cost = terms.pair * pairs(last - granule, last, self._window) + terms.query_row * granule
        total = int(self.home.loads.sum())
        return cost * len(self.home.loads) / total if total else 0.0

    def seconds(self, compiler: RouteCompiler) -> float:
        """Predicted seconds of one layer's phase with its transfers, without what the host does for them
        (:meth:`moved`). With speeds it begins with the linear work."""
        at_home, away = (load / UNITS_PER_SECOND / self._speeds for load in compiler.loads(self._task_cost))
        return self._seconds(at_home, away, *compiler.flows(self._cost.heads, self._phase))

    def _seconds(self, at_home: np.ndarray, away: np.ndarray, out: Flow, back: Flow) -> float:
        """Arguments: see :func:`phase_seconds`."""
        nodes = self._options.nodes
        if self._in_two:
            linear = self._linear / self._speeds
            return (
                seconds_in_two(self._cost, linear, at_home + away, out, back, nodes=nodes) - self.whole + self.before
            )
        return phase_seconds(self._cost, at_home, away, out, back, early=self._early, start=self._start, nodes=nodes)

    def takes(self, compiler: RouteCompiler) -> float:
        """Predicted seconds of one layer's phase, its linear work with it: the later of what device and host take."""
        if not compiler.moves_rows:
            return self.whole
        return max(self.moved(self.seconds(compiler), int(compiler.messages(self._phase).max())))

    def _without_transfers(self, tolerance: float) -> float:
        """What :meth:`takes` would be of a plan that moves no more than the tolerance asks for, and over links that
        take no time: a server gives away what exceeds its limit."""
        loads = self.home.loads.tolist()
        limits = Shares(self.weights, len(loads), tolerance).limits(sum(loads))
        kept = np.array([min(load, limit) for load, limit in zip(loads, limits, strict=True)], dtype=np.int64)
        seconds = self._seconds(kept / UNITS_PER_SECOND / self._speeds, np.zeros(len(kept)), NOTHING, NOTHING)
        return max(self.moved(seconds, 0))

    def least(self) -> float:
        """Seconds that :meth:`seconds` of no plan can be below."""
        linear = self._linear.tolist() if self._unlike or self._start is not None else [0.0]
        work = int(self.home.loads.sum()) / UNITS_PER_SECOND + math.fsum(linear)
        return work / math.fsum(self._speeds.tolist()) - (max(linear) if self._start is None else 0.0)

    def least_in_two(self) -> float:
        """Seconds that the phase, its linear work with it, cannot be below as two nano-batches: of the device, with
        attention where there is least to do, and of the host."""
        work = int(self.home.loads.sum()) / UNITS_PER_SECOND + math.fsum(self._linear.tolist())
        device = max(work / math.fsum(self._speeds.tolist()), float(self._linear.max()))
        return max((1 + IN_TWO) * device, 2 * PLAIN_HOST[self._phase])

    def moved(self, seconds: float, messages: int) -> tuple[float, float]:
        """Seconds of a layer's phase, its linear work with it, in which rows move: the device's and the host's.

        Args:
            seconds: see :meth:`seconds`.
            messages: of the rank with the most of them.
        """
        device, moving = self.whole - self.before + seconds, self._cost.moving_seconds(self._phase, messages)
        if not self._options.linear_flops:
            return device + moving, 0.0  # how far the host is ahead is not known
        return device, (1 + self._in_two) * (PLAIN_HOST[self._phase] + moving)  # in two it goes through it twice

    def pays(self, seconds: float, messages: int) -> bool:
        """Whether moving rows saves at least the share ``min_gain`` of the phase: a step takes as long as the later of
        its device and its host, and begins with the search for the plan (docs/design.md, "When rows move"). Arguments:
        see :meth:`moved`."""
        saved = self.whole - max(self.moved(seconds, messages)) - self._search
        return saved >= self._options.min_gain * self.whole

    def _task_cost(self, rows: np.ndarray) -> np.ndarray:
        return task_costs(rows, self._cost, self._phase, self._window)


def two_pay(phases: Iterable[tuple[Worth, int]], min_gain: float) -> bool:
    """Whether phases may be shorter as two nano-batches than whole and at home, all together and by their sums alone:
    by the share `min_gain` at least. With 0 rows move whatever it costs.

    Args:
        phases: with the number of layers of each.
    """
    whole = two = 0.0
    for worth, layers in phases:
        whole += layers * worth.whole
        two += layers * worth.least_in_two()
    return min_gain <= 0 or whole - two >= min_gain * whole


def phase_seconds(
    cost: CostModel,
    at_home: np.ndarray,
    away: np.ndarray,
    out: np.ndarray | Flow,
    back: np.ndarray | Flow,
    *,
    early: bool,
    start: np.ndarray | None = None,
    nodes: Topology | None = None,
) -> float:
    """Predicted seconds from the start of one layer's dispatch until the last rank has its results.

    Servers have something to do as long as they have tasks: those at home until rows are there, then those in the
    workspace first. What a transfer takes is what its busiest end takes for all it sends or receives over links of
    its kind: those within nodes, or those between them.

    Args:
        cost: rate and latency of transfers.
        at_home, away: seconds of each server's tasks in place and in its workspace, float64 [num_ranks].
        out, back: bytes [sender, receiver] of the dispatch and of the return, or their flows.
        early: results leave as soon as they are there; otherwise once either end has done all its tasks.
        start: seconds after which each server has done the linear work in front of its dispatch, float64
            [num_ranks]: its tasks begin then, and its rows leave then. The phase begins with that work. None: all
            servers begin at once.
        nodes: of the servers; None is one node.
    """
    begin = np.zeros(len(at_home)) if start is None else start
    there = begin.copy()  # when a server can begin with its workspace
    sender, receiver, seconds = _transfers(cost, out, len(at_home), nodes)
    np.maximum.at(there, receiver, begin[sender] + seconds)
    ready = there + away
    done = np.maximum(begin + at_home + away, np.where(away > 0, ready, 0.0))
    sender, receiver, seconds = _transfers(cost, back, len(at_home), nodes)
    leave = ready[sender] if early else np.maximum(done[sender], done[receiver])
    return float(max(done.max(initial=0.0), (leave + seconds).max(initial=0.0)))


def seconds_in_two(
    cost: CostModel,
    linear: np.ndarray,
    attention: np.ndarray,
    out: np.ndarray | Flow,
    back: np.ndarray | Flow,
    *,
    nodes: Topology | None = None,
) -> float:
    """Predicted seconds of one layer's phase, its linear work with it, of a micro-batch that runs as two nano-batches.

    Half of a rank's rows travel under half of its linear work or of its tasks, and so do their results; what takes
    longer than that is waited for. A transfer takes what its busiest end takes, as in :func:`phase_seconds`.

    Args:
        linear, attention: seconds of each server, float64 [num_ranks].
        out, back: bytes [sender, receiver] of the dispatch and of the return, or their flows.
    """
    waits = np.zeros(len(linear))
    for size in (out, back):
        sender, receiver, seconds = _transfers(cost, size, len(linear), nodes)
        longest = np.zeros(len(linear))
        np.maximum.at(longest, sender, seconds)
        np.maximum.at(longest, receiver, seconds)
        for cover in (linear, attention):
            waits += np.maximum(longest - cover, 0.0) / 2
    return (1 + IN_TWO) * float((linear + attention + waits).max(initial=0.0))


def nic_seconds(cost: CostModel, flows: Iterable[Flow], servers: int, nodes: Topology) -> float:
    """Seconds that the busiest NIC takes for all that crosses nodes, one flow after another."""
    sender, receiver, size = (np.concatenate(column) for column in zip(*(flow[:3] for flow in flows), strict=True))
    far = nodes.node_of[sender] != nodes.node_of[receiver]
    return float(_busier(cost, Flow(sender, receiver, np.where(far, size, 0)), servers, nodes).max(initial=0.0))


def _transfers(
    cost: CostModel, size: np.ndarray | Flow, servers: int, nodes: Topology | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sender, receiver and seconds of each transfer."""
    if isinstance(size, np.ndarray):
        sender, receiver = np.nonzero(size)
        size = Flow(sender, receiver, size[sender, receiver])
    sender, receiver, moved, late = size
    far = None if nodes is None else nodes.node_of[sender] != nodes.node_of[receiver]
    if far is None or not far.any():
        return sender, receiver, _busier(cost, size, servers)
    near = _busier(cost, size._replace(size=np.where(far, 0, moved)), servers)
    if late is None:
        across = _busier(cost, size._replace(size=np.where(far, moved, 0)), servers, nodes)
        return sender, receiver, np.where(far, across, near)
    first, then = (
        np.where(
            far & which,
            _busier(cost, size._replace(size=np.where(far & which, moved, 0)), servers, nodes),
            0.0,
        )
        for which in (~late, late)
    )
    arrived = np.zeros(servers)
    np.maximum.at(arrived, receiver, first)
    return sender, receiver, np.where(far, np.where(late, arrived[sender] + then, first), near)


def _busier(cost: CostModel, flow: Flow, servers: int, between: Topology | None = None) -> np.ndarray:
    """Seconds of the busier end of each transfer for all it sends or receives over one kind of links.

    Args:
        between: nodes, where the transfers cross them. NCCL lets what crosses leave by the NIC of the receiver's place
            in the sender's node ("PXN"), where GPUs of a node reach each other's NICs, else by the sender's own: it
            takes what the later of the two takes.
    """

    def busy(sender: np.ndarray) -> np.ndarray:
        sent, received = (np.zeros(servers, dtype=np.int64) for _ in range(2))
        np.add.at(sent, sender, flow.size)
        np.add.at(received, flow.receiver, flow.size)
        seconds = cost.transfer_seconds(sent, received, between_nodes=between is not None)
        return np.maximum(seconds[sender], seconds[flow.receiver])

    own = busy(flow.sender)
    return own if between is None else np.maximum(own, busy(between.by_place(flow.sender, flow.receiver)))
