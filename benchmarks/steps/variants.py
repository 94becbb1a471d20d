# SPDX-License-Identifier: Apache-2.0
"""What is compared: packed data parallelism alone, the plugin, and DeepSpeed-Ulysses, all with the same kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from transformers import AttentionInterface

from deepspeed_distca.attention_server.core_attention import core_attention
from deepspeed_distca.attention_server.kernels import select_kernel
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.statistics import DeviceTimer, TimedKernel
from deepspeed_distca.attention_server.steps import LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import home_tasks
from steps.batches import Batch, evened, placed

KINDS = ("plain", "plain_whole", "evened", "distca", "distca_free", "distca_whole", "ulysses")
#: What those train on in a batch's place.
DOCUMENTS: dict[str, Callable[[Batch], Batch]] = {
    "evened": evened,
    "plain_whole": partial(placed, placement="whole"),
    "distca_whole": partial(placed, placement="whole"),
    "distca_free": partial(placed, placement="free"),
}
#: Overlap that stands for leaving the key out.
LEFT_OUT = "default"


class PlainAttention:
    """Packed documents on this rank alone, by the plugin's kernel: what the plugin is compared with.

    Attributes:
        timer: of this rank's attention kernels.
        kernel: the kernel's name, once a layer has run.
        plan: of the documents that are attended.
    """

    NAME = "plain_packed"

    def __init__(self) -> None:
        self.timer = DeviceTimer()
        self.kernel: str | None = None
        self._kernels: dict[tuple, TimedKernel] = {}
        self.plan: LayerPlan | None = None
        AttentionInterface.register(self.NAME, self)

    def use(self, batch: Batch, rank: int) -> None:
        """Attends this batch's documents from now on."""
        self._set([s.length for s in batch.layout.rank(rank)])

    def release(self) -> None:
        """Keeps nothing of the last batch."""
        self.plan = None

    def bytes_sent(self, batch: Batch, layers: int, heads: tuple[int, int, int], passes: int, element: int) -> int:
        """Bytes that a rank sends for attention in a step."""
        return 0

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        out = self._attend(*(t.transpose(1, 2) for t in (query, key, value)), scaling)
        return out, None

    def _set(self, lengths: Sequence[int]) -> None:
        layout = Layout.from_lengths([lengths])
        part = RankPlan(RouteCompiler(layout, home_tasks(layout)).rank(0))
        self.plan = LayerPlan.whole(part, part)

    def _attend(self, query, key, value, scaling):
        """[1, tokens, heads, head_dim] each, and so the result."""
        q, k, v = (t.flatten(0, 1) for t in (query, key, value))
        shape = (q.shape[1:], k.shape[1:])
        if shape not in self._kernels:
            kernel = select_kernel(
                None, device=q.device, dtype=q.dtype, q_heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2]
            )
            self.kernel = kernel.name
            self._kernels[shape] = TimedKernel(kernel, self.timer)
        out, _ = core_attention(q, k, v, self.plan, AttentionSpec(scaling), self._kernels[shape])
        return out[None]


