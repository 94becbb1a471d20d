# SPDX-License-Identifier: Apache-2.0
"""Plans over many nodes: what crosses between them, and what a layer's attention takes with it.

    OMP_NUM_THREADS=1 python benchmarks/nodes.py --servers 64 128 256 512 [--json FILE] [--save FILE]

Nodes of 8 GPUs, 65,536 tokens a GPU, Llama 3 8B's heads, the shipped cost model of an H200, tolerance 0.02; one batch
of each workload, context and order, in a contiguous layout and a head-tail one, and as `GlobalPackedLoader` places its
documents with "whole", by nodes and as if there were none ("placing" is processor time of that). Links carry 450 GB/s
within a node and 50 GB/s between nodes, each way a GPU, and take 78 us. "Flat" is the plan that knows no nodes, whose
rows travel to each server that needs them; "levels" the one that balances nodes and then the servers of each, or flat
where that is not within the tolerance, whose rows cross once to a node; "chosen" what `Worth` takes in each phase with
`overlap` left out, which over nodes is `ping_pong`, and "local_first" what it takes with that: one of these, one of
less balance, or everything at home. "Across" are MiB that cross nodes, sent by the mean GPU in forward and backward of
a layer, "worst NIC" what the busiest one sends or receives, where rows leave by the NIC of the receiver's place in the
sender's node, as NCCL sends them between nodes of NVLink ("PXN"), "of its own", where they leave by their sender's
own, and "carried by one", as by NCCL, were what a home sends to a node carried by one server of it. "Planning" is
processor time of both phases, the least of three times. Seconds are those of a layer's attention, forward and
backward, as `phase_seconds` predicts them: with everything at home ("plain", where documents that continue on other
ranks are exchanged), by these plans, which but for the chosen one hide transfers under local tasks alone, by either
choice if all NICs of a node carried equal parts of what crosses, for nothing ("even NICs"), and with attention evened
out for nothing ("ideal"). Nothing is measured but planning and placing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from workloads.sampling import NAMES, layouts

from deepspeed_distca.data.global_loader.placement import place
from deepspeed_distca.layout import DOCUMENT, LENGTH, Layout
from deepspeed_distca.scheduler import Heads, Tasks, balance
from deepspeed_distca.scheduler.cost_model import PHASES, CostModel
from deepspeed_distca.scheduler.levels import by_levels
from deepspeed_distca.scheduler.profiles import Setting, choose
from deepspeed_distca.scheduler.relays import RelayRule
from deepspeed_distca.scheduler.routes import Flow, RouteCompiler
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.scheduler.worth import PlanOptions, Worth

REPEATS = 3
TOKENS, TOLERANCE, GRANULARITY, MIN_GAIN, NODE_SIZE = 65536, 0.02, 128, 0.04, 8
LINEAR = 436_207_616  # of a layer of Llama 3 8B and a token, in forward
H200 = Setting("NVIDIA H200", "sm90", "flash_attn_4", "bf16")
CONTEXTS = (131072, 262144, 524288)
MIB = 2**20
COLUMNS = {
    "workload": "workload",
    "context": "context",
    "shuffled": "shuffled",
    "homes": "homes",
    "placement": "placement",
    "servers": "GPUs",
    "flat_across_mib": "flat: across",
    "flat_worst_nic_mib": "worst NIC",
    "flat_planning_ms": "planning ms",
    "levels_across_mib": "levels: across",
    "levels_worst_nic_mib": "worst NIC",
    "levels_planning_ms": "planning ms",
    "balance_forward": "chosen: balance forward",
    "balance_backward": "backward",
    "granule_forward": "granule forward",
    "granule_backward": "backward",
    "across_mib": "across",
    "worst_nic_mib": "worst NIC",
    "own_nic_mib": "of its own",
    "alone_nic_mib": "carried by one",
    "planning_ms": "planning ms",
    "local_first_balance_forward": "local_first: balance forward",
    "local_first_balance_backward": "backward",
    "local_first_across_mib": "across",
    "local_first_worst_nic_mib": "worst NIC",
    "local_first_planning_ms": "planning ms",
    "plain_s": "seconds: plain",
    "flat_s": "flat",
    "levels_s": "levels",
    "local_first_s": "local_first",
    "local_first_even_s": "even NICs",
    "chosen_s": "chosen",
    "chosen_even_s": "even NICs",
    "ideal_s": "ideal",
    "placing_ms": "placing ms",
}


def cost_model() -> CostModel:
    """Of an H200, with the links of a node."""
    return replace(choose(H200, Heads(), folder=None).cost, bytes_per_second=450 * 10**9, latency=78_000_000_000)


def row(layout: Layout, topology: Topology) -> dict[str, float]:
    """What one layout's plans are and take."""
    cost, servers = cost_model(), layout.num_ranks
    options = PlanOptions(TOLERANCE, GRANULARITY, min_gain=MIN_GAIN, linear_flops=LINEAR, topology=topology)
    found: dict[str, float] = defaultdict(float)
    moved = {prefix: np.zeros((servers, servers)) for prefix in ("flat_", "levels_", "local_first_", "")}
    alone = np.zeros((servers, servers))
    given = {"tolerance": TOLERANCE, "granularity": GRANULARITY}
    for phase in PHASES:
        worth = Worth(layout, None, phase, cost, options, early=False)
        at_home = RouteCompiler(layout, worth.home.rows, topology)
        plans = {
            "flat_": partial(balance, layout, cost, phase=phase, **given),
            "levels_": partial(planned_by_levels, layout, cost, topology, phase=phase, **given),
            "local_first_": lambda worth=worth, at_home=at_home: worth.spread(at_home)[0],
        }
        for prefix, plan in plans.items():
            tasks, ms = timed(plan)
            found[f"{prefix}planning_ms"] += ms
            compiler = RouteCompiler(layout, tasks.rows, None if prefix == "flat_" else topology)
            found[f"{prefix}balance_{phase}"] = tasks.balance
            moved[prefix] += sum(compiler.bytes_between(cost.heads, phase))
            found[f"{prefix}s"] += worth.seconds(compiler)
        # What a phase takes more than its linear work.
        linear, in_two = (
            worth.whole - worth.before,
            Worth(layout, None, phase, cost, options, early=False, in_two=True),
        )
        (halved, _), ms = timed(partial(in_two.spread, at_home))
        found["planning_ms"] += ms
        found[f"balance_{phase}"], found[f"granule_{phase}"] = halved.balance, worth.granule()
        compiler = RouteCompiler(layout, halved.rows, topology)
        moved[""] += sum(compiler.bytes_between(cost.heads, phase))
        by_one = RouteCompiler(layout, halved.rows, topology, RelayRule(carried_rows=2**40))
        alone += sum(by_one.bytes_between(cost.heads, phase))
        for name, compiled in (("chosen_s", compiler), ("chosen_even_s", EvenNics(layout, halved.rows, topology))):
            found[name] += in_two.takes(compiled) - linear
        found["local_first_even_s"] += worth.seconds(EvenNics(layout, tasks.rows, topology))
        found["plain_s"] += worth.seconds(at_home)
        found["ideal_s"] += worth.least()
    for prefix, size in moved.items():
        across = np.where(topology.across, size, 0) / MIB
        found[f"{prefix}across_mib"] = across.sum() / servers
        found[f"{prefix}worst_nic_mib"], found[f"{prefix}own_nic_mib"] = worst_nic(across, topology)
    found["alone_nic_mib"], _ = worst_nic(np.where(topology.across, alone, 0) / MIB, topology)
    return found


