# SPDX-License-Identifier: Apache-2.0
"""Batches of some ranks that share a layout, with trees or without, and contradictions on one rank or on all: loss and
gradients against every text alone, or a named error on every rank before forward, and the next micro-batch right."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from deepspeed_distca import Layout
from deepspeed_distca.attention_server.coordination.errors import AgreementError, RankFailedError
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.huggingface.front_door import BatchError
from deepspeed_distca.layout import DOCUMENT, LENGTH, START, LayoutError
from deepspeed_distca.trees import BRANCH_DOCUMENT, BRANCH_PARENT, BRANCH_START
from tests.distributed.engine_worker import ds_config, tiny_llama
from tests.distributed.random_plans import random_layout, texts_of, visible
from tests.distributed.scenarios import compared
from tests.distributed.trees_worker import SPREAD
from tests.fuzz.batches import IGNORE
from tests.fuzz.ranks import agree, until
from tests.tiny_llama import SIZES, VOCABULARY

#: Relative error of a parameter's gradient, and of the loss, in fp32.
TOLERANCE = 1e-5
#: A rank may hear of what is wrong with another one's batch, but only before either has begun its forward.
REFUSALS = (LayoutError, BatchError, AgreementError)
_ROWS = ("input_ids", "labels", "shift_labels", "position_ids")


class Document(NamedTuple):
    """Token ids, targets of each row (or -100), and the rows of each text."""

    ids: np.ndarray
    targets: np.ndarray
    texts: list[np.ndarray]


def main(first: int, count: int, seconds: float) -> dict[str, int]:
    """Micro-batches of so many seeds, or of as many as there is time for; the same on every rank.

    Returns:
        how many were exact, and how many were refused, by what was done on some rank.

    Raises:
        AssertionError: on every rank: a wrong gradient or loss, a right batch that was refused, or an error that is
            none of :data:`REFUSALS`, or that not every rank has.
    """
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    engines = [(_engine(make(), overlap), make()) for overlap, make in ENGINES]
    found: collections.Counter[str] = collections.Counter()
    for seed in until(first, count, seconds):
        rng = np.random.default_rng((seed, world))
        layout = _layout(rng, world)
        documents = _documents(layout, rng)
        batch, name = _batch(documents, layout, rank), ""
        spoiled = rng.permutation(world)[: rng.choice([0, 1, 1, world])]
        alike = bool(rng.random() < 0.5)
        if rank in spoiled:
            name = spoil(batch, layout, rank, np.random.default_rng((seed, world, 0 if alike else 1 + rank)))
        names: list[str] = [""] * world
        dist.all_gather_object(names, name)
        where = f"seed {seed}, {names}, {layout.segments.tolist()} {layout.branches.tolist()}"
        engine, alone = engines[seed % len(engines)]
        loss, error, problem = _forward(engine, batch)
        if error is not None and not any(names):
            problem = problem or f"right batches were refused: {error}"
        refused: list[bool] = [False] * world
        dist.all_gather_object(refused, error is not None)
        if any(refused) and not all(refused):
            problem = problem or f"refused on {refused}: {error}"
        agree(problem and f"{where}: {problem}")
        if loss is not None:
            if isinstance(batch.get("layout"), Layout) and batch["layout"].num_ranks == world:
                documents = _read_as(batch["layout"], documents, layout)
            worst = _worst(engine, loss, *_texts_alone(alone, documents))
            agree(None if worst <= TOLERANCE else f"{where}: came in with an error of {worst}")
        outcome = f"{'exact' if error is None else 'refused'}: {'trees' if layout.has_trees else 'documents'}"
        found["cases"] += 1
        found.update({f"{outcome}: {name}" for name in names if name} or [f"{outcome}: nothing done"])
    return dict(found)


def _forward(engine: Any, batch: dict[str, Any]) -> tuple[torch.Tensor | None, Exception | None, str | None]:
    """The loss, or the error, and what is wrong with this one."""
    try:
        return engine(**batch).loss, None, None
    except Exception as error:
        named = isinstance(error, REFUSALS) and not isinstance(error, RankFailedError)
        return None, error, None if named else f"{type(error).__name__}: {error}"


def _worst(engine: Any, loss: torch.Tensor, wanted: float, references: list[torch.Tensor]) -> float:
    """Backward, without a step, so that weights stay: the largest relative error of loss and gradients."""
    engine.backward(loss)
    total = loss.detach().clone()
    dist.all_reduce(total)
    worst = abs(float(total) / dist.get_world_size() - wanted) / max(wanted, 1e-3)
    parameters = list(engine.module.parameters())
    if any(float(g.norm()) for g in references):
        worst = max(worst, compared([p.grad for p in parameters], references))
    for parameter in parameters:
        parameter.grad = None
    return worst


def windowed() -> MistralForCausalLM:
    """Of two layers with windows that most texts exceed."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6, attn_implementation="sdpa"))


