# SPDX-License-Identifier: Apache-2.0
"""A step of sequences of very different length: `pack_step` with the plugin against LPT by work without it.

    python benchmarks/pack_step.py [--save FILE]
    torchrun --nproc_per_node 2 benchmarks/pack_step.py --measure --zero 1 3 --json FILE --save FILE

Predicted for Llama-3-8B on H200s, as `ds_distca advise` predicts (micro-batches without the optimizer; with 64 ranks
in nodes of 8, and "ping_pong"). "LPT" is what frameworks do that balance work, at the same
cap: the sequence with the most work next, to the least loaded place that has room, work being its matrix products and
its attention by the cost model. Where ranks meet in every micro-batch (ZeRO-3, which gathers weights, and ZeRO-2),
places are the ranks of as few micro-batches as it gets by with, and those of like work run together. Where ranks meet
at the end of the step alone (ZeRO-1), places are ranks, whose sequences then go into micro-batches by best fit. With
the plugin ranks meet in every layer in which rows move, whatever ZeRO does, and in every micro-batch. The ideal is all
work divided by the ranks. "Fullest" is the highest number of tokens of a rank in a micro-batch, of the cap; "squares,
no cap" has as many micro-batches as LPT and evens out the sums of squares alone.

Mixes, sequences of prompt and answer, none longer than the cap: "answers", prompts of 128 to 1,024 tokens and answers
around a median of 1/16 of the cap (lognormal, sigma 1.2), cut at the cap; "answers, few", two of them for a rank;
"long or short", one in eight as long as the cap and the others of 1/32 to 1/16 of it; "ProLong", documents of
benchmarks/workloads, cut at the cap; "one long", one sequence of the cap and short ones that nearly fill the other
ranks; "short", 256 to 2,048 tokens. All but "answers, few" and "one long" have 3.6 caps of tokens for each rank.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from workloads.sampling import document_lengths

from deepspeed_distca import pack_step
from deepspeed_distca.data import pack_documents
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.cost_model import PHASES, UNITS_PER_SECOND
from deepspeed_distca.scheduler.profiles import Setting, choose
from deepspeed_distca.simulator.model import LLAMA_3_8B, Model, training_options
from deepspeed_distca.simulator.step import Training, plain, predict, seconds

RANKS, CAPS, NODE = (2, 8, 64), (32768, 65536), 8
MIXES = ("answers", "answers, few", "long or short", "ProLong", "one long", "short")
H200 = Setting("NVIDIA H200", "sm90", "flash_attn_4", "bf16")
COLUMNS = (
    "mix",
    "ranks",
    "cap",
    "sequences",
    "micro-batches: LPT",
    "pack_step",
    "fullest: squares, no cap",
    "LPT",
    "pack_step",
    "seconds: LPT, ranks meet at the end",
    "in every micro-batch",
    "pack_step and plugin",
    "ideal",
    "ideal / pack_step and plugin",
)
#: By micro-batch and rank, the indices of its sequences.
Step = list[list[list[int]]]


def lengths_of(mix: str, ranks: int, cap: int, seed: int = 0) -> np.ndarray:
    """Tokens of a step's sequences, int64."""
    draw = np.random.default_rng((seed, MIXES.index(mix), ranks, cap))
    count = 4 * ranks * cap  # more than are needed
    if mix.startswith("answers"):
        count = 2 * ranks if "few" in mix else 64 * ranks
        prompts = draw.integers(min(128, cap // 16), min(1024, cap // 4), count)
        drawn = np.minimum(prompts + draw.lognormal(np.log(cap / 16), 1.2, count), cap)
        if "few" in mix:
            return drawn.astype(np.int64)
    elif mix == "long or short":
        drawn = np.where(draw.random(64 * ranks) < 0.125, cap, draw.integers(cap // 32, cap // 16, 64 * ranks))
    elif mix == "ProLong":
        drawn = np.minimum(document_lengths("prolong", 131072, shuffle=ranks), cap)
    elif mix == "one long":
        short = draw.integers(cap // 128, cap // 32, 128 * ranks)
        return np.append(cap, short[np.cumsum(short) <= 0.95 * (ranks - 1) * cap])
    else:
        drawn = draw.integers(min(256, cap // 32), min(2048, cap // 8), 4 * ranks * cap // min(256, cap // 32))
    drawn = drawn.astype(np.int64)
    return drawn[: max(ranks, int(np.searchsorted(np.cumsum(drawn), int(3.6 * ranks * cap))))]


@dataclass(frozen=True)
class Predictor:
    """What steps take."""

    training: Training

    @classmethod
    def of(cls, ranks: int, config: dict[str, Any] = LLAMA_3_8B) -> Predictor:
        model = Model.of(config)
        options = training_options(config, ranks, NODE if ranks > NODE else None)
        return cls(Training(model, choose(H200, model.heads, folder=None).cost, options))

    def alone(self, lengths: list[int]) -> float:
        """Seconds of a rank's micro-batch where it waits for nobody."""
        if not lengths:
            return 0.0
        layout, training = Layout.from_lengths([lengths]), self.training
        return seconds(training, plain(training, layout), layout.tokens.max())

    def alone_all(self, step: Step, lengths: np.ndarray) -> np.ndarray:
        """The same for all ranks, [micro-batches, ranks]."""
        return np.array([[self.alone(lengths[rank].tolist()) for rank in batch] for batch in step])

    def plugin(self, step: Step, lengths: np.ndarray) -> float:
        """Seconds of a step with the plugin. Where no rows move, nobody waits within a micro-batch."""
        taken = 0.0
        for batch in step:
            rows = [lengths[rank].tolist() for rank in batch]
            found = predict(self.training, Layout.from_lengths(rows).filled())
            taken += found.plugin if found.moves else max(map(self.alone, rows))
        return taken

    def work(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds of sequences, without what a micro-batch takes beside them."""
        model, cost = self.training.model, self.training.cost
        token = model.layers * sum(map(self.training.linear, PHASES)) + self.training.output()
        nothing, found = np.zeros_like(lengths), lengths * token
        for window, layers in model.windows.items():
            for phase in PHASES:
                found += layers * cost.cost(nothing, lengths, nothing, window, phase) / UNITS_PER_SECOND
        return found


def lpt(lengths: np.ndarray, work: np.ndarray, cap: int, ranks: int) -> Step:
    """LPT by work at the cap, for ranks that meet in every micro-batch."""
    order = np.argsort(-work, kind="stable")
    count = -(-int(lengths.sum()) // (ranks * cap))
    while (bins := _least_loaded(lengths, work, order, cap, count * ranks)) is None:
        count += 1
    load = [float(work[found].sum()) for found in bins]
    bins = [bins[i] for i in np.argsort(-np.array(load), kind="stable")]
    return [bins[i : i + ranks] for i in range(0, len(bins), ranks)]


def lpt_of_ranks(lengths: np.ndarray, work: np.ndarray, cap: int, ranks: int) -> Step:
    """LPT by work over ranks, and best fit at the cap on each, for ranks that meet at the end of the step."""
    order = np.argsort(-work, kind="stable")
    shares = _least_loaded(lengths, work, order, int(lengths.sum()), ranks)
    assert shares is not None
    rows: list[list[list[int]]] = []
    for share in shares:
        longest = sorted(share, key=lambda i: -lengths[i])
        packed = pack_documents(lengths[longest], cap).rows if longest else ()
        rows.append([[longest[piece.document] for piece in row] for row in packed])
    count = max(map(len, rows))
    return [[mine[m] if m < len(mine) else [] for mine in rows] for m in range(count)]


def _least_loaded(
    lengths: np.ndarray, work: np.ndarray, order: np.ndarray, cap: int, count: int
) -> list[list[int]] | None:
    load, tokens = np.zeros(count), np.zeros(count, dtype=np.int64)
    bins: list[list[int]] = [[] for _ in range(count)]
    for i in order.tolist():
        fits = np.where(tokens + lengths[i] <= cap, load, np.inf)
        bin = int(fits.argmin())
        if fits[bin] == np.inf:
            return None
        bins[bin].append(i)
        load[bin] += work[i]
        tokens[bin] += lengths[i]
    return bins


def _by_squares(lengths: np.ndarray, count: int, ranks: int) -> Step:
    """Sums of squares made even, whatever the tokens are."""
    squares = lengths.astype(np.float64) ** 2
    order = np.argsort(-squares, kind="stable")
    bins = _least_loaded(lengths, squares, order, int(lengths.sum()), count * ranks)
    assert bins is not None
    return [bins]


def fullest(step: Step, lengths: np.ndarray) -> int:
    """Tokens of the fullest rank of a micro-batch."""
    return max(int(lengths[rank].sum()) for batch in step for rank in batch)


def row(mix: str, ranks: int, cap: int) -> dict[str, Any]:
    """A line of the table."""
    lengths, predictor = lengths_of(mix, ranks, cap), Predictor.of(ranks)
    work = predictor.work(lengths)
    theirs, at_end, ours = (
        lpt(lengths, work, cap, ranks),
        lpt_of_ranks(lengths, work, cap, ranks),
        pack_step(lengths, cap, ranks),
    )
    return {
        "mix": mix,
        "ranks": ranks,
        "cap": cap,
        "sequences": len(lengths),
        "lpt_batches": len(theirs),
        "batches": len(ours),
        "squares_fullest": fullest(_by_squares(lengths, len(theirs), ranks), lengths) / cap,
        "lpt_fullest": fullest(theirs, lengths) / cap,
        "fullest": fullest(ours, lengths) / cap,
        "lpt_end_s": float(predictor.alone_all(at_end, lengths).sum(axis=0).max()),
        "lpt_s": float(predictor.alone_all(theirs, lengths).max(axis=1).sum()),
        "plugin_s": predictor.plugin(ours, lengths),
        "ideal_s": float(work.sum() / ranks),
    }


def plans(args: argparse.Namespace, config: dict[str, Any], mix: str, ranks: int, zero: int) -> dict[str, Any]:
    """A step of the measurement, in both ways, and what it is predicted to take."""
    lengths, predictor = lengths_of(mix, ranks, args.cap, args.seed), Predictor.of(ranks, config)
    work, ours = predictor.work(lengths), pack_step(lengths, args.cap, ranks)
    if zero < 2:
        theirs = lpt_of_ranks(lengths, work, args.cap, ranks)
        plain = predictor.alone_all(theirs, lengths).sum(axis=0).max()
    else:
        theirs = lpt(lengths, work, args.cap, ranks)
        plain = predictor.alone_all(theirs, lengths).max(axis=1).sum()
    predicted = {"plain": float(plain), "plugin": predictor.plugin(ours, lengths)}
    return {"lengths": lengths, "plain": theirs, "plugin": ours, "predicted": predicted}


def shown(found: dict[str, Any]) -> list[str]:
    """Cells of a line of the table."""
    seconds = [found[key] for key in ("lpt_end_s", "lpt_s", "plugin_s", "ideal_s")]
    return [
        found["mix"],
        str(found["ranks"]),
        f"{found['cap'] // 1024}K",
        f"{found['sequences']:,}",
        str(found["lpt_batches"]),
        str(found["batches"]),
        f"{found['squares_fullest']:.3f}",
        f"{found['lpt_fullest']:.3f}",
        f"{found['fullest']:.3f}",
        *(f"{s:.2f}" for s in seconds),
        f"{found['ideal_s'] / found['plugin_s']:.3f}",
    ]


def predictions() -> Iterator[dict[str, Any]]:
    for ranks in RANKS:
        for cap in CAPS:
            for mix in MIXES:
                yield row(mix, ranks, cap)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="the table in Markdown")
    parser.add_argument("--json", type=Path)
    measured = parser.add_argument_group("measuring, under torchrun")
    measured.add_argument("--measure", action="store_true")
    measured.add_argument("--mixes", nargs="+", default=list(MIXES), choices=MIXES)
    measured.add_argument("--tokens", type=int, default=32768, dest="cap", help="the most of a rank (32768)")
    measured.add_argument("--width", type=int, default=4096, help="2048, 4096, or 64 to try the script")
    measured.add_argument("--layers", type=int, help="in place of the width's")
    measured.add_argument("--zero", type=int, nargs="+", default=[1, 3])
    measured.add_argument("--checkpointing", action="store_true")
    measured.add_argument("--block", type=json.loads, default={}, help="JSON, more keys of the `distca` block")
    measured.add_argument("--turns", type=int, default=3, help="measured, of each kind on each mix")
    measured.add_argument("--attention", help="of plain (flash_attention_4; sdpa on CPU)")
    measured.add_argument("--seed", type=int, default=0, help="of the mixes")
    measured.add_argument("--ds-config", type=json.loads, default={}, help="JSON, more keys of the ds_config")
    parser.set_defaults(compile=False)
    args = parser.parse_args()
    if args.measure:
        from steps.packed import llama, measure

        return measure(args, functools.partial(plans, args, llama(args.width, args.layers)))
    found, lines = [], [list(COLUMNS), ["---"] * len(COLUMNS)]
    print(" | ".join(COLUMNS))
    for one in predictions():
        found.append(one)
        lines.append(shown(one))
        print(" | ".join(lines[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"rows": found}, indent=1) + "\n")
    if args.save:
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        about = __doc__.split("\n\n", 2)[2].strip()
        args.save.write_text(f"# A step of sequences\n\n{about}\n\n{datetime.date.today()}:\n\n{table}\n")


if __name__ == "__main__":
    main()
