# SPDX-License-Identifier: Apache-2.0
"""Megatron's record of packed sequences, ``PackedSeqParams`` of megatron.core (0.16.1), as a description of documents.

Its fields are compared like any other description, by the names below. For context parallelism every document is
stored in a space that may be longer: ``cu_seqlens_q`` then has the lengths and ``cu_seqlens_q_padded`` the spaces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepspeed_distca.data.integers import integers, on_host
from deepspeed_distca.layout import LayoutError

NAME = "packed_seq_params"
LENGTHS = (f"{NAME}.cu_seqlens_q", f"{NAME}.cu_seqlens_kv")
SPACES = tuple(f"{key}_padded" for key in LENGTHS)


def fields(params: Any) -> dict[str, Any]:
    """The cumulative lengths of the record, or of any object with its names, by :data:`LENGTHS` and :data:`SPACES`:
    all of them on the host, unless all are on a device.

    Raises:
        LayoutError: another layout than "thd", documents that are cut over ranks, or no lengths.
    """
    if params is None:
        return {}
    form = getattr(params, "qkv_format", None)
    if form not in (None, "thd"):
        raise LayoutError(f'{NAME}.qkv_format is {form!r}; allowed: "thd", documents stored one after another')
    if (getattr(params, "local_cp_size", None) or 1) > 1:
        raise LayoutError(
            f"{NAME}.local_cp_size is {params.local_cp_size}: documents cut for context parallelism; give each rank "
            "whole documents, or a layout"
        )
    found: dict[str, Any] = {key: getattr(params, key.partition(".")[2], None) for key in (*LENGTHS, *SPACES)}
    found = {key: value for key, value in found.items() if value is not None}
    if not any(key in found for key in LENGTHS):
        raise LayoutError(
            f"{NAME} ({type(params).__name__}) has neither cu_seqlens_q nor cu_seqlens_kv; give it one of them"
        )
    if any(map(on_host, found.values())):  # lengths without their spaces would be misread
        found = {key: value if on_host(value) else value.cpu() for key, value in found.items()}
    return found


def stored(name: str, lengths: Any, spaces: Any, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Of documents in spaces of their own: where they begin, cumulative [documents + 1], and which tokens are padding,
    bool [end].

    Raises:
        LayoutError: lengths and spaces that do not go together.
    """
    begins = integers(f"{name}_padded", spaces).ravel()
    real = np.diff(integers(name, lengths).ravel()) if lengths is not None else np.zeros(0, dtype=np.int64)
    room = np.diff(begins)
    matching = len(begins) > 0 and len(real) == len(room) and ((real >= 0) & (real <= room)).all()
    if not matching or begins[0] or begins[-1] > end:
        raise LayoutError(
            f"{name} and {name}_padded must have the same number of documents, none of them longer than the space it "
            f"is stored in, from 0, and end within the batch's {end} tokens"
        )
    edges = np.zeros(end + 1, dtype=np.int64)  # a document is where their running sum is 1
    np.add.at(edges, begins[:-1], 1)
    np.add.at(edges, begins[:-1] + real, -1)
    return begins, np.cumsum(edges[:-1]) == 0
