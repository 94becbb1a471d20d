# SPDX-License-Identifier: Apache-2.0
"""Plans that the planner makes of random layouts and options, carried out on some ranks, whole or in two nano-batches,
against dense attention of every document alone."""

from __future__ import annotations

import collections
import itertools
import traceback
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import float32

from deepspeed_distca.attention_server.exchange.process_group import PeerToPeerExchange
from deepspeed_distca.attention_server.kernels import make_kernel
from deepspeed_distca.attention_server.parts import crossings, row_cuts, two_parts
from deepspeed_distca.attention_server.phase_planner import PhasePlanner
from deepspeed_distca.attention_server.rank_plan import RankPlan
from deepspeed_distca.attention_server.side_stream import SideStream
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.attention_server.steps import LayerPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.layout import Layout, Segment
from deepspeed_distca.scheduler import CostModel, Heads, balance
from deepspeed_distca.scheduler.cost_model import PHASES, Phase, PhaseCost
from deepspeed_distca.scheduler.levels import by_levels
from deepspeed_distca.scheduler.relays import RelayRule
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.scheduler.worth import PlanOptions
from tests.distributed.core_attention_worker import compare
from tests.distributed.ping_pong_worker import in_two
from tests.distributed.random_plans import random_layout
from tests.fuzz.ranks import agree, until

#: The largest relative error in fp32. dq and dk of a few rows may nearly cancel, for any kernel.
TOLERANCE = {"out": 1e-5, "lse": 1e-5, "dv": 1e-5, "dq": 1e-4, "dk": 1e-4}


def main(first: int, count: int, seconds: float) -> dict[str, int]:
    """So many seeds, or as many as there is time for; the same on every rank.

    Returns:
        of how many cases each thing was true.

    Raises:
        AssertionError: on every rank: attention was not exact on one, or failed.
    """
    dist.init_process_group("gloo")
    exchange, kernel = PeerToPeerExchange(dist.group.WORLD), make_kernel("reference")
    found: collections.Counter[str] = collections.Counter()
    for seed in until(first, count, seconds):
        problem = None
        try:
            case = Case(seed, dist.get_rank(), dist.get_world_size())
            worst = case.run(exchange, kernel)
            wrong = {name: worst[name] for name, most in TOLERANCE.items() if not worst[name] <= most}
            problem = f"seed {seed}: errors {wrong}: {case}" if wrong else None
        except Exception:
            problem = f"seed {seed}: {traceback.format_exc()}"
            print(problem, flush=True)  # others may wait for this rank, and not come to know
        agree(problem)
        found["cases"] += 1
        found.update(name for name, times in case.holds.items() if times)
    return dict(found)


