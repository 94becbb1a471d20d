# SPDX-License-Identifier: Apache-2.0
"""Reports in HTML: whole in one file, every figure drawn, in a browser where there is one, on phones and desktops."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from deepspeed_distca.attention_server.coordination.agreement import GlobalMicroBatch
from deepspeed_distca.attention_server.server import AttentionServer
from deepspeed_distca.attention_server.statistics import StepStatistics
from deepspeed_distca.cli import main
from deepspeed_distca.layout import Layout
from deepspeed_distca.report import write_run
from deepspeed_distca.report.figures import Plan, loads, plan_map
from deepspeed_distca.report.run import run_page
from deepspeed_distca.scheduler import CostModel, balance
from deepspeed_distca.scheduler.worth import PlanOptions
from tests.huggingface.lone_server import lone_server

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
)
FIGURES = {
    "plan": ["loads", "map", "timeline"],
    "advise": ["steps", "loads", "map", "timeline"],
    "simulate": ["parts", "scale", "loads", "map", "timeline"],
    "run": ["balance", "seconds", "loads", "map"],
}
#: Says in the title of the page around it what a reader sees of it.
LOOK = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.right, r.height] };
top.document.title = JSON.stringify({
  wide: document.documentElement.scrollWidth, window: window.innerWidth,
  figures: Object.fromEntries([...document.querySelectorAll('figure')].map(f => [f.id, box(f.querySelector('svg'))])),
  texts: [...document.querySelectorAll('svg text')].map(t => [t.textContent, ...box(t),
    t.getBoundingClientRect().top - t.closest('svg').getBoundingClientRect().top]),
  rows: document.querySelectorAll('#table tbody tr').length,
});
</script>"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    lengths = (np.random.default_rng(0).lognormal(8.5, 1.5, 2000).astype(int) + 1).tolist()
    (folder / "documents.json").write_text(json.dumps(lengths))
    layout = Layout.from_lengths([[40000], [500] * 40, [9000, 9000], []])
    heads = {"query": 32, "key_value": 8, "head_dim": 128}
    (folder / "layout.json").write_text(json.dumps({"ranks": layout.to_ranks(), "heads": heads}))
    drawn = [str(folder / "documents.json"), "--ranks", "16", "--tokens-per-rank", "32768"]
    commands = {
        "plan": ["--layout", str(folder / "layout.json")],
        "advise": [*drawn, "--micro-batches", "3"],
        "simulate": [*drawn, "--micro-batches", "1", "--checkpointing"],
    }
    files = {name: folder / f"{name}.html" for name in commands}
    for name, arguments in commands.items():
        assert main([name, *arguments, "--html", str(files[name])]) == 0
    files["run"] = folder / "run.html"
    write_run(SimpleNamespace(distca=SimpleNamespace(server=trained(100))), files["run"])
    return files


def trained(steps: int, servers: int = 4) -> AttentionServer:
    """A server that has planned steps of two micro-batches each, without anybody else."""
    now = [0]
    server = lone_server(CostModel.fitted(), PlanOptions(0.02, 128), step=lambda: now[0], accumulation_steps=lambda: 2)
    draw = np.random.default_rng(1)
    for now[0] in range(steps):
        for _ in range(2):
            lengths = [[int(draw.integers(2000, 30000))], *[[1000] * 20 for _ in range(servers - 1)]]
            for _given in server.plan(GlobalMicroBatch(Layout.from_lengths(lengths), 1, None)):
                pass
    return server


def test_what_is_kept_of_a_run_is_what_its_steps_said() -> None:
    said, now = [], [0]
    server = lone_server(CostModel.fitted(), PlanOptions(0.02, 128), step=lambda: now[0])
    for now[0] in range(5):
        lengths = [[30000 - 5000 * now[0]], [1000] * 30]
        list(server.plan(GlobalMicroBatch(Layout.from_lengths(lengths), 1, None)))
        said.append(server.planned)
    history = server.history
    assert [step.step for step in history] == list(range(5))
    for step, then in zip(history, said, strict=True):
        for name in ("balance_before", "balance_after", "moved_share", "tokens", "bytes_sent", "micro_batches"):
            assert getattr(step, name) == getattr(then, name)
    assert all(step.seconds > 0 for step in history[:-1]) and history[-1].seconds is None
    layout, last = server.last_plan
    assert layout.tokens.tolist() == [10000, 30000] and last.phase == "forward"


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (SimpleNamespace(), "no `distca` block"),
        (SimpleNamespace(distca=SimpleNamespace(server=SimpleNamespace(last_plan=None))), "no step was trained"),
    ],
)
def test_a_run_that_there_is_not(engine: SimpleNamespace, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        write_run(engine, tmp_path / "run.html")


def test_a_step_with_an_evaluation_behind_it_is_no_measure_of_the_others() -> None:
    steps = [
        StepStatistics(2.0, 1.0, predicted_server_seconds=[0.1, 0.1], tokens=1000, step=i, seconds=s)
        for i, s in enumerate([0.5, 0.5, 600.0, 0.5, None])
    ]
    layout = Layout.from_lengths([[4000], [500] * 4])
    cost = CostModel.fitted()
    text = str(run_page(steps, Plan.of(layout, balance(layout, cost), cost, "forward")))
    assert "0.50 s" in text and "+20.0%" in text and "<b>1,000</b>" in text


def test_a_run_of_one_step_and_one_of_a_thousand(tmp_path: Path) -> None:
    for steps in (1, 1200):
        write_run(SimpleNamespace(distca=SimpleNamespace(server=trained(steps, 2))), tmp_path / "run.html")
        text = (tmp_path / "run.html").read_text()
        assert f"{min(steps, 1000):,} optimizer steps" in text and ('id="seconds"' in text) == (steps > 1)
        assert text.count("<circle") <= 3 * 60 and len(text) < 200_000


@pytest.mark.parametrize("name", FIGURES)
def test_a_report_is_one_file(reports: dict[str, Path], name: str) -> None:
    text = reports[name].read_text()
    assert re.findall(r'<figure id="(\w+)"', text) == FIGURES[name] and 'id="table"' in text
    assert not re.search(r"https?:|@import|url\(|<script|<link(?! rel=\"icon\" href=\"data:,\")|src=", text)
    assert "prefers-color-scheme:dark" in text and "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", text.lower())


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", FIGURES)
def test_a_browser_shows_all_of_it(reports: dict[str, Path], tmp_path: Path, name: str, width: int) -> None:
    page = tmp_path / "page.html"
    inside = html.escape(reports[name].read_text().replace("</body>", f"{LOOK}</body>"))
    # Chromium's own window is 500 wide at least.
    style = f"border:0;width:{width}px;height:4000px"
    page.write_text(f'<meta charset="utf-8"><title></title><iframe style="{style}" srcdoc="{inside}"></iframe>')
    own = (f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,900", "--disable-sync")
    told = ("--enable-logging=stderr", "--v=0", "--dump-dom", page.as_uri())
    done = subprocess.run([BROWSER, *QUIET, *own, *told], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    seen = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)[1]))
    assert seen["window"] == width and seen["wide"] <= width  # nothing to scroll aside but tables
    assert list(seen["figures"]) == FIGURES[name] and seen["rows"] >= 4
    for left, right, height in seen["figures"].values():
        assert 0 < left < right <= width and right - left > 0.6 * width and height > 60
    assert len(seen["texts"]) > 20
    for words, left, right, height, down in seen["texts"]:
        assert not words or (left >= 0 and right <= width and height > 8 and down > -8), words


def test_figures_have_every_rank_and_all_attention(reports: dict[str, Path]) -> None:
    layout = Layout.from_lengths([[40000], [500] * 40, [9000, 9000], []])
    cost = CostModel.fitted()
    plan = Plan.of(layout, balance(layout, cost), cost, "forward")
    before, after = plan.loads()
    drawn = str(loads(before, after))
    assert all(f"<title>rank {rank}: " in drawn for rank in range(4))
    drawn = str(plan_map(plan))
    widths = [float(w) for w in re.findall(r'width="([\d.]+)%"', drawn)]
    assert sum(widths) == pytest.approx(100 * after.sum() / after.max(), abs=0.1 * len(widths))
    assert "40 documents of rank 1" in drawn or drawn.count("of rank 1") == 40
    assert drawn.count("fill-opacity") == sum("fill-opacity" in part for part in drawn.split("<rect"))
    assert int(plan.moved.sum()) == len(re.findall(r"<rect (?![^>]*fill-opacity)", drawn))


def test_a_file_that_cannot_be_written_is_one_line(reports: dict[str, Path], capsys: pytest.CaptureFixture) -> None:
    layout = reports["plan"].parent / "layout.json"
    assert main(["plan", "--layout", str(layout), "--html", "no/such/folder.html"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "no/such/folder.html: No such file" in err


def test_empty_plans_have_a_report(tmp_path: Path, run_plan: Callable[[dict], Path]) -> None:
    assert (
        'id="map"' in run_plan({"ranks": [[], []], "heads": {"query": 8, "key_value": 2, "head_dim": 64}}).read_text()
    )


@pytest.fixture
def run_plan(tmp_path: Path) -> Callable[[dict], Path]:
    def run(layout: dict) -> Path:
        (tmp_path / "layout.json").write_text(json.dumps(layout))
        assert main(["plan", "--layout", str(tmp_path / "layout.json"), "--html", str(tmp_path / "report.html")]) == 0
        return tmp_path / "report.html"

    return run
