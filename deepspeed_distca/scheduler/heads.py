# SPDX-License-Identifier: Apache-2.0
"""The shape of one layer's attention heads and the bytes of its rows, which the scheduler weighs and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_distca.given import integer, shown

#: The most heads and elements of a head, and the most bytes of an element: far beyond any model, and so few that
#: scaled cost models and bytes of a row stay far from int64's end.
MAX_HEADS, MAX_ELEMENT_SIZE = 2**20, 16

#: Bytes of an lse or delta entry: both are fp32 for any element type.
_FP32 = 4


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

    @property
    def step_q_bytes(self) -> int:
        """Bytes of a moved query row over forward and backward: q, out, lse; q, dout, lse, delta, dq."""
        return 3 * self.q_bytes + 2 * self.out_bytes + 3 * self.lse_bytes

    @property
    def step_kv_bytes(self) -> int:
        """Bytes of a moved key/value row over forward and backward: k, v; k, v, dk, dv."""
        return 3 * self.kv_bytes

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
