# SPDX-License-Identifier: Apache-2.0
"""``ds_distca profile`` on the CPU: what is printed, stored and found again, and one line for wrong input."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from deepspeed_distca.cli import main
from deepspeed_distca.profiling.measure import KernelBench
from deepspeed_distca.scheduler import CostModel, Heads
from deepspeed_distca.scheduler.cost_model import PHASES
from deepspeed_distca.scheduler.fit import predict
from deepspeed_distca.scheduler.profiles import Profile, Setting, cache_folder, choose
from tests.distributed.harness import ROOT, free_port, run_program

# Large enough for pairs to be what takes the time, even on a machine with other work.
SMALL = ["--device", "cpu", "--quick", "--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--dtype", "fp32"]
HEADS = Heads(8, 2, 64, element_size=4)
CPU = Setting("cpu", "cpu", "reference", "fp32")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where other tests run
    yield
    torch.set_num_threads(threads)


def test_what_is_measured_is_stored_and_used(capsys):
    assert main(["profile", *SMALL, "--tokens", "512", "--budget-seconds", "3"]) == 0
    printed = capsys.readouterr().out
    for words in ("cpu, reference, fp32, 8/2 heads of 64", "held out: median", ": not measured (start"):
        assert words in printed, printed
    (path,) = cache_folder().iterdir()
    assert str(path) in printed
    stored = Profile.load(path)
    assert stored.setting == CPU and stored.cost.heads == HEADS
    for cost in (stored.cost.forward, stored.cost.backward):
        # 2048 multiply-adds forward: between a TFLOP/s and a hundredth of a GFLOP/s.
        assert 4e6 < cost.pair < 4e11
    assert stored.cost.launch > 0 and 1e8 < stored.cost.linear_rate < 1e15
    assert stored.cost.moving_backward == CostModel().moving_backward
    choice = choose(CPU, HEADS, folder=cache_folder())
    assert choice.cost == stored.cost and str(path) in choice.source


def test_save_stores_there_alone(tmp_path, capsys, monkeypatch):
    true = CostModel.fitted(HEADS)
    monkeypatch.setattr(
        KernelBench,
        "start",
        lambda self, shape: {p: lambda p=p: float(predict(true.phase(p), shape.features[None])[0]) for p in PHASES},
    )
    path = tmp_path / "new" / "mine.json"
    assert main(["profile", *SMALL, "--tokens", "4096", "--windows", "512,32", "--save", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"stored in {path}" in printed and "window 32" in printed and "window 512" in printed
    stored = Profile.load(path)
    assert stored.setting == CPU and not cache_folder().exists()
    assert stored.about["windows"] == [32, 512]
    for phase in PHASES:
        for term in ("pair", "query_row", "key_row", "task"):
            expected = getattr(true.phase(phase), term)
            assert getattr(stored.cost.phase(phase), term) == pytest.approx(expected, rel=0.01, abs=1e3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--heads", "3"], "multiple of key_value"),
        (["--head-dim", "0"], "head_dim must be"),
        (["--dtype", "fp8"], "--dtype"),
        (["--kernel", "flash"], "unknown attention kernel 'flash'"),
        (["--kernel", "flash_attn_4"], "flash_attn_4"),
        (["--device", "gpu"], "'gpu'"),
        (["--device", "meta"], "'meta'"),
        (["--windows", "a"], "--windows"),
        (["--windows", "128,0"], "--windows"),
        (["--budget-seconds", "0"], "must be positive"),
        (["--budget-seconds", "x"], "--budget-seconds"),
        (["--tokens", "0"], "must be 1 or more"),
        (["--tokens", "15"], "16 or more"),
        (["--save", "."], "a folder"),
    ],
)
def test_wrong_options_are_one_line(options, words, capsys):
    assert main(["profile", *SMALL, *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and words in err, err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_several_ranks_do_not_measure_one_gpu(rank, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, value)
    assert main(["profile", *SMALL, "--device", "cuda:1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "'cuda:1', one GPU for all 2 ranks; give cuda" in err, err


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_ranks_measure_the_exchange(tmp_path, launcher):
    port = free_port()
    start = {
        "torchrun": ["--nproc_per_node", "2", "--master_port", port, "-m"],
        "deepspeed": ["--num_accelerators", "2", "--master_port", port, "--module"],
    }[launcher]
    path = tmp_path / "both.json"
    arguments = [
        "deepspeed_distca.cli",
        "profile",
        *SMALL,
        "--tokens",
        "512",
        "--budget-seconds",
        "1",
        "--save",
        str(path),
    ]
    command = [Path(sys.executable).with_name(launcher), *start, *arguments]
    done = run_program(command, environment={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("stored in") == 1 and done.stdout.count(": not measured") == 1  # between nodes
    stored = Profile.load(path)
    assert stored.about["exchange within a node"].startswith("measured over 2 ranks")
    assert 1e7 < stored.cost.bytes_per_second < 1e12 and stored.cost.latency > 0
    assert "message, us" in done.stdout and "moving rows: measured over 2 ranks" in done.stdout
    assert stored.about["moving rows"] == "measured over 2 ranks"
    layers = stored.about["ms more of layers whose rows move, forward and backward"]
    assert [layer.split(" messages")[0] for layer in layers] == ["10, 16", "40, 64", "120, 192"]
    default = CostModel()
    for phase in PHASES:
        moving = getattr(stored.cost, f"moving_{phase}")
        assert moving != getattr(default, f"moving_{phase}") and 0 < moving.layer + 100 * moving.message < 1e15
