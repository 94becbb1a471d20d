# SPDX-License-Identifier: Apache-2.0
"""One random plan, made from a seed, against everything that is promised of plans. Needs no pytest.

    check_plan(seed)  # None, or an AssertionError that holds the case

Whatever is checked is worked out here anew, plainly, from (document, position) of every row; only the bound itself is
the library's own statement of it, ``bounds.promised``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
import traceback
from typing import Any, NamedTuple

import numpy as np

from deepspeed_distca.layout import DOCUMENT, RANK, Layout, Segment
from deepspeed_distca.scheduler import CostModel, Heads, Tasks, balance, home_tasks
from deepspeed_distca.scheduler.cost_model import PhaseCost
from deepspeed_distca.scheduler.digest import digest
from deepspeed_distca.scheduler.relays import RelayRule
from deepspeed_distca.scheduler.routes import RouteCompiler, Routes
from deepspeed_distca.scheduler.topology import Topology
from deepspeed_distca.scheduler.traffic import rows_between
from tests.scheduler.bounds import promised
from tests.scheduler.checks import check_shards, check_tasks, documents_of

#: Numbers of ranks, and of tokens in all, that most cases have: what is wrong is mostly wrong with few of both.
_RANKS = [1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 8, 16]
_TOKENS = [60, 600, 6000, 6000, 20000]


class Case(NamedTuple):
    """What a plan is made of: the arguments of ``balance``, and when keys are relayed."""

    layout: Layout
    cost: CostModel
    options: dict[str, Any]
    rule: RelayRule
    nodes: Topology | None

    def __str__(self) -> str:
        ranks = [[tuple(segment) for segment in self.layout.rank(r)] for r in range(self.layout.num_ranks)]
        return f"ranks={ranks} cost={self.cost} options={self.options} rule={self.rule} nodes={self.nodes}"


def random_case(seed: int) -> Case:
    """Layouts, cost models and options of every kind, the same for a seed on every machine."""
    rng = random.Random(seed)
    ranks = rng.choice(_RANKS) if rng.random() < 0.97 else rng.choice([32, 48, 64])
    heads = _random_heads(rng)
    options = {
        "phase": rng.choice(["forward", "backward"]),
        "tolerance": rng.choice([0, 0.001, 0.005, 0.02, 0.02, 0.1, 0.3, 1.0]),
        "granularity": rng.choice([1, 1, 2, 7, 16, 64, 128, 128, 128, 1000]),
        "window": rng.choice([None, None, None, 1, 2, 50, 127, 128, 129, 3000]),
        "server_weights": _random_weights(rng, ranks),
        "max_received_rows": rng.choice([1, 50, 500, 5000, 50000]) if rng.random() < 0.15 else None,
    }
    rule = RelayRule(rng.choice([1, 100, 32768]), rng.choice([0, 1, 2, 4]), rng.choice([1, 16, 4096]))
    nodes = Topology.of_size(rng.randint(1, ranks), ranks) if rng.random() < 0.3 else None
    return Case(_random_layout(rng, ranks), _random_cost(rng, heads), options, rule, nodes)


def check_plan(seed: int) -> None:
    """Makes the plan of a seed and checks all that is promised of it.

    Raises:
        AssertionError: a promise is broken, or an error where a plan was due; its message holds the case.
    """
    case = random_case(seed)
    try:
        _check(case, seed)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}: {last.line}"
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error} ({where}); {case}") from error


# -- cases ------------------------------------------------------------------------------------------------------------


def _random_layout(rng: random.Random, num_ranks: int) -> Layout:
    """Documents of one distribution of lengths, whole or in pieces, on some of the ranks, in any order."""
    left = rng.choice(_TOKENS)
    few = rng.sample(range(num_ranks), rng.randint(1, num_ranks))  # who stores anything
    where = rng.choice(["one rank", "some", "all"])
    homes = {"one rank": few[:1], "some": few, "all": list(range(num_ranks))}[where]
    longest = rng.choice([1, 3, 130, 2000, left, left])
    cut = rng.choice([0, 0, 0.3, 1])
    rows: list[list[Segment]] = [[] for _ in range(num_ranks)]
    for document in itertools.count():
        length = min(left, rng.choice([longest, rng.randint(1, longest), max(1, longest // rng.randint(1, 40))]))
        if not length or document == 400:
            break
        left -= length
        pieces = min(length, rng.choice([2, 3, 6])) if rng.random() < cut else 1
        borders = [0, *sorted(rng.sample(range(1, length), pieces - 1)), length]
        for start, end in itertools.pairwise(borders):
            rows[rng.choice(homes)].append(Segment(document * 7 + 3, start, end - start))
    for row in rows:
        rng.shuffle(row)
    return Layout.from_ranks(rows).validate()


def _random_heads(rng: random.Random) -> Heads:
    key_value = rng.choice([1, 2, 8])
    return Heads(key_value * rng.choice([1, 4]), key_value, rng.choice([16, 64, 128]), rng.choice([None, None, 96]))


def _random_cost(rng: random.Random, heads: Heads) -> CostModel:
    """The fit, pairs alone, or any other proportion of pairs, rows, keys and tasks."""
    kind = rng.choice(["fitted", "fitted", "area", "any"])
    if kind != "any":
        return CostModel.fitted(heads) if kind == "fitted" else CostModel.area(heads)

    def phase() -> PhaseCost:
        rest = [0 if rng.random() < 0.3 else int(10 ** rng.uniform(0, 10)) for _ in range(3)]
        return PhaseCost(int(10 ** rng.uniform(0, 6)), *rest)

    return CostModel(heads, phase(), phase(), bytes_per_second=int(10 ** rng.uniform(6, 12)))


def _random_weights(rng: random.Random, ranks: int) -> list[int] | None:
    kind = rng.choice(["none", "none", "none", "one zero", "zeros", "small", "wide"])
    if kind == "none":
        return None
    if kind == "one zero":
        weights = [rng.choice([1, 3])] * ranks
        weights[rng.randrange(ranks)] = 0
    elif kind == "zeros":
        weights = [rng.choice([0, 0, 1]) for _ in range(ranks)]
    elif kind == "small":
        weights = [rng.randint(0, 4) for _ in range(ranks)]
    else:
        weights = [rng.choice([1, 1000, 999_999, 10**6]) for _ in range(ranks)]
    return weights if any(weights) else None


# -- checks -----------------------------------------------------------------------------------------------------------


def _check(case: Case, seed: int) -> None:
    layout, cost, options, rule, nodes = case
    window, phase = options["window"], options["phase"]
    tasks = balance(layout, cost, **options)
    check_tasks(layout, tasks.rows, window)
    check_shards(layout, tasks.rows, options["granularity"])
    _check_cuts(layout, tasks.rows, options["granularity"])
    home = home_tasks(layout, window)
    check_tasks(layout, home, window)
    assert tasks.loads.tolist() == _loads(case, tasks.rows), "loads"
    assert tasks.loads_before.tolist() == _loads(case, home), "loads before"
    _check_bound(case, tasks, home)
    _check_cap(case, tasks, home)
    _check_transfers(layout, tasks.rows, cost.heads, phase, rule, nodes)
    if seed % 4 == 0:
        again = balance(layout, cost, **options)
        names = dict(phase=phase, window=window)
        assert digest(layout, again, **names) == digest(layout, tasks, **names), "the same plan twice"
    if seed % 4 == 1:
        renamed = balance(_renamed(layout, random.Random(seed)), cost, **options)
        assert renamed.loads.tolist() == tasks.loads.tolist(), "ids or the order in storage decide"


def _renamed(layout: Layout, rng: random.Random) -> Layout:
    """The same documents under other ids, in another order in storage."""
    ids = np.unique(layout.segments[:, DOCUMENT])
    segments = layout.segments.copy()
    segments[:, DOCUMENT] = np.array(rng.sample(range(10**12), len(ids)))[np.searchsorted(ids, segments[:, DOCUMENT])]
    order = rng.sample(range(len(segments)), len(segments))
    segments = segments[order]
    return Layout(segments[np.argsort(segments[:, RANK], kind="stable")], layout.num_ranks)


def _loads(case: Case, rows: np.ndarray) -> list[int]:
    """Cost of each server's tasks, in Python integers."""
    terms, window = case.cost.phase(case.options["phase"]), case.options["window"]
    loads = [0] * case.layout.num_ranks

    def below(x: int) -> int:  # pairs of queries [0, x)
        full = x if window is None else min(x, window)
        return full * (full + 1) // 2 + (x - full) * (window or 0)

    for _, start, end, low, _, server in rows.tolist():
        pairs = terms.pair * (below(end) - below(start))
        loads[server] += pairs + terms.query_row * (end - start) + terms.key_row * (end - low) + terms.task
    return loads


