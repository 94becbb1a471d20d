# SPDX-License-Identifier: Apache-2.0
"""How long a CA-task takes, forward and backward, how long a transfer takes, and what moving rows costs beside that.

A phase's cost is linear in what a task asks of the kernel: query-key pairs, query rows, key rows and a constant. All
of it is int64 femtoseconds, so every rank takes the same decisions whatever its CPU. The coefficients were fitted to
flash-attn-4 on an H200 (see ``CostModel.fitted``); a measured profile can replace them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from deepspeed_distca.given import integer, shown
from deepspeed_distca.scheduler.heads import Heads

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")

#: The cost unit: femtoseconds in a second.
UNITS_PER_SECOND = 10**15

#: Costs above this are refused: sums of a few of them would leave int64. A stored term may be half of it, so that both
#: phases together can be weighed as one.
MAX_COST = 2**62
MAX_TERM = MAX_COST // 2


def pairs(q_start: Any, q_end: Any, window: int | None = None) -> Any:
    """Query-key pairs that queries [q_start, q_end) of a document see, causal, at most `window` keys each.

    Works on int64 arrays and on Python integers alike.
    """
    return _pairs_below(q_end, window) - _pairs_below(q_start, window)


def _pairs_below(x: Any, window: int | None) -> Any:
    if window is None:
        return x * (x + 1) // 2
    full: Any = np.minimum(x, window) if isinstance(x, np.ndarray) else min(x, window)
    return full * (full + 1) // 2 + (x - full) * window


def key_start(q_start: Any, window: int | None = None) -> Any:
    """The first key that the query at q_start sees: 0, or max(0, q_start - window + 1)."""
    if window is None:
        return np.zeros_like(q_start) if isinstance(q_start, np.ndarray) else 0
    if isinstance(q_start, np.ndarray):
        return np.maximum(q_start - (window - 1), 0)
    return max(q_start - (window - 1), 0)


_UNIT = " (femtoseconds)"
_MOVING = ("moving_forward", "moving_backward")
#: Terms that profiles were first written without.
_LATER = ("nic_bytes_per_second", "nic_latency", "linear_rate")


@dataclass(frozen=True)
class PhaseCost:
    """Femtoseconds of one phase of a task: pair * pairs + query_row * queries + key_row * keys + task."""

    pair: int
    query_row: int = 0
    key_row: int = 0
    task: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            integer(f"cost model: {name}", value, int(name == "pair"), MAX_COST, _UNIT)

    def __call__(self, q_start: Any, q_end: Any, k_start: Any, window: int | None = None) -> Any:
        """Cost of queries [q_start, q_end) against keys [k_start, q_end)."""
        return (
            self.pair * pairs(q_start, q_end, window)
            + self.query_row * (q_end - q_start)
            + self.key_row * (q_end - k_start)
            + self.task
        )

    def full(self, queries: Any, keys: Any) -> Any:
        """Cost of a full task: every query against every key."""
        return self.pair * queries * keys + self.query_row * queries + self.key_row * keys + self.task

    def scaled(self, numerator: int, denominator: int) -> PhaseCost:
        """Every coefficient times numerator / denominator, rounded; pair stays at least 1.

        Raises:
            ValueError: a coefficient that leaves its limits.
        """
        values = {k: (v * numerator + denominator // 2) // denominator for k, v in asdict(self).items()}
        values["pair"] = max(values["pair"], 1)
        return PhaseCost(**values)


@dataclass(frozen=True)
class MovingCost:
    """Femtoseconds by which one phase of a layer takes longer where rows move, transfers apart: once, and for each
    message that a rank sends or receives. None of it depends on the heads."""

    layer: int = 0
    message: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            integer(f"cost model: {name} of moving rows", value, 0, MAX_TERM, _UNIT)


def _work(heads: Heads) -> int:
    """What a query-key pair costs, up to a factor: elements of a query head and of a value head, over all heads."""
    return heads.query * (heads.head_dim + (heads.value_dim or heads.head_dim))


# Least absolute relative error over the 14 shapes of DESIGN.md's table (H200, bf16, flash-attn-4, 32/8 heads,
# head_dim 128), with non-negative coefficients. Forward: median error 3.5 %, largest 10 %. Backward: median 1.4 %,
# largest 13 %. Rounding areas up to tiles, or a constant for each call, fits no better; the key rows' 21 ns carry the
# backward of short query ranges, the constant and the query rows the small documents.
_REFERENCE_HEADS = Heads(query=32, key_value=8, head_dim=128)
_H200_FORWARD = PhaseCost(pair=27_093, query_row=6_967_785, key_row=0, task=1_824_430_452)
_H200_BACKWARD = PhaseCost(pair=66_108, query_row=10_305_242, key_row=21_324_438, task=2_035_929_155)

# By `ds_distca profile` on two H200s (host: Intel Xeon, 2026-11-30, commit 4ce236b), peer copies, heads of 64.
_H200_MOVING_FORWARD = MovingCost(layer=394_000_000_000, message=4_400_000_000)
_H200_MOVING_BACKWARD = MovingCost(layer=1_082_000_000_000, message=5_400_000_000)


@dataclass(frozen=True)
class CostModel:
    """Predicted time of CA-tasks and transfers of one layer, and of moving rows at all.

    Attributes:
        heads: the heads that the coefficients are for.
        forward, backward: cost of a task in each phase.
        launch: femtoseconds below which no server's phase ends if it has a task at all. It enters predicted seconds
            only: no decision depends on it, as nothing can be cut from it.
        bytes_per_second: of a transfer, each way at once (NCCL all-to-all between two H200s over NVLink).
        latency: femtoseconds of a transfer of no size. With the default rate, 4 MiB take the measured 0.09 ms.
        moving_forward, moving_backward: cost of a layer in which rows move, in each phase.
        nic_bytes_per_second, nic_latency: of transfers between nodes.
        linear_rate: floating-point operations a second of linear layers' matrix products; 0: not measured, taken to be
            the rate at which attention's forward goes through its pairs.
    """

    heads: Heads = field(default_factory=Heads)
    forward: PhaseCost = _H200_FORWARD
    backward: PhaseCost = _H200_BACKWARD
    launch: int = 0
    bytes_per_second: int = 323 * 2**30
    latency: int = 77_906_000_000
    moving_forward: MovingCost = _H200_MOVING_FORWARD
    moving_backward: MovingCost = _H200_MOVING_BACKWARD
    nic_bytes_per_second: int = 50 * 10**9
    nic_latency: int = 78_000_000_000
    linear_rate: int = 0

    def __post_init__(self) -> None:
        for phase in PHASES:
            for name, value in asdict(getattr(self, phase)).items():
                integer(f"cost model: {name} of {phase}", value, 0, MAX_TERM, _UNIT)
        links = (("bytes_per_second", 1), ("latency", 0), ("nic_bytes_per_second", 1), ("nic_latency", 0))
        for name, low in (("launch", 0), *links, ("linear_rate", 0)):
            integer(f"cost model: {name}", getattr(self, name), low, MAX_TERM)

    @classmethod
    def fitted(cls, heads: Heads | None = None) -> CostModel:
        """The H200 fit, for other heads than its own by :meth:`for_heads`."""
        return cls(_REFERENCE_HEADS).for_heads(heads or Heads())

    def for_heads(self, heads: Heads) -> CostModel:
        """This model scaled to other heads by query heads times head dim: kernels work through every query head's
        pairs, and in backward through every query head's key blocks. What is not a task's cost stays.

        Raises:
            ValueError: a term that leaves its limits when it is scaled.
        """
        if heads == self.heads:
            return self
        size, own = _work(heads), _work(self.heads)
        try:
            forward, backward = self.forward.scaled(size, own), self.backward.scaled(size, own)
            return replace(self, heads=heads, forward=forward, backward=backward)
        except ValueError as error:
            raise ValueError(f"{error}, when scaled from {self.heads} to {heads}") from error

    @classmethod
    def area(cls, heads: Heads | None = None) -> CostModel:
        """Query-key pairs alone, at the fit's rate: what the literature balances."""
        full = cls.fitted(heads)
        return cls(full.heads, PhaseCost(full.forward.pair), PhaseCost(full.backward.pair))

    def phase(self, phase: Phase) -> PhaseCost:
        """The coefficients of a phase.

        Raises:
            ValueError: neither "forward" nor "backward".
        """
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")
        return self.forward if phase == "forward" else self.backward

    def cost(
        self,
        q_start: np.ndarray,
        q_end: np.ndarray,
        k_start: np.ndarray,
        window: int | None = None,
        phase: Phase = "forward",
    ) -> np.ndarray:
        """Femtoseconds of tasks, int64 like the arguments [num_tasks].

        Raises:
            OverflowError: a task whose cost would leave int64; its document is too long for this unit.
        """
        terms = self.phase(phase)
        if len(q_end):
            longest = int(np.max(q_end))
            if terms(0, longest, 0, window) > MAX_COST:
                raise OverflowError(f"a document of {longest} tokens costs more than {MAX_COST} fs: it is too long")
        return terms(q_start, q_end, k_start, window)

    def full(self, queries: np.ndarray, keys: np.ndarray, phase: Phase = "forward") -> np.ndarray:
        """Femtoseconds of tasks in which every query attends to every key, int64 like the arguments [num_tasks].

        Raises:
            OverflowError: see :meth:`cost`.
        """
        terms = self.phase(phase)
        if len(keys) and terms.full(int(queries.max()), int(keys.max())) > MAX_COST:
            raise OverflowError(f"a tree's tasks cost more than {MAX_COST} fs: it is too long")
        return terms.full(queries, keys)

    def seconds(self, loads: Any) -> Any:
        """Predicted seconds of servers with these loads (femtoseconds), not below the launch floor unless idle."""
        loads = np.asarray(loads, dtype=np.int64)
        return np.where(loads > 0, np.maximum(loads, self.launch), 0) / UNITS_PER_SECOND

    def linear_seconds(self, flops: int) -> float:
        """Predicted seconds of linear layers' matrix products."""
        if self.linear_rate:
            return flops / self.linear_rate
        return flops * self.forward.pair / (2 * _work(self.heads)) / UNITS_PER_SECOND

    def linear_cost(self, flops: int) -> int:
        """The same in whole femtoseconds, comparable with tasks'."""
        if self.linear_rate:
            return flops * UNITS_PER_SECOND // self.linear_rate
        return flops * self.forward.pair // (2 * _work(self.heads))

    def transfer_seconds(self, sent: Any, received: Any = 0, *, between_nodes: bool = False) -> Any:
        """Predicted seconds of one exchange in which a rank sends and receives so many bytes at once."""
        size = np.maximum(np.asarray(sent, dtype=np.int64), np.asarray(received, dtype=np.int64))
        rate, latency = self.bytes_per_second, self.latency
        if between_nodes:
            rate, latency = self.nic_bytes_per_second, self.nic_latency
        return np.where(size > 0, latency / UNITS_PER_SECOND + size / rate, 0.0)

    def moving(self, phase: Phase) -> MovingCost:
        """What moving rows costs in a phase."""
        return self.moving_forward if phase == "forward" else self.moving_backward

    def moving_seconds(self, phase: Phase, messages: int) -> float:
        """Predicted seconds by which a layer's phase takes longer, transfers apart, because rows move.

        Args:
            messages: that the rank with the most of them sends and receives.
        """
        terms = self.moving(phase)
        return (terms.layer + terms.message * messages) / UNITS_PER_SECOND

    @property
    def terms(self) -> tuple[int, ...]:
        """Every integer but the heads, for :meth:`from_terms`: what ranks tell each other."""
        phases, moving = (self.forward, self.backward), (self.moving_forward, self.moving_backward)
        tasks, rows = ([value for part in parts for value in asdict(part).values()] for parts in (phases, moving))
        last = self.nic_bytes_per_second, self.nic_latency, self.linear_rate
        return (*tasks, self.launch, self.bytes_per_second, self.latency, *rows, *last)

    @classmethod
    def from_terms(cls, heads: Heads, terms: Sequence[int]) -> CostModel:
        """The model whose :attr:`terms` these are.

        Raises:
            ValueError: another number of terms, or one out of range.
        """
        if len(terms) != 18:
            raise ValueError(f"cost model: expected 18 terms, got {len(terms)}")
        forward, backward, (launch, rate, latency) = PhaseCost(*terms[:4]), PhaseCost(*terms[4:8]), terms[8:11]
        moving = MovingCost(*terms[11:13]), MovingCost(*terms[13:15])
        return cls(heads, forward, backward, launch, rate, latency, *moving, *terms[15:])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostModel:
        """What :meth:`to_dict` gave. What moving rows costs, links between nodes and the rate of linear layers may
        be left out, as profiles did at first: they are the default then.

        Raises:
            ValueError: unknown or missing keys, or values out of range.
        """
        kinds: list[tuple[str, Any]] = [(name, PhaseCost) for name in PHASES]
        kinds += [(name, MovingCost) for name in _MOVING]
        known = set(cls.__dataclass_fields__)
        if not isinstance(values, Mapping) or not known - {*_MOVING, *_LATER} <= set(values) <= known:
            raise ValueError(f"cost model: expected a mapping with the keys {sorted(known)}, got {shown(values)}")
        terms = {**values, "heads": Heads.from_dict(values["heads"])}
        for name, kind in kinds:
            if name not in values:
                continue
            given, keys = values[name], list(kind.__dataclass_fields__)
            if not isinstance(given, Mapping) or set(given) != set(keys):
                raise ValueError(f"cost model: {name} must have the keys {keys}, got {shown(given)}")
            terms[name] = kind(**given)
        return cls(**terms)
