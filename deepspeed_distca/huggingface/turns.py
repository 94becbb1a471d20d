# SPDX-License-Identifier: Apache-2.0
"""Two functions that take turns in one process: each runs until it hands over, and exactly one runs at any time.

They run on two threads, since a model's forward cannot be left and entered again on one. The other thread gets what
PyTorch keeps for each thread: device, stream, autocast, grad mode, and hooks on what autograd saves.
"""

from __future__ import annotations

import contextvars
import hashlib
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from deepspeed_distca.compat.torch import saved_tensor_hooks


class Abandoned(BaseException):
    """The other function has failed. Not an Exception, so that no model's code takes it for an error of its own."""


class Turns:
    """Runs two functions, each given the number 0 or 1, which pass the turn to each other by :meth:`hand_over`.

    Args:
        device: on which they work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = threading.Semaphore(0), threading.Semaphore(0)
        self._finished = [False, False]
        self._failure: BaseException | None = None
        self._forked: _RandomState | None = None

    def run(self, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
        """The results of both. ``first`` begins, on another thread; ``second`` begins, on this one, when the other
        first hands over. That way round autograd, which prefers what was made last on a long-lived thread, has
        backward finish ``second`` before it goes on with ``first``, where nothing else decides.

        Raises:
            BaseException: the first that either raised; the other one has ended then.
        """
        state = _ThreadState(self._device)
        results: list[Any] = [None, None]
        after: list[_RandomState] = []

        def begin_first() -> Any:
            with state.entered():
                result = first()
            if self._forked is not None:
                after.append(_RandomState(self._device))
            return result

        def begin_second() -> Any:
            self._wait(1)
            if self._forked is not None:
                # Its own random numbers, see hand_over: not those that the first draws, nor drawn from them.
                self._forked.fork()
            return second()

        def play(who: int, function: Callable[[], Any]) -> None:
            try:
                results[who] = function()
            except Abandoned:
                pass
            except BaseException as error:
                self._failure = self._failure or error
            self._finished[who] = True
            self._turn[1 - who].release()

        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(play, 0, begin_first), name="distca-nano-batch", daemon=True)
        thread.start()
        play(1, begin_second)
        thread.join()
        for generators in after:
            generators.restore()
        if self._failure is not None:
            raise self._failure
        return results[0], results[1]

    def hand_over(self, who: int) -> None:
        """Lets the other one run, and returns when it hands over in turn or has finished.

        From the first checkpointed layer on each has random numbers of its own: a recomputed layer draws all of its
        numbers without anybody in between, and must get the same ones.

        Raises:
            Abandoned: the other one has failed.
        """
        if self._failure is not None:
            raise Abandoned
        own = self._forked is not None or saved_tensor_hooks() is not None
        mine = _RandomState(self._device) if own else None
        if self._forked is None:
            self._forked = mine
        if not self._finished[1 - who]:
            self._turn[1 - who].release()
            self._wait(who)
        if mine is not None:
            mine.restore()
        elif self._forked is not None:
            self._forked.fork()

    def _wait(self, who: int) -> None:
        self._turn[who].acquire()
        if self._failure is not None:
            raise Abandoned


class _ThreadState:
    """What PyTorch keeps for the calling thread, to be entered on another one."""

    def __init__(self, device: torch.device) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in {device.type, "cpu"}
            if torch.is_autocast_enabled(kind)
        ]
        self._hooks = saved_tensor_hooks()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def entered(self) -> ExitStack:
        stack = ExitStack()
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)
            torch.cuda.set_stream(self._stream)
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, dtype, cache in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
        if self._hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
        return stack


class _RandomState:
    """Where the random number generators stand; reading and setting them does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Sets them back to there."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    def fork(self) -> None:
        """Sets them to numbers that follow from there, without drawing any."""
        states = [s.numpy().tobytes() for s in (self._cpu, self._cuda) if s is not None]
        seed = int.from_bytes(hashlib.blake2b(b"".join(states), digest_size=7).digest(), "little")
        torch.default_generator.manual_seed(seed)
        if self._cuda is not None:
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
