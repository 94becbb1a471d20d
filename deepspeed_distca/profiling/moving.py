# SPDX-License-Identifier: Apache-2.0
"""What a layer takes longer because rows move, over numbers of messages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.core_attention import core_attention
from deepspeed_distca.attention_server.exchange.base import Exchange
from deepspeed_distca.attention_server.kernels import Kernel
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.side_stream import SideStream
from deepspeed_distca.attention_server.steps import LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.layout import Layout
from deepspeed_distca.profiling.link import meet
from deepspeed_distca.scheduler.cost_model import PHASES, Phase
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import SERVER, TASK_DOCUMENT, home_tasks

Result = TypeVar("Result")

# Documents of each rank, so short that a layer is what the host does for it, and how many another rank computes.
_DOCUMENTS = 16
_MOVED = (1, 4, 12)
_LAYERS = 8


@dataclass(frozen=True)
class Moves:
    """Layers whose rows move, against the same layer with every row at home.

    Attributes:
        ranks: how many took part.
        messages: that a rank sends or receives in each of the layers, by phase.
        sizes: bytes that a rank sends out and back in each of them, by phase.
        seconds: by which each of them took longer, its transfers included, by phase.
    """

    ranks: int
    messages: dict[Phase, list[int]]
    sizes: dict[Phase, list[tuple[int, int]]]
    seconds: dict[Phase, list[float]]


def measure_moving(
    exchange: Exchange, kernel: Kernel, heads: Heads, device: torch.device, dtype: torch.dtype, rounds: int
) -> Moves:
    """Times layers in which every rank computes some documents of another, half the group apart, and as many of its
    own are computed elsewhere: the work is that of a layer whose rows stay. Layers are launched one after the other
    and waited for together, forward and backward apart, so that what no device hides is seen. Collective over the
    default group, of at least two ranks.

    Args:
        exchange: over all ranks of the group.
        rounds: over all the layers in turn; one more comes first and is not counted.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    length = 128 if device.type == "cuda" else 16
    layout = Layout.from_lengths([[length] * _DOCUMENTS] * world)
    compilers = [RouteCompiler(layout, _moved(layout, count)) for count in (0, *_MOVED)]
    layers = [_Layers(compiler, rank, exchange, kernel, heads, device, dtype) for compiler in compilers]
    samples = [[layer.seconds() for layer in layers] for _ in range(rounds + 1)][1:]
    # Other processes take a CPU's time and never give any.
    typical = min if device.type == "cpu" else statistics.median
    taken = [[typical(sample[i][phase] for sample in samples) for i in range(len(layers))] for phase in PHASES]
    slowest = torch.tensor(taken, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    moves = Moves(world, {}, {}, {})
    for phase, (plain, *moved) in zip(PHASES, slowest.tolist(), strict=True):
        sizes = [compiler.bytes_between(heads, phase) for compiler in compilers[1:]]
        moves.messages[phase] = [int(compiler.messages(phase).max()) for compiler in compilers[1:]]
        moves.sizes[phase] = [(_most(out), _most(back)) for out, back in sizes]
        moves.seconds[phase] = [seconds - plain for seconds in moved]
    return moves


def _most(sent: np.ndarray) -> int:
    """What the rank sends that sends the most.

    Args:
        sent: bytes, int64 [sender, receiver].
    """
    return int(sent.sum(axis=1).max())


def _moved(layout: Layout, count: int) -> np.ndarray:
    """Tasks of which the first documents of every rank run half the group further."""
    tasks = home_tasks(layout)
    moved = tasks[:, TASK_DOCUMENT] % _DOCUMENTS < count
    tasks[moved, SERVER] = (tasks[moved, SERVER] + layout.num_ranks // 2) % layout.num_ranks
    return tasks


class _Layers:
    """A few layers of one plan, with the same rows."""

    def __init__(
        self,
        compiler: RouteCompiler,
        rank: int,
        exchange: Exchange,
        kernel: Kernel,
        heads: Heads,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        part = RankPlan(compiler.rank(rank))
        self._plan, self._kernel, self._device = LayerPlan.whole(part, part, exchange, SideStream()), kernel, device
        self._spec = AttentionSpec(heads.head_dim**-0.5)
        value_dim, rows = heads.value_dim or heads.head_dim, part.routes.home_rows
        shapes = (heads.query, heads.head_dim), (heads.key_value, heads.head_dim), (heads.key_value, value_dim)
        self._qkv = [torch.randn(rows, *s, device=device, dtype=dtype, requires_grad=True) for s in shapes]
        self._dout = torch.randn(rows, heads.query, value_dim, device=device, dtype=dtype)

    def seconds(self) -> dict[Phase, float]:
        """Of one layer, by phase. Collective."""
        plan, spec, kernel, (q, k, v) = self._plan, self._spec, self._kernel, self._qkv
        outs, forward = self._timed(lambda: [core_attention(q, k, v, plan, spec, kernel)[0] for _ in range(_LAYERS)])
        _, backward = self._timed(lambda: torch.autograd.grad(outs, self._qkv, [self._dout] * _LAYERS))
        return {"forward": forward / _LAYERS, "backward": backward / _LAYERS}

    def _timed(self, call: Callable[[], Result]) -> tuple[Result, float]:
        meet(None, self._device)
        start = time.perf_counter()
        result = call()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return result, time.perf_counter() - start
