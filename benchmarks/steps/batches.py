# SPDX-License-Identifier: Apache-2.0
"""The batches that steps are measured on: hand-made mixes, and the length distributions of arXiv 2510.18121.

Documents of a distribution are packed in order over the ranks and cut at the ranks' ends, each piece a document of its
own: that is what packed data-parallel training does, and so every variant has the same attention work, less than the
uncut documents would have. Batches marked "whole" keep documents that continue on other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from workloads.sampling import NAMES, layouts

from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.data.global_loader.placement import Placement, place, work_of
from deepspeed_distca.data.global_loader.regrouping import regroup
from deepspeed_distca.layout import DOCUMENT, LENGTH, Layout, Segment
from deepspeed_distca.scheduler.cost_model import PHASES, CostModel

MIXES = ("long|short", "half|short", "even", "short")
ONE = "one"
#: What a workload's spec may say after the number of batches.
OPTIONS = "[:shuffled[=SEED]][:whole][:skip=N][:step=N]"
_SHORT = 4096
_SHUFFLE_SEED = 1


@dataclass(frozen=True)
class Batch:
    """Documents over all ranks, equally many tokens on each.

    Attributes:
        name: unique among the batches of a run.
        group: batches that are summed up together.
        layout: of all ranks.
        whole: documents continue on other ranks; no work for a rank alone.
    """

    name: str
    group: str
    layout: Layout
    whole: bool = False

    def targets(self) -> int:
        """Target tokens of all ranks: every document's but its first."""
        documents = np.unique(self.layout.segments[:, DOCUMENT]).size
        return int(self.layout.segments[:, LENGTH].sum()) - documents

    def inputs(self, rank: int, vocabulary: int, device: torch.device) -> dict[str, Any]:
        """What the engine takes on a rank: random tokens, the same in every variant, and the layout."""
        generator = torch.Generator().manual_seed(0)
        ids, counts = np.unique(self.layout.segments[:, DOCUMENT], return_inverse=True)
        lengths = np.bincount(counts, weights=self.layout.segments[:, LENGTH]).astype(np.int64)
        tokens = torch.randint(0, vocabulary, (int(lengths.sum()),), generator=generator).numpy()
        documents = dict(zip(ids.tolist(), np.split(tokens, np.cumsum(lengths)[:-1]), strict=True))
        batch = batch_from_layout(documents, self.layout, rank)
        if not self.whole:  # as a collator would have it
            batch["layout"] = Layout.from_lengths([[s.length for s in self.layout.rank(rank)]])
        batch["step_targets"] = batch["num_targets"]
        return {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}