#: Overlap and model, by seed in turns.
ENGINES: tuple[tuple[str, Callable[[], PreTrainedModel]], ...] = (
    ("local_first", tiny_llama),
    ("ping_pong", tiny_llama),
    ("none", windowed),
)


def _engine(model: PreTrainedModel, overlap: str) -> Any:
    config = ds_config(0, 1, {"overlap": overlap, "timeout_seconds": 30, "advanced": SPREAD})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.train()
    return engine


# -- right batches ----------------------------------------------------------------------------------------------------


def _layout(rng: np.random.Generator, world: int) -> Layout:
    """Whole documents, or any pieces, and trees; some ranks may have none."""
    if rng.random() < 0.3:
        lengths: list[list[int]] = [[] for _ in range(world)]
        for _ in range(int(rng.integers(1, 7))):
            lengths[int(rng.integers(world))].append(int(rng.integers(1, 20)))
        return Layout.from_lengths(lengths)
    counts = dict(documents=int(rng.integers(0, 7)), longest=int(rng.integers(1, 40)))
    return random_layout(rng, world, **counts, trees=float(rng.choice([0.0, 0.6])))


def _documents(layout: Layout, rng: np.random.Generator) -> dict[int, Document]:
    """Each row's target is the next one's token; none where a text ends or branches go on, and some are left out."""
    found = {}
    for document in np.unique(layout.segments[:, DOCUMENT]).tolist():
        mine = layout.segments[layout.segments[:, DOCUMENT] == document]
        length = int((mine[:, START] + mine[:, LENGTH]).max())
        ids = rng.integers(0, VOCABULARY, length)
        targets = np.append(ids[1:], IGNORE)
        branches = layout.branches[layout.branches[:, BRANCH_DOCUMENT] == document]
        targets[branches[1:, BRANCH_START] - 1] = IGNORE
        targets[rng.random(length) < 0.1] = IGNORE
        found[document] = Document(ids, targets, texts_of(visible(layout, document, length)))
    return found


def _read_as(layout: Layout, documents: dict[int, Document], stored: Layout) -> dict[int, Document]:
    """The documents that another layout makes of the same rows, where all ranks have given it."""
    if layout == stored:
        return documents
    rows = [
        [
            (documents[d].ids[i], documents[d].targets[i])
            for d, start, n in stored.rank(r)
            for i in range(start, start + n)
        ]
        for r in range(stored.num_ranks)
    ]
    places: dict[int, dict[int, Any]] = {}
    for (rank, document, start, length), first in zip(layout.segments.tolist(), layout.rows.tolist(), strict=True):
        places.setdefault(document, {}).update({start + i: rows[rank][first + i] for i in range(length)})
    found = {}
    for document, row in places.items():
        ids, targets = np.array([row[i] for i in range(len(row))], dtype=np.int64).T
        found[document] = Document(ids, targets, texts_of(visible(layout, document, len(row))))
    return found


def _batch(documents: dict[int, Document], layout: Layout, rank: int) -> dict[str, Any]:
    if not layout.has_trees:
        labels = {d: np.append(IGNORE, document.targets[:-1]) for d, document in documents.items()}
        return batch_from_layout({d: document.ids for d, document in documents.items()}, layout, rank, labels)
    empty = np.zeros(0, dtype=np.int64)
    ids, targets = (
        np.concatenate([empty, *(column(documents[d])[start : start + n] for d, start, n in layout.rank(rank))])
        for column in (lambda document: document.ids, lambda document: document.targets)
    )
    columns = ids, np.append(IGNORE, targets[:-1])[: len(ids)], targets, layout.position_ids(rank)
    batch: dict[str, Any] = {key: torch.from_numpy(values)[None] for key, values in zip(_ROWS, columns, strict=True)}
    return {**batch, "layout": layout, "num_targets": int((targets != IGNORE).sum())}


