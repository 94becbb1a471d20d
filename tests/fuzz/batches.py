# SPDX-License-Identifier: Apache-2.0
"""Random batches that describe their documents in random combinations, right or contradicting, with the right answer.

A case is made from its truth: documents and the target of each of their tokens. What the batch says is derived from
it, in some of the ways that people use, and then perhaps spoiled in one place. Nothing that makes one uses the code
under test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from deepspeed_distca.huggingface.contract import Contract
from deepspeed_distca.huggingface.front_door import BatchError, Limits, admit
from deepspeed_distca.layout import LENGTH, Layout, LayoutError

VOCABULARY = 97
IGNORE = -100


@dataclass
class Case:
    """One rank's batch.

    Attributes:
        batch: keyword arguments of the engine.
        documents: its real documents: (token ids, target of each token or -100).
        spoiled: what was made wrong; None: nothing, the batch must be computed exactly.
        places: (row, start) of each document.
    """

    batch: dict[str, Any]
    documents: list[tuple[list[int], list[int]]]
    spoiled: str | None = None
    places: list[tuple[int, int]] = field(default_factory=list)

    @property
    def targets(self) -> int:
        return sum(t != IGNORE for _, targets in self.documents for t in targets)


@dataclass
class _Rows:
    """Rows of a batch: document lengths of each, padding before and behind them, tokens of a row."""

    documents: list[list[int]]
    left: list[int]
    right: list[int]
    tokens: int

    def runs(self, row: int) -> list[tuple[int, int, int]]:
        """(number, start, length) of what is in a row: documents from 1, padding 0."""
        out, at = [], 0
        if self.left[row]:
            out.append((0, 0, self.left[row]))
            at = self.left[row]
        for number, length in enumerate(self.documents[row], 1):
            out.append((number, at, length))
            at += length
        if self.right[row]:
            out.append((0, at, self.right[row]))
        return out


def make_case(seed: int) -> Case:
    """A random batch of one rank."""
    g = random.Random(seed)
    rows = _rows(g)
    count = len(rows.documents)
    ids = torch.zeros((count, rows.tokens), dtype=torch.long)
    targets = torch.full((count, rows.tokens), IGNORE)
    documents, places = [], []
    for row in range(count):
        for number, start, length in rows.runs(row):
            if number:
                tokens = [g.randrange(1, VOCABULARY) for _ in range(length)]
                following = [t if g.random() < 0.8 else IGNORE for t in tokens[1:]] + [IGNORE]
                ids[row, start : start + length] = torch.tensor(tokens)
                targets[row, start : start + length] = torch.tensor(following)
                documents.append((tokens, following))
                places.append((row, start))
    case = Case({"input_ids": ids}, documents, places=places)
    _describe(g, case, rows)
    _label(g, case, rows, targets)
    if g.random() < 0.4:
        _spoil(g, case, rows)
    return case


def check_batch(seed: int) -> str:
    """Has a random batch come through the front door, and compares with its truth.

    Returns:
        what it was: "exact", or what was spoiled and refused.

    Raises:
        AssertionError: a wrong batch came in, a right one was refused, or came in as something else.
    """
    case = make_case(seed)
    where = f"batch {seed}: { {k: v.tolist() if hasattr(v, 'tolist') else v for k, v in case.batch.items()} }"
    try:
        admitted = admit(case.batch, Contract(), Limits(VOCABULARY, VOCABULARY))
    except (LayoutError, BatchError) as error:
        assert case.spoiled, f"{where}: refused: {error}"
        return case.spoiled
    assert not case.spoiled, f"{where}: came in in spite of: {case.spoiled}"
    ids, tokens = admitted.arguments["input_ids"], admitted.arguments["input_ids"].shape[1]
    length_at = dict(
        zip(
            admitted.micro_batch.layout.rows.tolist(),
            admitted.micro_batch.layout.segments[:, LENGTH].tolist(),
            strict=True,
        )
    )
    positions = admitted.arguments.get("position_ids")
    positions = torch.arange(tokens)[None] if positions is None else positions
    targets = admitted.arguments.get("shift_labels")
    if targets is None:
        targets = torch.full_like(ids, IGNORE)
        targets[:, :-1] = admitted.arguments["labels"][:, 1:]
    for (row, start), (document, expected) in zip(case.places, case.documents, strict=True):
        here = slice(start, start + len(document))
        length = length_at.get(row * tokens + start, 0)
        assert length >= len(document), f"{where}: {admitted.micro_batch.layout}"
        assert not ids[row, start + len(document) : start + length].any(), (
            f"{where}: {admitted.micro_batch.layout}"
        )  # padding
        assert positions.expand_as(ids)[row, here].tolist() == list(range(len(document))), f"{where}: {positions}"
        assert targets[row, here].tolist() == expected, f"{where}: {targets}"
    assert admitted.micro_batch.targets == case.targets == int((targets != IGNORE).sum()), (
        f"{where}: {admitted.micro_batch.targets} targets"
    )
    return "exact"


def _rows(g: random.Random) -> _Rows:
    count = g.choice([1, 1, 1, 1, 2, 3])
    documents = [[g.randint(1, 9) for _ in range(g.randint(1, 4))] for _ in range(count)]
    if count == 1 and g.random() < 0.05:
        return _Rows([[]], [0], [0], 0)
    longest = max(map(sum, documents))
    pad = 0 if g.random() < 0.5 else g.randint(1, 4)
    left, right = [], []
    side = g.choice(["left", "right", "both"])
    for row in documents:
        free = longest + pad - sum(row)
        before = {"left": free, "right": 0, "both": g.randint(0, free)}[side]
        left.append(before)
        right.append(free - before)
    return _Rows(documents, left, right, longest + pad)


def _describe(g: random.Random, case: Case, rows: _Rows) -> None:
    """Adds descriptions; as many as it takes, and perhaps more."""
    padded = any(rows.left) or any(rows.right)
    several = any(len(row) > 1 for row in rows.documents)
    ways: dict[str, Callable[..., Any]] = {
        "layout": _layout,
        "cu_seqlens": _cumulative,
        "cu_seq_lens": _cumulative,
        "packed_seq_params": _packed_params,
        "position_ids": _positions,
        "numbered": _numbered,
        "seq_idx": _seq_idx,
    }
    if not rows.tokens:
        ways = {key: ways[key] for key in ("layout", "cu_seqlens", "position_ids")}
    least = 1 if several else 0
    names = g.sample(list(ways), g.randint(least, len(ways)))
    # Padding that no mask tells apart is described as documents of its own, by all who describe documents.
    if padded and "numbered" not in names and (g.random() < 0.7 or not names):
        real = torch.zeros((len(rows.documents), rows.tokens), dtype=g.choice([torch.long, torch.bool, torch.int32]))
        for row in range(len(rows.documents)):
            for number, start, length in rows.runs(row):
                real[row, start : start + length] = bool(number)
        case.batch["attention_mask"] = real
    elif not padded and "numbered" not in names and g.random() < 0.3:
        case.batch["attention_mask"] = torch.ones((len(rows.documents), rows.tokens), dtype=torch.long)
    for name in names:
        if name == "numbered":
            case.batch["attention_mask"] = _numbered(g, rows)
        elif name == "cu_seq_lens":
            made = _cumulative(g, rows, "attention_mask" in case.batch)
            for key in g.choice([("cu_seq_lens_q",), ("cu_seq_lens_k",), ("cu_seq_lens_q", "cu_seq_lens_k")]):
                case.batch[key] = made
        elif name in ("cu_seqlens", "position_ids", "packed_seq_params"):
            case.batch[name] = ways[name](g, rows, "attention_mask" in case.batch)
        else:
            case.batch[name] = ways[name](g, rows)


def _layout(g: random.Random, rows: _Rows) -> Layout:
    return Layout.from_lengths([[n for row in range(len(rows.documents)) for _, _, n in rows.runs(row)]])


def _borders(rows: _Rows) -> list[int]:
    lengths = [n for row in range(len(rows.documents)) for _, _, n in rows.runs(row)]
    return [0, *np.cumsum(lengths, dtype=int).tolist()]


def _cumulative(g: random.Random, rows: _Rows, masked: bool) -> Any:
    if len(rows.documents) > 1 and g.random() < 0.3:  # a line for each row of the batch
        lines = [[0, *np.cumsum([n for _, _, n in rows.runs(r)]).tolist()] for r in range(len(rows.documents))]
        longest = max(map(len, lines))
        return torch.tensor([line + [rows.tokens] * (longest - len(line)) for line in lines])
    borders = _borders(rows)
    if masked and rows.right and rows.right[-1] and g.random() < 0.3:
        borders.pop()  # padding at the end is told by the mask alone
    borders += [borders[-1]] * g.choice([0, 0, 3])  # padded to a fixed size
    kind = g.randrange(5)
    if kind == 0:
        return borders
    if kind == 1:
        return np.array(borders)
    made = torch.tensor(borders, dtype=g.choice([torch.int32, torch.int64]))
    return made[None] if kind == 2 else made


def _packed_params(g: random.Random, rows: _Rows, masked: bool) -> SimpleNamespace:
    """Megatron's record: documents one after another, or each in a space of its own with padding behind it."""
    if not any(rows.left) and g.random() < 0.5:
        starts = [r * rows.tokens + s for r in range(len(rows.documents)) for number, s, _ in rows.runs(r) if number]
        lengths = [n for row in rows.documents for n in row]
        spaces = [*starts, len(rows.documents) * rows.tokens]
        return SimpleNamespace(
            qkv_format=g.choice(["thd", None]),
            cu_seqlens_kv=torch.tensor([0, *np.cumsum(lengths, dtype=int).tolist()]),
            cu_seqlens_kv_padded=torch.tensor(spaces, dtype=torch.int32),
        )
    made = {f"cu_seqlens_{x}": _cumulative(g, rows, masked) for x in g.choice(["q", ["q", "kv"]])}
    return SimpleNamespace(qkv_format="thd", max_seqlen_q=rows.tokens, **made)


