# SPDX-License-Identifier: Apache-2.0
"""The benchmark of whole steps, as it is run: two CPU ranks under torchrun, tiny sizes; and its parts."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from deepspeed_distca.layout import LENGTH
from deepspeed_distca.scheduler.cost_model import PHASES, CostModel
from tests.distributed.harness import ROOT, run_program, run_ranks, run_script

TINY = ["--hidden", "256", "--head-dim", "32", "--tokens", "512", "--layers", "1", "--vocabulary", "256"]
VARIANTS = ("plain", "distca local_first tol 0.005", "ulysses")


@pytest.fixture
def steps(monkeypatch):
    """The benchmark's modules, importable as the script imports them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from steps import batches, report

    return batches, report


SCRIPT = ROOT / "benchmarks" / "step_time.py"


def run(*arguments: object) -> str:
    return run_script(SCRIPT, 2, *TINY, *arguments, launcher="torchrun")


def launch(*arguments: object) -> str:
    """The same, by torchrun itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = run_program([*command, SCRIPT, *TINY, *arguments])
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_all_variants_have_the_same_loss_and_a_row_each(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("raw.json", "report.md", "trace.json.gz")}
    options = ["--mixes", "long|short", "--workloads", "pretrain:1:shuffled", "--overlap", "local_first"]
    options += ["--tolerance", 0.005, "--steps", 2, "--warm-up", 0, "--budget-seconds", 600]
    options += ["--json", files["raw.json"], "--save", files["report.md"], "--timeline", files["trace.json.gz"]]
    printed = run(*options)
    raw = json.loads(files["raw.json"].read_text())
    assert list(raw["batches"]) == ["long|short", "pretrain:shuffled #0"] and raw["notes"] == []
    for rows in raw["batches"].values():
        assert tuple(rows) == VARIANTS
        for row in rows.values():
            assert row["loss"] == pytest.approx(rows["plain"]["loss"], rel=1e-4)
            assert np.shape(row["steps"]) == (2, 2, 3)
            assert row["ms"] >= max(row["attention_ms"]) > 0
        assert rows["plain"]["ideal_ms"] <= rows["plain"]["ms"]
    moved = raw["batches"]["long|short"]["distca local_first tol 0.005"]
    assert max(moved["exposed_ms"]) > 0 and moved["mib_sent_max"] > 0
    assert moved["balance_after"] < moved["balance_before"]
    saved = files["report.md"].read_text()
    assert saved.startswith("**CPU x2, 20") and "--tolerance 0.005" in saved
    for variant in VARIANTS:
        for group in (r"long\|short (1)", "pretrain:shuffled (1)"):
            assert f"| {group} | {variant} |" in saved and f"| {group} | {variant} |" in printed
        assert f"| pretrain:shuffled #0 | {variant} |" in saved
    for rank in range(2):
        with gzip.open(tmp_path / f"trace_rank{rank}.json.gz", "rt") as stream:
            names = {event.get("name") for event in json.load(stream)["traceEvents"]}
        assert {"forward", "backward", "optimizer"} <= names


def test_variants_take_turns_with_the_same_losses_and_a_measured_ideal(tmp_path: Path) -> None:
    options = ["--turns", "--mixes", "long|short", "--workloads", "--variants", "plain", "evened", "distca"]
    options += ["--overlap", "local_first", "--steps", 2, "--warm-up", 0]
    run(*options, "--json", tmp_path / "raw.json", "--save", tmp_path / "report.md")
    rows = json.loads((tmp_path / "raw.json").read_text())["batches"]["long|short"]
    assert list(rows) == ["plain", "evened", "distca local_first"]
    steps = [(*when, name) for name, row in rows.items() for when in row["when"]]
    names = list(rows)
    assert [name for *_, name in sorted(steps)] == names + names[::-1]
    plain, evened, distca = rows.values()
    # Each engine has been trained on its own documents alone.
    assert distca["loss"] == pytest.approx(plain["loss"], rel=1e-5) != evened["loss"]
    ideal = evened["ms"] - max(evened["attention_ms"]) + np.mean(plain["attention_ms"])
    assert plain["evened_ms"] == pytest.approx(ideal) and "of_plain" not in evened
    assert f"{plain['evened_ms']:.1f} ms" in (tmp_path / "report.md").read_text()


def test_a_budget_ends_it_with_a_report(tmp_path: Path) -> None:
    printed = launch("--budget-seconds", 0, "--json", tmp_path / "raw.json", "--variants", "plain", "plain")
    assert "The budget of 0 s was over in plain" in printed
    assert json.loads((tmp_path / "raw.json").read_text())["batches"] == {}


@pytest.mark.quick
def test_ulysses_computes_what_plain_does() -> None:
    lengths = [[61, 3], [1, 31, 30, 2]]
    shape = dict(q_heads=4, kv_heads=2, head_dim=8)
    for found in run_ranks("tests.benchmarks.ulysses_worker:errors", 2, lengths=lengths, **shape):
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("spec", ["pretrain:3", "prolong:2:shuffled", "pretrain:2:whole:shuffled=7"])
@pytest.mark.parametrize(("world", "tokens"), [(1, 65536), (2, 65536), (3, 1000), (4, 65536), (8, 65536)])
def test_workloads_fill_every_rank_exactly(steps, spec: str, world: int, tokens: int) -> None:
    batches, _ = steps
    found = batches.workload(spec, world, tokens, 131072)
    assert len(found) == int(spec.split(":")[1]) and len({b.name for b in found}) == len(found)
    for batch in found:
        assert batch.layout.validate().tokens.tolist() == [tokens] * world
        assert batch.whole == ("whole" in spec and world > 1)
        assert batch.whole or all(s.start == 0 for rank in range(world) for s in batch.layout.rank(rank))
        targets = sum(batch.inputs(rank, 100, "cpu")["num_targets"] for rank in range(world))
        assert batch.targets() == targets


def test_workloads_are_the_sampled_documents_cut_at_ranks_ends(steps) -> None:
    from workloads.sampling import layouts

    batches, _ = steps
    for mine, theirs in zip(
        batches.workload("prolong:3:whole", 4, 65536, 131072),
        layouts("prolong", context=131072, servers=4, tokens=65536, batches=3),
        strict=True,
    ):
        assert mine.layout == theirs
    cut = batches.workload("prolong:3", 4, 65536, 131072)[2]
    assert cut.layout.segments[:, LENGTH].tolist() == theirs.segments[:, LENGTH].tolist()


def test_batches_can_be_skipped(steps) -> None:
    batches, _ = steps
    everything = batches.workload("prolong:4:shuffled", 2, 65536, 131072)
    assert batches.workload("prolong:1:shuffled:skip=3", 2, 65536, 131072) == everything[3:]


def test_documents_change_places_among_the_batches_of_a_step(steps) -> None:
    batches, _ = steps
    as_packed = batches.workload("prolong:8:shuffled", 2, 65536, 131072)
    regrouped = batches.workload("prolong:8:shuffled:step=4", 2, 65536, 131072)
    for first in (0, 4):
        lengths = [
            sorted(n for batch in found[first : first + 4] for n in batch.layout.segments[:, LENGTH].tolist())
            for found in (as_packed, regrouped)
        ]
        assert lengths[0] == lengths[1]
    for batch in regrouped:
        assert batch.layout.tokens.tolist() == [65536] * 2 and not batch.whole

    def busiest(found) -> int:
        return sum(max(sum(s.length**2 for s in batch.layout.rank(rank)) for rank in range(2)) for batch in found)

    assert busiest(regrouped) < 0.9 * busiest(as_packed)


@pytest.mark.parametrize("placement", ["whole", "free"])
def test_placed_batches_have_the_same_documents(steps, placement: str) -> None:
    batches, _ = steps

    def documents(batch) -> Counter:
        """Token ids of every document, put together from all ranks, and how often they occur."""
        parts: dict[int, list] = {}
        for rank in range(2):
            ids = batch.inputs(rank, 50000, "cpu")["input_ids"].flatten()
            segments = batch.layout.rank(rank)
            for segment, piece in zip(segments, ids.split([s.length for s in segments]), strict=True):
                parts.setdefault(segment.document, []).append((segment.start, piece.numpy().tobytes()))
        return Counter(b"".join(p for _, p in sorted(pieces)) for pieces in parts.values())

    cut = 0
    for batch in batches.workload("prolong:4:shuffled", 2, 65536, 131072):
        placed = batches.placed(batch, placement)
        assert placed.layout.tokens.tolist() == [65536] * 2 and placed.name == batch.name
        assert documents(placed) == documents(batch) and placed.targets() == batch.targets()
        cut += placed.whole
    assert (cut > 0) == (placement == "free")  # they fill the ranks as they are packed


def test_variants_of_several_blocks(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from steps.variants import make_variants

    blocks = [{}, {"advanced": {"server_weights": [1, 1]}}]
    variants = make_variants(["plain", "distca", "distca_whole", "plain"], ["none"], None, None, blocks)
    assert [(v.name, v.block) for v in variants] == [
        ("plain", None),
        ("distca none", {"enabled": True, "overlap": "none"}),
        (
            "distca none server_weights=[1, 1]",
            {"enabled": True, "advanced": {"server_weights": [1, 1]}, "overlap": "none"},
        ),
        ("distca whole none", {"enabled": True, "overlap": "none"}),
        ("plain again", None),
    ]


@pytest.mark.parametrize("spec", ["pretrain", "books:3", "pretrain:0", "pretrain:3:sorted", "pretrain:3:shuffled=x"])
def test_other_workloads_are_refused(steps, spec: str) -> None:
    with pytest.raises(ValueError, match=r"expected pretrain\|prolong:BATCHES"):
        steps[0].workload(spec, 2, 65536, 131072)


@pytest.mark.parametrize("name", ["long|short", "half|short", "even", "short"])
@pytest.mark.parametrize(("world", "tokens"), [(2, 65536), (4, 16384), (3, 65536)])
def test_evened_documents_have_the_mean_attention_on_every_rank(steps, name: str, world: int, tokens: int) -> None:
    batches, _ = steps
    cost = CostModel.fitted()

    def seconds(layout) -> list[float]:
        ranks = [np.array([s.length for s in layout.rank(r)]) for r in range(world)]
        return [sum(float(cost.cost(0 * n, n, 0 * n, phase=p).sum()) for p in PHASES) for n in ranks]

    batch = batches.mix(name, world, tokens)
    evened = batches.evened(batch)
    assert (evened.layout.tokens == tokens).all() and evened.name == batch.name
    mean, found = np.mean(seconds(batch.layout)), seconds(evened.layout)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(mean, rel=0.03)


def test_shares_of_the_ideal(steps) -> None:
    _, report = steps

    def row(ms: float, attention: list[float], loss: float = 2.0) -> dict:
        return {"ms": ms, "attention_ms": attention, "exposed_ms": None, "loss": loss, "kernel": "some",
                "mib_sent_max": 0.0, "mib_sent_mean": 0.0}  # fmt: skip

    results = report.Results({})
    results.add("mix", "mix #0", "plain", row(1000.0, [500.0, 100.0]))  # ideal 800
    results.add("mix", "mix #0", "other", row(850.0, [300.0, 300.0], loss=2.02))
    results.add("mix", "mix #1", "plain", row(1000.0, [500.0, 490.0]))  # 5 ms to gain: too few to count
    results.add("mix", "mix #1", "other", row(1010.0, [495.0, 495.0]))
    first, second = (results.rows[f"mix #{i}"]["other"] for i in range(2))
    assert results.rows["mix #0"]["plain"]["ideal_ms"] == 800.0
    assert first["share_of_ideal"] == pytest.approx(0.75) and first["of_plain"] == pytest.approx(0.85)
    assert first["loss_difference"] == pytest.approx(0.01)
    assert second["share_of_ideal"] is None and second["of_plain"] == pytest.approx(1.01)
    line = next(line for line in results.summary().splitlines() if "other" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    together = round(100 * (150 - 10) / (200 + 5))
    assert cells[:6] == ["mix (2)", "other", "930.0", "0.930, 1.010", "75% (1)", f"{together}%"]
    assert cells[6] == "" and cells[8] == "1.34 → 1.00"

    # Measured on evened documents with 310 ms of attention, 10 more than the mean: 850 - 10 ms, 160 to gain.
    results = report.Results({})
    results.add("mix", "mix #0", "plain", row(1000.0, [500.0, 100.0]))
    results.add("mix", "mix #0", "before", row(860.0, [300.0, 300.0]))
    results.add("mix", "mix #0", "evened", row(850.0, [310.0, 308.0]))
    results.add("mix", "mix #0", "other", row(860.0, [300.0, 300.0]))
    rows = results.rows["mix #0"]
    assert rows["plain"]["evened_ms"] == 840.0
    assert rows["before"]["share_of_evened"] == rows["other"]["share_of_evened"] == pytest.approx(0.875)
    line = next(line for line in results.summary().splitlines() if "other" in line)
    assert line.split("|")[7].strip() == "88%, 88%"

    results.memory["other"] = {"peak_gib": [60.0, 61.5], "left_gib": [0.0, 0.25], "growth_gib": [0.0, 1.0]}
    assert "| other | 60.00–61.50 | 0.25 | 1.00 |" in results.memory_table()
