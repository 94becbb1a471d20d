# SPDX-License-Identifier: Apache-2.0
"""Batches with trees on two ranks: loss and gradients against every text run alone, or an error on both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch.nn.functional import cross_entropy

from deepspeed_distca import Layout
from deepspeed_distca.data import PrefixCollator, weighted_loss
from deepspeed_distca.trees import depths_of
from tests.distributed.doors_worker import alone, engine_of, mbart, mixtral, phi
from tests.distributed.model_families import build
from tests.distributed.scenarios import compared, outcomes
from tests.tiny_llama import VOCABULARY, llama

#: Of each rank, prompts and their answers; one without an answer is a document.
LENGTHS = [[(40, [9, 1, 30, 4]), (7, []), (25, [3, 3])], [(3, [5, 8]), (11, [])]]
Prompt = tuple[list[int], list[list[int]]]
SPREAD = {"granularity": 1, "min_gain": 0.0, "tolerance": 0.0}


def run() -> dict[str, Any]:
    """See :func:`~.scenarios.outcomes`."""
    return outcomes(SCENARIOS)


def prompts(rank: int | None = None, lengths: Any = None) -> list[Prompt]:
    """Token ids of a rank's prompts and their answers, or of all."""
    draw = torch.Generator().manual_seed(5)

    def ids(count: int) -> list[int]:
        return torch.randint(1, VOCABULARY, (count,), generator=draw).tolist()

    made = [[(ids(n), [ids(m) for m in answers]) for n, answers in row] for row in lengths or LENGTHS]
    return made[rank] if rank is not None else [prompt for row in made for prompt in row]


def collated(given: list[Prompt]) -> dict[str, Any]:
    features = [
        {"prompt_ids": prompt, "answers": answers} if answers else {"input_ids": prompt} for prompt, answers in given
    ]
    return PrefixCollator(min_shared=2)(features)


def mine(lengths: Any = None) -> dict[str, Any]:
    return collated(prompts(dist.get_rank(), lengths))


def texts(given: list[Prompt]) -> tuple[list[list[int]], list[int]]:
    """All texts, and the place of the first target of each."""
    found = [
        (prompt, answer, len(prompt) if answers else 1) for prompt, answers in given for answer in answers or [[]]
    ]
    return [prompt + answer for prompt, answer, _ in found], [first for _, _, first in found]


def worst(
    make: Callable[[], torch.nn.Module] = llama,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda batch: batch,
    lengths: Any = None,
    checkpointing: bool = False,
    moves: bool = True,
    **config: Any,
) -> float:
    """The largest relative error of a micro-batch's loss and gradients; infinite where no row moved that should."""
    wanted, references = alone(make(), *texts(prompts(lengths=lengths)))
    model = make()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = engine_of(model, **config)
    zero = "zero_optimization" in config
    for turn in range(2):  # the first forward is watched
        if zero and turn:
            engine.step()  # of size 0
        model.zero_grad()
        loss = engine(**change(mine(lengths))).loss
        engine.backward(loss)
    total = loss.detach().clone()
    dist.all_reduce(total)
    error = abs(float(total) / dist.get_world_size() - wanted) / wanted
    gradients = [safe_get_full_grad(p) if zero else p.grad for p in engine.module.parameters()]
    error = max(error, compared(gradients, references))
    return error if engine.distca.stats.bytes_sent > 0 or not moves else float("inf")


def block(**keys: Any) -> dict[str, Any]:
    return {**keys, "advanced": SPREAD}