def _positions(g: random.Random, rows: _Rows, masked: bool) -> torch.Tensor:
    out = torch.zeros((len(rows.documents), rows.tokens), dtype=torch.long)
    padding = g.choice(["own", "zeros", "ones"]) if masked else "own"
    for row in range(len(rows.documents)):
        for number, start, length in rows.runs(row):
            if number or padding == "own":
                out[row, start : start + length] = torch.arange(length)
            elif padding == "ones":
                out[row, start : start + length] = 1
    return out


def _numbered(g: random.Random, rows: _Rows) -> torch.Tensor:
    out = torch.zeros((len(rows.documents), rows.tokens), dtype=torch.long)
    for row in range(len(rows.documents)):
        for number, start, length in rows.runs(row):
            out[row, start : start + length] = number
    return out


def _seq_idx(g: random.Random, rows: _Rows) -> torch.Tensor:
    out = torch.zeros((len(rows.documents), rows.tokens), dtype=torch.int32)
    for row in range(len(rows.documents)):
        for index, (_, start, length) in enumerate(rows.runs(row)):
            out[row, start : start + length] = index
    return out


def _label(g: random.Random, case: Case, rows: _Rows, targets: torch.Tensor) -> None:
    """labels, shift_labels, or both, with or without targets that cross documents; and perhaps their number."""
    ids = case.batch["input_ids"]
    labels = torch.full_like(targets, IGNORE)
    labels[:, 1:] = targets[:, :-1]
    shifted = targets.clone()
    masked = case.batch.get("attention_mask")
    for row in range(len(rows.documents)):
        for number, start, length in rows.runs(row):
            last = start + length - 1
            if number and g.random() < 0.3:
                labels[row, start] = ids[row, start]  # the target of another document, or of none
            if number and g.random() < 0.2:
                shifted[row, last] = g.randrange(1, VOCABULARY)
            if not number and masked is not None and g.random() < 0.3:
                labels[row, start : start + length] = 0
                shifted[row, start : start + length] = 0
    kind = g.choice(["labels", "both"])
    case.batch["labels"] = labels
    if kind == "both":
        case.batch["shift_labels"] = shifted
    if g.random() < 0.3:
        case.batch["num_targets"] = case.targets
    if g.random() < 0.2:
        case.batch["step_targets"] = case.targets


