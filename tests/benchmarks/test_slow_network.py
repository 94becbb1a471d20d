# SPDX-License-Identifier: Apache-2.0
"""Two nodes with a slow link between them: losses are plain's, and the link carries what was planned."""

from __future__ import annotations

import os
import shutil
import subprocess
from argparse import Namespace

import pytest

from benchmarks import slow_network


def possible() -> bool:
    """Whether this machine lets us make namespaces and a link that tc holds back."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return False
    try:
        slow_network.link(100)
    except subprocess.CalledProcessError:
        return False
    finally:
        slow_network.unlink()
    return True


@pytest.mark.skipif(not possible(), reason="needs root, ip and tc")
def test_losses_are_plains_and_the_link_carries_what_was_planned() -> None:
    rows = slow_network.measured(Namespace(mbit=200, ranks=2, tokens=1024, steps=2, kinds=["nodes"]))
    plain, nodes = rows["plain"], rows["nodes"]
    assert nodes["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert any("4 attention servers in 1 group(s) on 2 nodes of 0.025 GB/s a rank" in line for line in nodes["said"])
    assert nodes["planned"] > 2**20
    assert nodes["bytes"] - plain["bytes"] == pytest.approx(nodes["planned"], rel=0.05)
