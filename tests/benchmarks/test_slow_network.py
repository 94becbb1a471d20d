# SPDX-License-Identifier: Apache-2.0
"""Two nodes with a slow link between them: losses are plain's, the link carries what was planned, and the end of one
node is an error on the other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import slow_network

GIVEN = Namespace(mbit=200, ranks=2, tokens=1024, steps=2, prolong=None, min_gain=0.0, kinds=["nodes"])
PATIENCE = 90
pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def possible(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine lets us make namespaces, and a link that tc holds back."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # as harness.run_program has it
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs root, ip and tc")
    name = f"{slow_network.NAMES[0]}x"
    probe = (
        f"ip netns add {name} && ip netns exec {name} tc qdisc add dev lo root tbf rate 1mbit burst 4kb latency 9ms"
    )
    asked = subprocess.run(probe, shell=True, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    if asked.returncode:
        pytest.skip(f"needs network namespaces with tbf: {asked.stderr}")
    slow_network.link(GIVEN.mbit)
    yield
    slow_network.unlink()


@pytest.mark.long
def test_losses_are_plains_and_the_link_carries_what_was_planned() -> None:
    rows = slow_network.measured(GIVEN)
    plain, nodes = rows["plain"], rows["nodes"]
    assert nodes["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert any("4 attention servers in 1 group(s) on 2 nodes of " in line for line in nodes["said"])
    assert nodes["planned"] > 2**20
    assert nodes["bytes"] - plain["bytes"] == pytest.approx(
        nodes["planned"], rel=0.02
    )  # what gloo and TCP put around it


def test_a_node_that_is_gone_is_an_error_on_the_other(tmp_path: Path) -> None:
    log = tmp_path / "nodes0.log"
    processes = slow_network.start("nodes", Namespace(**{**vars(GIVEN), "steps": 10_000}), tmp_path)
    try:
        end = time.monotonic() + 4 * PATIENCE
        while "step 1 " not in log.read_text():
            assert time.monotonic() < end and processes[0].poll() is None, log.read_text()[-3000:]
            time.sleep(0.5)
        ranks = slow_network.shell(f"ip netns pids {slow_network.NAMES[1]}").split()
        subprocess.run(["kill", "-9", *ranks], check=False)
        assert processes[0].wait(timeout=PATIENCE) != 0
        text = log.read_text()
        assert re.search(r"RankFailedError: .*\b[23]\b.*(no sign of life|gone|ended|lost)", text), text[-3000:]
    finally:
        for process in processes:
            process.kill()
