# SPDX-License-Identifier: Apache-2.0
"""What each description says about documents, and whether all of them say the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from deepspeed_distca.huggingface.front_door import packed_params
from deepspeed_distca.huggingface.front_door.values import integers, like_tokens, on_host
from deepspeed_distca.layout import RANK, START, Layout, LayoutError

CUMULATIVE = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", *packed_params.LENGTHS)
#: Axes of multi-modal position ids of which the first is the text's, as transformers reads them.
TEXT_AXES = 4
_DESCRIPTIONS = (*CUMULATIVE, *packed_params.SPACES, "attention_mask", "seq_idx", "position_ids")


class _Claim(NamedTuple):
    """What one description says: where documents begin, bool [batch * tokens]."""

    name: str
    begins: np.ndarray


def documents_of(
    given: Mapping[str, Any], arguments: dict[str, Any], rows: int, tokens: int, place: tuple[int, int] | None
) -> tuple[Layout, np.ndarray, dict[str, Any]]:
    """The layout of a batch with tokens, which of them are real, bool [rows * tokens], and the model's arguments with
    the mask that it gets."""
    layout = given.get("layout")
    if layout is not None:
        check_layout(layout, rows * tokens, rows, tokens, place)
    given = {**given, **packed_params.fields(given.get(packed_params.NAME))}
    # On the host everything is compared. Of what is on a device nothing is read where the host knows the documents.
    descriptions = {key: given[key] for key in _DESCRIPTIONS if given.get(key) is not None}
    at_hand = {key: value for key, value in descriptions.items() if on_host(value)}
    known = layout is not None or any(key in at_hand for key in (*CUMULATIVE, "seq_idx"))
    known = known or ("position_ids" in at_hand and "attention_mask" not in descriptions)
    said = at_hand if known else descriptions
    if layout is not None and not said and rows == 1:  # nothing to compare
        return layout.filled(), np.ones(tokens, dtype=bool), _with_mask(arguments, None, rows, tokens)
    mask = _mask(said.get("attention_mask"), rows, tokens)
    real = np.ones(rows * tokens, dtype=bool) if mask is None else mask != 0
    stored = {}
    for key, space in zip(packed_params.LENGTHS, packed_params.SPACES, strict=True):
        if said.get(space) is not None:
            stored[key], padding = packed_params.stored(key, said.get(key), said[space], rows * tokens)
            real &= ~padding
    claims = []
    if layout is not None:
        claims.append(_Claim("layout", _begins_of_layout(layout, rows, tokens, place)))
    for key in CUMULATIVE:
        if said.get(key) is not None:
            claims.append(_Claim(key, _begins_of_cumulative(key, stored.get(key, said[key]), rows, tokens, real)))
    if mask is not None and mask.max() > 1:
        claims.append(_Claim("attention_mask", _begins_of_numbers("attention_mask", mask, rows, tokens, real)))
    if said.get("seq_idx") is not None:
        numbers = like_tokens("seq_idx", said["seq_idx"], rows, tokens)
        claims.append(_Claim("seq_idx", _begins_of_numbers("seq_idx", numbers, rows, tokens, real)))
    positions = _positions(said.get("position_ids"), rows, tokens, bool(claims) or not real.all())
    if positions is not None:
        there = _begins_of_positions(positions, rows, tokens)
        if layout is not None:
            # A piece of a document may begin at the very position behind what is stored before it.
            there |= _begins_of_layout(layout, rows, tokens, place, pieces=True)
        claims.append(_Claim("position_ids", there))
    begins = _agreed(claims, real, rows, tokens, layout)
    if layout is None:
        layout = Layout.from_cu_seqlens(np.append(np.flatnonzero(begins), rows * tokens))
    if positions is not None:
        _check_positions(positions, layout, place, real, tokens)
    read = "attention_mask" in said or stored
    return layout.filled(), real, _with_mask(arguments, real if read else None, rows, tokens)


def _agreed(claims: list[_Claim], real: np.ndarray, rows: int, tokens: int, layout: Layout | None) -> np.ndarray:
    """Where documents begin by all claims, bool [rows * tokens]; padding and the ends of rows cut in any case.

    Padding behind a document belongs to it, as far as attention goes: no real token sees it, and alone it would be a
    row of zeros in some models, whose gradient is no number.
    """
    edges = np.ones(rows * tokens, dtype=bool)
    edges[1:] = real[1:] & ~real[:-1]
    edges[::tokens] = True
    runs = np.flatnonzero(edges & real)  # first tokens of runs of real ones
    later = np.zeros(len(runs), dtype=bool)
    later[1:] = runs[1:] // tokens == runs[:-1] // tokens
    if later.any() and not claims:
        raise LayoutError(
            f"attention_mask: row {int(runs[later][0]) // tokens} has several runs of real tokens; describe them by "
            "position_ids, cu_seqlens or a mask that numbers documents"
        )
    for claim in claims:
        if not claim.begins[runs[later]].all():
            bad = int(runs[later][~claim.begins[runs[later]]][0])
            raise LayoutError(
                f"there is padding before token {bad % tokens} of row {bad // tokens}, which by "
                f"{claim.name} goes on with a document; padding may stand before and behind documents, not inside"
            )
    if layout is not None:
        inside = edges & ~claims[0].begins
        if inside.any():
            bad = int(np.flatnonzero(inside)[0])
            what = f"the end of row {bad // tokens - 1}" if bad % tokens == 0 else "the end of padding"
            raise LayoutError(
                f"{what} (token {bad % tokens} of row {bad // tokens}) lies inside a document of the layout, which "
                "must cut there"
            )
    said = [(claim.name, (claim.begins | edges) & real) for claim in claims]
    for name, begins in said[1:]:
        first, expected = said[0]
        if not np.array_equal(begins, expected):
            bad = int(np.flatnonzero(begins != expected)[0])
            one, other = (first, name) if expected[bad] else (name, first)
            raise LayoutError(
                f"{first} and {name} contradict each other: by {one} a document begins at token {bad % tokens} of row "
                f"{bad // tokens}, by {other} none does. Both must describe the same documents"
                + (
                    "; position_ids start at 0 in each of them, or leave them out"
                    if "position_ids" in (one, other)
                    else ""
                )
            )
    return edges | said[0][1] if said else edges


def check_layout(layout: Any, count: int, rows: int, tokens: int, place: tuple[int, int] | None) -> None:
    if not isinstance(layout, Layout):
        raise LayoutError(f"layout must be a Layout, got {type(layout).__name__}")
    layout.validate()
    rank, ranks = 0, 1
    if layout.num_ranks > 1:
        if place is None:
            return
        rank, ranks = place
    if layout.num_ranks != ranks:
        raise LayoutError(f"the layout has {layout.num_ranks} ranks, but {ranks} share attention")
    described = int(layout.tokens[rank])
    if described != count:
        where = f" for rank {rank}" if layout.num_ranks > 1 else ""
        raise LayoutError(
            f"the layout has {described} tokens{where}, input_ids has {rows} x {tokens}; the layout must describe "
            "the very tokens of the batch"
        )


def empty_layout(layout: Any, place: tuple[int, int] | None) -> Layout:
    """Of a batch without tokens; the others may have some."""
    if layout is None:
        return Layout.from_lengths([[]]).filled()
    check_layout(layout, 0, 1, 0, place)
    return layout.filled()


def _begins_of_layout(
    layout: Layout, rows: int, tokens: int, place: tuple[int, int] | None, pieces: bool = False
) -> np.ndarray:
    """Where its segments begin; with `pieces` only those that are not the beginning of a document."""
    begins = np.zeros(rows * tokens, dtype=bool)
    rank = place[0] if place is not None and layout.num_ranks > 1 else 0
    here = layout.segments[:, RANK] == rank
    starts = layout.rows[here & (layout.segments[:, START] > 0) if pieces else here]
    begins[starts[starts < begins.size]] = True
    return begins


def _begins_of_cumulative(name: str, given: Any, rows: int, tokens: int, real: np.ndarray) -> np.ndarray:
    values, end = integers(name, given), rows * tokens
    wanted = f"cumulative lengths [documents + 1] from 0 to {end}"
    if values.ndim == 2 and len(values) == 1:
        values = values[0]
    if values.ndim == 2 and len(values) == rows:
        # One line for each row of the batch, each from 0 to the row's end.
        if (values[:, 0] != 0).any() or (values[:, -1] != tokens).any() or (np.diff(values) < 0).any():
            raise LayoutError(f"{name} {list(values.shape)}: each line must rise from 0 to the row's {tokens} tokens")
        values = (values + tokens * np.arange(rows)[:, None]).ravel()
    if values.ndim != 1 or values.size == 0 or values[0] != 0 or (np.diff(values) < 0).any():
        raise LayoutError(
            f"{name} must be {wanted}, or a line of them for each row; it may not fall. Got {values.tolist()[:8]} of "
            f"shape {list(values.shape)}"
        )
    if values[-1] > end or (values[-1] < end and real[values[-1] :].any()):
        raise LayoutError(
            f"{name} ends at {int(values[-1])}, but the batch has {rows} x {tokens} tokens; it must be {wanted}, "
            "unless attention_mask says that the rest is padding"
        )
    begins = np.zeros(end + 1, dtype=bool)
    begins[values] = True
    begins = begins[:end]
    crossed = np.flatnonzero(~begins[::tokens])
    if len(crossed):
        raise LayoutError(f"{name}: a document crosses the end of row {int(crossed[0]) - 1}; rows are apart")
    return begins


def _begins_of_numbers(name: str, numbers: np.ndarray, rows: int, tokens: int, real: np.ndarray) -> np.ndarray:
    """A document for each run of one number; a number that comes back would be one document with a hole."""
    if (numbers[real] < 0).any():
        raise LayoutError(f"{name} holds {int(numbers[real].min())} on a token; allowed: numbers from 0 on")
    begins = _changes(numbers, tokens)
    for row in range(rows):
        part = slice(row * tokens, (row + 1) * tokens)
        runs = numbers[part][(begins & real)[part]]
        if len(np.unique(runs)) < len(runs):
            kinds, times = np.unique(runs, return_counts=True)
            raise LayoutError(
                f"{name}: number {int(kinds[times > 1][0])} comes back in row {row} after others; every document "
                "needs a number of its own, its tokens one after another"
            )
    return begins


def _begins_of_positions(positions: np.ndarray, rows: int, tokens: int) -> np.ndarray:
    begins = np.ones(rows * tokens, dtype=bool)
    begins[1:] = positions[1:] != positions[:-1] + 1
    begins[::tokens] = True
    return begins


def _changes(values: np.ndarray, tokens: int) -> np.ndarray:
    begins = np.ones(values.size, dtype=bool)
    begins[1:] = values[1:] != values[:-1]
    begins[::tokens] = True
    return begins


def _mask(given: Any, rows: int, tokens: int) -> np.ndarray | None:
    if given is None:
        return None
    mask = like_tokens("attention_mask", given, rows, tokens)
    if (mask < 0).any():
        raise LayoutError(
            f"attention_mask holds {int(mask.min())}; allowed: 0 for padding, and 1, or a number for each document"
        )
    return mask


def _positions(given: Any, rows: int, tokens: int, described: bool) -> np.ndarray | None:
    """Position ids, int64 [rows * tokens]; None where there are none, or ones of several axes beside another
    description of the documents."""
    if given is None:
        return None
    if np.shape(given)[:1] == (TEXT_AXES,) and len(np.shape(given)) == 3:
        given = given[0]
    if len(np.shape(given)) > 2:
        if described:
            return None
        raise LayoutError(
            f"position_ids of shape {list(np.shape(given))} (multi-axis) do not say where documents begin; give "
            f"[batch, tokens] position ids, or [{TEXT_AXES}, batch, tokens] with the text's first, a layout or "
            "cu_seqlens"
        )
    values = integers("position_ids", given)
    if values.shape in ((tokens,), (1, tokens)):
        values = np.broadcast_to(values.reshape(1, tokens), (rows, tokens))
    if values.shape != (rows, tokens):
        raise LayoutError(f"position_ids is {list(values.shape)}, but the batch has {rows} x {tokens} tokens")
    return values.ravel()


def _check_positions(
    positions: np.ndarray, layout: Layout, place: tuple[int, int] | None, real: np.ndarray, tokens: int
) -> None:
    """Every document's first token here has the position that the layout says: 0, where it begins here."""
    rank = place[0] if place is not None and layout.num_ranks > 1 else 0
    which = layout.segments[:, RANK] == rank
    at, start = layout.rows[which], layout.segments[which, START]
    inside = at < positions.size
    at, start = at[inside], start[inside]
    wrong = (positions[at] != start) & real[at]
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        row, token = divmod(int(at[bad]), tokens)
        raise LayoutError(
            f"position_ids: the document at token {token} of row {row} begins at position {int(positions[at[bad]])}, "
            f"not {int(start[bad])}; position ids start at 0 in every document. A piece of a document that continues "
            "on other ranks needs a layout that names its document and start"
        )


def _with_mask(arguments: dict[str, Any], real: np.ndarray | None, rows: int, tokens: int) -> dict[str, Any]:
    """The mask for whatever else reads it (router losses): 1 on real tokens; none where all are, or none is. `real` is
    None where nothing that tells of padding was read."""
    mask = arguments.get("attention_mask")
    if real is None or (mask is None and real.all()):
        return arguments if mask is None else {**arguments, "attention_mask": (mask != 0).long()}
    if real.all() or not real.any():
        return {**arguments, "attention_mask": None}
    like = next(t for t in (mask, arguments.get("input_ids"), arguments.get("inputs_embeds")) if t is not None)
    device = like.device if torch.is_tensor(like) else None
    return {**arguments, "attention_mask": torch.from_numpy(real).view(rows, tokens).long().to(device)}
