# SPDX-License-Identifier: Apache-2.0
"""The shape of one layer's attention heads and the bytes of its rows, which the scheduler weighs and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepspeed_distca.given import integer, shown

#: The most heads and elements of a head, and the most bytes of an element: far beyond any model, and so few that
#: scaled cost models and bytes of a row stay far from int64's end.
MAX_HEADS, MAX_ELEMENT_SIZE = 2**20, 16

#: Bytes of an lse or delta entry: both are fp32 for any element type.
_FP32 = 4


class RowBytes(NamedTuple):
    """Bytes of a query row and of a key/value row that are moved, on their way out to the server and back."""

    query_out: int
    query_back: int
    key_out: int
    key_back: int

    @property
    def query(self) -> int:
        """Of a query row, out and back."""
        return self.query_out + self.query_back

    @property
    def key(self) -> int:
        """Of a key/value row, out and back."""
        return self.key_out + self.key_back


@dataclass(frozen=True)
class Heads:
    """Heads of core attention (GQA: every ``query // key_value`` query heads share a key/value head).

    Attributes:
        query, key_value: numbers of heads.
        head_dim: elements of a query and key head.
        value_dim: elements of a value and output head; None is head_dim.
        element_size: bytes of an element of q, k, v, out and their gradients (2: bf16, fp16).

    Raises:
        ValueError: a value below 1 or above the limits, or query heads that key/value heads do not divide.
    """

    query: int = 32
    key_value: int = 8
    head_dim: int = 128
    value_dim: int | None = None
    element_size: int = 2

    def __post_init__(self) -> None:
        for name in ("query", "key_value", "head_dim", "value_dim", "element_size"):
            value = getattr(self, name)
            if value is not None or name != "value_dim":
                integer(f"heads: {name}", value, 1, MAX_ELEMENT_SIZE if name == "element_size" else MAX_HEADS)
        if self.query % self.key_value:
            raise ValueError(
                f"heads: query ({self.query}) must be a multiple of key_value ({self.key_value}); every key/value "
                "head serves the same number of query heads"
            )

    @property
    def _value(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def q_bytes(self) -> int:
        """Bytes of a query row, and of its gradient."""
        return self.query * self.head_dim * self.element_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of a key row and its value row, and of their gradients."""
        return self.key_value * (self.head_dim + self._value) * self.element_size

    @property
    def out_bytes(self) -> int:
        """Bytes of an output row, and of its gradient."""
        return self.query * self._value * self.element_size

    @property
    def lse_bytes(self) -> int:
        """Bytes of the lse (or delta) of one query row."""
        return self.query * _FP32

    @property
    def return_bytes(self) -> int:
        """Bytes that a query row brings home in forward: out and lse."""
        return self.out_bytes + self.lse_bytes

    def moved(self, phase: str) -> RowBytes:
        """Bytes of moved rows in a phase. In "forward" q, k and v go out, and out and lse come back; in "backward" q,
        dout, lse, delta, k and v go out, and dq, dk and dv come back."""
        if phase == "forward":
            return RowBytes(self.q_bytes, self.return_bytes, self.kv_bytes, 0)
        return RowBytes(self.q_bytes + self.out_bytes + 2 * self.lse_bytes, self.q_bytes, self.kv_bytes, self.kv_bytes)

    def to_dict(self) -> dict[str, int | None]:
        return {
            "query": self.query,
            "key_value": self.key_value,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "element_size": self.element_size,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Heads:
        """From a mapping with query, key_value and head_dim, and if wanted value_dim and element_size.

        Raises:
            ValueError: not a mapping, or unknown, missing or wrong keys.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"heads: expected a mapping, got {shown(values)}")
        needed, known = ("query", "key_value", "head_dim"), tuple(cls.__dataclass_fields__)
        for key in values:
            if key not in known:
                raise ValueError(f"heads: unknown key {shown(key)}; allowed: {', '.join(known)}")
        for key in needed:
            if key not in values:
                raise ValueError(f"heads: {key!r} is missing; needed: {', '.join(needed)}")
        return cls(**values)
