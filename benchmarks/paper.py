# SPDX-License-Identifier: Apache-2.0
"""Steps at the scale of arXiv 2510.18121, as `ds_distca simulate` predicts them, beside its published speed-ups.

    OMP_NUM_THREADS=1 python benchmarks/paper.py [--save FILE] [--json FILE]

The paper's set-up: tensor parallelism over the 8 GPUs of a node, which hold tokens together, 131,072 of the 8B model
and 65,536 of the 34B one (48 layers, 8192 wide, 22016, 64/16 heads of 128), so a "server" is a node; Pretrain and
ProLong in contexts of 128K to 512K, documents in random order, activations recomputed, one micro-batch. 3D: a step of
tensor, context and data parallelism. 4D: with 4 pipeline stages beside it and 8 micro-batches. WLB is "dealt by work",
each group sharing its documents, at its best degree; in 4D documents are dealt over all micro-batches. A server's link
is its 8 NICs of 50 GB/s. Tensor parallelism gathers and scatters hidden states over NVLink, 4 times in a layer's
forward and 6 in its backward, which nothing hides, for all policies alike. "WLB / plugin" are seconds of
WLB, whose ranks wait for gathered keys, over those of the plugin with default options: over nodes two nano-batches
("ping_pong"), with "keep_attention" true, and over pipelines with checkpointing that is not reentrant. "Its exchange
hidden" is the same, were all that rows and nano-batches cost the plugin ("exchange") nothing; "WLB's keys hidden" WLB
with keys that travel under attention as far as that is long, over the plugin. Nothing is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workloads.sampling import document_lengths

from deepspeed_distca.scheduler.cost_model import Phase
from deepspeed_distca.scheduler.profiles import Setting, choose
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.simulator.documents import micro_batches
from deepspeed_distca.simulator.model import LLAMA_3_8B, Model, training_options
from deepspeed_distca.simulator.policies import IDEAL, OURS, PLAIN, Outcome, outcomes
from deepspeed_distca.simulator.step import Training

RESULTS = Path(__file__).parent / "results"
H200 = Setting("NVIDIA H200", "sm90", "flash_attn_4", "bf16")
NODE, SEED, STAGES, MICRO_BATCHES = 8, 1, 4, 8
GPUS, CONTEXTS, WORKLOADS = (64, 128, 256, 512), (131072, 262144, 524288), ("pretrain", "prolong")
WIDE = {"hidden_size": 8192, "intermediate_size": 22016, "num_hidden_layers": 48}
CONFIGS = {
    "8B": LLAMA_3_8B,
    "34B": {**LLAMA_3_8B, **WIDE, "num_attention_heads": 64, "num_key_value_heads": 16},
}
TOKENS = {"8B": 131072, "34B": 65536}
#: Of WLB over DistCA, by the paper.
PUBLISHED = {
    ("3D", "pretrain"): "1.07-1.20",
    ("3D", "prolong"): "1.05-1.12",
    ("4D", "pretrain"): "1.15-1.30",
    ("4D", "prolong"): "1.10-1.35",
}
WLB = "dealt by work"
#: Of a set-up: WLB waiting for keys over the plugin, the same were the plugin's exchange hidden, WLB with hidden keys
#: over the plugin, the plugin over the ideal.
RATIOS = ("waiting", "all hidden", "hidden", "ideal")
NAMES = ("WLB / plugin", "its exchange hidden", "WLB's keys hidden", "plugin / ideal")
COLUMNS = ("model", "documents", "context", "GPUs", *(f"3D: {NAMES[0]}", *NAMES[1:]), "exchange", "plain / plugin")
COLUMNS += ("most tokens: WLB", *(f"4D: {NAMES[0]}", *NAMES[1:]))


@dataclass(frozen=True)
class TensorParallel(Training):
    """One of the GPUs of a node that compute every layer together."""

    def linear(self, phase: Phase) -> float:
        bytes_of_token = self.model.hidden * NODE * self.model.heads.element_size
        times = 4 if phase == "forward" else 6
        moved = times * bytes_of_token * (NODE - 1) / NODE / self.cost.bytes_per_second
        return super().linear(phase) + moved


def of_node(model: Model) -> Model:
    """A GPU's share of a model that the GPUs of a node compute together."""
    heads = replace(model.heads, query=model.heads.query // NODE, key_value=model.heads.key_value // NODE)
    shared = ("hidden", "wide", "vocabulary", "layer_flops", "output_flops", "layer_parameters", "outer_parameters")
    return replace(model, heads=heads, **{name: getattr(model, name) // NODE for name in shared})


def paper(name: str, gpus: int, stages: int) -> tuple[TensorParallel, int]:
    """The paper's training, and tokens of a server."""
    model = of_node(Model.of(CONFIGS[name]))
    servers = gpus // NODE
    cost = choose(H200, Model.of(CONFIGS[name]).heads, folder=None).cost.for_heads(model.heads)
    options = replace(
        training_options(CONFIGS[name]), linear_flops=model.layer_flops, topology=Topology.of_size(1, servers)
    )
    return TensorParallel(model, cost, options, True, True, 1, stages), TOKENS[name]


def steps(training: Training, tokens: int, workload: str, context: int, ranks: int) -> list[dict[str, Outcome]] | None:
    """Outcomes by name, with WLB waiting for keys and with keys hidden; None where the documents do not last."""
    lengths = document_lengths(workload, context)
    count = MICRO_BATCHES if training.stages > 1 else 1
    batches = list(micro_batches(lengths, ranks // training.stages, tokens, count, SEED, context))
    if len(batches) < count:
        return None
    return [{o.name: o for o in outcomes(training, batches, context, hidden=hidden)} for hidden in (False, True)]


def row(name: str, workload: str, context: int, gpus: int) -> dict[str, Any]:
    """A line of the table, of the set-ups in which there is room for a context."""
    made = {
        "3D": (*paper(name, gpus, 1), gpus // NODE),
        "4D": (*paper(name, gpus, STAGES), gpus // NODE),
    }
    found: dict[str, Any] = {"model": name, "documents": workload, "context": context, "GPUs": gpus}
    for kind, (training, tokens, ranks) in made.items():
        if ranks // training.stages * tokens >= context:
            found[kind] = ratios(steps(training, tokens, workload, context, ranks))
    return found


def rows() -> Iterator[dict[str, Any]]:
    for name in CONFIGS:
        for workload in WORKLOADS:
            for context in CONTEXTS:
                for gpus in GPUS:
                    yield row(name, workload, context, gpus)


def ratios(found: list[dict[str, Outcome]] | None) -> dict[str, float] | None:
    if found is None:
        return None
    waiting, hidden = found
    ours = waiting[OURS]
    return {
        "waiting": waiting[WLB].seconds / ours.seconds,
        "all hidden": waiting[WLB].seconds / (ours.seconds - ours.parts["exchange"]),
        "hidden": hidden[WLB].seconds / ours.seconds,
        "plain": waiting[PLAIN].seconds / ours.seconds,
        "ideal": ours.seconds / waiting[IDEAL].seconds,
        "exchange": ours.parts["exchange"] / ours.seconds,
        "tokens": waiting[WLB].tokens / ours.tokens,
        "seconds": ours.seconds,
    }


def cells(row: dict[str, Any]) -> list[str]:
    def of(kind: str, *keys: str) -> list[str]:
        found = row.get(kind)
        return (
            [f"{found[key]:.0%}" if key == "exchange" else f"{found[key]:.2f}" for key in keys]
            if found
            else [""] * len(keys)
        )

    about = [row["model"], row["documents"], f"{row['context'] // 1024}K", str(row["GPUs"])]
    three = of("3D", *RATIOS, "exchange", "plain", "tokens")
    return [*about, *three, *of("4D", *RATIOS)]


def ranges(found: list[dict[str, Any]]) -> list[list[str]]:
    """Of all sizes: published beside ours."""
    lines = [["", "documents", "published", *NAMES]]
    for kind in ("3D", "4D"):
        for workload in WORKLOADS:
            own = [row[kind] for row in found if row["documents"] == workload and row.get(kind)]
            spans = [sorted(one[key] for one in own) for key in RATIOS]
            told = [f"{span[0]:.2f}-{span[-1]:.2f}, median {statistics.median(span):.2f}" for span in spans]
            lines.append([kind, workload, PUBLISHED[kind, workload], *told])
    return lines


def table(lines: list[list[str]]) -> str:
    head, *body = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="the report in Markdown")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for line in rows():
        found.append(line)
        print(" | ".join(cells(line)), flush=True)
    text = f"{table(ranges(found))}\n\n{table([list(COLUMNS), *map(cells, found)])}"
    print(text)
    if args.json:
        args.json.write_text(json.dumps({"rows": found}, indent=1) + "\n")
    if args.save:
        about = (__doc__ or "").partition("[--json FILE]")[2].strip()
        args.save.write_text(f"# At the paper's scale\n\n{about}\n\n{datetime.date.today()}:\n\n{text}\n")


if __name__ == "__main__":
    main()