def _check_cuts(layout: Layout, rows: np.ndarray, granularity: int) -> None:
    """Cuts lie at multiples of the granularity or where the document goes on at another rank."""
    homes = documents_of(layout)
    for document, start, end, *_ in rows.tolist():
        home = homes[document]
        for x in (start, end):
            assert x % granularity == 0 or x == len(home) or home[x - 1] != home[x], f"cut at {x}"


def _check_bound(case: Case, tasks: Tasks, home: np.ndarray) -> None:
    """Nothing moves where nothing must, weight 0 computes nothing, and loads stay below what is promised."""
    layout, cost, options, *_ = case
    loads, before = tasks.loads.tolist(), tasks.loads_before.tolist()
    weights = options["server_weights"] or [1] * layout.num_ranks
    assert all(not load for load, weight in zip(loads, weights, strict=True) if not weight), "weight 0 computes"
    if all(load * sum(weights) <= sum(before) * w for load, w in zip(before, weights, strict=True)):
        assert np.array_equal(tasks.rows, home), "moved without need"
    if len(set(weights)) == 1:
        assert max(loads) <= max(before), "slower than at home"
    if options["max_received_rows"]:
        return
    names = ("phase", "granularity", "window", "server_weights")
    most = promised(layout, cost, tasks, options["tolerance"], **{name: options[name] for name in names})
    worst = max((load / bound, server) for server, (load, bound) in enumerate(zip(loads, most, strict=True)) if bound)
    assert all(load <= bound for load, bound in zip(loads, most, strict=True)), f"{worst} times the bound"


