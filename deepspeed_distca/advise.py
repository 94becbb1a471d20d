# SPDX-License-Identifier: Apache-2.0
"""Whether the plugin pays for some documents, a model and a number of GPUs: predicted by what plans in training.

Documents are drawn and packed as people pack them: in random order, one behind another, cut where a rank's row is
full. Each micro-batch is then planned by training's own rules. A step is predicted as its attention, its matrix
products (the decoder layers' and the output's), and :data:`OTHER` times the latter for all else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from deepspeed_distca.config import parse_config
from deepspeed_distca.data.lengths import read_json
from deepspeed_distca.layout import Layout
from deepspeed_distca.plan_options import linear_flops, of_first_layer, plan_options
from deepspeed_distca.scheduler.cost_model import PHASES, CostModel
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.worth import (
    LINEAR_WORK,
    PLAIN_HOST,
    SEARCH,
    SEARCH_SEGMENT,
    PlanOptions,
    Worth,
)

#: Speed-up from which on it pays: less is lost in what is not predicted.
WORTHWHILE = 1.02
#: Seconds of element-wise work and the optimizer for each second of matrix products. In 24 batches of 64K tokens on
#: two H200s (8B's width, ZeRO-1) it was 0.34 to 0.39; docs/performance.md, "Predicted steps", has what it is good for.
OTHER = 0.37

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
#: GPUs that one node has at most, as far as anybody knows.
NODE = 8
_NODES = (
    "all ranks are taken to be in one node, since --node-size was not given; over slow links less is won, or nothing"
)
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class Model:
    """What of a model a step's time depends on.

    Attributes:
        name: for people to read.
        windows: how many layers there are with each window; None is full causal attention.
        heads: of each.
        layer_flops, output_flops: of a forward of a layer's linear work, and of the output layer, for a token.
    """

    name: str
    windows: dict[int | None, int]
    heads: Heads
    layer_flops: int
    output_flops: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Model:
        """From a HuggingFace configuration (config.json).

        Raises:
            ValueError: one without the sizes of a decoder.
        """
        given = config.get("text_config") or config
        missing = [key for key in _NEEDED if not isinstance(given.get(key), int)]
        if missing:
            raise ValueError(f"the model's configuration has no {', '.join(missing)}; a decoder's config.json has")
        sizes = of_first_layer(SimpleNamespace(**given))
        query = sizes.num_attention_heads
        heads = Heads(
            query,
            getattr(sizes, "num_key_value_heads", None) or query,
            getattr(sizes, "head_dim", None) or sizes.hidden_size // query,
        )
        vocabulary = int(given.get("vocab_size") or 0)
        name = f"{given.get('model_type', 'model')}, {given['num_hidden_layers']} layers of {sizes.hidden_size}"
        return cls(name, _windows(given), heads, linear_flops(sizes), 2 * sizes.hidden_size * vocabulary)


def _windows(config: Mapping[str, Any]) -> dict[int | None, int]:
    """Layers by window, as transformers' configurations describe them."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return {None: layers}
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    return {kind: count for kind, count in ((None, layers - sliding), (int(window), sliding)) if count}


@dataclass(frozen=True)
class Predicted:
    """Seconds of one micro-batch, forward and backward.

    Attributes:
        plain, plugin: of the slowest rank.
        ideal: plain's with its attention spread evenly for nothing. With checkpointing the plugin may be faster.
        balance: largest over mean attention of the ranks, as documents lie.
        moves: whether rows move.
    """

    plain: float
    plugin: float
    ideal: float
    balance: float
    moves: bool


def predict(
    layout: Layout, model: Model, cost: CostModel, options: PlanOptions, *, checkpointing: bool = False
) -> Predicted:
    """A micro-batch, planned as training does.

    Args:
        layout: of the ranks that share attention.
        cost: for the model's heads.
        options: of planning; see :func:`training_options`.
        checkpointing: every layer's forward is computed a second time; by the plugin without its attention.
    """
    plain = plugin = ideal = before = mean = 0.0
    moves = False
    early = options.nodes is None  # peer copies, within a node, send results as soon as they are there
    for phase, (window, layers) in product(PHASES, model.windows.items()):
        worth = Worth(layout, window, phase, cost, options, early=early, layers=layers)
        _, compiler = worth.spread(RouteCompiler(layout, worth.home.rows))
        linear, even, host = worth.whole - worth.before, worth.least(), PLAIN_HOST[phase]
        again = checkpointing and phase == "forward"
        rest = linear * (OTHER + again * (1 + OTHER))  # of a layer, the same whoever computes attention
        if compiler.moves_rows:
            moves = True
            plugin += SEARCH + SEARCH_SEGMENT * len(layout.segments)
        plain += layers * max(worth.whole + rest + again * worth.before, host)
        plugin += layers * max(worth.takes(compiler) + rest, host)
        ideal += layers * max(linear + rest + (1 + again) * even, host)
        before, mean = before + layers * worth.before, mean + layers * even
    passes = int(layout.tokens.max()) * sum(LINEAR_WORK.values())
    output = (1 + OTHER) * cost.linear_seconds(model.output_flops * passes)
    plain, plugin, ideal = (seconds + output for seconds in (plain, plugin, ideal))
    return Predicted(plain, plugin, ideal, before / mean if mean else 1.0, moves)


