# SPDX-License-Identifier: Apache-2.0
"""Steps at the paper's scale: the published table is near what the script makes."""

from __future__ import annotations

import sys

import pytest

from tests.distributed.harness import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import paper as benchmark

from deepspeed_distca.simulator.model import Model

RESULTS = (benchmark.RESULTS / "paper.md").read_text()


@pytest.mark.parametrize(
    ("model", "workload", "context", "gpus"), [("8B", "pretrain", 131072, 64), ("34B", "prolong", 262144, 128)]
)
def test_the_table_is_what_the_script_makes(model: str, workload: str, context: int, gpus: int) -> None:
    own = benchmark.cells(benchmark.row(model, workload, context, gpus))
    (line,) = [line for line in RESULTS.splitlines() if line.startswith(f"| {' | '.join(own[:4])} |")]
    published = [cell.strip() for cell in line.strip("|").split("|")]
    for mine, theirs in zip(own[4:], published[4:], strict=True):
        if mine or theirs:
            assert float(mine.rstrip("%")) == pytest.approx(
                float(theirs.rstrip("%")), rel=0.03, abs=1.1 * mine.endswith("%")
            )


def test_a_node_computes_a_whole_layer() -> None:
    whole = Model.of(benchmark.CONFIGS["34B"])
    part = benchmark.of_node(whole)
    assert whole.parameters == 8 * part.parameters and 32e9 < whole.parameters < 37e9
    assert (part.heads.query, part.heads.key_value, part.layers) == (8, 2, 48)
    training, tokens = benchmark.paper("34B", 64, 1)
    assert tokens == 65536 and training.options.topology.size == 8
    plain = type(training).__mro__[1].linear(training, "forward")
    assert training.linear("forward") - plain == pytest.approx(4 * 8192 * 2 * 7 / 8 / training.cost.bytes_per_second)
