# SPDX-License-Identifier: Apache-2.0
"""Whether the plugin pays for some documents, a model and a number of GPUs: predicted by what plans in training.

Documents are drawn and packed as people pack them: in random order, one behind another, cut where a rank's row is
full. Each micro-batch is then planned by training's own rules, and :mod:`deepspeed_distca.simulator` says what a step
of it takes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepspeed_distca.simulator.documents import described, in_words, micro_batches, too_few
from deepspeed_distca.simulator.step import Training, predict

#: Speed-up from which on it pays: less is lost in what is not predicted.
WORTHWHILE = 1.02
#: GPUs that one node has at most, as far as anybody knows.
NODE = 8
_NODES = "all ranks are taken to be in one node (--node-size); over slow links less is won, or nothing"


@dataclass(frozen=True)
class Advice:
    """What was found.

    Attributes:
        documents: their number, tokens, median, the length below which nine of ten are, and the longest.
        micro_batches: that were drawn.
        balance, plain_ms, plugin_ms, ideal_ms, speed_up: median, tenth and ninetieth percentile over the
            micro-batches; milliseconds are of a step with one micro-batch.
        moved: the part of the micro-batches in which rows move.
        overlap: with which the plugin's steps are predicted: what it is where the block leaves it out.
        steps_ms: of each micro-batch, without the plugin, with it, and with perfect balance.
        pays: whether to use it.
        why: in words.
        note: what this does not know; or nothing.
        block: of ds_config.json; empty where it does not pay.
    """

    documents: dict[str, int]
    micro_batches: int
    balance: tuple[float, float, float]
    plain_ms: tuple[float, float, float]
    plugin_ms: tuple[float, float, float]
    ideal_ms: tuple[float, float, float]
    speed_up: tuple[float, float, float]
    moved: float
    overlap: str
    steps_ms: list[tuple[float, ...]]
    pays: bool
    why: str
    note: str
    block: dict[str, Any]

    def rows(self) -> list[tuple[str, list[str]]]:
        """Of a table: what, and its median, tenth and ninetieth percentile."""
        rows = (
            ("attention, largest / mean rank", self.balance, "{:.2f}"),
            ("a step without the plugin, ms", self.plain_ms, "{:.0f}"),
            (f"with it, {self.overlap}", self.plugin_ms, "{:.0f}"),
            ("with perfect balance", self.ideal_ms, "{:.0f}"),
            ("speed-up", self.speed_up, "{:.2f}x"),
        )
        return [(name, [form.format(x) for x in values]) for name, values, form in rows]

    def __str__(self) -> str:
        """Lines to print."""
        lines = [
            in_words(self.documents),
            f"{self.micro_batches} micro-batches; rows move in {self.moved:.0%} of them",
            f"{'':32}{'median':>9}{'10 %':>9}{'90 %':>9}",
            *(f"{name:32}" + "".join(f"{cell:>9}" for cell in cells) for name, cells in self.rows()),
            self.why,
        ]
        if self.note:
            lines.append(self.note)
        if self.block:
            lines.append(f"ds_config.json: {json.dumps(self.block)[1:-1]}")
        return "\n".join(lines)


def advise(
    lengths: np.ndarray, training: Training, *, ranks: int, tokens: int, count: int = 20, seed: int = 0
) -> Advice:
    """Whether it pays.

    Args:
        lengths: of the documents, int64 [n], all positive.
        ranks: that share attention.
        tokens: of each rank in a micro-batch.
        count: the most micro-batches that are drawn.

    Raises:
        ValueError: fewer tokens than a micro-batch has.
    """
    found = [predict(training, layout) for layout in micro_batches(lengths, ranks, tokens, count, seed)]
    if not found:
        raise too_few(lengths, ranks, tokens)
    end = training.end(ranks)
    plain, plugin, ideal = (np.array([getattr(p, name) + end for p in found]) for name in ("plain", "plugin", "ideal"))
    speed_up = plain.sum() / plugin.sum()
    pays, could = speed_up >= WORTHWHILE, plain.sum() / ideal.sum()
    gain = f"perfect balance would make a step {could:.2f}x faster"
    if pays:
        why = f"use it: a step is predicted to be {speed_up:.2f}x faster; {gain}"
    elif could < WORTHWHILE:
        why = f"leave it out: {gain}, there is little to gain"
    else:
        why = f"leave it out: {gain}, but moving rows costs as much; more than {tokens} tokens a rank may change that"
    block, overlap = {"enabled": True}, training.overlap
    note = _NODES if ranks > NODE and training.options.nodes is None else ""
    kept, layers = training.kept(ranks, tokens), training.model.attention_layers
    if pays and kept < layers:
        memory = f"there is memory, by estimate, to keep core attention of {kept} of {layers} checkpointed layers"
        note = "; ".join(filter(None, [note, f"{memory}, and that of the others is repeated in backward"]))
    return Advice(
        described(lengths),
        len(found),
        _spread([p.balance for p in found]),
        _spread(plain * 1e3),
        _spread(plugin * 1e3),
        _spread(ideal * 1e3),
        _spread(plain / plugin),
        sum(p.moves for p in found) / len(found),
        overlap,
        [tuple(step) for step in (np.stack([plain, plugin, ideal], axis=1) * 1e3).tolist()],
        bool(pays),
        why,
        note,
        {"distca": block} if pays else {},
    )


def _spread(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    median, low, high = np.percentile(values, [50, 10, 90]).tolist()
    return median, low, high