def without(*keys: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda batch: {key: value for key, value in batch.items() if key not in keys}


def given(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """On rank 1 only."""
    return lambda batch: {**batch, **{k: v(batch) for k, v in values.items()}} if dist.get_rank() else batch


# -- scenarios --------------------------------------------------------------------------------------------------------


def shared_layout() -> float:
    """The layout of both ranks, as a loader of all ranks would give it."""
    both = Layout.from_integers([collated(prompts(rank))["layout"].to_integers() for rank in range(2)])
    return worst(change=lambda batch: {**batch, "layout": both})


def found_beginnings() -> float:
    """Documents with common beginnings, several deep; by a loss of one's own every target of each document counts."""
    draw = torch.Generator().manual_seed(3 + dist.get_rank())
    everyone = [_documents(torch.Generator().manual_seed(3 + rank)) for rank in range(2)]
    documents = _documents(draw)
    count = sum(len(d) - 1 for row in everyone for d in row)
    reference = llama()
    for document in (d for row in everyone for d in row):
        ids = torch.tensor([document])
        logits = reference(input_ids=ids).logits[0, :-1]
        (cross_entropy(logits, ids[0, 1:], reduction="sum") / count).backward()
    engine = engine_of(llama())
    batch = PrefixCollator(min_shared=3)([{"input_ids": d} for d in documents])
    depth = len({*depths_of(batch["layout"].branches).tolist()})
    logits = engine(**without("labels", "shift_labels")(batch)).logits
    engine.backward(weighted_loss(logits, batch, count / 2))  # gradients are averaged over two ranks
    error = compared([p.grad for p in engine.module.parameters()], [p.grad for p in reference.parameters()])
    return error if depth > 3 else float("inf")


def _documents(draw: torch.Generator) -> list[list[int]]:
    """Ten, each of which goes on from a random place of a random one before."""
    made = [torch.randint(1, VOCABULARY, (30,), generator=draw).tolist()]
    for _ in range(9):
        source = made[int(torch.randint(len(made), (1,), generator=draw))]
        cut = int(torch.randint(4, len(source), (1,), generator=draw))
        more = int(torch.randint(1, 15, (1,), generator=draw))
        made.append(source[:cut] + torch.randint(1, VOCABULARY, (more,), generator=draw).tolist())
    return made


def evaluation(make: Callable[[], torch.nn.Module] = llama) -> float:
    engine = engine_of(make())
    engine.eval()
    batch = mine()
    with torch.no_grad():
        logits = engine(**without("labels", "shift_labels")(batch)).logits[0]
        error = 0.0
        rows = {tuple(d): i for i, d in enumerate(_paths(batch["layout"]))}
        for path in rows:
            ids = batch["input_ids"][:, list(path)]
            expected = engine.module(input_ids=ids).logits[0]
            error = max(error, float((logits[list(path)] - expected).norm() / expected.norm()))
    return error


def _paths(layout: Layout) -> list[list[int]]:
    """Rows of every text of a layout of one rank."""
    found: list[list[int]] = []
    for (_, document, _, length), first in zip(layout.segments.tolist(), layout.rows.tolist(), strict=True):
        tree = layout.branches[layout.branches[:, 0] == document][:, 1:].tolist() or [[0, length, -1]]
        rows: dict[int, list[int]] = {-1: []}
        for start, size, parent in tree:
            rows[start] = rows[parent] + list(range(first + start, first + start + size))
        inner = {parent for _, _, parent in tree}
        found += [path for start, path in rows.items() if start >= 0 and start not in inner]
    return found


def unknown_parent(batch: dict[str, Any]) -> Layout:
    layout = batch["layout"]
    branches = layout.branches.copy()
    branches[-1, 3] = 1
    return Layout(layout.segments, 1, branches)


def moved_positions(batch: dict[str, Any]) -> torch.Tensor:
    """As if every branch were a document."""
    positions = batch["position_ids"].clone()
    start = int(batch["layout"].branches[1, 1])
    positions[0, start:] -= int(positions[0, start])
    return positions


def two_targets(batch: dict[str, Any]) -> torch.Tensor:
    """The prompt's last row predicts the first answer's first token, as nobody can."""
    labels = batch["shift_labels"].clone()
    last = int(batch["layout"].branches[0, 2]) - 1
    labels[0, last] = int(batch["input_ids"][0, last + 1])
    return labels


def other_beginnings(batch: dict[str, Any]) -> dict[str, Any]:
    """Answers that do not begin with a copy of the prompt's last token."""
    if not dist.get_rank():
        return batch
    ids = batch["input_ids"].clone()
    for place, start in enumerate(batch["layout"].branches[1:, 1].tolist()):
        ids[0, start] = 1 + place
    return {**batch, "input_ids": ids, "shift_labels": two_targets({**batch, "input_ids": ids})}


def family(model_type: str, **options: Any) -> Callable[[], torch.nn.Module]:
    return lambda: build(model_type, options)


def trees_in_one_group() -> float:
    """Of two groups of servers one has trees. Neither divides its micro-batch: ZeRO-3 gathers weights in one order."""
    lengths = [[(40, [9, 1])], [(30, []), (11, [])]]
    return worst(
        lengths=lengths,
        moves=False,
        distca=block(overlap="ping_pong", servers=1),
        zero_optimization={"stage": 3},
        optimizer={"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
    )


def without_a_block() -> Any:
    model = llama()
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine(**mine()).loss


def detached() -> Any:
    engine = engine_of(llama())
    engine.distca.detach()
    return engine(**mine()).loss


LONG = [[(40, [9, 1, 30, 4]), (25, [3, 3])], [(20, [5, 8])]]

SCENARIOS: dict[str, Callable[[], Any]] = {
    "llama": worst,
    "labels alone": lambda: worst(change=without("shift_labels", "num_targets")),
    "no position ids": lambda: worst(change=without("position_ids")),
    "a mask of ones": lambda: worst(
        change=lambda batch: {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    ),
    "none": lambda: worst(distca=block(overlap="none")),
    "ping_pong": lambda: worst(distca=block(overlap="ping_pong")),
    "trees in one group of two": trees_in_one_group,
    "checkpointing": lambda: worst(checkpointing=True, distca=block(keep_attention=True)),
    "recomputation": lambda: worst(checkpointing=True, distca=block(keep_attention=False)),
    "a layout of both ranks": shared_layout,
    "beginnings that are found": found_beginnings,
    "evaluation": evaluation,
    "latent attention": lambda: worst(family("deepseek_v3")),
    "experts": lambda: worst(lambda: without_router_loss(mixtral())),
    "windows that hide nothing": lambda: worst(family("mistral", sliding_window=70)),
    "sinks": lambda: worst(family("gpt_oss", sliding_window=70)),
    "softcap": lambda: worst(family("gemma2", sliding_window=70)),
    "longrope, all texts long": lambda: worst(phi, lengths=LONG),
    "windows": lambda: worst(family("mistral", sliding_window=12)),
    "windows and sinks": lambda: worst(family("gpt_oss", sliding_window=5)),
    "windows, softcap, recomputation": lambda: worst(
        family("gemma2", sliding_window=20), checkpointing=True, distca=block(keep_attention=True)
    ),
    "evaluation with windows": lambda: evaluation(family("mistral", sliding_window=12)),
    # refused
    "without the plugin": lambda: worst(distca={"enabled": False}),
    "without a block": without_a_block,
    "detached": detached,
    "longrope, texts on both sides": lambda: worst(lambda: phi(42), lengths=LONG),
    "no positions": lambda: worst(mbart),
    "a parent that is not there": lambda: worst(change=given(layout=unknown_parent)),
    "positions that do not go on": lambda: worst(change=given(position_ids=moved_positions)),
    "cu_seqlens beside": lambda: worst(change=given(cu_seqlens=lambda b: torch.tensor([0, b["input_ids"].numel()]))),
    "padding": lambda: worst(
        change=given(attention_mask=lambda b: torch.nn.functional.pad(torch.ones_like(b["input_ids"])[:, 1:], (1, 0)))
    ),
    "a token with two targets": lambda: worst(change=other_beginnings),
}


def without_router_loss(model: torch.nn.Module) -> torch.nn.Module:
    """It counts a token that is shared once."""
    model.config.output_router_logits = False
    return model
