# SPDX-License-Identifier: Apache-2.0
"""The one front door of a batch: all that it says about its documents and targets is read here, and compared.

A batch may describe its documents in several ways at once (a layout, cu_seqlens, position ids, masks, ``seq_idx``), as
training frameworks do. Whatever *names* documents must name the same ones; a mask of 0 and 1 names none, it says where
padding is and cuts in any case. docs/batches.md has the table. What contradicts itself is refused before any rank
plans.

Nothing here waits for a device unless it must: of what lies on one, only what is needed to tell documents apart, and
to count targets, is read. What was not read is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepspeed_distca.attention_server.coordination.agreement import MicroBatch
from deepspeed_distca.data import packed_params
from deepspeed_distca.data.claims import CUMULATIVE, TEXT_AXES
from deepspeed_distca.data.from_layout import IGNORE_INDEX
from deepspeed_distca.data.integers import integers
from deepspeed_distca.huggingface.contract import Contract
from deepspeed_distca.huggingface.front_door.claims import documents_of, empty_layout, rank_in
from deepspeed_distca.huggingface.front_door.targets import count_targets, read_step_targets, with_targets
from deepspeed_distca.huggingface.front_door.trees import chains, check_model, check_targets
from deepspeed_distca.huggingface.front_door.values import (
    UNLIMITED,
    Here,
    Limits,
    check_ids,
    check_items,
    digest_of,
    shape_of,
    tokens_of,
)
from deepspeed_distca.layout import DOCUMENT, LENGTH, RANK, START, Layout, LayoutError
from deepspeed_distca.trees import BRANCH_DOCUMENT, lengths_of_texts

#: Keys of a collated batch that describe it and are not arguments of a model.
DESCRIPTION = (
    "layout",
    "planned",
    "cu_seqlens",
    "max_seqlen",
    packed_params.NAME,
    "num_targets",
    "step_targets",
    "row_answers",
    "row_weights",
)

#: One of each row: the tokens at which an answer to a question begins and ends, found by a softmax over the row.
_PLACES = ("start_positions", "end_positions")

_EMPTY_VALUES = {
    "input_ids": 0,
    "inputs_embeds": 0,
    "position_ids": 0,
    "attention_mask": 1,
    "labels": IGNORE_INDEX,
    "shift_labels": IGNORE_INDEX,
    **dict.fromkeys(_PLACES, 0),
}


@dataclass(frozen=True)
class Admitted:
    """A batch that came through.

    Attributes:
        micro_batch: what the ranks are told of it. No rank of its layout is without a token; targets are 0 where they
            were not to be counted, and so is the digest of the tokens.
        arguments: what the model gets.
        nothing: there is no real token: one stands in, which may have no part in any loss.
        shape: of the batch, [batch, tokens].
        pieces: tokens of each segment here, and how long its document is as a whole, wherever that is stored; int64
            [segments] each.
    """

    micro_batch: MicroBatch
    arguments: dict[str, Any]
    nothing: bool
    shape: tuple[int, int]
    pieces: tuple[np.ndarray, np.ndarray]

    @property
    def lengths(self) -> np.ndarray:
        """How long the document of each token is as a whole, a tree's longest text, int64 [batch, tokens]."""
        tokens, lengths = self.pieces
        return np.repeat(lengths, tokens).reshape(self.shape)


