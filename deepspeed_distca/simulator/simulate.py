# SPDX-License-Identifier: Apache-2.0
"""``ds_distca simulate``: what a step takes by every policy, on as many ranks as are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.simulator.documents import described, in_words, micro_batches, too_few
from deepspeed_distca.simulator.policies import IDEAL, OURS, PLACED, PLAIN, Outcome, outcomes
from deepspeed_distca.simulator.step import MEMORY, Loads, Training

#: Of a step's seconds, what is waited for; the rest is work.
WAITING = {
    "uneven work": "the busiest rank",
    "exchange": "rows of others",
    "host, ZeRO": "host or ZeRO",
    "pipeline": "the pipeline",
}
GIB, MIB = 2**30, 2**20
SCALE = (8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Simulated:
    """Steps of so many ranks.

    Attributes:
        training: what was simulated.
        ranks, tokens, context: how many ranks, tokens of each in a micro-batch, and tokens of a context.
        micro_batches: that were drawn.
        documents: what they were drawn from.
        outcomes: of the policies, the ideal last.
        first: layout of the first micro-batch, over the ranks of a stage.
    """

    training: Training
    ranks: int
    tokens: int
    context: int
    micro_batches: int
    documents: dict[str, int]
    outcomes: list[Outcome]
    first: Layout

    def __getitem__(self, name: str) -> Outcome:
        return next(one for one in self.outcomes if one.name == name)

    def name(self, policy: str) -> str:
        """A policy's name to show; the plugin's with its overlap."""
        return f"{policy}, {self.training.overlap}" if policy in (OURS, PLACED) else policy

    def rate(self, one: Outcome) -> float:
        """Tokens a second and GPU."""
        stages = self.training.stages
        step = self.tokens * (self.micro_batches / stages if stages > 1 else 1)
        return step / one.seconds

    def rows(self) -> list[dict[str, Any]]:
        """By policy, plain values."""
        best = self[IDEAL].seconds
        return [
            {
                "policy": one.name,
                "degree": one.degree,
                "seconds": one.seconds,
                "tokens_per_second_per_gpu": self.rate(one),
                "of_ideal": best / one.seconds,
                "sent_mib": one.sent / MIB,
                "most_tokens": one.tokens,
                "memory_gib": one.memory / GIB,
                "parts": one.parts,
                "waits_for": waits_for(one),
            }
            for one in self.outcomes
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        about = {key: getattr(self, key) for key in ("ranks", "tokens", "context", "micro_batches", "documents")}
        about |= {"model": self.training.model.name, "overlap": self.training.overlap}
        return {**about, "policies": self.rows(), "limits": self.limits()}

    def limits(self) -> str:
        """What a step with the plugin goes for, in words."""
        ours = self[OURS]
        shares = {key: value / ours.seconds for key, value in ours.parts.items() if value / ours.seconds >= 0.005}
        told = ", ".join(f"{key} {share:.0%}" for key, share in sorted(shares.items(), key=lambda kv: -kv[1]))
        text = f"with the plugin a step is {self[PLAIN].seconds / ours.seconds:.2f}x as fast as packed data: {told}"
        over = [one.name for one in self.outcomes if one.memory > MEMORY and one.name != IDEAL]
        return text + (f"; more than an H200's memory: {', '.join(over)}" if over else "")

    def table(self) -> list[list[str]]:
        """Head and rows, to show."""
        head = ["policy", "degree", "seconds", "tokens/s/GPU", "of ideal", "MiB a rank", "GiB (est.)", "waits for"]
        return [head] + [
            [
                self.name(row["policy"]),
                str(row["degree"]) if row["degree"] > 1 else "",
                f"{row['seconds']:.3f}",
                f"{row['tokens_per_second_per_gpu']:,.0f}",
                f"{row['of_ideal']:.0%}",
                f"{row['sent_mib']:,.0f}",
                f"{row['memory_gib']:.0f}",
                row["waits_for"],
            ]
            for row in self.rows()
        ]

    def __str__(self) -> str:
        """Lines to print."""
        head, *rows = self.table()
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(w) if n in (0, len(head) - 1) else cell.rjust(w)
                for n, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (head, *rows)
        ]
        kind = f"a step of {self.micro_batches}" if self.training.stages > 1 else f"means of {self.micro_batches}"
        about = f"{self.ranks} ranks of {self.tokens:,} tokens, contexts of {self.context:,}; {kind} micro-batches"
        return "\n".join([in_words(self.documents), about, *lines, self.limits()])


def waits_for(one: Outcome) -> str:
    """The largest share of a step that is neither work nor its end."""
    key = max(WAITING, key=lambda key: one.parts[key])
    share = one.parts[key] / one.seconds
    return f"{WAITING[key]} {share:.0%}" if share >= 0.005 else ""


def simulate(
    lengths: np.ndarray,
    training: Training,
    *,
    ranks: int,
    tokens: int,
    node_size: int,
    context: int | None = None,
    count: int = 4,
    seed: int = 0,
    placed: bool = False,
) -> Simulated:
    """Steps by every policy, of the same documents.

    Args:
        lengths: of the documents, int64 [n], all positive.
        tokens: of each rank in a micro-batch.
        node_size: ranks of a node.
        context: tokens of a context; None is a rank's.
        count: the most micro-batches that are drawn: each a step, or all of them one, over a pipeline.
        placed: see :func:`outcomes`.

    Raises:
        ValueError: a layout that there cannot be, or fewer tokens than a micro-batch has.
    """
    context = context or tokens
    if problem := _problem(training, ranks, tokens, context):
        raise ValueError(problem)
    replicas = ranks // training.stages
    training = replace(
        training, options=replace(training.options, topology=Topology.of_size(min(node_size, ranks), ranks))
    )
    batches = list(micro_batches(lengths, replicas, tokens, count, seed, context))
    if not batches:
        raise too_few(lengths, replicas, tokens)
    found = outcomes(training, batches, context, placed=placed)
    return Simulated(training, ranks, tokens, context, len(batches), described(lengths), found, batches[0])


def _problem(training: Training, ranks: int, tokens: int, context: int) -> str:
    """Why there cannot be such a layout; empty where there can."""
    stages = training.stages
    if ranks % stages:
        return f"--ranks {ranks} cannot be divided into --stages {stages}; give a multiple"
    if any(layers % stages for layers in training.model.kinds.values()):
        return f"the model's {training.model.layers} layers cannot be divided evenly into --stages {stages}"
    if stages > 1 and training.zero > 1:
        return f"--zero {training.zero} with --stages {stages}: DeepSpeed's pipelines have ZeRO 0 or 1"
    replicas = ranks // stages
    if (context % tokens and tokens % context) or replicas % max(1, context // tokens):
        return (
            f"--context {context} must be a multiple of --tokens-per-rank {tokens}, or divide it, and fill ranks that "
            f"divide the {replicas} of a stage"
        )
    return ""


def over_scale(lengths: np.ndarray, training: Training, **layout: Any) -> dict[int, dict[str, float]]:
    """By ranks, 8 to 512 as far as the documents last, and policy: how much faster than packed data a step is.

    Args:
        layout: of :func:`simulate`, but for the ranks.
    """
    found: dict[int, dict[str, float]] = {}
    tokens, context = layout["tokens"], layout["context"] or layout["tokens"]
    count = layout["count"] if training.stages > 1 else 1
    for ranks in SCALE:
        room = ranks // training.stages * tokens
        if _problem(training, ranks, tokens, context) or lengths.sum() < room:
            continue
        at = simulate(lengths, training, ranks=ranks, **{**layout, "count": count})
        found[ranks] = {one.name: at[PLAIN].seconds / one.seconds for one in at.outcomes}
    return found


# -- a step in time ---------------------------------------------------------------------------------------------------


def spans(training: Training, loads: Loads, tokens: int, ranks: int) -> Iterator[tuple[int, str, float, float]]:
    """A step of one micro-batch: (rank, what, seconds when it starts, seconds it takes). Layers of different kinds
    are one kind after another."""
    at = np.zeros(ranks)
    for phase in ("forward", "backward"):
        for kind, layers in training.model.kinds.items():
            load = loads[kind, phase]
            columns = ("linear layers", load.linear), ("attention", load.attention), ("exchange", load.exposed)
            for _ in range(layers):
                start = at.copy()
                for what, some in columns:
                    seconds = np.broadcast_to(some, ranks)
                    for rank in np.flatnonzero(seconds).tolist():
                        yield rank, f"{what}, {phase}", float(at[rank]), float(seconds[rank])
                    at = at + seconds
                at = np.full(ranks, start.max() + load.seconds) if load.meets else start + load.ranks
        if phase == "forward":
            for rank in range(ranks):
                yield rank, "output and loss", float(at[rank]), training.output() * tokens
            at = at + training.output() * tokens
    for rank in range(ranks):
        yield rank, "optimizer", float(at.max()), training.end(ranks)


def write_trace(simulated: Simulated, path: Path) -> None:
    """A step by rank without and with the plugin, in the JSON that ui.perfetto.dev and chrome://tracing open.

    Raises:
        ValueError: a pipeline, whose ticks it does not know.
        OSError: it cannot be written.
    """
    if simulated.training.stages > 1:
        raise ValueError("--trace shows a step without pipeline stages; leave out --stages or --trace")
    events: list[dict[str, Any]] = []
    for process, name in enumerate((PLAIN, OURS)):
        one = simulated[name]
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        for rank in range(simulated.ranks):
            about = {"ph": "M", "pid": process, "tid": rank, "name": "thread_name"}
            events.append({**about, "args": {"name": f"rank {rank}"}})
        for rank, what, start, seconds in spans(simulated.training, one.loads, one.tokens, simulated.ranks):
            span = {"ph": "X", "pid": process, "tid": rank, "name": what, "ts": start * 1e6, "dur": seconds * 1e6}
            events.append(span)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