def mix(name: str, world: int, tokens: int) -> Batch:
    """One of MIXES, or ONE: a single document over all ranks.

    Raises:
        ValueError: tokens that short documents do not divide.
    """
    if name == ONE:
        ranks = [[Segment(0, rank * tokens, tokens)] for rank in range(world)]
        return Batch(name, name, Layout.from_ranks(ranks).validate(), whole=world > 1)
    length = min(_SHORT, max(1, tokens // 16))
    if tokens % length:
        raise ValueError(f"{tokens} tokens a rank are not a multiple of the short documents' {length}")
    short, long = [length] * (tokens // length), [tokens]
    on_even, on_odd = {
        "long|short": (long, short),
        "half|short": ([tokens - tokens // 2, tokens // 2], short),
        "even": (long, long),
        "short": (short, short),
    }[name]
    return Batch(name, name, Layout.from_lengths([on_odd if rank % 2 else on_even for rank in range(world)]))


def beginning(world: int, tokens: int) -> list[Batch]:
    """Two batches: a long document on the even ranks and short ones on the others, and the other way round."""
    kinds = [tokens], _cut(tokens, min(_SHORT, max(1, tokens // 16)))
    ranks = [[list(kinds[(rank + odd) % 2]) for rank in range(world)] for odd in range(2)]
    return [Batch("beginning", "beginning", Layout.from_lengths(documents)) for documents in ranks]


def workload(spec: str, world: int, tokens: int, context: int) -> list[Batch]:
    """Consecutive batches of a distribution.

    Args:
        spec: NAME:BATCHES, then ":shuffled" or ":shuffled=SEED" for another order than the published one, ":whole" for
            documents that continue on other ranks, ":skip=N" to leave out the first N batches, and ":step=N" for
            documents that change places among N batches each, as the loader lets those of a step.
        context: which the distribution was sampled for. A batch that is no multiple of it takes the documents of the
            next larger multiple and shortens them in proportion.

    Raises:
        ValueError: a spec of another form, or more batches than the documents last for.
    """
    name, *more = spec.split(":")
    seed, whole, count, skip, step = None, False, 0, 0, 1
    for option in more:
        key, _, value = option.partition("=")
        if key.isdigit() and not value:
            count = int(key)
        elif key == "shuffled" and (not value or value.isdigit()):
            seed = int(value or _SHUFFLE_SEED)
        elif option == "whole":
            whole = True
        elif key == "skip" and value.isdigit():
            skip = int(value)
        elif key == "step" and value.isdigit() and int(value):
            step = int(value)
        else:
            count = 0
            break
    if name not in NAMES or count < 1:
        raise ValueError(f"workload {spec!r}: expected {'|'.join(NAMES)}:BATCHES{OPTIONS}")
    group = ":".join([name, *(option for option in more if not option.isdigit() and not option.startswith("skip"))])
    contexts = -(-world * tokens // context)
    found = list(
        layouts(name, context=context, servers=1, tokens=contexts * context, batches=skip + count, shuffle=seed)
    )
    if len(found) < skip + count:
        raise ValueError(f"workload {spec!r}: the documents last for {len(found)} batches of {world * tokens} tokens")
    spread = [_spread([s.length for s in layout.rank(0)], world, tokens) for layout in found[skip:]]
    keep = (lambda layout: layout) if whole else _cut_at_ends
    spread = [keep(layout) for layout in spread]
    for first in range(0, len(spread), step):
        spread[first : first + step] = map(keep, _regrouped(spread[first : first + step], tokens))
    return [
        Batch(f"{group} #{index}", group, layout.validate(), whole and world > 1)
        for index, layout in enumerate(spread, start=skip)
    ]


def evened(batch: Batch) -> Batch:
    """Other documents, the same on every rank: as many tokens, and the mean of the ranks' attention as it is
    predicted. One long document and equal short ones, so that nothing has to be moved."""
    cost, tokens = CostModel.fitted(), int(batch.layout.tokens.max())

    def seconds(lengths: list[int]) -> float:
        ends = np.array(lengths, dtype=np.int64)
        start = np.zeros_like(ends)
        return float(sum(cost.cost(start, ends, start, phase=phase).sum() for phase in PHASES))

    ranks = range(batch.layout.num_ranks)
    wanted = float(np.mean([seconds([s.length for s in batch.layout.rank(rank)]) for rank in ranks]))
    short = min(_SHORT, tokens)
    while short > 1 and seconds(_cut(tokens, short)) > wanted:
        short //= 2
    low, high = 0, tokens
    while high - low > 1:
        middle = (low + high) // 2
        above = seconds([middle, *_cut(tokens - middle, short)]) > wanted
        low, high = (low, middle) if above else (middle, high)
    documents = [*([low] if low else []), *_cut(tokens - low, short)]
    return Batch(batch.name, batch.group, Layout.from_lengths([documents] * batch.layout.num_ranks))


def placed(batch: Batch, placement: Placement) -> Batch:
    """The same documents where a placement of the loader stores them: other ranks, as many tokens on each."""
    documents, lengths = np.unique(batch.layout.segments[:, DOCUMENT]), _lengths(batch.layout)
    layout = place(lengths, batch.layout.tokens, placement=placement)
    segments = layout.segments.copy()
    segments[:, DOCUMENT] = documents[segments[:, DOCUMENT]]
    layout = Layout(segments, layout.num_ranks).validate()
    return Batch(batch.name, batch.group, layout, whole=len(layout.segments) > len(documents))


def _cut_at_ends(layout: Layout) -> Layout:
    """Each piece of a document on a rank is a document of its own."""
    return Layout.from_lengths([[s.length for s in layout.rank(rank)] for rank in range(layout.num_ranks)])


def _regrouped(layouts: list[Layout], tokens: int) -> list[Layout]:
    """Documents of these batches where the loader has those of a step; in whole documents, if it moves any."""
    packs = [_lengths(layout) for layout in layouts]
    world, work = layouts[0].num_ranks, work_of(CostModel.fitted(), None)
    groups = regroup(packs, world, tokens, lambda length: work(0, length))
    if groups is None:
        return layouts
    documents = [length for pack in packs for length in pack]
    return [place([documents[i] for i in group], [tokens] * world, placement="whole") for group in groups]


def _lengths(layout: Layout) -> list[int]:
    """Of the documents, by their ids."""
    _, index = np.unique(layout.segments[:, DOCUMENT], return_inverse=True)
    return np.bincount(index, weights=layout.segments[:, LENGTH]).astype(np.int64).tolist()


def _cut(tokens: int, length: int) -> list[int]:
    """Documents of that length, the last one shorter."""
    whole, rest = divmod(tokens, length)
    return [length] * whole + ([rest] if rest else [])


def _spread(documents: list[int], world: int, tokens: int) -> Layout:
    """Documents in order over the ranks, shortened in proportion to fit where they are too long together."""
    ends = np.cumsum(documents)
    ends = np.rint(ends * (world * tokens / ends[-1])).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    ranks = []
    for low in range(0, world * tokens, tokens):
        here = [(d, max(a, low), min(b, low + tokens), a) for d, (a, b) in enumerate(zip(starts, ends, strict=True))]
        ranks.append([Segment(d, int(a - start), int(b - a)) for d, a, b, start in here if b > a])
    return Layout.from_ranks(ranks)
