# SPDX-License-Identifier: Apache-2.0
"""The attention server of one rank: agrees on layouts, plans micro-batches, computes attention, keeps statistics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from deepspeed_distca.attention_server.coordination.agreement import (
    Agreement,
    GlobalMicroBatch,
    MicroBatch,
    fingerprint,
)
from deepspeed_distca.attention_server.coordination.watch import Watch
from deepspeed_distca.attention_server.exchange.base import Exchange
from deepspeed_distca.attention_server.kernels import Kernel, select_kernel
from deepspeed_distca.attention_server.parts import Parts, crossings, row_cuts, two_parts
from deepspeed_distca.attention_server.phase_planner import (
    MicroBatchPlanner,
    PhasePlanner,
    PlannedAhead,
    PlannedPhase,
    PlanOptions,
)
from deepspeed_distca.attention_server.plan_request import PlanRequest
from deepspeed_distca.attention_server.planned_step import KEPT, PlannedStep
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.side_stream import SideStream
from deepspeed_distca.attention_server.statistics import DeviceTimer, StepStatistics, TimedExchange, TimedKernel
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.attention_server.steps import LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import CostModel, Phase
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import home_tasks


class AttentionServer:
    """One rank's share of core attention.

    Args:
        agreement: over all ranks of the loss; plans are made for this rank's group of servers. None: nobody else is
            there to agree with, and no micro-batch can be asked for.
        exchange: over this rank's servers; not used by a single one.
        server: this rank's place among its servers.
        cost: predicts the seconds of tasks.
        options: how to plan.
        windows: the window of each attention layer (None: full causal), one entry per layer.
        kernel: a kernel's name, or None to choose.
        local_first: tasks that stay at home hide the exchange, instead of waiting for it.
        several_groups: other servers plan for themselves. Of micro-batches that every rank can run as two nano-batches
            all are divided then, not only those in which rows move: ranks must go through a model's modules in the
            same order, for the sake of ZeRO-3 and tensor parallelism.
        accumulation_steps: micro-batches of an optimizer step, by which the engine divides the loss.
        ranks: over how many ranks the engine averages gradients.
        step: called for the number of the current optimizer step; statistics start anew when it changes.
        watch: follows where this rank is, and tells the others when it fails.
    """

    def __init__(
        self,
        *,
        agreement: Agreement | None,
        exchange: Exchange,
        server: int,
        cost: CostModel,
        options: PlanOptions,
        windows: Sequence[int | None],
        kernel: str | None,
        local_first: bool,
        accumulation_steps: Callable[[], int],
        ranks: int,
        step: Callable[[], int],
        several_groups: bool = False,
        watch: Watch | None = None,
    ) -> None:
        self._timer = DeviceTimer()
        self._agreement, self._exchange, self._server = agreement, TimedExchange(exchange, self._timer), server
        self._cost, self._granularity = cost, options.granularity
        planner = partial(PhasePlanner, server, cost, options, early=exchange.early)
        self._phase_planners = {two: planner(in_two=two) for two in (False, True)}
        self._planner = self._phase_planners[False]
        self._layers = {window: list(windows).count(window) for window in dict.fromkeys(windows)}
        self._planners = {two: MicroBatchPlanner(one, self._layers) for two, one in self._phase_planners.items()}
        self._kernel_name = kernel
        self._side = SideStream() if local_first else None
        self._accumulation_steps, self._ranks, self._step = accumulation_steps, ranks, step
        self._several_groups, self._watch = several_groups, watch
        self._kernels: dict[tuple, Kernel] = {}
        self._steps: deque[PlannedStep] = deque(maxlen=KEPT)
        self._last: tuple[Layout, PlannedPhase] | None = None
        self._moving = False

    @property
    def stats(self) -> StepStatistics:
        """Statistics of the last step. On a GPU reading them waits for its kernels."""
        measured, statistics = self._timer.seconds, self.planned
        statistics.server_seconds, statistics.exposed_seconds = measured
        return statistics

    @property
    def planned(self) -> StepStatistics:
        """The same as planned, with what was measured in the step before only: never waits for the device."""
        statistics = self._statistics_of(self._steps[-1]) if self._steps else StepStatistics()
        statistics.previous_server_seconds, statistics.previous_exposed_seconds = self._timer.previous
        return statistics

    @property
    def history(self) -> list[StepStatistics]:
        """Of the last steps, what was planned and how long each took of the host's time until the next one began."""
        found = [self._statistics_of(step) for step in self._steps]
        for statistics, (step, later) in zip(found, pairwise(self._steps), strict=False):
            statistics.seconds = later.began - step.began
        return found

    @property
    def last_plan(self) -> tuple[Layout, PlannedPhase] | None:
        """The layout of the last micro-batch that was planned, and its forward by the layers of the first kind."""
        return self._last

    @property
    def moving(self) -> bool:
        """Whether servers exchange rows for the last micro-batch."""
        return self._moving

    @property
    def cost(self) -> CostModel:
        """By which is planned."""
        return self._cost

    def _statistics_of(self, step: PlannedStep) -> StepStatistics:
        return step.statistics(self._server, self._cost, self._planner)

    def planner(self, *, in_two: bool = False) -> MicroBatchPlanner:
        """Plans micro-batches; a copy of it plans ahead in another process.

        Args:
            in_two: those that run as two nano-batches.
        """
        return self._planners[in_two]

    @property
    def kernel(self) -> str | None:
        """Name of the kernel in use, once a layer has run."""
        return next((kernel.name for kernel in self._kernels.values()), None)

    def request(self, given: MicroBatch | Exception, device: torch.device) -> PlanRequest:
        """Tells the other ranks about a training micro-batch. Collective over all ranks, and so is the first
        ``result()`` of what it gives, which comes before the next request. See :meth:`Agreement.gather`.

        Raises:
            RuntimeError: there is nobody to tell.
        """
        if self._agreement is None:
            raise RuntimeError(
                "this server was made without an agreement: give it one, or plan a layout by plan_alone"
            )
        ahead = given.ahead if isinstance(given, MicroBatch) else None
        return PlanRequest(self._agreement.gather(given), partial(self.plan, ahead=ahead), device)

    def plan(
        self, everyone: GlobalMicroBatch, wanted: bool | None = None, *, ahead: PlannedAhead | None = None
    ) -> Iterator[tuple[StepPlan, float]]:
        """Collective over all ranks: the plan of a training micro-batch, and the divisor of its summed loss with which
        the mean over ranks and micro-batches is the mean over all targets.

        Given at once is what forward needs. The second step plans backward, unless the micro-batch runs in two
        nano-batches, and the third hears whether the others have the same: both while the device has the first layers'
        work. All steps give the same.

        Args:
            wanted: see :meth:`PlanRequest.result`.
            ahead: what a loader has planned already.
        """
        layout, two, what = everyone.layout, everyone.in_two, "the plan of a micro-batch"
        planned = self._planned(two, layout, "forward", ahead)
        plan = StepPlan(
            {p.window: LayerPlan.whole(p.part, None, self._exchange, self._side, self._watch) for p in planned},
            self._kernel,
        )
        self._steps[-1].micro_batches += 1
        self._steps[-1].tokens += int(layout.tokens.sum())
        if everyone.step_targets is None:
            divisor = everyone.targets / self._ranks
        else:
            divisor = everyone.step_targets / (self._ranks * self._accumulation_steps())
        given = plan, divisor or 1.0
        self._same(planned, what, wanted)()
        if self._watch is not None:
            self._watch.planned(sum(self._layers.values()))
        if not two:
            self._divide_exchange(plan, planned)
            yield given
        backward = self._planned(two, layout, "backward", ahead)
        for p in backward:
            plan.layers[p.window].backward = Parts.whole(p.part)
        planned += backward
        self._divide_exchange(plan, planned)
        self._moving = any(p.sent.any() for p in planned)
        agreed = self._same(backward, what)
        if two:
            agreed()
            if self._several_groups or self._moving:
                given = replace(plan, halves=self._halves(layout, plan)), given[1]
        yield given
        agreed()

    def _planned(self, two: bool, layout: Layout, phase: Phase, ahead: PlannedAhead | None) -> list[PlannedPhase]:
        start = time.perf_counter()
        planned = self._planners[two].phase(layout, phase, ahead)
        self._note(layout, planned, start)
        return planned

    def _divide_exchange(self, plan: StepPlan, planned: list[PlannedPhase]) -> None:
        """The layers' exchange from now on is the one for all that is planned so far."""
        exchange = self._exchange.for_sizes(np.maximum.reduce([p.largest for p in planned]))
        for layer in plan.layers.values():
            layer.exchange = exchange

    def _same(self, planned: list[PlannedPhase], what: str, wanted: bool | None = None) -> Callable[[], None]:
        """See :meth:`Agreement.same`; nothing where plans are not compared."""
        if self._agreement is None or not planned or len(planned[0].sent) == 1:
            return lambda: None
        return self._agreement.same(fingerprint(*(p.digest for p in planned)), what, wanted)

    def note_kept(self, layers: int) -> None:
        """Core attention of so many layers was kept for recomputation, in a micro-batch of the current step."""
        self._steps[-1].kept_layers = layers

    def plan_tick(
        self,
        phase: Phase,
        kinds: Sequence[tuple[Layout, int | None, int]],
        *,
        note: bool,
        micro_batches: int = 0,
        in_two: bool = False,
    ) -> list[Parts]:
        """This rank's parts of one phase alone, for layers that differ in layout or window. Collective if plans are
        checked. With pipeline stages the ranks of a layout are those that are in the phase at the same time.

        Args:
            kinds: for each kind of layers: the layout, the window, how many layers there are.
            note: whether it goes into the statistics, with that number of micro-batches.
            in_two: its micro-batches run as two nano-batches.
        """
        start = time.perf_counter()
        planner = self._phase_planners[in_two]
        planned = [planner.plan(layout, window, phase, layers) for layout, window, layers in kinds]
        self._same(planned, f"the plan of a {phase} tick")()
        if note:
            self._note(kinds[0][0] if kinds else None, planned, start)
            self._steps[-1].micro_batches += micro_batches
        if not in_two:
            return [Parts.whole(p.part) for p in planned]
        return [self._divider(layout)(p.part, p.window, phase) for p, (layout, *_) in zip(planned, kinds, strict=True)]

    def two_pay(self, ticks: Iterable[tuple[Phase, Layout, int | None, int]]) -> bool:
        """Whether the micro-batches of these ticks are to run as two nano-batches: see :func:`two_pay`."""
        return self._phase_planners[True].two_pay(ticks)

    def step_plan(self, parts: Mapping[int | None, Parts]) -> StepPlan:
        """What layers follow in a tick of forward, by window as :meth:`plan_tick` gave their parts; those of backward
        follow when its tick comes."""
        layers = {
            window: LayerPlan(forward, None, self._exchange, self._side, self._watch)
            for window, forward in parts.items()
        }
        return StepPlan(layers, self._kernel)

    def plan_alone(self, layout: Layout) -> StepPlan:
        """A plan that involves no other rank, for whole documents on this one (evaluation).

        Raises:
            ValueError: a layout of several ranks.
        """
        if layout.num_ranks > 1:
            raise ValueError(
                f"evaluation of a layout over {layout.num_ranks} ranks: documents that continue on other ranks need "
                "training mode; give each rank whole documents"
            )
        plans = {}
        for window in self._layers:
            seen = layout.for_window(window)
            part = RankPlan(RouteCompiler(seen, home_tasks(seen, window)).rank(0))
            plans[window] = LayerPlan.whole(part, part)
        # Not timed: outside the optimizer steps, whose statistics stay as they are.
        return StepPlan(plans, self._untimed)

    def _halves(self, layout: Layout, plan: StepPlan) -> StepPlan:
        """The same plan, divided in time; nobody has to agree on it, since it follows from the layout."""
        divide = self._divider(layout)

        def divided(whole: Parts | None, window: int | None, phase: Phase) -> Parts:
            assert whole is not None  # both phases are planned
            return divide(whole.parts[0].plan, window, phase)

        layers = {
            window: replace(
                layer,
                forward=divided(layer.forward, window, "forward"),
                backward=divided(layer.backward, window, "backward"),
            )
            for window, layer in plan.layers.items()
        }
        return StepPlan(layers, self._kernel)

    def _divider(self, layout: Layout) -> Callable[[RankPlan, int | None, Phase], Parts]:
        """Divides plans of a layout, for a window and a phase."""
        cuts = row_cuts(layout, self._granularity)
        crossed = crossings(layout, cuts)

        def divide(whole: RankPlan, window: int | None, phase: Phase) -> Parts:
            return two_parts(whole.routes, cuts, window, backward=phase == "backward", crossed=crossed)

        return divide

    def _kernel(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> Kernel:
        """Of a layer whose attention begins."""
        if self._watch is not None:
            self._watch.attending()
        return TimedKernel(self._untimed(q, k, v, spec), self._timer)

    def _untimed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> Kernel:
        key = (q.device, q.dtype, q.shape[1:], k.shape[1:], v.shape[1:], spec)
        if key not in self._kernels:
            self._kernels[key] = select_kernel(
                self._kernel_name,
                device=q.device,
                dtype=q.dtype,
                q_heads=q.shape[1],
                kv_heads=k.shape[1],
                head_dim=q.shape[2],
                v_head_dim=v.shape[2],
                spec=spec,
            )
        return self._kernels[key]

    def _note(self, layout: Layout | None, planned: list[PlannedPhase], start: float) -> None:
        """Takes down what was planned, since a time of the host's."""
        number = self._step()
        if not self._steps or self._steps[-1].number != number:
            self._steps.append(PlannedStep(number, start))
            self._timer.reset()
        self._steps[-1].planning_ms += (time.perf_counter() - start) * 1e3
        self._steps[-1].add(planned)
        if layout is not None and planned[0].phase == "forward":
            self._last = layout.for_window(planned[0].window), planned[0]