def training_options(config: Mapping[str, Any], ranks: int = 1, node_size: int | None = None) -> PlanOptions:
    """With which a GPU plans when the `distca` block says nothing about it.

    Args:
        config: the model's.
        ranks: that share attention.
    """
    sizes = SimpleNamespace(**(config.get("text_config") or config))
    machines = {rank: str(rank // (node_size or ranks)) for rank in range(ranks)}
    return plan_options(parse_config({}), torch.device("cuda"), sizes, servers=machines)


def micro_batches(lengths: np.ndarray, ranks: int, tokens: int, count: int, seed: int) -> Iterator[Layout]:
    """Documents in random order, one behind another into rows of so many tokens for each rank; what a row's end cuts
    off is a document of its own in the next one. As many micro-batches as the documents fill, or `count`.

    Args:
        lengths: of the documents, int64 [n], all positive.
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    ends = np.cumsum(lengths[order])
    for batch in range(min(count, int(ends[-1]) // (ranks * tokens) if len(ends) else 0)):
        rows = []
        for row in range(batch * ranks, (batch + 1) * ranks):
            low, high = row * tokens, (row + 1) * tokens
            inside = ends[np.searchsorted(ends, low, side="right") : np.searchsorted(ends, high, side="left")]
            rows.append(np.diff(np.concatenate([[low], inside, [high]])))
        yield Layout.from_lengths(rows)


@dataclass(frozen=True)
class Advice:
    """What was found.

    Attributes:
        documents: their number, tokens, median, the length below which nine of ten are, and the longest.
        micro_batches: that were drawn.
        balance, plain_ms, plugin_ms, ideal_ms, speed_up: median, tenth and ninetieth percentile over the
            micro-batches; milliseconds are of a step with one micro-batch.
        moved: the part of the micro-batches in which rows move.
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
    pays: bool
    why: str
    note: str
    block: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Lines to print."""
        d = self.documents
        rows = (
            ("attention, largest / mean rank", self.balance, "{:.2f}"),
            ("a step without the plugin, ms", self.plain_ms, "{:.0f}"),
            ("with it", self.plugin_ms, "{:.0f}"),
            ("with perfect balance", self.ideal_ms, "{:.0f}"),
            ("speed-up", self.speed_up, "{:.2f}x"),
        )
        lines = [
            f"{d['documents']:,} documents, {d['tokens']:,} tokens: half of them up to {d['median']:,}, nine of ten "
            f"up to {d['nine_of_ten_below']:,}, the longest {d['longest']:,}",
            f"{self.micro_batches} micro-batches; rows move in {self.moved:.0%} of them",
            f"{'':32}{'median':>9}{'10 %':>9}{'90 %':>9}",
            *(f"{name:32}" + "".join(f"{form.format(x):>9}" for x in values) for name, values, form in rows),
            self.why,
        ]
        if self.note:
            lines.append(self.note)
        if self.block:
            lines.append(f"ds_config.json: {json.dumps(self.block)[1:-1]}")
        return "\n".join(lines)


def advise(
    lengths: np.ndarray,
    model: Model,
    cost: CostModel,
    options: PlanOptions,
    *,
    ranks: int,
    tokens: int,
    checkpointing: bool = False,
    count: int = 20,
    seed: int = 0,
) -> Advice:
    """Whether it pays.

    Args:
        lengths: of the documents, int64 [n], all positive.
        ranks: that share attention.
        tokens: of each rank in a micro-batch.
        checkpointing: see :func:`predict`.
        count: the most micro-batches that are drawn.

    Raises:
        ValueError: fewer tokens than a micro-batch has.
    """
    found = [
        predict(layout, model, cost, options, checkpointing=checkpointing)
        for layout in micro_batches(lengths, ranks, tokens, count, seed)
    ]
    if not found:
        raise ValueError(
            f"the {len(lengths)} documents have {int(lengths.sum())} tokens, a micro-batch of {ranks} ranks with "
            f"{tokens} each needs {ranks * tokens}; give more documents, fewer ranks or fewer tokens"
        )
    plain, plugin, ideal = (np.array([getattr(p, name) for p in found]) for name in ("plain", "plugin", "ideal"))
    speed_up = plain.sum() / plugin.sum()
    pays, could = speed_up >= WORTHWHILE, plain.sum() / ideal.sum()
    gain = f"perfect balance would make a step {could:.2f}x faster"
    if pays:
        why = f"use it: a step is predicted to be {speed_up:.2f}x faster; {gain}"
    elif could < WORTHWHILE:
        why = f"leave it out: {gain}, there is little to gain"
    else:
        why = f"leave it out: {gain}, but moving rows costs as much; more than {tokens} tokens a rank may change that"
    return Advice(
        _describe(lengths),
        len(found),
        _spread([p.balance for p in found]),
        _spread(plain * 1e3),
        _spread(plugin * 1e3),
        _spread(ideal * 1e3),
        _spread(plain / plugin),
        sum(p.moves for p in found) / len(found),
        bool(pays),
        why,
        _NODES if ranks > NODE and options.nodes is None else "",
        {"distca": {"enabled": True}} if pays else {},
    )


def _describe(lengths: np.ndarray) -> dict[str, int]:
    median, most = np.percentile(lengths, [50, 90]).astype(int).tolist()
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "median": median,
        "nine_of_ten_below": most,
        "longest": int(lengths.max()),
    }


def _spread(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    median, low, high = np.percentile(values, [50, 10, 90]).tolist()
    return median, low, high


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object: a model's config.json, or a DeepSpeed config.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    config = read_json(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config