def _texts_alone(model: torch.nn.Module, documents: dict[int, Document]) -> tuple[float, list[torch.Tensor]]:
    """Mean loss over all targets, each in the first text that has it, and every parameter's gradient."""
    model.zero_grad()
    count, total = sum(int((d.targets != IGNORE).sum()) for d in documents.values()), 0.0
    for document in documents.values():
        left = torch.from_numpy(document.targets.copy())
        for rows in map(torch.from_numpy, document.texts):
            if (left[rows] == IGNORE).all():
                continue
            logits = model(input_ids=torch.from_numpy(document.ids)[rows][None], use_cache=False).logits[0].float()
            loss = cross_entropy(logits, left[rows], ignore_index=IGNORE, reduction="sum") / count
            loss.backward()
            total += loss.item()
            left[rows] = IGNORE
    return total, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


# -- contradictions ---------------------------------------------------------------------------------------------------


def spoil(batch: dict[str, Any], layout: Layout, rank: int, rng: np.random.Generator) -> str:
    """Changes a batch in one of many ways, some of which mean the same documents as before.

    Returns:
        what was done.
    """
    ways = _ways(batch, layout, rank, rng)
    name = str(rng.choice(list(ways)))
    ways[name]()
    return name


def _ways(batch: dict[str, Any], layout: Layout, rank: int, rng: np.random.Generator) -> dict[str, Callable[[], Any]]:
    tokens = batch["input_ids"].shape[1]
    place = int(rng.integers(tokens)) if tokens else 0
    lengths = [segment.length for segment in layout.rank(rank)]

    def put(key: str, values: list[int]) -> None:
        if tokens:
            batch[key] = batch[key].clone()
            batch[key][0, place] = int(rng.choice(values))

    def rows(change: Callable[[torch.Tensor], torch.Tensor], *keys: str) -> None:
        batch.update({key: change(batch[key]) for key in keys or _ROWS})

    def set_to(**values: Any) -> Callable[[], None]:
        return lambda: batch.update(values)

    def without(*keys: str) -> Callable[[], list[Any]]:
        return lambda: [batch.pop(key) for key in keys]

    ways: dict[str, Callable[[], Any]] = {
        "another layout": lambda: batch.update(layout=_other_layout(layout, rng)),
        "a layout of more ranks": set_to(layout=Layout(layout.segments, layout.num_ranks + 1, layout.branches)),
        "a layout of its own": set_to(layout=Layout.from_lengths([lengths])),
        "a layout that is none": set_to(layout="no"),
        "no layout": without("layout"),
        "no layout, no targets": without("layout", "num_targets"),
        "no shift_labels": without("shift_labels"),
        "no positions": without("position_ids"),
        "None": set_to(position_ids=None, attention_mask=None),
        "a token more": lambda: rows(lambda t: torch.cat([t, t.new_ones(1, 1)], 1)),
        "a token less": lambda: rows(lambda t: t[:, 1:]),
        "no token": lambda: rows(lambda t: t[:, :0]),
        "ids alone longer": lambda: rows(lambda t: torch.cat([t, t.new_ones(1, 1)], 1), "input_ids"),
        "two rows": lambda: rows(lambda t: t.view(2, -1) if tokens and tokens % 2 == 0 else t),
        "a vector of ids": lambda: rows(lambda t: t[0], "input_ids"),
        "a list of ids": lambda: rows(lambda t: t.tolist(), "input_ids"),
        "other num_targets": set_to(num_targets=batch["num_targets"] + int(rng.choice([-1, 1]))),
        "num_targets that are no number": set_to(num_targets=float("nan")),
        "no num_targets": without("num_targets"),
        "step_targets": set_to(step_targets=batch["num_targets"]),
        "negative step_targets": set_to(step_targets=-1),
        "another position": lambda: put("position_ids", list(range(-2, 50))),
        "another label": lambda: put("shift_labels", [VOCABULARY, -5, IGNORE]),
        "another id": lambda: put("input_ids", [VOCABULARY, -1]),
        "padding": set_to(attention_mask=(torch.arange(tokens) != place).long()[None]),
        "a mask of any numbers": set_to(attention_mask=torch.from_numpy(rng.integers(0, 3, (1, tokens)))),
        "a mask of floats": set_to(attention_mask=torch.ones(1, tokens)),
        "a mask of ones": set_to(attention_mask=torch.ones(1, tokens, dtype=torch.bool)),
        "other cu_seqlens": set_to(cu_seqlens=sorted({0, tokens, place, int(rng.integers(tokens + 1))})),
        "cu_seqlens": set_to(cu_seqlens=[0, *np.cumsum(lengths, dtype=int).tolist()]),
        "any seq_idx": set_to(seq_idx=torch.from_numpy(np.sort(rng.integers(0, 3, (1, tokens)), 1))),
        "ids of 16 bits": lambda: rows(torch.Tensor.short, "input_ids"),
        "ids of 32 bits": lambda: rows(torch.Tensor.int, "input_ids"),
        "ids of 8 bits": lambda: rows(torch.Tensor.byte, "input_ids"),
        "ids of floats": lambda: rows(torch.Tensor.float, "input_ids"),
        "positions of floats": lambda: rows(torch.Tensor.float, "position_ids"),
        "labels of 32 bits": lambda: rows(torch.Tensor.int, "labels", "shift_labels"),
        "shift_labels of 32 bits": lambda: rows(torch.Tensor.int, "shift_labels"),
        "three axes": lambda: rows(lambda t: t.expand(3, 1, tokens), "position_ids"),
        "four axes": lambda: rows(lambda t: t.expand(4, 1, tokens), "position_ids"),
    }
    if layout.has_trees:
        ways = {name: ways[name] for name in rng.permutation(list(ways))[:20]}  # so that these are not drowned
        ways |= {
            "a parent that is not there": set_to(layout=_with_branch(layout, rng, 3, 1)),
            "another parent": lambda: batch.update(layout=_other_parent(layout, rng)),
            "a branch moved": set_to(layout=_with_branch(layout, rng, 1, int(rng.choice([-1, 1])))),
            "a branch of another length": set_to(layout=_with_branch(layout, rng, 2, int(rng.choice([-1, 1])))),
            "a branch less": set_to(layout=_branches(layout, np.delete(layout.branches, -1, 0))),
            "no branches": set_to(layout=Layout(layout.segments, layout.num_ranks)),
            "positions of the rows": set_to(position_ids=_positions_of_rows(layout, rank)),
            "the target of another branch": lambda: _reach_over(batch, layout, rank, rng),
        }
    return ways