def _check_cap(case: Case, tasks: Tasks, home: np.ndarray) -> None:
    """No server receives more than the cap allows, unless its own queries alone need more, or servers that are to
    compute nothing leave no other way."""
    cap, weights = case.options["max_received_rows"], case.options["server_weights"] or []
    if cap is None or any(not weight and server in home[:, 5] for server, weight in enumerate(weights)):
        return
    received = sum(rows_between(case.layout, tasks.rows)).sum(axis=0)
    own = rows_between(case.layout, home)[1].sum(axis=0)
    assert (received <= np.maximum(cap, own)).all(), "received more than the cap"


def _check_transfers(
    layout: Layout, rows: np.ndarray, heads: Heads, phase: str, rule: RelayRule, nodes: Topology | None
) -> None:
    """Every task finds the rows that it asks for, and senders and receivers agree."""
    compiler = RouteCompiler(layout, rows, nodes, rule)
    plans = [compiler.rank(rank) for rank in range(layout.num_ranks)]
    # Every row has a name: the start of its document in a numbering of all tokens, plus its position.
    lengths = {document: len(home) for document, home in documents_of(layout).items()}
    first = dict(zip(lengths, np.cumsum([0, *lengths.values()]).tolist(), strict=False))
    stored = [
        np.concatenate([np.zeros(0, np.int64), *(first[d] + np.arange(a, a + n) for d, a, n in layout.rank(rank))])
        for rank in range(layout.num_ranks)
    ]
    work = [tuple(_workspace(plan, kind, stored) for kind in ("q", "kv")) for plan in plans]
    found = []
    for plan, (q, kv) in zip(plans, work, strict=True):
        own = stored[plan.rank]
        for ranges, queries, keys in ((plan.local, own, own), (plan.remote, q, kv)):
            for qs, ql, ks, kl, _ in np.stack(list(vars(ranges).values()), axis=1).tolist():
                asked, seen = queries[qs : qs + ql], keys[ks : ks + kl]
                assert len(asked) == ql <= kl == len(seen), "rows out of the buffer"
                assert asked[-1] - asked[0] == ql - 1 and seen[-1] - seen[0] == kl - 1 and asked[-1] == seen[-1]
                found.append((plan.rank, int(asked[0]), ql, kl))
        _check_waves(plan)
        for relay, row, target, size in plan.relay_in.tolist():
            assert np.array_equal(work[relay][1][row : row + size], kv[target : target + size]), "relayed other rows"
            sent = plans[relay].kv_in[plans[relay].kv_in_direct]
            assert any(w <= row and row + size <= w + n for _, _, w, n in sent.tolist()), "relayed before received"
    wanted = [(server, first[d] + a, b - a, b - low) for d, a, b, low, _, server in rows.tolist()]
    assert sorted(found) == sorted(wanted), "other tasks"
    out, back = _check_runs(plans, heads, phase)
    there, returned = compiler.bytes_between(heads, phase)
    assert np.array_equal(there, out) and np.array_equal(returned, back), "bytes"


