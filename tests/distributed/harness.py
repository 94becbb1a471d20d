# SPDX-License-Identifier: Apache-2.0
"""Runs a test function in real processes that form a process group, or a program, with a clear report of what failed.

Nothing here ends by the clock: a machine may be slow or busy. Processes are ended when they have done nothing for a
while, as those in a collective that never returns. That and pytest's own limit (pyproject.toml), for what works for
ever, are all the limits there are. Where time is the matter of a test, `slowness` says what a busy machine needs.

Ranks on CPU are forked from a process that has imported torch, DeepSpeed and transformers already and done nothing
else (preload.py): the import takes 5 s of a core for each rank otherwise, half of these tests' time. Ranks on GPUs
start afresh, since DeepSpeed chooses its accelerator when it is imported.
"""

from __future__ import annotations

import collections
import faulthandler
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

ROOT = Path(__file__).resolve().parents[2]
#: Seconds after which processes that did nothing hang.
QUIET = 60
#: Ports of a worker, and the first of all.
_PORTS, _FIRST_PORT = 2000, 12000
#: From a place of this process's own, in case of another session beside this one.
_NUMBERS = itertools.count(os.getpid() * 37 % _PORTS)


def slowness() -> float:
    """How many times longer than alone a process takes on this machine as busy as it is, about; from 1 to 10."""
    return min(10.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def free_port() -> int:
    """A port for a process group, another one at every call. Not one that the system chooses: it gives the same to any
    connection that is opened before the port is used, of which tests that run beside this one have many. These are
    below those, and each worker of pytest-xdist has its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in itertools.islice(_NUMBERS, _PORTS):
        port = _FIRST_PORT + worker % 10 * _PORTS + number % _PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"none of worker {worker}'s {_PORTS} ports from {_FIRST_PORT} on is free")


def run_program(
    command: Sequence[object], folder: Path = ROOT, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program on CPU with one thread, whatever it starts included.

    Args:
        command: its arguments, of any types.
        folder: in which it runs.
        environment: what it has beside this process's.

    Returns:
        its end; `stdout` holds what it printed to both streams.

    Raises:
        AssertionError: it hangs; the message holds what it printed.
    """
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",  # even where there is a GPU
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        # None of them compiles, but ZeRO imports torch's compiler where that is not said: 1.5 s of a core for each.
        "TORCHDYNAMO_DISABLE": "1",
        **(environment or {}),
    }
    command = list(map(str, command))
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        ended = False
        try:
            ended = while_at_work([process.pid], lambda: _ended(process))
        finally:
            if not ended:
                for pid in _family(process.pid):
                    pid.kill()
                process.wait()
            output.seek(0)
            printed = output.read()
            if not ended:
                print(printed[-6000:])
    assert ended, f"{command} did nothing for {QUIET} s and was ended; it printed:\n{printed[-6000:]}"
    return subprocess.CompletedProcess(command, process.returncode, printed)


def _ended(process: subprocess.Popen) -> bool:
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        return False
    return True


def while_at_work(pids: Sequence[int], ended: Callable[[], bool], quiet: int = QUIET) -> bool:
    """Waits for processes that work, however long they take.

    Args:
        pids: the processes; what they started counts as they do.
        ended: waits a second at most, and says whether they have ended.
        quiet: seconds after which processes that used less than a fiftieth of a core each hang.

    Returns:
        whether they have ended; False: they hang.
    """
    before: dict[int, float] = {}
    worked: collections.deque[float] = collections.deque(maxlen=quiet)
    while not ended():
        now = {process.pid: _processor_seconds(process) for pid in pids for process in _family(pid)}
        worked.append(sum(max(0.0, seconds - before.get(pid, 0.0)) for pid, seconds in now.items()))
        before = now
        if len(worked) == quiet and sum(worked) < 0.02 * quiet * len(pids):
            return False
    return True


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _processor_seconds(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:2])
    except psutil.Error:
        return 0.0