def _spoil(g: random.Random, case: Case, rows: _Rows) -> None:
    """One thing made wrong, if there is something of the kind that was drawn."""
    batch = case.batch
    count = len(rows.documents)
    naming = [
        k for k in ("layout", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "seq_idx") if k in batch
    ]
    numbered = "attention_mask" in batch and bool((batch["attention_mask"].long() > 1).any())
    wrongs: list[tuple[str, Callable[[], None]]] = [
        ("id too large", lambda: _put(batch, "input_ids", VOCABULARY + g.randrange(10**6))),
        ("negative id", lambda: _put(batch, "input_ids", -1 - g.randrange(5))),
        ("label too large", lambda: _put(batch, "labels", VOCABULARY)),
        ("negative label", lambda: _put(batch, "labels", -7)),
        ("float labels", lambda: batch.update(labels=batch["labels"].float())),
        ("float ids", lambda: batch.update(input_ids=batch["input_ids"].float())),
        ("short labels", lambda: batch.update(labels=batch["labels"][:, :-1])),
        ("negative num_targets", lambda: batch.update(num_targets=-7)),
        ("other num_targets", lambda: batch.update(num_targets=case.targets + 1)),
        ("fractional num_targets", lambda: batch.update(num_targets=float(case.targets))),
        ("huge step_targets", lambda: batch.update(step_targets=1 << 63)),
        ("too small step_targets", lambda: batch.update(step_targets=case.targets - 1)),
        ("no layout", lambda: batch.update(layout=[[0, 0, rows.tokens]])),
        ("float cu_seqlens", lambda: batch.update(cu_seqlens=torch.tensor(_borders(rows)).float())),
        ("cu_seqlens beyond the end", lambda: batch.update(cu_seqlens=[*_borders(rows), rows.tokens * count + 1])),
        ("falling cu_seqlens", lambda: batch.update(cu_seqlens=[0, rows.tokens * count, 1, rows.tokens * count])),
        ("negative mask", lambda: batch.update(attention_mask=torch.full((count, rows.tokens), -1))),
        ("float mask", lambda: batch.update(attention_mask=torch.ones(count, rows.tokens))),
        ("mask of another shape", lambda: batch.update(attention_mask=torch.ones(count, rows.tokens + 1).long())),
        ("positions of another shape", lambda: batch.update(position_ids=torch.zeros(count, rows.tokens + 1).long())),
        ("a vector of ids", lambda: batch.update(input_ids=batch["input_ids"].flatten())),
    ]
    if rows.tokens * count < 2:
        return
    if len(naming) + numbered > 1 and any(len(row) > 1 for row in rows.documents):
        # Another number of documents in one of several descriptions: two made one, where the others know two.
        wrongs += [("documents merged in " + key, lambda key=key: _merge(batch, key, rows)) for key in naming] * 3
    long = [(r, s, n) for r in range(count) for number, s, n in rows.runs(r) if number and n > 1]
    if len(naming) + numbered > 1 and long:
        wrongs += [
            ("a document cut in " + key, lambda key=key: _cut(batch, key, rows, g.choice(long))) for key in naming
        ] * 3
    longer = [(r, s, n) for r, s, n in long if n > 2]
    if longer and naming:
        wrongs.append(("padding inside a document", lambda: _hole(batch, rows, g.choice(longer))))
    if "position_ids" in batch and long:
        wrongs.append(("positions from 50", lambda: _shift(batch, rows, g.choice(long))))
    name, spoil = g.choice(wrongs)
    spoil()
    case.spoiled = name


