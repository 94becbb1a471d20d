# SPDX-License-Identifier: Apache-2.0
"""What each description says about documents, and whether all of them say the same: for batches that come to a model,
and for what a dataset yields.

A description becomes a claim, where documents begin. Whatever names documents must name the same ones; a mask of 0 and
1 names none, it says where padding is and cuts in any case. docs/batches.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from deepspeed_distca.data import packed_params
from deepspeed_distca.data.integers import integers, like_tokens
from deepspeed_distca.layout import LayoutError

CUMULATIVE = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", *packed_params.LENGTHS)
#: Axes of multi-modal position ids of which the first is the text's, as transformers reads them.
TEXT_AXES = 4
DESCRIPTIONS = (*CUMULATIVE, *packed_params.SPACES, "attention_mask", "seq_idx", "position_ids")


class Claimed(NamedTuple):
    """What all of them say.

    Attributes:
        begins: where documents begin, and where rows and the padding before documents do; bool [rows * tokens].
        real: which tokens are no padding, bool [rows * tokens].
        told: whether anything told of padding.
    """

    begins: np.ndarray
    real: np.ndarray
    told: bool


def descriptions_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a batch or a feature says, by :data:`DESCRIPTIONS`: lists, arrays or tensors.

    Raises:
        LayoutError: see :func:`~.packed_params.fields`.
    """
    said = {key: given[key] for key in DESCRIPTIONS if given.get(key) is not None}
    return said | packed_params.fields(given.get(packed_params.NAME))


def read_claims(said: Mapping[str, Any], rows: int, tokens: int, layout: np.ndarray | None = None) -> Claimed:
    """Reads descriptions, of :func:`descriptions_of`, and compares them. "seq_lengths" of a dataset may be among them,
    cumulative.

    Args:
        layout: where a layout has a document, or a piece of one, begin: the position in the document, -1 at all other
            tokens, int64 [rows * tokens]. It has to cut wherever rows end and padding does.

    Raises:
        LayoutError: what cannot be read, contradicts itself or another description.
    """
    mask = _mask(said.get("attention_mask"), rows, tokens)
    real = np.ones(rows * tokens, dtype=bool) if mask is None else mask != 0
    stored = {}
    for key, space in zip(packed_params.LENGTHS, packed_params.SPACES, strict=True):
        if said.get(space) is not None:
            stored[key], padding = packed_params.stored(key, said.get(key), said[space], rows * tokens)
            real &= ~padding
    claims: dict[str, np.ndarray] = {} if layout is None else {"layout": layout >= 0}
    for key in (*CUMULATIVE, "seq_lengths"):
        if said.get(key) is not None:
            claims[key] = begins_of_cumulative(key, stored.get(key, said[key]), rows, tokens, real)
    if mask is not None and mask.max(initial=0) > 1:
        claims["attention_mask"] = _begins_of_numbers("attention_mask", mask, rows, tokens, real)
    if said.get("seq_idx") is not None:
        numbers = like_tokens("seq_idx", said["seq_idx"], rows, tokens)
        claims["seq_idx"] = _begins_of_numbers("seq_idx", numbers, rows, tokens, real)
    positions = _positions(said.get("position_ids"), rows, tokens, bool(claims) or not real.all())
    if positions is not None:
        there = changes(positions - np.arange(positions.size), tokens)
        # A piece of a document may begin at the very position behind what is stored before it.
        claims["position_ids"] = there if layout is None else there | (layout > 0)
    begins = _agreed(claims, real, rows, tokens)
    if positions is not None:
        at = np.flatnonzero(begins & real)
        _check_starts(positions, at, np.zeros_like(at) if layout is None else layout[at], tokens)
    return Claimed(begins, real, mask is not None or bool(stored))