class Case:
    """One layout and its plans of forward and backward, the same on every rank.

    Attributes:
        holds: of what it is a case, by how often.
    """

    def __init__(self, seed: int, rank: int, world: int) -> None:
        self._rng = rng = np.random.default_rng((seed, world))
        self._rank = rank
        self.window = None if rng.random() < 0.6 else int(rng.integers(1, 40))
        self.nano = bool(rng.random() < 0.4)
        # Trees are not divided into nano-batches.
        trees = 0.0 if self.nano or rng.random() < 0.4 else 0.6
        if rng.random() < 0.2:
            self.layout = zigzag(rng, world)
        else:
            counts = dict(documents=int(rng.integers(1, 8)), longest=int(rng.integers(1, 100)))
            self.layout = random_layout(rng, world, **counts, trees=trees)
        self.shape = *[(4, 2), (2, 2), (3, 1)][int(rng.integers(3))], *[(8, 8), (16, 8)][int(rng.integers(2))]
        self.cost = _cost(rng, Heads(*self.shape))
        weights = rng.choice([0, 1, 1, 3], world).tolist()
        self.options: dict[str, Any] = {
            "granularity": int(rng.choice([1, 1, 2, 4, 8, 16])),
            "tolerance": float(rng.choice([0.0, 0.001, 0.02, 0.3])),
            "server_weights": tuple(weights) if any(weights) and rng.random() < 0.4 else None,
        }
        self.nodes = Topology.of(rng.integers(0, 2, world).tolist()) if rng.random() < 0.5 else None
        self._seen = self.layout.for_window(self.window)  # as layers with this window see it
        self.holds = collections.Counter(
            {
                "trees": int(self.layout.has_trees),
                "trees in windows": int(self._seen is not self.layout),
                "in two": int(self.nano),
            }
        )
        self.planned = bool(rng.random() < 0.5)
        self.plans = [self._planned(phase) if self.planned else self._balanced(phase) for phase in PHASES]

    def __str__(self) -> str:
        about = {key: value for key, value in vars(self).items() if key[0] != "_" and key != "plans"}
        return f"{about}: {self.layout.segments.tolist()} {self.layout.branches.tolist()}"

    def run(self, exchange: PeerToPeerExchange, kernel: Any) -> dict[str, float]:
        """The largest relative errors on this rank."""
        rng, plans = self._rng, self.plans
        spec = AttentionSpec(
            scale=float(rng.uniform(0.1, 0.5)), window=self.window, softcap=None if rng.random() < 0.7 else 5.0
        )
        exchange.early = bool(rng.random() < 0.5)
        side = SideStream() if rng.random() < 0.5 else None
        worst: collections.defaultdict[str, float] = collections.defaultdict(float)
        common = spec, kernel, self._rank, self.shape, rng, worst, float32
        if not self.nano:
            compare(self.layout, LayerPlan.whole(*plans, exchange, side), *common)
            return worst
        cuts = row_cuts(self.layout, granularity=self.options["granularity"])
        if rng.random() < 0.5:
            cuts = np.array([int(rng.integers(0, n + 1)) for n in self.layout.tokens], dtype=np.int64)
        crossed, again = crossings(self.layout, cuts), bool(rng.random() < 0.5)
        self.holds["crossing"] += int(crossed[0])
        self.holds["again"] += int(again)
        divided = [
            two_parts(plan.routes, cuts, self.window, backward=backward, crossed=crossed)
            for plan, backward in zip(plans, (False, True), strict=True)
        ]
        halves = StepPlan({self.window: LayerPlan(*divided, exchange, side)}, lambda *_: kernel)
        plan = LayerPlan.whole(*plans, exchange, SideStream())
        compare(
            self.layout, plan, *common, lambda q, k, v, plan, spec, kernel: in_two(q, k, v, halves, spec, again=again)
        )
        return worst

    def _planned(self, phase: Phase) -> RankPlan:
        """By all that decides in training."""
        rng = self._rng
        options = PlanOptions(
            **self.options,
            max_received_rows=int(rng.choice([1, 20, 200])) if rng.random() < 0.15 else None,
            min_gain=0.0 if rng.random() < 0.7 else 0.0001,
            linear_flops=int(rng.choice([0, 10**6])),
            topology=self.nodes,
        )
        planner = PhasePlanner(self._rank, self.cost, options, early=bool(rng.random() < 0.5), in_two=self.nano)
        planned = planner.plan(self.layout, self.window, phase, layers=2)
        self.holds["moved"] += int(planned.sent.any())
        return planned.part

    def _balanced(self, phase: Phase) -> RankPlan:
        """By what spreads the tasks alone, with relays of any size, whatever it is worth."""
        common = dict(self.options, phase=phase, window=self.window)
        tasks = None
        if self.nodes is not None and self.nodes.size > 1 and not self.layout.has_trees:
            tasks = by_levels(self._seen, self.cost, self.nodes, **common)
            self.holds["by nodes"] += int(tasks is not None)
        if tasks is None:
            tasks = balance(self._seen, self.cost, **common)
        rule = RelayRule(1, int(self._rng.integers(0, 3)), int(self._rng.choice([1, 8, 4096])))
        compiler = RouteCompiler(self._seen, tasks.rows, self.nodes, rule)
        self.holds["relayed"] += len(compiler.relayed())
        alone = RouteCompiler(self._seen, tasks.rows, self.nodes, rule._replace(carried_rows=2**40))
        self.holds["carried"] += int(alone.key_rows().sum() < compiler.key_rows().sum())
        self.holds["moved"] += int(compiler.moves_rows)
        return RankPlan(compiler.rank(self._rank))


def zigzag(rng: np.random.Generator, world: int) -> Layout:
    """Every document cut into two pieces a rank, the first and the last to the first rank, and so inwards."""
    pieces: list[list[Segment]] = [[] for _ in range(world)]
    for document in range(int(rng.integers(1, 4))):
        length, count = int(rng.integers(1, 80)), 2 * world
        cuts = [length * i // count for i in range(count + 1)]
        for i, (start, end) in enumerate(itertools.pairwise(cuts)):
            if end > start:
                pieces[min(i, count - 1 - i)].append(Segment(document, start, end - start))
    for row in pieces:
        rng.shuffle(row)
    return Layout(Layout.from_ranks(pieces).segments, world).validate()


def _cost(rng: np.random.Generator, heads: Heads) -> CostModel:
    """The fit, pairs alone, or any other proportion of pairs, rows, keys and tasks."""
    kind = int(rng.integers(3))
    if kind < 2:
        return CostModel.area(heads) if kind else CostModel.fitted(heads)

    def phase() -> PhaseCost:
        rest = [0 if rng.random() < 0.3 else int(10 ** rng.uniform(0, 8)) for _ in range(3)]
        return PhaseCost(int(10 ** rng.uniform(0, 6)), *rest)

    return CostModel(heads, phase(), phase(), bytes_per_second=int(10 ** rng.uniform(6, 12)))
