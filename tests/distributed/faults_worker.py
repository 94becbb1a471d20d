# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of test_faults.py: a training script one of whose ranks fails, ends, stops or hangs somewhere.

A rank is forked, and ends as the interpreter would end it: the exception printed and kept, what was registered with
atexit called, and an exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

import deepspeed_distca
from deepspeed_distca import building, engine_hooks
from deepspeed_distca.attention_server import steps
from tests.distributed import pipeline_worker
from tests.distributed.engine_worker import VOCABULARY, ds_config, tiny_llama

#: The micro-batch in which a fault strikes: ranks that have trained once.
AT = 2


def rank_main(case: dict, folder: str, environment: dict[str, str]) -> None:
    """One rank's process, from its start to its end."""
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(Path(folder, f"log{environment['RANK']}"), os.O_WRONLY | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    torch.set_num_threads(1)
    code: Any = 0
    try:
        (pipeline_script if case["pipeline"] else script)(Fault(case, Path(folder)), case)
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Fault:
    """What happens to one rank, and where."""

    def __init__(self, case: dict, folder: Path) -> None:
        self.mine = case["rank"] == int(os.environ["RANK"])
        self._kind, self._place, self._time = case["fault"], case["place"], folder / "time"
        self._left_first = case["left_first"] and not self.mine
        self.micro_batch = 0

    def __call__(self, place: str) -> None:
        """This rank is at a place."""
        if self._left_first and (place, self.micro_batch) == ("embedding", 1):
            raise ValueError("left")
        early = place in ("hello", "attach")
        if not self.mine or place != self._place or (not early and self.micro_batch != AT):
            return
        self._time.write_text(str(time.time()))
        if self._kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self._kind == "kill" else signal.SIGSTOP)
        elif self._kind == "exit":
            sys.exit(0)
        elif self._kind == "hang":
            time.sleep(1000)
        elif self._kind == "interrupt":
            raise KeyboardInterrupt
        elif self._kind == "raise":
            raise ValueError("a made-up fault")


def script(fault: Fault, case: dict) -> None:
    """What a user's script does."""
    deepspeed.init_distributed("nccl" if os.environ["DS_ACCELERATOR"] == "cuda" else "gloo")
    block: dict | None = {"timeout_seconds": case["seconds"], "advanced": {"granularity": 16}, **case["block"]}
    if fault.mine and case["own_block"] is not None:
        block = {**block, **case["own_block"]} if case["own_block"] else None
    if fault.mine and case["fault"] == "absent":
        deepspeed_distca.uninstall()
    exchange, meet = building.make_exchange, engine_hooks._meet

    def make_exchange(*args: Any, **options: Any) -> Any:
        fault("attach")
        return exchange(*args, **options)

    def meeting(*args: Any) -> Any:
        if case["fault"] != "absent":
            dist.barrier()  # however busy the machine is, the time limit is not for building engines
        fault("hello")
        return meet(*args)

    exchanging = mock.patch.object(building, "make_exchange", make_exchange)
    with exchanging, mock.patch.object(engine_hooks, "_meet", meeting):
        config = ds_config(case["zero"], 1, block)
        engine, *_ = deepspeed.initialize(model=tiny_llama(), config=config)
    if case["fault"] == "absent":
        fault("hello")
    engine.train()
    plant(fault, engine)
    rank = int(os.environ["RANK"])
    for number in range(1, AT + 2):
        fault.micro_batch = number
        try:
            fault("data")
            if fault.mine and case["fault"] == "end" and number == AT:
                return
            lengths = [200] if rank == 0 else [9, 4]
            tokens = np.random.default_rng(rank)
            features = [{"input_ids": tokens.integers(0, VOCABULARY, size=n)} for n in lengths]
            loss = engine(**deepspeed_distca.PackedSequenceCollator()(features)).loss
            fault("between")
            engine.backward(loss)
            engine.step()
        except (Exception, KeyboardInterrupt) as error:
            print("RAISED", type(error).__name__, error, flush=True)
            if case["left_first"] and number == 1:
                continue
            if fault.mine and case["lives_on"]:
                time.sleep(1000)  # saves, logs, tries again
            raise


def pipeline_script(fault: Fault, case: dict) -> None:
    """The same with a pipeline of two stages, whose micro-batches of a step count as one here."""
    deepspeed.init_distributed("gloo")
    settings = pipeline_worker.defaults({"distca": {"timeout_seconds": case["seconds"]}})
    engine = pipeline_worker.make_engine(2, settings.micro_batches, settings)
    for layer in engine.module.forward_funcs:
        if isinstance(layer, torch.nn.Module):
            layer.register_forward_pre_hook(lambda *_: fault("layer"))
    documents = pipeline_worker.documents_of_steps(1, settings.micro_batches, AT, settings.seed)
    batches = pipeline_worker.loader(documents, 0, "mapping")
    for fault.micro_batch in range(1, AT + 1):
        try:
            engine.train_batch(batches)
        except (Exception, KeyboardInterrupt):
            if fault.mine and case["lives_on"]:
                time.sleep(1000)
            raise


def plant(fault: Fault, engine: Any) -> None:
    """Has the places of a step call the fault."""
    model = engine.module.model
    model.embed_tokens.register_forward_pre_hook(lambda *_: fault("embedding"))
    model.layers[1].mlp.register_forward_pre_hook(lambda *_: fault("layer"))

    def of_gradient(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: fault("backward"))

    model.layers[0].mlp.register_forward_hook(of_gradient)
    serve, step = steps.BackwardSteps.serve, engine._take_model_step

    def attention_backward(*args: Any) -> Any:
        fault("attention backward")
        return serve(*args)

    def take_step(*args: Any, **options: Any) -> Any:
        fault("step")
        return step(*args, **options)

    steps.BackwardSteps.serve, engine._take_model_step = attention_backward, take_step


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as preload.py has it
    given = json.loads(sys.argv[1])
    script(Fault(given, Path(sys.argv[2])), given)