def _agreed(claims: dict[str, np.ndarray], real: np.ndarray, rows: int, tokens: int) -> np.ndarray:
    """Where documents begin by all claims, bool [rows * tokens]; padding and the ends of rows cut in any case.

    Padding behind a document belongs to it, as far as attention goes: no real token sees it, and alone it would be a
    row of zeros in some models, whose gradient is no number.

    Args:
        claims: by description, the same of it alone.
    """
    edges = np.ones(rows * tokens, dtype=bool)
    edges[1:] = real[1:] & ~real[:-1]
    edges[:: max(1, tokens)] = True
    runs = np.flatnonzero(edges & real)  # first tokens of runs of real ones
    later = np.zeros(len(runs), dtype=bool)
    later[1:] = runs[1:] // max(1, tokens) == runs[:-1] // max(1, tokens)
    if later.any() and not claims:
        raise LayoutError(
            f"attention_mask: row {int(runs[later][0]) // tokens} has several runs of real tokens; describe them by "
            "position_ids, cu_seqlens or a mask that numbers documents"
        )
    for name, claim in claims.items():
        if not claim[runs[later]].all():
            bad = int(runs[later][~claim[runs[later]]][0])
            raise LayoutError(
                f"there is padding before token {bad % tokens} of row {bad // tokens}, which by "
                f"{name} goes on with a document; padding may stand before and behind documents, not inside"
            )
    if "layout" in claims:
        inside = edges & ~claims["layout"]
        if inside.any():
            bad = int(np.flatnonzero(inside)[0])
            what = f"the end of row {bad // tokens - 1}" if bad % tokens == 0 else "the end of padding"
            raise LayoutError(
                f"{what} (token {bad % tokens} of row {bad // tokens}) lies inside a document of the layout, which "
                "must cut there"
            )
    said = [(name, (claim | edges) & real) for name, claim in claims.items()]
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


def begins_of_cumulative(name: str, given: Any, rows: int, tokens: int, real: np.ndarray) -> np.ndarray:
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
    crossed = np.flatnonzero(~begins[:: max(1, tokens)])
    if len(crossed):
        raise LayoutError(f"{name}: a document crosses the end of row {int(crossed[0]) - 1}; rows are apart")
    return begins


def _begins_of_numbers(name: str, numbers: np.ndarray, rows: int, tokens: int, real: np.ndarray) -> np.ndarray:
    """A document for each run of one number; a number that comes back would be one document with a hole."""
    if (numbers[real] < 0).any():
        raise LayoutError(f"{name} holds {int(numbers[real].min())} on a token; allowed: numbers from 0 on")
    begins = changes(numbers, tokens)
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


def changes(values: np.ndarray, tokens: int) -> np.ndarray:
    """Where a value is not its left neighbour's, and where a row of so many tokens begins; bool, like the values."""
    begins = np.ones(values.size, dtype=bool)
    begins[1:] = values[1:] != values[:-1]
    begins[:: max(1, tokens)] = True
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
    values = integers("position_ids", given)
    if values.ndim == 3 and len(values) == TEXT_AXES:
        values = values[0]
    if values.ndim > 2:
        if described:
            return None
        raise LayoutError(
            f"position_ids of shape {list(values.shape)} (multi-axis) do not say where documents begin; give "
            f"[batch, tokens] position ids, or [{TEXT_AXES}, batch, tokens] with the text's first, a layout or "
            "cu_seqlens"
        )
    if values.shape in ((tokens,), (1, tokens)):
        values = np.broadcast_to(values.reshape(1, tokens), (rows, tokens))
    if values.shape != (rows, tokens):
        raise LayoutError(f"position_ids is {list(values.shape)}, but the batch has {rows} x {tokens} tokens")
    return values.ravel()


def _check_starts(positions: np.ndarray, at: np.ndarray, expected: np.ndarray, tokens: int) -> None:
    """The documents, or pieces of them, that begin at these tokens have the expected positions there."""
    wrong = positions[at] != expected
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        row, token = divmod(int(at[bad]), tokens)
        raise LayoutError(
            f"position_ids: the document at token {token} of row {row} begins at position {int(positions[at[bad]])}, "
            f"not {int(expected[bad])}; position ids start at 0 in every document. A piece of a document that "
            "continues on other ranks needs a layout that names its document and start"
        )