def admit(
    given: Mapping[str, Any],
    contract: Contract,
    limits: Limits = UNLIMITED,
    *,
    place: tuple[int, int] | None = None,
    count: bool = True,
    digest: bool = False,
    say: Callable[[str], None] = lambda message: None,
) -> Admitted:
    """Reads a batch, compares what it says, and makes a model's arguments of it.

    Args:
        given: the batch: arguments of a model, and keys of :data:`DESCRIPTION`.
        contract: how the model reads its arguments.
        limits: of ids and labels.
        place: this rank's among those that share a layout, and how many these are; None: a layout of several ranks is
            not compared with the batch.
        count: whether targets are wanted.
        digest: whether a digest of the token ids is wanted.
        say: told what was changed: targets that were left out. Only where labels are on the host.

    Raises:
        LayoutError: documents that cannot be told apart, or are told apart in ways that contradict each other.
        BatchError: tokens, labels or counts that cannot be used.
    """
    arguments = {key: value for key, value in given.items() if key not in DESCRIPTION}
    rows, tokens = shape_of(arguments)
    check_ids(arguments.get("input_ids"), limits.token_ids)
    nothing = rows * tokens == 0
    if nothing:
        layout, arguments = empty_layout(given.get("layout"), place), stand_in(arguments, limits.stand_in)
        rows, tokens, real = 1, 1, np.ones(1, dtype=bool)
    else:
        layout, real, arguments = documents_of(given, arguments, rows, tokens, place)
        nothing = not real.any()
    rank = rank_in(layout, place)
    mine = layout.segments[layout.segments[:, RANK] == rank]
    here = Here(mine, _whole_lengths(layout, mine), real, (rows, tokens))
    in_pieces = layout.num_ranks > 1 or bool(layout.segments[:, START].any())
    lengths = here.whole if in_pieces else _without_padding(here)
    if layout.has_trees:
        check_model(layout, contract)
        lengths = _lengths_in_trees(layout, mine, lengths)
    one_result = contract.whole_rows or any(given.get(key) is not None for key in _PLACES)
    _check_documents(here, lengths, contract, one_result)
    arguments = _with_positions(arguments, layout, here, contract)
    if layout.has_trees:
        check_targets(arguments, layout, rank, contract)
        here = chains(layout, here)
    arguments = with_targets(arguments, here, contract, limits, say)
    items, summed = arguments.get("num_items_in_batch"), contract.weighting == "num_items_in_batch"
    if items is not None and summed and arguments.get("labels") is not None and not nothing:
        check_items(items)
    said, targets = given.get("num_targets"), 0
    if (count or said is not None) and contract.targets is not None and not contract.whole_rows:
        targets = count_targets(arguments, said, rows * tokens, contract)
    micro_batch = MicroBatch(
        layout,
        targets if count else 0,
        read_step_targets(given.get("step_targets"), targets),
        digest_of(given.get("input_ids")) if digest else 0,
        given.get("planned"),
    )
    return Admitted(micro_batch, arguments, nothing, (rows, tokens), (mine[:, LENGTH], lengths))


def names_documents(given: Mapping[str, Any]) -> bool:
    """Whether a batch tells several documents of a row apart, other than by padding, or has no token at all: for
    evaluation, where any other batch goes the model's own way. Position ids and masks on a device are read, which
    waits for it."""
    ids = tokens_of(given)
    if torch.is_tensor(ids) and not ids.numel():
        return True
    if any(given.get(key) is not None for key in ("layout", "seq_idx", packed_params.NAME, *CUMULATIVE)):
        return True
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if positions is not None and not torch.is_tensor(positions):
        positions = torch.from_numpy(integers("position_ids", positions))
    if torch.is_tensor(mask) and mask.ndim == 2 and mask.dtype != torch.bool and mask.numel() and int(mask.max()) > 1:
        return True
    if torch.is_tensor(positions) and positions.ndim == 3 and len(positions) == TEXT_AXES:
        positions = positions[0]
    elif torch.is_tensor(positions) and positions.ndim == 1:
        positions = positions[None]
    if not torch.is_tensor(positions) or positions.ndim != 2 or positions.shape[1] < 2:
        return False
    begins = positions[:, 1:] == 0
    if torch.is_tensor(mask) and mask.shape == positions.shape:
        begins = begins & (mask[:, :-1] != 0) & (mask[:, 1:] != 0)  # padding counts from 0, or stays there
    return bool(begins.any())


def _whole_lengths(layout: Layout, mine: np.ndarray) -> np.ndarray:
    """How long the documents of these segments are as a whole, int64 [segments]."""
    if not layout.segments[:, START].any():
        return mine[:, LENGTH]
    ids, number = np.unique(layout.segments[:, DOCUMENT], return_inverse=True)
    total = np.zeros(len(ids), dtype=np.int64)
    np.add.at(total, number, layout.segments[:, LENGTH])
    return total[np.searchsorted(ids, mine[:, DOCUMENT])]


