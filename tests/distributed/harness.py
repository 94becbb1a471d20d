# SPDX-License-Identifier: Apache-2.0
"""Runs a test function in real processes that form a gloo process group, with a time limit and a clear report."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

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
        processes, logs = [], []
        for rank in range(world):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
                "DS_ACCELERATOR": accelerator,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            environment.pop("LOCAL_SIZE", None)  # DeepSpeed's shared-memory buffers of 69 MB a rank
            log = Path(folder, f"log{rank}")
            logs.append(log)
            command = [sys.executable, "-m", "tests.distributed.harness", function, json.dumps(arguments), folder]
            with log.open("w") as stream:
                processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT)
                )
        codes = []
        try:
            for process in processes:
                codes.append(process.wait(timeout))
        except subprocess.TimeoutExpired:
            codes.append("time limit")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        results = [Path(folder, f"result{rank}") for rank in range(world)]
        if any(code != 0 for code in codes) or not all(path.exists() for path in results):
            report = "\n".join(f"--- rank {r} ---\n{log.read_text()[-6000:]}" for r, log in enumerate(logs))
            raise AssertionError(f"{function} over {world} ranks: exit codes {codes}\n{report}")
        return [json.loads(path.read_text()) for path in results]


def _main() -> None:
    function, arguments, folder = sys.argv[1:]
    code = 1
    try:
        if os.environ["DS_ACCELERATOR"] == "cpu":
            import deepspeed

            # The shared-memory collectives would be compiled on first use (45 s) and leave 69 MB behind per rank.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        module, name = function.split(":")
        result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
        Path(folder, f"result{os.environ['RANK']}").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter exit: process groups' threads sometimes abort there.
    os._exit(code)


if __name__ == "__main__":
    _main()
