# SPDX-License-Identifier: Apache-2.0
"""Plans of the published document lengths: balance and bytes of benchmarks/planner.py's table, on fewer batches."""

from __future__ import annotations

import hashlib
import itertools
import json

import numpy as np
import pytest

from benchmarks.workloads.sampling import layouts
from deepspeed_distca.layout import LENGTH, START
from deepspeed_distca.scheduler import CostModel, Heads, balance
from deepspeed_distca.scheduler.cost_model import pairs
from deepspeed_distca.scheduler.profiles import Setting, choose
from deepspeed_distca.scheduler.routes import RouteCompiler

HEADS = Heads(query=4, key_value=1, head_dim=128)
H200 = Setting("NVIDIA H200", "sm90", "flash_attn_4", "bf16")

CASES = {
    "pretrain-128K-8": dict(name="pretrain", context=131072, servers=8),
    "pretrain-512K-32": dict(name="pretrain", context=524288, servers=32),
    "pretrain-128K-64": dict(name="pretrain", context=131072, servers=64),
    "prolong-128K-64-shuffled": dict(name="prolong", context=131072, servers=64, shuffle=1),
    "pretrain-128K-512": dict(name="pretrain", context=131072, servers=512),
    "prolong-128K-8-headtail": dict(name="prolong", context=131072, servers=8, head_tail=True),
}

# Of the layouts as JSON, three batches: the sampling must not change under the benchmark.
SAMPLES = {
    "pretrain-128K-8": "49aa2fd1ea160330",
    "pretrain-512K-32": "285985832f755d55",
    "pretrain-128K-64": "4e8b2afbdcd158ba",
    "prolong-128K-64-shuffled": "4513e46322fc31c9",
    "pretrain-128K-512": "575383143359236c",
    "prolong-128K-8-headtail": "d07feaf26003dcaf",
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_samples_are_the_published_ones(case):
    lines = [json.dumps(layout.to_ranks()) for layout in layouts(**CASES[case], tokens=65536, batches=3)]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == SAMPLES[case]


@pytest.mark.parametrize(
    ("case", "mean_mib", "worst_mib"),
    [
        ("pretrain-128K-8", 48, 192),
        ("pretrain-512K-32", 175, 747),
        ("pretrain-128K-64", 49, 208),
        ("prolong-128K-64-shuffled", 35, 480),
        ("pretrain-128K-512", 49, 208),
    ],
)
def test_balance_and_bytes(case, mean_mib, worst_mib):
    cost = CostModel.area(HEADS)
    mean, worst = [], []
    for layout in layouts(**CASES[case], tokens=65536, batches=10):
        tasks = balance(layout, cost, tolerance=0.02)
        assert tasks.loads.max() <= 1.02 * tasks.loads.mean()
        moved = RouteCompiler(layout, tasks.rows).bytes_between(HEADS, "forward")[0] / 2**20
        mean.append(moved.sum() / layout.num_ranks)
        worst.append(max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))
    assert np.mean(mean) <= mean_mib
    assert np.mean(worst) <= worst_mib


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("case", ["pretrain-128K-64", "prolong-128K-64-shuffled", "pretrain-512K-32"])
def test_balance_of_predicted_time(case, phase):
    for layout in layouts(**CASES[case], tokens=65536, batches=4):
        tasks = balance(layout, CostModel.fitted(), phase=phase, tolerance=0.02)
        assert tasks.balance <= 1.02
        # What cuts add: reading keys more than once, in backward.
        assert tasks.loads.sum() <= 1.05 * tasks.loads_before.sum()


@pytest.mark.parametrize("head_tail", [False, True])
@pytest.mark.parametrize("servers", [16, 64])
@pytest.mark.parametrize("name", ["pretrain", "prolong"])
def test_what_shards_leave_is_a_granule_in_backward_too(name, servers, head_tail):
    """A task reads the keys of all before it, so that whole tails are given away: whoever gave them takes again."""
    cost, over = choose(H200, CostModel().heads, folder=None).cost, []
    for context, shuffle in itertools.product((262144, 524288), (None, 1, 7)):
        case = dict(name=name, context=context, servers=servers, shuffle=shuffle, head_tail=head_tail)
        for layout in layouts(**case, tokens=65536, batches=3):
            longest = int((layout.segments[:, START] + layout.segments[:, LENGTH]).max())
            for tolerance in (0.005, 0.02):
                tasks = balance(layout, cost, phase="backward", tolerance=tolerance)
                rows = cost.backward.pair * pairs(longest - 128, longest) + cost.backward.query_row * 128
                over.append(tasks.balance - 1 - tolerance - rows / tasks.loads.mean())
    assert max(over) <= 0
