# SPDX-License-Identifier: Apache-2.0
"""Two nodes on one machine: gloo ranks in two network namespaces, with a slow link between them.

    sudo python benchmarks/slow_network.py [--mbit 200] [--ranks 2] [--tokens 2048] [--prolong SEED] [--save FILE]

Needs Linux, root, `ip` and `tc`. Each namespace is a node of so many ranks; a pair of virtual interfaces joins them,
which tc's token bucket (tbf) holds at so many megabits a second, each way. Ranks train a small Llama (four layers,
hidden size 256, 8/2 heads of 64, fp32, ZeRO-1) on the same documents in four ways: "plain", without the plugin;
"flat", whose plans take all ranks for one node; "whole", with plans that know nodes and what the link carries, and
`overlap` "local_first"; "nodes", the same in two nano-batches, as it is over nodes where nothing is said. Node 0's
first rank has one document of all its tokens, every other rank short ones: there is a neighbour to take of it, and two
ranks beyond the link. With --prolong documents are as long as ProLong's, shuffled by a seed, for ranks of 131072
tokens. Documents are told by position ids alone. Trained are the projections to queries, so that DeepSpeed itself has
little to send. Losses of all are compared. MiB are those that the kernel counted at node 0's end of the link, both
ways, in a step, less those of plain, which are DeepSpeed's; beside them stands what the plan says is sent across.
What is left of the difference is what gloo and TCP put around it, and what ranks tell each other. Seconds are
medians; they are those of a few cores that all ranks share, so that only the network's part means something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KINDS = ("plain", "flat", "whole", "nodes")
#: Of the namespaces, and of the interfaces in them.
NAMES = tuple(f"dca{os.getpid() % 10**6}{end}" for end in "ab")
SKIPPED = 1
#: Of ProLong's documents, that a rank's tokens stand for.
CONTEXT = 131072
ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=200, help="of the link between nodes, each way")
    parser.add_argument("--ranks", type=int, default=2, help="of a node")
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank")
    parser.add_argument("--prolong", type=int, metavar="SEED", help="documents of ProLong's lengths, in this order")
    parser.add_argument("--min-gain", type=float, default=0.04, help="the block's; 0: rows move whatever it costs")
    parser.add_argument("--steps", type=int, default=5, help="of which the first is not timed")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS[1:]), choices=KINDS[1:], help="beside plain")
    parser.add_argument("--save", type=Path, help="the table in Markdown")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(json.loads(args.worker))
    rows = measured(args)
    text = table(rows, args)
    print(text)
    if args.save:
        about = (__doc__ or "").split("\n\n", 2)[2].strip()
        args.save.write_text(f"# Two nodes and a slow link\n\n{about}\n\n{time.strftime('%Y-%m-%d')}. {text}\n")


def measured(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Rank 0's record of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        link(args.mbit)
        try:
            return {kind: run(kind, args, Path(folder)) for kind in ("plain", *args.kinds)}
        finally:
            unlink()


def link(mbit: int) -> None:
    """Makes the namespaces, and the link between them."""
    unlink()
    for name in NAMES:
        shell(f"ip netns add {name}")
    shell(f"ip link add {NAMES[0]} netns {NAMES[0]} type veth peer name {NAMES[1]} netns {NAMES[1]}")
    for number, name in enumerate(NAMES):
        inside = f"ip netns exec {name}"
        shell(f"{inside} ip addr add 10.87.0.{number + 1}/24 dev {name}")
        shell(f"{inside} ip link set {name} up && {inside} ip link set lo up")
        # As much as the link carries in 20 ms may wait.
        shell(f"{inside} tc qdisc add dev {name} root tbf rate {mbit}mbit burst 256kb latency 20ms")


def unlink() -> None:
    for name in NAMES:
        subprocess.run(f"ip netns del {name}", shell=True, stderr=subprocess.DEVNULL, check=False)


def shell(command: str) -> str:
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


def run(kind: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains in both namespaces; rank 0's record."""
    for number, process in enumerate(start(kind, args, folder)):
        if process.wait(timeout=900):
            raise SystemExit((folder / f"{kind}{number}.log").read_text()[-4000:])
    said = [
        line
        for line in (folder / f"{kind}0.log").read_text().splitlines()
        if line.startswith(("distca: ", "measured: "))
    ]
    return {**json.loads((folder / f"{kind}.json").read_text()), "said": said}