class UlyssesAttention(PlainAttention):
    """DeepSpeed-Ulysses over all ranks: each attends all documents of the global batch for its share of the heads.

    DeepSpeed's own all-to-alls, but not its sequence-parallel groups: every rank keeps a loss of its own, gradients
    are averaged over all of them, and so the step computes the same as the others do.
    """

    NAME = "ulysses_packed"

    def __init__(self) -> None:
        super().__init__()
        self._distributed = DistributedAttention(self._attend, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    @staticmethod
    def unfit(world: int, q_heads: int, kv_heads: int) -> str | None:
        """Why it cannot run, or None."""
        if world < 2:
            return "Ulysses is left out: there is one rank only"
        if q_heads % world or kv_heads % world:
            return (
                f"Ulysses is left out: {q_heads} query and {kv_heads} key/value heads do not divide by {world} ranks"
            )
        return None

    def use(self, batch: Batch, rank: int) -> None:
        if batch.whole:  # contiguous over the ranks: storage order is the documents' order
            order = batch.layout.segments[:, 1]
            self._set([int(batch.layout.segments[order == d, 3].sum()) for d in dict.fromkeys(order.tolist())])
        else:
            self._set([s.length for r in range(batch.layout.num_ranks) for s in batch.layout.rank(r)])

    def bytes_sent(self, batch: Batch, layers: int, heads: tuple[int, int, int], passes: int, element: int) -> int:
        q_heads, kv_heads, head_dim = heads
        world = batch.layout.num_ranks
        rows = int(batch.layout.tokens.max())
        return layers * passes * rows * 2 * (q_heads + kv_heads) * head_dim * element * (world - 1) // world

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return self._distributed(q, k, v, 0, None, scaling), None


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        name: unique in a run.
        attention: the attention function of the model's configuration.
        block: the ``distca`` block, or None for DeepSpeed without the plugin.
        own: the attention that takes the plugin's place, where there is no block.
        documents: what it trains on in a batch's place: the same documents elsewhere, or other ones; None: the batch.
    """

    name: str
    attention: str
    block: dict[str, Any] | None = None
    own: PlainAttention | None = None
    documents: Callable[[Batch], Batch] | None = None

    def batch(self, batch: Batch) -> Batch:
        """What it trains on in a batch's place."""
        return _in_place_of(self.documents, batch) if self.documents else batch

    def fits(self, batch: Batch) -> bool:
        """Whether it computes the batch's attention: a rank alone has no documents that continue on others."""
        return not self.batch(batch).whole or self.block is not None or isinstance(self.own, UlyssesAttention)

    def arguments(self, batch: Batch, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the engine is called with: without the plugin only the model's own arguments, and the number of targets
        that makes the mean of the ranks' losses the mean over all targets, as the plugin's is."""
        if self.block is not None:
            return inputs
        tensors = {k: v for k, v in inputs.items() if torch.is_tensor(v)}
        return {**tensors, "num_items_in_batch": batch.targets() / batch.layout.num_ranks}


@lru_cache(maxsize=16)
def _in_place_of(documents: Callable[[Batch], Batch], batch: Batch) -> Batch:
    return documents(batch)


def make_variants(
    kinds: Sequence[str],
    overlaps: Sequence[str],
    tolerances: Sequence[float] | None,
    exchanges: Sequence[str] | None = None,
    blocks: Sequence[dict[str, Any]] | None = None,
) -> list[Variant]:
    """The variants in the order of `kinds`, which are of KINDS; the plugin with every overlap, tolerance and exchange,
    and the further keys of each of `blocks`, which are named where there are several (placed: of the first).
    A kind named again is measured again, which tells how steady the machine is."""
    variants: list[Variant] = []
    plain, ulysses = PlainAttention(), UlyssesAttention()
    for kind in kinds:
        documents = DOCUMENTS.get(kind)
        if not kind.startswith("distca"):
            own = ulysses if kind == "ulysses" else plain
            variants.append(Variant(kind, own.NAME, None, own, documents))
            continue
        of_kind = (blocks or [{}])[: None if kind == "distca" else 1]
        choices = product(overlaps, tolerances or [None], exchanges or [None], of_kind)
        for overlap, tolerance, exchange, more in choices:
            block: dict[str, Any] = {"enabled": True, **more}
            advanced = dict(more.get("advanced", {}))
            given = {key: value for key, value in more.items() if key != "advanced"} | advanced
            name = f"{kind.replace('_', ' ')} {overlap}"
            if overlap != LEFT_OUT:
                block["overlap"] = overlap
            if tolerance is not None:
                advanced["tolerance"] = tolerance
                name += f" tol {tolerance:g}"
            if exchange is not None:
                advanced["exchange"] = exchange
                name += f" {exchange}"
            if len(of_kind) > 1:
                name += "".join(f" {key}={value}" for key, value in given.items())
            if advanced:
                block["advanced"] = advanced
            variants.append(Variant(name, "sdpa", block, documents=documents))
    seen: dict[str, int] = {}
    named = []
    for variant in variants:
        seen[variant.name] = seen.get(variant.name, 0) + 1
        again = " again" * (seen[variant.name] - 1)
        named.append(replace(variant, name=variant.name + again))
    return named
