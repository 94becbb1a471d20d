# SPDX-License-Identifier: Apache-2.0
"""Ranks of test_harness.py, the last of which does not end well."""

from __future__ import annotations

import os
import time


def place() -> list[int]:
    return [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")]


def fails() -> None:
    print(f"rank {os.environ['RANK']} was here")
    if os.environ["RANK"] == "1":
        raise ValueError("no more")


def hangs() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(1000)


def dies() -> None:
    if os.environ["RANK"] == "1":
        os.abort()