def run_ranks(
    function: str, world: int, *, quiet: int = QUIET, threads: int = 1, accelerator: str = "cpu", **arguments: Any
) -> list[Any]:
    """Calls ``function(**arguments)`` on every rank of a fresh process group.

    Args:
        function: "module:name", importable from the repository's root; it returns something JSON can hold.
        world: number of processes.
        quiet: seconds after which ranks of which none does anything are killed, and the test fails.
        threads: of each process.
        accelerator: "cpu" or "cuda", DeepSpeed's name for the device.
        arguments: JSON values.

    Returns:
        what each rank returned.

    Raises:
        AssertionError: a rank failed or all hang; the message holds every rank's output, and where it hangs.
    """
    return _run(function, world, arguments, quiet=quiet, threads=threads, accelerator=accelerator)[0]


def run_script(script: Path, world: int, *arguments: object, folder: Path = ROOT, launcher: str = "deepspeed") -> str:
    """Runs a script on so many ranks, as a launcher would: as ``__main__``, in a process that knows nothing of the
    plugin, and to the end of what is registered with atexit. Ranks are forked, which spares the import of libraries:
    5 s of a core each, and as much for a launcher. `run_program` is for what launchers and interpreters do.

    Args:
        script: its path.
        world: number of processes.
        arguments: of the script, of any types.
        folder: in which it runs.
        launcher: "deepspeed", which gives ``--local_rank`` too, or "torchrun".

    Returns:
        what it printed, rank 0 first.

    Raises:
        AssertionError: as `run_ranks` does; or a rank ended with another exit code than 0.
    """
    given = dict(script=str(script), arguments=list(map(str, arguments)), folder=str(folder), launcher=launcher)
    return _run("tests.distributed.script_worker:run", world, given, returns=False)[1]


def _run(
    function: str,
    world: int,
    arguments: Mapping[str, Any],
    *,
    quiet: int = QUIET,
    threads: int = 1,
    accelerator: str = "cpu",
    returns: bool = True,
) -> tuple[list[Any], str]:
    """What each rank returned, if it `returns` anything, and what all printed."""
    with tempfile.TemporaryDirectory() as folder:
        common = {
            **os.environ,
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": str(threads),
            "DS_ACCELERATOR": accelerator,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        common.pop("LOCAL_SIZE", None)  # DeepSpeed's shared-memory buffers of 69 MB a rank
        context = forking() if accelerator == "cpu" else multiprocessing.get_context("spawn")
        processes = []
        for rank in range(world):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            task = (function, json.dumps(arguments), folder, environment)
            processes.append(context.Process(target=_rank, args=task))

        def ended() -> bool:
            connection.wait([process.sentinel for process in processes if process.exitcode is None], 1.0)
            return all(process.exitcode is not None for process in processes)

        try:
            for process in processes:
                process.start()
            while_at_work([process.pid for process in processes], ended, quiet)
        except BaseException:  # pytest's limit
            _say_where(processes)
            print(_logs(folder, world))
            raise
        finally:
            codes = ["hangs" if process.exitcode is None else process.exitcode for process in processes]
            if "hangs" in codes and sys.exc_info()[0] is None:
                _say_where(processes)
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        # A script may end by itself.
        results = [Path(folder, f"result{rank}") for rank in range(world)] if returns else []
        if any(code != 0 for code in codes) or not all(path.exists() for path in results):
            raise AssertionError(f"{function} over {world} ranks: exit codes {codes}\n{_logs(folder, world)}")
        return [json.loads(path.read_text()) for path in results], "".join(_texts(folder, world))


def _logs(folder: str, world: int) -> str:
    return "\n".join(f"--- rank {rank} ---\n{text[-6000:]}" for rank, text in enumerate(_texts(folder, world)))


def _texts(folder: str, world: int) -> list[str]:
    logs = [Path(folder, f"log{rank}") for rank in range(world)]
    return [log.read_text(errors="replace") if log.exists() else "" for log in logs]


def _say_where(processes: list[multiprocessing.process.BaseProcess]) -> None:
    """Has processes that hang write where their threads are."""
    for process in processes:
        if process.pid is not None and process.exitcode is None:
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1.0)


def forking() -> multiprocessing.context.BaseContext:
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
    faulthandler.register(signal.SIGUSR1)
    # As in a process of its own: a DataLoader's workers would start by importing everything anew.
    multiprocessing.set_start_method(None, force=True)
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
