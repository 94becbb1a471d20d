# SPDX-License-Identifier: Apache-2.0
"""What every test shares: its marks, CPU settings for DeepSpeed, and no litter in shared memory.

The time limit of each test is pytest-timeout's, set in pyproject.toml.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Before deepspeed is imported, here and in the processes that tests start.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# Nothing is fetched: a test that names a model of the hub by mistake fails at once instead of waiting for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked `slow` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is no CUDA device, and those marked `slow` unless they are asked for."""
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device"
    if not config.getoption("--slow"):
        reasons["slow"] = "slow: run it with --slow"
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def clean_shared_memory() -> Iterator[None]:
    """Deletes the 69 MB buffers that DeepSpeed's shared-memory collectives leave behind, one for each process."""
    before = _shared_buffers()
    yield
    for path in _shared_buffers() - before:
        path.unlink(missing_ok=True)


def _shared_buffers() -> set[Path]:
    return set(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*"))