def _put(batch: dict, key: str, value: int) -> None:
    batch[key] = batch[key].clone()
    batch[key][0, -1] = value
    if key == "labels":
        batch.pop("shift_labels", None)  # beside which labels do not count


def _merged(borders: list[int], rows: _Rows) -> list[int]:
    """Without the first border between two documents of one row."""
    for row, lengths in enumerate(rows.documents):
        if len(lengths) > 1:
            gone = row * rows.tokens + rows.left[row] + lengths[0]
            return [b for b in borders if b != gone]
    raise AssertionError("no row has two documents")


def _rewrite(batch: dict, key: str, rows: _Rows, borders: list[int]) -> None:
    """Says these borders by one description, the others as they are."""
    lengths = np.diff(borders)
    if key == "layout":
        batch[key] = Layout.from_lengths([lengths.tolist()])
    elif key.startswith("cu_seq"):
        batch[key] = torch.tensor(borders, dtype=torch.int32)
    elif key == "position_ids":
        batch[key] = torch.cat([torch.arange(n) for n in lengths]).view(-1, rows.tokens)
    else:
        batch[key] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).view(-1, rows.tokens)


def _merge(batch: dict, key: str, rows: _Rows) -> None:
    _rewrite(batch, key, rows, _merged(_borders(rows), rows))


def _cut(batch: dict, key: str, rows: _Rows, where: tuple[int, int, int]) -> None:
    row, start, length = where
    _rewrite(batch, key, rows, sorted({*_borders(rows), row * rows.tokens + start + length // 2}))


def _hole(batch: dict, rows: _Rows, where: tuple[int, int, int]) -> None:
    row, start, length = where
    mask = batch.get("attention_mask")
    mask = torch.ones(len(rows.documents), rows.tokens, dtype=torch.long) if mask is None else mask.long()
    batch["attention_mask"] = mask.clone()
    batch["attention_mask"][row, start + length // 2] = 0


def _shift(batch: dict, rows: _Rows, where: tuple[int, int, int]) -> None:
    row, start, length = where
    batch["position_ids"] = batch["position_ids"].clone()
    batch["position_ids"][row, start : start + length] += 50  # rows are shorter: it goes on from nothing