def _workspace(plan: Routes, kind: str, stored: list[np.ndarray]) -> np.ndarray:
    """The name of every workspace row, as the incoming runs fill it; each is filled exactly once."""
    runs, rows = (plan.q_in, plan.work_q_rows) if kind == "q" else (plan.kv_in, plan.work_kv_rows)
    filled = np.full(rows, -1, dtype=np.int64)
    for peer, row, target, size in runs.tolist():
        assert (filled[target : target + size] == -1).all() and target + size <= rows
        filled[target : target + size] = stored[peer][row : row + size]
    assert (filled >= 0).all(), "a row that nobody sends"
    if kind == "kv":
        assert len(np.unique(filled)) == rows, "a key/value row twice"
    return filled


def _check_waves(plan: Routes) -> None:
    """Waves hold every task once, and no key row twice in one of them."""
    assert sorted(np.concatenate([*plan.waves, np.zeros(0, int)]).tolist()) == list(range(len(plan.remote)))
    for ranges in [plan.local, *(plan.remote.take(wave) for wave in plan.waves)]:
        order = np.argsort(ranges.k_start)
        assert (ranges.k_start[order][1:] >= (ranges.k_start + ranges.k_len)[order][:-1]).all(), "waves overlap"


def _check_runs(plans: list[Routes], heads: Heads, phase: str) -> tuple[np.ndarray, np.ndarray]:
    """Both ends list the same runs in the same order.

    Returns:
        bytes out and back, int64 [sender, receiver].
    """
    n = len(plans)
    out, back = np.zeros((n, n), dtype=np.int64), np.zeros((n, n), dtype=np.int64)
    q_size, kv_size = heads.q_bytes, heads.kv_bytes
    q_back, kv_back = heads.out_bytes + heads.lse_bytes, 0
    if phase == "backward":
        q_size, q_back, kv_back = q_size + heads.out_bytes + 2 * heads.lse_bytes, heads.q_bytes, kv_size

    def by_peer(runs: np.ndarray) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = {}
        for peer, *run in runs.tolist():
            found.setdefault(peer, []).append(run)
        return found

    kinds = {
        "q": (lambda p: p.q_out, lambda p: p.q_in, q_size, q_back),
        "kv": (
            lambda p: p.kv_out[~p.kv_out_relayed],
            lambda p: p.kv_in[p.kv_in_direct & ~p.kv_in_relayed],
            kv_size,
            kv_back,
        ),
        "kv sent on": (
            lambda p: p.kv_out[p.kv_out_relayed],
            lambda p: p.kv_in[p.kv_in_direct & p.kv_in_relayed],
            kv_size,
            kv_back,
        ),
        "relayed": (lambda p: p.relay_out, lambda p: p.relay_in, kv_size, kv_back),
    }
    for name, (leaving, arriving, there, returned) in kinds.items():
        sends = {(p.rank, peer): runs for p in plans for peer, runs in by_peer(leaving(p)).items()}
        takes = {(peer, p.rank): runs for p in plans for peer, runs in by_peer(arriving(p)).items() if peer != p.rank}
        assert sends == takes, f"{name}: senders and receivers disagree"
        for (sender, receiver), runs in takes.items():
            rows = sum(run[-1] for run in runs)
            out[sender, receiver] += rows * there
            back[receiver, sender] += rows * returned
    return out, back


def main() -> None:
    """Checks the plans of a range of seeds and prints what is found."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--plans", type=int, default=1000)
    arguments = parser.parse_args()
    start, broken = time.monotonic(), 0
    for seed in range(arguments.start, arguments.start + arguments.plans):
        try:
            check_plan(seed)
        except AssertionError as error:
            broken += 1
            print(str(error)[:600], flush=True)
    print(f"{arguments.plans} plans from seed {arguments.start}: {broken} broken, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