def _lengths_in_trees(layout: Layout, mine: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The same lengths, of a tree that of its longest text."""
    trees = np.unique(layout.branches[:, BRANCH_DOCUMENT])
    longest = dict(zip(trees.tolist(), lengths_of_texts(layout.branches)[1].tolist(), strict=True))
    both = zip(mine[:, DOCUMENT].tolist(), lengths.tolist(), strict=True)
    return np.array([longest.get(document, length) for document, length in both], dtype=np.int64)


def _without_padding(here: Here) -> np.ndarray:
    """Real tokens of each segment, int64 [segments]; of padding alone all of it."""
    real, starts = here.real, here.starts
    if real.all():
        return here.whole
    return np.where(real[starts], np.add.reduceat(real.astype(np.int64), starts), here.whole)


def _check_documents(here: Here, lengths: np.ndarray, contract: Contract, one_result: bool) -> None:
    """What this model cannot do exactly with documents as they are. With one result for a row each needs its own."""
    if contract.rows != "packed":
        _check_rows(here, contract)
    elif not contract.takes_positions and here.continues:
        raise LayoutError(
            "a document continues on other ranks, but this model takes no position ids, so it cannot know where a "
            "piece of a document stands; give each rank whole documents"
        )
    is_real = here.real[here.starts]
    longest = int(lengths[is_real].max(initial=0))
    if contract.longest_document is not None and longest > contract.longest_document:
        raise LayoutError(
            f"a document has {longest} tokens; this model's rotary frequencies change with the length of a "
            f"row beyond {contract.longest_document} tokens (rope_type of its configuration), so that longer "
            "documents cannot be packed exactly. Cut documents to that length, or choose another rope_type"
        )
    if one_result:
        rows, tokens = here.shape
        of_row = np.bincount(here.starts[is_real] // tokens, minlength=rows)
        if (of_row > 1).any():
            row = int(np.flatnonzero(of_row > 1)[0])
            raise LayoutError(
                f"row {row} holds {int(of_row[row])} documents, but this model gives one result for a row; give it "
                "one document a row, padded"
            )


def _check_rows(here: Here, contract: Contract) -> None:
    """Of a model in which something beside core attention passes through a document."""
    if here.continues:
        raise LayoutError(
            f"a document continues on other ranks, but in {contract.name} something beside core attention passes "
            "through a document and stays on its rank, such as a convolution, a recurrent state or a count of places; "
            'give each rank whole documents (GlobalPackedLoader: placement="whole")'
        )
    rows, tokens = here.shape
    if len(here.segments) == rows or (contract.rows == "told" and rows == 1):
        return  # padding behind a document belongs to it
    of_row = np.bincount(here.starts // tokens)
    row = int(np.flatnonzero(of_row > 1)[0])
    what = f"row {row} holds several documents, or padding before one"
    if contract.rows == "told":
        raise LayoutError(
            f"{what}, and the batch has {rows} rows; {contract.name} is told of borders in a single row only: give it "
            "one row of all documents, or one document a row, padded on the right"
        )
    raise LayoutError(
        f"{what}; {contract.name} is exact with one document a row only, padded on the right, because with several "
        f"{contract.why}"
    )


def stand_in(arguments: Mapping[str, Any], token: int = 0) -> dict[str, Any]:
    """One token, without a target, in a batch that has none: HuggingFace models cannot run without. Embeddings need a
    gradient if those given do, or backward would not come through layers through which it comes on other ranks."""
    size = shape_of(arguments)
    if all(size):
        return dict(arguments)
    found = dict(arguments)
    for key, value in arguments.items():
        if torch.is_tensor(value) and (key in _EMPTY_VALUES or value.shape[:2] == size):
            fill = token if key == "input_ids" else _EMPTY_VALUES.get(key, 0)
            shape = (len(value), 1, 1) if key == "position_ids" and value.ndim == 3 else (1, 1, *value.shape[2:])
            if key in _PLACES or (key == "labels" and value.is_floating_point()):  # of rows
                shape, fill = (1, *value.shape[1:]), 0
            found[key] = value.new_full(shape, fill)
            if value.requires_grad:
                found[key] = found[key] + value.sum()
    return found


def _with_positions(arguments: dict[str, Any], layout: Layout, here: Here, contract: Contract) -> dict[str, Any]:
    """The arguments with positions from 0 in every document, where none were given and the model's own count, along a
    row, would be another.

    Raises:
        LayoutError: positions of several axes for a model that has one, or none where they must be given.
    """
    (rows, tokens), positions = here.shape, arguments.get("position_ids")
    if positions is not None and np.ndim(positions) > 2 and not contract.takes_axes:
        raise LayoutError(
            f"position_ids have shape {list(np.shape(positions))}, but {contract.name} has rotary embeddings of one "
            f"axis; allowed: [{rows}, {tokens}], or leave them out where documents are whole"
        )
    if contract.rows == "alone" and positions is not None and np.ndim(positions) < 3:
        # They count from 0 in every row, as the model does itself, if not from another number.
        return {key: value for key, value in arguments.items() if key != "position_ids"}
    if positions is not None:
        if not torch.is_tensor(positions):
            positions = torch.from_numpy(integers("position_ids", positions))
        return {**arguments, "position_ids": positions[None] if positions.ndim == 1 else positions}
    if layout.num_ranks > 1:
        raise LayoutError("a layout of several ranks needs position_ids beside it: true positions in each document")
    if (len(here.segments) == rows and not layout.has_trees) or not contract.takes_positions:
        return arguments  # a document a row, or nothing to tell
    made = torch.from_numpy(layout.position_ids(0)).view(rows, tokens)
    return {**arguments, "position_ids": made.to(tokens_of(arguments).device)}
