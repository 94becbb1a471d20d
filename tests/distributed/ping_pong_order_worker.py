# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of test_ping_pong.py: in which order a step of two nano-batches does what it does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from deepspeed_distca.attention_server import steps
from deepspeed_distca.attention_server.exchange.process_group import PeerToPeerExchange
from deepspeed_distca.attention_server.statistics import TimedKernel
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.layout import Layout
from tests.distributed.engine_worker import documents_of
from tests.distributed.ping_pong_worker import engine_of


def record(layout: list, zero: int = 1, checkpointing: bool = False) -> dict:
    """What happens in the third step, in order: ``events`` as (what, phase, stage, nano-batch), where what is "start"
    or "wait" of an exchange, "tasks" or "linear". Exchanges in which this rank has nothing to send or receive are left
    out; ``calls`` has every stage. And ZeRO-3's parameters that are there after each layer's backward, and how often
    its trace was thrown away in that step."""
    deepspeed.init_distributed("gloo")
    engine = engine_of(zero, checkpointing=checkpointing, options={"num_hidden_layers": 4})
    ranks = Layout.from_ranks(layout).validate()
    documents = documents_of(ranks, np.random.default_rng(0))
    batch = batch_from_layout(documents, ranks, dist.get_rank())
    log = _Log(engine)
    for step in range(3):
        with log.of(engine) if step == 2 else nullcontext():
            loss = engine(**batch).loss
            engine.backward(loss)
        engine.step()
    return {"events": log.events, "calls": log.calls, "available": log.available, "lost_traces": log.lost_traces}


class _Log:
    """Records a step of an engine in two nano-batches."""

    def __init__(self, engine) -> None:
        self.events: list[tuple] = []
        self.calls: list[tuple] = []
        self.available: list[int] = []
        self.lost_traces = 0
        self._stage: tuple = ("", "", None)
        self._parameters = list(engine.module.parameters())

    @contextmanager
    def of(self, engine) -> Iterator[None]:
        """While it lasts everything is recorded."""
        cut = engine.distca._overlap.ping_pong
        handles = []
        for module in engine.module.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                forward = lambda *_: self.events.append(("linear", "forward", "", cut.running))  # noqa: E731
                handles.append(module.register_forward_hook(forward))
                handles.append(module.register_full_backward_hook(self._linear_backward))
        with ExitStack() as stack:
            for owner, phase in ((steps.ForwardSteps, "forward"), (steps.BackwardSteps, "backward")):
                for stage in ("dispatch", "serve", "collect" if phase == "forward" else "gradients"):
                    stack.enter_context(_around(owner, stage, functools.partial(self._in_stage, phase, stage)))
            for name in ("forward", "backward"):
                stack.enter_context(_around(TimedKernel, name, self._tasks))
            stack.enter_context(_around(PeerToPeerExchange, "start", self._start))
            stack.enter_context(_around(PartitionedParameterCoordinator, "_invalidate_trace", self._lost))
            yield
        for handle in handles:
            handle.remove()

    def _in_stage(self, phase: str, stage: str, function, owner, nano: int, *arguments):
        self.calls.append((phase, stage, nano))
        before, self._stage = self._stage, (phase, stage, nano)
        self._sizes = getattr(self, "_sizes", {})
        if (phase, stage) == ("forward", "dispatch"):
            self._sizes[len(arguments[0])] = nano
        result = function(owner, nano, *arguments)
        self._stage = before
        if (phase, stage, nano) == ("backward", "gradients", 0):
            self.available.append(
                sum(getattr(p, "ds_status", None) == ZeroParamStatus.AVAILABLE for p in self._parameters)
            )
        return result

    def _linear_backward(self, module, grad_input, grad_output) -> None:
        # The nano-batches differ in length, which tells them apart.
        self.events.append(("linear", "backward", "", self._sizes[grad_output[0].shape[1]]))

    def _tasks(self, function, *arguments, **keywords):
        self.events.append(("tasks", *self._stage))
        return function(*arguments, **keywords)

    def _start(self, function, owner, sends, receives, *then):
        pending, stage = function(owner, sends, receives, *then), self._stage
        if not sends and not receives:
            return pending
        self.events.append(("start", *stage))
        log, waited = self.events, []

        class Waited:
            def wait(self) -> None:
                if not waited:
                    waited.append(True)
                    log.append(("wait", *stage))
                pending.wait()

        return Waited()

    def _lost(self, function, *arguments):
        self.lost_traces += 1
        return function(*arguments)


def _around(owner, name: str, wrapper):
    """Patches a method: `wrapper` is called with the original before the method's own arguments."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))