def worst_nic(across: np.ndarray, topology: Topology) -> tuple[float, float]:
    """What the busiest NIC sends or receives where rows leave by the NIC of the receiver's place, and by their own."""
    sent = np.zeros(len(across))
    np.add.at(sent, topology.by_place(*np.indices(across.shape)), across)
    received = across.sum(axis=0).max()
    return max(received, sent.max()), max(received, across.sum(axis=1).max())


class EvenNics(RouteCompiler):
    """Of the same routes, what crosses nodes as if all NICs of a node carried equal parts of it."""

    def __init__(self, layout: Layout, rows: np.ndarray, topology: Topology) -> None:
        super().__init__(layout, rows, topology)
        self._topology, self._of_node = topology, len(topology.nodes) // topology.size

    def flows(self, heads: Heads, phase: str) -> tuple[Flow, Flow]:
        out, back = (self._even(flow) for flow in super().flows(heads, phase))
        return out, back

    def _even(self, flow: Flow) -> Flow:
        node, nodes, its = self._topology.node_of, self._topology.size, self._of_node
        far = node[flow.sender] != node[flow.receiver]
        between = np.zeros((nodes, nodes), dtype=np.int64)
        np.add.at(between, (node[flow.sender[far]], node[flow.receiver[far]]), flow.size[far])
        pairs = np.argwhere(between)[:, None, :] * its
        ends = (pairs + np.indices((its, its)).reshape(2, -1).T).reshape(-1, 2)
        size = between[tuple((ends // its).T)] // its**2
        near = (column[~far] for column in flow[:3])
        return Flow(*map(np.append, near, (*ends.T, size)))


def planned_by_levels(layout: Layout, cost: CostModel, topology: Topology, **options: Any) -> Tasks:
    """By levels, or flat where that is not within the tolerance."""
    return by_levels(layout, cost, topology, **options) or balance(layout, cost, **options)


def timed(plan: Callable[[], Any]) -> tuple[Any, float]:
    """What a plan is, and the ms that it took at least."""
    took = []
    for _ in range(REPEATS):
        start = time.process_time()
        made = plan()
        took.append(time.process_time() - start)
    return made, min(took) * 1e3


def placed(layout: Layout, nodes: Topology | None) -> Layout:
    """A layout's documents as the loader places them."""
    lengths = np.bincount(layout.segments[:, DOCUMENT], layout.segments[:, LENGTH]).astype(np.int64)
    return place(lengths, layout.tokens, cost=cost_model(), tolerance=TOLERANCE, min_gain=MIN_GAIN, nodes=nodes)


def rows(servers: int) -> Iterator[dict[str, Any]]:
    """A row of each workload, context, order, layout and placement."""
    topology = Topology.of_size(NODE_SIZE, servers)
    for name in NAMES:
        for context in CONTEXTS:
            for shuffle in (None, 1):
                about = {"workload": name, "context": context, "shuffled": shuffle is not None, "servers": servers}
                wanted = dict(context=context, servers=servers, shuffle=shuffle, tokens=TOKENS, batches=1)
                for homes in ("contiguous", "head-tail"):
                    layout = next(layouts(name, head_tail=homes == "head-tail", **wanted))
                    how = {"homes": homes, "placement": "in order", "placing_ms": 0.0}
                    yield {**about, **how, **row(layout, topology)}
                for placement, nodes in (("no nodes", None), ("by nodes", topology)):
                    found, ms = timed(partial(placed, layout, nodes))
                    how = {"homes": "whole", "placement": placement, "placing_ms": ms}
                    yield {**about, **how, **row(found, topology)}


def shown(key: str, value: Any) -> str:
    """A cell of the table."""
    if key == "context":
        return f"{value // 1024}K"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if "balance" in key or "granule" in key:
        return f"{value:.4f}"
    return f"{value:.3f}" if key.endswith("_s") else f"{value:.0f}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, nargs="+", default=[64, 128, 256, 512], help="GPUs (64 128 256 512)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the table to a file, in Markdown")
    arguments = parser.parse_args()
    print(" | ".join(COLUMNS.values()))
    found, lines = [], [list(COLUMNS.values()), ["---"] * len(COLUMNS)]
    for servers in arguments.servers:
        for line in rows(servers):
            found.append(line)
            lines.append([shown(key, line[key]) for key in COLUMNS])
            print(" | ".join(lines[-1]), flush=True)
    command = f"python benchmarks/nodes.py {shlex.join(sys.argv[1:])}"
    where = (
        f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"command": command, "made": where, "rows": found}, indent=1) + "\n")
    if arguments.save:
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        about = " ".join(__doc__.split("\n\n", 2)[2].split())
        arguments.save.write_text(f"# Many nodes\n\n`{command}`, {where}.\n\n{table}\n\n{about}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
