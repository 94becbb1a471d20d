# SPDX-License-Identifier: Apache-2.0
"""Runs a test function in real processes that form a process group, with a time limit and a clear report.

Ranks on CPU are forked from a process that has imported torch, DeepSpeed and transformers already and done nothing
else (preload.py): the import takes 5 s of a core for each rank otherwise, half of these tests' time. Ranks on GPUs
start afresh, since DeepSpeed chooses its accelerator when it is imported.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(
    function: str, world: int, *, timeout: float = 120.0, threads: int = 1, accelerator: str = "cpu", **arguments: Any
) -> list[Any]:
    """Calls ``function(**arguments)`` on every rank of a fresh process group.

    Args:
        function: "module:name", importable from the repository's root; it returns something JSON can hold.
        world: number of processes.
        timeout: seconds after which all of them are killed and the test fails.
        threads: of each process.
        accelerator: "cpu" or "cuda", DeepSpeed's name for the device.
        arguments: JSON values.

    Returns:
        what each rank returned.

    Raises:
        AssertionError: a rank failed or the time is up; the message holds every rank's output.
    """
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {
            **os.environ,
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads),
            "DS_ACCELERATOR": accelerator,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        common.pop("LOCAL_SIZE", None)  # DeepSpeed's shared-memory buffers of 69 MB a rank
        context = _forking() if accelerator == "cpu" else multiprocessing.get_context("spawn")
        processes = []
        for rank in range(world):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            task = (function, json.dumps(arguments), folder, environment)
            processes.append(context.Process(target=_rank, args=task))
        end = time.monotonic() + timeout
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
            codes = ["time limit" if process.exitcode is None else process.exitcode for process in processes]
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        results = [Path(folder, f"result{rank}") for rank in range(world)]
        if any(code != 0 for code in codes) or not all(path.exists() for path in results):
            logs = [Path(folder, f"log{rank}") for rank in range(world)]
            texts = [log.read_text(errors="replace")[-6000:] if log.exists() else "" for log in logs]
            report = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in enumerate(texts))
            raise AssertionError(f"{function} over {world} ranks: exit codes {codes}\n{report}")
        return [json.loads(path.read_text()) for path in results]


def _forking() -> multiprocessing.context.BaseContext:
    """The context whose server is this session's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    # One thread: libraries that start more when they are imported cannot be forked.
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


def _rank(function: str, arguments: str, folder: str, environment: dict[str, str]) -> None:
    """One rank's process, from its start to its end."""
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(Path(folder, f"log{environment['RANK']}"), os.O_WRONLY | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    code = 1
    try:
        if environment["DS_ACCELERATOR"] == "cpu":
            import torch

            from tests.distributed import preload  # noqa: F401 -- where the server could not

            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        module, name = function.split(":")
        result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
        Path(folder, f"result{environment['RANK']}").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter exit: process groups' threads sometimes abort there.
    os._exit(code)
