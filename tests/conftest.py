# SPDX-License-Identifier: Apache-2.0
"""What every test shares: marks, what runs beside what, CPU settings for DeepSpeed, no litter in shared memory.

The time limit of each test is pytest-timeout's, set in pyproject.toml.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import hypothesis
import pytest

# One thread each, here and in the processes that tests start: there are more of these than cores, tensors are small,
# and threads that wait for each other spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    # Before deepspeed is imported, here and in the processes that tests start.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# Nothing is fetched: a test that names a model of the hub by mistake fails at once instead of waiting for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No limit that a busy machine could reach.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")

ROOT = Path(__file__).parents[1]
#: Functions that start processes.
STARTERS = {("tests.distributed.harness", name) for name in ("run_ranks", "run_script", "run_program", "forking")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked `slow` too")
    parser.addoption("--quick", action="store_true", help="of the tests marked `ranks` run those marked `quick` alone")


@pytest.hookimpl(optionalhook=True)  # a GPU machine may be without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests go to pytest-xdist's workers one by one, those of a file with fixtures of module scope all to the same.
    (Its own way of saying so, ``xdist_group``, has no effect with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Schedule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return file if _shares(file := nodeid.split("::")[0]) else nodeid

    return Schedule(config, log)


@functools.cache
def _shares(file: str) -> bool:
    return 'scope="module"' in (ROOT / file).read_text()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests that start processes as `ranks`, and leaves out what is not to run."""
    starts: dict[Any, bool] = {}
    for item in items:
        if any(_starts(function, starts) for function in _functions(item)):
            item.add_marker(pytest.mark.ranks)
    if config.getoption("--quick"):
        left_out = {i for i in items if i.get_closest_marker("ranks") and not i.get_closest_marker("quick")}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):  # of pytest-xdist: what takes long is begun first
        items.sort(key=lambda item: [item.get_closest_marker(mark) is None for mark in ("long", "ranks")])
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device"
    if not config.getoption("--slow"):
        reasons["slow"] = "slow: run it with --slow"
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Tests, and DataLoaders' workers that they fork, collect their own garbage, not all that was imported."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton prints a page about what is left


def _fixtures(item: pytest.Item) -> list[Any]:
    """The definitions of a test's own fixtures, not those of this file."""
    definitions = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
    return [each[-1] for each in definitions if each[-1].baseid.endswith(".py")]


def _functions(item: pytest.Item) -> list[Any]:
    return [getattr(item, "function", None), *(fixture.func for fixture in _fixtures(item))]


def _starts(function: Any, known: dict[Any, bool]) -> bool:
    """Whether a function of the tests starts processes, itself or by another one that it names."""
    function = inspect.unwrap(function) if callable(function) else function
    place = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
    if place in STARTERS:
        return True
    if not inspect.isfunction(function) or not place[0].startswith("tests."):
        return False
    if function not in known:
        known[function] = False  # while it is looked at
        names = list(_names(function.__code__))
        named = [function.__globals__.get(name) for name in names]
        # And what it may take from modules of the tests.
        modules = [m for m in named if inspect.ismodule(m) and m.__name__.startswith("tests.")]
        named += [getattr(module, name, None) for module in modules for name in names]
        known[function] = any(_starts(other, known) for other in named)
    return known[function]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@pytest.fixture(scope="session", autouse=True)
def clean_shared_memory() -> Iterator[None]:
    """Deletes the 69 MB buffers that DeepSpeed's shared-memory collectives leave behind, one for each process."""
    before = _shared_buffers()
    yield
    for path in _shared_buffers() - before:
        path.unlink(missing_ok=True)


def _shared_buffers() -> set[Path]:
    return set(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*"))
