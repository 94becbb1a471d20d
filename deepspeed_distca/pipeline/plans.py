# SPDX-License-Identifier: Apache-2.0
"""The attention of one rank in a pipeline, tick by tick: of its own micro-batches and of those that it serves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import torch

from deepspeed_distca.attention_server.coordination.watch import backward_of_layer
from deepspeed_distca.attention_server.kernels import Kernel
from deepspeed_distca.attention_server.parts import Parts
from deepspeed_distca.attention_server.server import AttentionServer
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.attention_server.steps import BackwardSteps, ForwardSteps, Given, LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.huggingface.kept_attention import KeptAttention
from deepspeed_distca.layout import Layout
from deepspeed_distca.pipeline.batches import over_grid
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.ticks import Tick


@dataclass(frozen=True)
class Kind:
    """Attention layers of a tick that have one plan.

    Layer i of every stage runs at the same time: it is *slot* i. Stages may have different numbers of layers, so that
    the last slots are those of some stages only.

    Attributes:
        window: of all of them.
        stages: the stages of the grid that have the slot.
        slots: how many slots are of this kind.
    """

    window: int | None
    stages: tuple[int, ...]
    slots: int


class Slots:
    """Which plan each slot of a tick follows.

    Args:
        windows: for each stage of the grid, the window of each of its attention layers.

    Raises:
        ValueError: stages whose layers of one slot have different windows.
    """

    def __init__(self, windows: list[list[int | None]]) -> None:
        keys = []
        for slot in range(max(map(len, windows))):
            stages = tuple(s for s, layers in enumerate(windows) if len(layers) > slot)
            if len({windows[s][slot] for s in stages}) > 1:
                raise ValueError(
                    f"attention layer {slot} of the stages has windows of {[windows[s][slot] for s in stages]} keys: "
                    "stages that share attention must have the same kinds of layers in the same order"
                )
            keys.append((windows[stages[0]][slot], stages))
        order = list(dict.fromkeys(keys))
        self.kinds = [Kind(window, stages, keys.count((window, stages))) for window, stages in order]
        #: by slot, the index of its kind
        self.kind_of = [order.index(key) for key in keys]


@dataclass
class MicroBatchAttention:
    """All layers of this stage for one micro-batch.

    Attributes:
        plans: by kind; None where no rank has rows. Their backward parts follow when its tick comes.
        layers: by layer of the stage, its plan.
        kept: what recomputation takes in the place of another exchange.
        in_two: the plan of all layers, where the micro-batch runs as two nano-batches.
    """

    plans: list[StepPlan | None]
    layers: list[StepPlan | None]
    kept: KeptAttention | None
    in_two: StepPlan | None


class TickPlanner:
    """Goes through the ticks of one batch after another: plans each, and runs what this rank does in it beside its own
    layers.

    Args:
        server: this rank's attention server, over the ranks of the grid.
        slots: of the grid.
        place: int64 [stages, replicas], the number of each of the grid's ranks among the servers.
        stage: this rank's stage, counted in the grid.
        layers: attention layers of this stage.
        heads, dtype, scale: of the model's attention, for ranks that serve without rows of their own.

    Attributes:
        able: whether micro-batches may run as two nano-batches.
    """

    able = False

    def __init__(
        self,
        server: AttentionServer,
        slots: Slots,
        place: np.ndarray,
        stage: int,
        layers: int,
        *,
        heads: Heads,
        dtype: torch.dtype,
        scale: float,
        device: torch.device,
    ) -> None:
        self._server, self._slots, self._place, self._stage, self._layers = server, slots, place, stage, layers
        self._in_two = self._training = False
        self._coming: Iterator[Tick] = iter(())
        self._layouts: list[Layout] = []
        #: Of the tick: this stage's micro-batch, and this rank's parts of the plan by kind.
        self._micro_batch: int | None = None
        self._parts: list[Parts | None] = []
        self._open: dict[int | None, MicroBatchAttention] = {}  # whose backward is to come, by micro-batch
        self._specs = [AttentionSpec(scale, kind.window) for kind in slots.kinds]
        value_dim = heads.value_dim or heads.head_dim

        def rows(heads_: int, dim: int) -> torch.Tensor:
            return torch.empty((0, heads_, dim), dtype=dtype, device=device)

        self._q = rows(heads.query, heads.head_dim)
        self._k, self._v = rows(heads.key_value, heads.head_dim), rows(heads.key_value, value_dim)
        self._out = rows(heads.query, value_dim)
        self._lse = torch.empty((heads.query, 0), dtype=torch.promote_types(dtype, torch.float32), device=device)

    def begin(self, ticks: list[Tick], layouts: list[Layout], *, training: bool) -> None:
        """A batch begins, with the plan of its first tick. Collective over the grid.

        Its micro-batches run as two nano-batches where that may pay: all of them or none, since in a tick all ranks do
        alike, and in backward each does as it did in forward.

        Args:
            ticks: all that come.
            layouts: by micro-batch, the layout over the grid's replicas.
            training: the batch is one of training, and goes into the statistics.
        """
        self._coming, self._layouts, self._training = iter(ticks), layouts, training
        self._in_two = False
        if training and self.able:
            every = ((tick.phase, *kind) for tick in ticks for kind in self._layouts_of(tick))
            self._in_two = self._server.two_pay(one for one in every if len(one[1].segments))
        self.next()

    def next(self) -> None:
        """Goes on to the next tick, if there is one, and plans it; on a GPU the device is still at work on the one
        before. Collective over the grid."""
        tick = next(self._coming, None)
        if tick is not None:
            self._micro_batch, self._parts = tick.micro_batches[self._stage], self._plan(tick)

    def end(self) -> None:
        """The batch is over, or failed."""
        self._open.clear()
        self._parts = []

    def _plan(self, tick: Tick) -> list[Parts | None]:
        """This rank's parts of a tick, by kind; None where no rank has rows."""
        found = self._layouts_of(tick)
        wanted = [bool(len(layout.segments)) for layout, *_ in found]
        kinds = list(compress(found, wanted))
        mine = tick.phase == "forward" and tick.micro_batches[self._stage] is not None
        parts = iter(
            self._server.plan_tick(
                tick.phase, kinds, note=self._training, micro_batches=int(mine), in_two=self._in_two
            )
        )
        return [next(parts) if want else None for want in wanted]

    def _layouts_of(self, tick: Tick) -> list[tuple[Layout, int | None, int]]:
        """By kind of layers: over the grid's ranks, with the window and the number of slots."""
        found = []
        for kind in self._slots.kinds:
            live = [
                self._layouts[m] if m is not None and s in kind.stages else None
                for s, m in enumerate(tick.micro_batches)
            ]
            found.append((over_grid(live, self._place), kind.window, kind.slots))
        return found

    def forward(self) -> MicroBatchAttention:
        """The attention of this stage's micro-batch, whose forward tick has come. In training its backward parts
        follow later, and there may be recomputation in it."""
        given = [(kind.window, part) for kind, part in zip(self._slots.kinds, self._parts, strict=True)]
        kept, in_two = KeptAttention(always=True) if self._training else None, None
        plans: list[StepPlan | None]
        if any(part is not None and part.divided for part in self._parts):
            in_two = self._server.step_plan({window: part for window, part in given if part is not None})
            plans = [None if part is None else in_two for part in self._parts]
        else:
            plans = [None if part is None else self._server.step_plan({window: part}) for window, part in given]
        layers = [plans[self._slots.kind_of[slot]] for slot in range(self._layers)]
        attention = MicroBatchAttention(plans, layers, kept, in_two)
        if self._training:
            self._open[self._micro_batch] = attention
        return attention

    def backward(self) -> MicroBatchAttention:
        """The same of the micro-batch whose backward tick has come, with this rank's parts of it."""
        attention = self._open.pop(self._micro_batch)
        for kind, plan, part in zip(self._slots.kinds, attention.plans, self._parts, strict=True):
            if plan is not None and part is not None:
                plan.layer(kind.window).backward = part
        return attention

    def serve_forward(self) -> None:
        """Takes part, without rows of its own, in the exchange of the slots that this stage has no layer for in the
        tick."""
        for kind, part in self._served():
            plan, spec, kernel = self._serving(part, kind)
            steps = ForwardSteps(plan, spec, kernel)
            for i in range(len(part.parts)):
                steps.dispatch(i, self._q, self._k, self._v)
            for i in range(len(part.parts)):
                steps.serve(i)
            for i in range(len(part.parts)):
                steps.collect(i)

    def serve_backward(self) -> None:
        """The same in backward, where slots and parts come in reverse order."""
        given = Given(self._q, self._k, self._v, self._out, self._lse, self._out, None)
        for kind, part in reversed(self._served()):
            plan, spec, kernel = self._serving(part, kind)
            with backward_of_layer(plan.watch):
                steps = BackwardSteps(replace(plan, backward=part), spec, kernel)
                last_first = list(reversed(range(len(part.parts))))
                for i in last_first:
                    steps.dispatch(i, given)
                for i in last_first:
                    steps.serve(i)
                for i in last_first:
                    steps.gradients(i)

    def _served(self) -> list[tuple[int, Parts]]:
        """Of the slots in which this rank only serves, in order, the kind and its part of the plan."""
        first = 0 if self._micro_batch is None else self._layers
        found = ((kind, self._parts[kind]) for kind in self._slots.kind_of[first:])
        return [(kind, part) for kind, part in found if part is not None and not part.is_local]

    def _serving(self, part: Parts, kind: int) -> tuple[LayerPlan, AttentionSpec, Kernel]:
        spec = self._specs[kind]
        plan = self._server.step_plan({spec.window: part})
        return plan.layer(spec.window), spec, plan.kernel(self._q, self._k, self._v, spec)