def _other_layout(layout: Layout, rng: np.random.Generator) -> Layout:
    """Other segments: names exchanged, another start, length or name, one less or one more."""
    rows, kind = layout.segments.tolist(), int(rng.integers(6))
    if kind == 5 or not rows:
        rows.append([layout.num_ranks - 1, 10**6, 0, int(rng.integers(1, 5))])
    elif kind == 4:
        del rows[int(rng.integers(len(rows)))]
    elif kind == 3:
        one, other = rng.integers(len(rows), size=2)
        rows[one][1], rows[other][1] = rows[other][1], rows[one][1]
    else:
        changed = rows[int(rng.integers(len(rows)))]
        changed[1 + kind] = int(rng.integers(-3, 2**40)) if kind == 0 else changed[1 + kind] + 1
    return Layout(np.array(rows, dtype=np.int64).reshape(-1, 4), layout.num_ranks, layout.branches)


def _branches(layout: Layout, branches: np.ndarray) -> Layout:
    return Layout(layout.segments, layout.num_ranks, branches)


def _with_branch(layout: Layout, rng: np.random.Generator, column: int, change: int) -> Layout:
    branches = layout.branches.copy()
    branches[int(rng.integers(len(branches))), column] += change
    return _branches(layout, branches)


def _other_parent(layout: Layout, rng: np.random.Generator) -> Layout:
    """A branch that goes on from another one of its tree, or from the same."""
    branches = layout.branches.copy()
    changed = branches[int(rng.integers(len(branches)))]
    others = branches[branches[:, BRANCH_DOCUMENT] == changed[BRANCH_DOCUMENT], BRANCH_START]
    changed[BRANCH_PARENT] = int(rng.choice(others))
    return _branches(layout, branches)


def _positions_of_rows(layout: Layout, rank: int) -> torch.Tensor:
    """As if no document were a tree."""
    return torch.from_numpy(Layout(layout.segments, layout.num_ranks).position_ids(rank))[None]


def _reach_over(batch: dict[str, Any], layout: Layout, rank: int, rng: np.random.Generator) -> None:
    """A row that ends a branch gets the token behind it as its target, which may be of a branch beside it."""
    firsts = dict(zip(layout.segments[:, DOCUMENT].tolist(), layout.rows.tolist(), strict=True))
    here = {segment.document for segment in layout.rank(rank)}
    ends = [firsts[d] + start - 1 for d, start, *_ in layout.branches.tolist() if start and d in here]
    if ends:
        last = int(rng.choice(ends))
        batch["shift_labels"] = batch["shift_labels"].clone()
        batch["shift_labels"][0, last] = batch["input_ids"][0, last + 1]