def start(kind: str, args: argparse.Namespace, folder: Path) -> list[subprocess.Popen[bytes]]:
    """torchrun in both namespaces, with their logs in the folder."""
    asked = {name: vars(args)[name] for name in ("tokens", "ranks", "mbit", "steps", "min_gain")}
    given = {"kind": kind, "folder": str(folder), "lengths": lengths_of(args), **asked}
    processes = []
    for number, name in enumerate(NAMES):
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": name,
            "TP_SOCKET_IFNAME": name,
        }
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)]
        launcher += ["--nproc-per-node", str(args.ranks), "--master-addr", "10.87.0.1", "--master-port", "29511"]
        command = ["ip", "netns", "exec", name, *launcher, __file__, "--worker", json.dumps(given)]
        log = (folder / f"{kind}{number}.log").open("w")
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return processes


def lengths_of(args: argparse.Namespace) -> list[list[int]]:
    """Of the documents of each rank, whole ones."""
    tokens, world = args.tokens, 2 * args.ranks
    if args.prolong is None:
        return [[tokens], *[[tokens // 16] * 16] * (world - 1)]
    from workloads.sampling import document_lengths

    drawn = iter((document_lengths("prolong", CONTEXT, args.prolong) * tokens // CONTEXT).tolist())
    ranks: list[list[int]] = []
    for _ in range(world):
        ranks.append([])
        while room := tokens - sum(ranks[-1]):
            ranks[-1].append(min(max(next(drawn), 1), room))  # cut where the rank ends
    return ranks


def table(rows: dict[str, dict[str, Any]], args: argparse.Namespace) -> str:
    plain = rows["plain"]
    lines = [
        f"{args.ranks} ranks a node, {args.tokens} tokens a rank, {args.mbit} Mbit/s between nodes"
        + (":" if args.prolong is None else f", ProLong in order {args.prolong}:"),
        *sorted({line for row in rows.values() for line in row["said"] if line.startswith("measured: ")}),
        "",
        "| | seconds of a step | balance | MiB across, counted | planned | largest error of a loss |",
        "|---|---|---|---|---|---|",
    ]
    for kind, row in rows.items():
        more = (row["bytes"] - plain["bytes"]) / 2**20
        errors = [abs(a - b) / b for a, b in zip(row["losses"], plain["losses"], strict=True)]
        planned = f"{row['planned'] / 2**20:.2f}" if kind != "plain" else ""
        counted = f"{more:.2f}" if kind != "plain" else f"({plain['bytes'] / 2**20:.2f})"
        lines.append(
            f"| {kind} | {row['seconds']:.2f} | {row['balance']} | {counted} | {planned} | {max(errors):.1e} |"
        )
    return "\n".join(lines)


def worker(given: dict[str, Any]) -> None:
    """One rank."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    from deepspeed_distca.layout import Layout
    from deepspeed_distca.scheduler.cost_model import PHASES, CostModel
    from deepspeed_distca.scheduler.heads import Heads
    from deepspeed_distca.scheduler.profiles import Profile, Setting

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    rank, tokens = dist.get_rank(), given["tokens"]
    heads = Heads(8, 2, 64, element_size=4)
    path = Path(given["folder"], "cost.json")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    if given["kind"] != "plain":
        # Pairs alone, and what the links carry, as `ds_distca profile` would find.
        area, (rate, *seconds) = CostModel.area(heads), measure(heads, tokens, given["ranks"])
        slow = {phase: {"pair": int(took * 2e15 / tokens**2)} for phase, took in zip(PHASES, seconds, strict=True)}
        values = {**area.to_dict(), "bytes_per_second": 10**9, "latency": 10**12}
        values |= {"nic_bytes_per_second": int(rate), "nic_latency": 2 * 10**12}
        for phase in PHASES:
            values[phase] = {**values[phase], **slow[phase]}
        if rank == 0:
            print(f"measured: {rate / 1e6:.1f} MB/s between nodes, attention {seconds[0]:.3f} and {seconds[1]:.3f} s")
            Profile(Setting("cpu", "cpu", "reference", "fp32"), CostModel.from_dict(values)).save(path)
        dist.barrier()
        size = dist.get_world_size() if given["kind"] == "flat" else given["ranks"]
        config["distca"] = {
            "enabled": True,
            "cost_model": str(path),
            "advanced": {"granularity": 64, "node_size": size, "min_gain": given["min_gain"], "tolerance": 0.05},
        }
        if given["kind"] == "whole":
            config["distca"]["overlap"] = "local_first"
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=64)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, **sizes, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=tokens
        )
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    world = dist.get_world_size()
    lengths = given["lengths"]
    ids = torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(rank))
    positions = torch.cat([torch.arange(n) for n in lengths[rank]])[None]
    labels = torch.where(positions > 0, ids, -100)
    targets = sum(n - 1 for row in lengths for n in row)
    losses, seconds, counted = [], [], []
    for _ in range(given["steps"]):
        dist.barrier()
        before, start = bytes_across(), time.perf_counter()
        loss = engine(
            input_ids=ids, position_ids=positions, labels=labels, num_items_in_batch=targets / world, use_cache=False
        ).loss
        engine.backward(loss)
        engine.step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        counted.append(bytes_across() - before)
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0:
            print(f"step {len(losses)} loss {mean.item():.4f}", flush=True)
        losses.append(mean.item())
    if rank == 0:
        record: dict[str, Any] = {"losses": losses, "seconds": statistics.median(seconds[SKIPPED:]), "planned": 0}
        record["bytes"], record["balance"] = statistics.median(counted[SKIPPED:]), ""
        if given["kind"] != "plain":
            stats = engine.distca.stats
            record["balance"] = f"{stats.balance_before:.2f} -> {stats.balance_after:.2f}"
            record["planned"] = planned_across(
                engine, Layout.from_lengths(lengths), heads, given["ranks"], knows_nodes=given["kind"] != "flat"
            )
        Path(given["folder"], f"{given['kind']}.json").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


def measure(heads: Any, tokens: int, ranks: int) -> tuple[float, float, float]:
    """What the slowest rank finds while all are at it: bytes a second that it sends to its partner on the other node
    and gets from there, and seconds of a document's attention, forward and backward."""
    import torch
    import torch.distributed as dist

    from deepspeed_distca.attention_server.kernels import BackwardInputs, Gradients, make_kernel
    from deepspeed_distca.attention_server.rank_plan import RankPlan
    from deepspeed_distca.attention_server.task_batch import AttentionSpec
    from deepspeed_distca.layout import Layout
    from deepspeed_distca.scheduler.routes import home_routes

    sent, received = torch.zeros(2, 2**21)
    partner = (dist.get_rank() + ranks) % (2 * ranks)
    took = []
    for _ in range(6):  # the best of them: a packet that the link dropped halves what one finds
        dist.barrier()
        start = time.perf_counter()
        works = [dist.isend(sent, partner), dist.irecv(received, partner)]
        for work in works:
            work.wait()
        took.append(time.perf_counter() - start)
    kernel, spec = make_kernel("reference"), AttentionSpec(heads.head_dim**-0.5)
    tasks = RankPlan(home_routes(Layout.from_lengths([[tokens]]), 0)).local[0]
    q, k, v, dout = (
        torch.randn(tokens, n, heads.head_dim) for n in (heads.query, heads.key_value, heads.key_value, heads.query)
    )
    for _ in range(2):
        start = time.perf_counter()
        out, lse = kernel.forward(q, k, v, tasks, spec)
        forward = time.perf_counter() - start
        gradients = Gradients(*map(torch.empty_like, (q, k, v)))
        start = time.perf_counter()
        kernel.backward(BackwardInputs(q, k, v, dout, lse, out), tasks, spec, gradients)
        backward = time.perf_counter() - start
    found = torch.tensor([min(took), forward, backward], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return sent.nbytes / float(found[0]), float(found[1]), float(found[2])


def bytes_across() -> int:
    """That the kernel has seen on this node's end of the link, both ways."""
    end = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics")
    return sum(int((end / f"{way}_bytes").read_text()) for way in ("tx", "rx"))


def planned_across(engine: Any, layout: Any, heads: Any, node_size: int, *, knows_nodes: bool) -> int:
    """Bytes that the plans of a step send between nodes."""
    from deepspeed_distca.scheduler.cost_model import PHASES
    from deepspeed_distca.scheduler.routes import RouteCompiler
    from deepspeed_distca.scheduler.topology import Topology

    nodes, total = Topology.of_size(node_size, layout.num_ranks), 0
    for phase, planned in zip(PHASES, engine.distca.planner.phases(layout, None), strict=True):
        sizes = RouteCompiler(layout, planned.tasks.rows, nodes if knows_nodes else None).bytes_between(heads, phase)
        total += planned.layers * sum(int(size[nodes.across].sum()) for size in sizes)
    return total


if __name__ == "__main__":
    main()
