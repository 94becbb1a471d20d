# SPDX-License-Identifier: Apache-2.0
"""The attention of one rank in a pipeline, tick by tick: of its own micro-batches and of those that it serves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_distca.attention_server.parts import Parts
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.server import AttentionServer
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.huggingface.kept_attention import KeptAttention
from deepspeed_distca.layout import Layout
from deepspeed_distca.pipeline.batches import over_grid
from deepspeed_distca.pipeline.schedule import Tick
from deepspeed_distca.scheduler.heads import Heads


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

    def __len__(self) -> int:
        return len(self.kind_of)


@dataclass
class MicroBatchAttention:
    """All layers of this stage for one micro-batch.

    Attributes:
        plans: by kind; None where no rank has rows. Their backward parts follow when its tick comes.
        layers: by layer of the stage, its plan.
        kept: what recomputation takes in the place of another exchange.
    """

    plans: list[StepPlan | None]
    layers: list[StepPlan | None]
    kept: KeptAttention | None


class TickPlanner:
    """Plans ticks and runs what this rank does in them beside its own layers.

    Args:
        server: this rank's attention server, over the ranks of the grid.
        slots: of the grid.
        place: int64 [stages, replicas], the number of each of the grid's ranks among the servers.
        stage: this rank's stage, counted in the grid.
        layers: attention layers of this stage.
        heads, dtype, scale: of the model's attention, for ranks that serve without rows of their own.
    """

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
        self._specs = [AttentionSpec(scale, kind.window) for kind in slots.kinds]
        value_dim = heads.value_dim or heads.head_dim

        def rows(heads_: int, dim: int) -> torch.Tensor:
            return torch.empty((0, heads_, dim), dtype=dtype, device=device)

        self._q = rows(heads.query, heads.head_dim)
        self._k, self._v = rows(heads.key_value, heads.head_dim), rows(heads.key_value, value_dim)
        self._out = rows(heads.query, value_dim)
        self._lse = torch.empty((heads.query, 0), dtype=torch.promote_types(dtype, torch.float32), device=device)

    def plan(self, tick: Tick, layouts: list[Layout], *, note: bool) -> list[RankPlan | None]:
        """This rank's parts of a tick, by kind; None where no rank has rows. Collective over the grid.

        Args:
            layouts: by micro-batch, the layout over the grid's replicas.
            note: whether the tick goes into the statistics.
        """
        wanted, kinds = [], []
        for kind in self._slots.kinds:
            live = [
                layouts[m] if m is not None and s in kind.stages else None for s, m in enumerate(tick.micro_batches)
            ]
            layout = over_grid(live, self._place)
            wanted.append(bool(len(layout.segments)))
            if wanted[-1]:
                kinds.append((layout, kind.window, kind.slots))
        mine = tick.phase == "forward" and tick.micro_batches[self._stage] is not None
        parts = iter(self._server.plan_tick(tick.phase, kinds, note=note, micro_batches=int(mine)))
        return [next(parts) if want else None for want in wanted]

    def open(self, forward: list[RankPlan | None], *, keep: bool) -> MicroBatchAttention:
        """The attention of a micro-batch whose forward tick has come; its backward parts follow later.

        Args:
            keep: there will be a backward, and perhaps recomputation in it.
        """
        kinds = self._slots.kinds
        plans = [
            None if part is None else self._server.step_plan(kind.window, part, None)
            for kind, part in zip(kinds, forward, strict=True)
        ]
        layers = [plans[self._slots.kind_of[slot]] for slot in range(self._layers)]
        return MicroBatchAttention(plans, layers, KeptAttention(always=True) if keep else None)

    def begin_backward(self, attention: MicroBatchAttention, parts: list[RankPlan | None]) -> None:
        """The backward tick of a micro-batch has come, and this rank's parts of it."""
        for kind, plan, part in zip(self._slots.kinds, attention.plans, parts, strict=True):
            if plan is not None and part is not None:
                plan.layer(kind.window).backward = Parts.whole(part)

    def serve_forward(self, parts: list[RankPlan | None], first: int) -> None:
        """Takes part in the exchange of the slots from ``first`` on, without rows of its own."""
        for slot in range(first, len(self._slots)):
            kind = self._slots.kind_of[slot]
            part = parts[kind]
            if part is not None and not part.is_local:
                with torch.no_grad():
                    spec = self._specs[kind]
                    self._server.step_plan(spec.window, part, None).attend(self._q, self._k, self._v, spec)

    def serve_backward(self, parts: list[RankPlan | None], first: int) -> None:
        """The same in backward, where slots come in reverse order."""
        for slot in reversed(range(first, len(self._slots))):
            kind = self._slots.kind_of[slot]
            part = parts[kind]
            if part is None or part.is_local:
                continue
            q, k, v = (t.detach().requires_grad_() for t in (self._q, self._k, self._v))
            with torch.enable_grad():
                # An out of no rows, "kept" from a forward that never was, whose backward serves the others.
                spec, kept = self._specs[kind], (self._out, self._lse)
                out, _ = self._server.step_plan(spec.window, part, part).attend(q, k, v, spec, kept)
            out.backward(torch.zeros_like(out))
