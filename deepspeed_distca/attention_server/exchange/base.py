# SPDX-License-Identifier: Apache-2.0
"""Moving rows between ranks: what every exchange looks like.

A transfer is a list of (peer, tensor) to send and one to receive. The tensors are contiguous row ranges of larger
buffers, so that rows leave from where they are and arrive where they are needed; a rank with nothing to say is not
involved at all. The two sides list what passes between them in the same order (the plan sees to that), and sizes are
known from the plan, never negotiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

Messages = Sequence[tuple[int, torch.Tensor]]
Round = tuple[Messages, Messages]


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Orders what follows on the caller's stream (on CPU: the host) behind the exchange; again: nothing."""


class Exchange(Protocol):
    """Moves rows between the servers of a group; peers are ranks of that group.

    Attributes:
        name: of the kind of exchange, for people to read.
        early: results had better leave as soon as they are there. They had not where sending holds multiprocessors
            until the receiver is ready, which it is when it has done its own tasks.
    """

    @property
    def name(self) -> str: ...

    @property
    def early(self) -> bool: ...

    def start(self, sends: Messages, receives: Messages, then: Round | None = None) -> Pending:
        """Starts sending and receiving; neither side's tensors may be touched until ``wait()``.

        Args:
            sends, receives: of the first round.
            then: sends and receives of a second one, which may send on what the first receives.
        """

    def expect(self, receives: Messages, *, sends: bool) -> Expected:
        """Names what an exchange will receive before there is something to send: the next one between these ranks.

        The tensors may not be touched from now on; an exchange that can do so fills them as soon as their senders are
        ready.

        Args:
            sends: whether this rank will send anything in that exchange.
        """

    def for_sizes(self, sizes: np.ndarray) -> Exchange:
        """The same exchange with its memory divided for a plan that moves so much. Those of one plan may be used in
        turn with those of another, in the same order on every rank.

        Args:
            sizes: bytes from each rank to each at a time, int64 [sender, receiver]; more is moved too, but slower.
        """


class Expected(Protocol):
    """An exchange whose receives are known."""

    def start(self, sends: Messages) -> Pending:
        """See :meth:`Exchange.start`."""


class Done:
    """An exchange that is over, or in which there was nothing to do."""

    def wait(self) -> None:
        pass


class Nothing:
    """What is expected where nothing is."""

    def start(self, sends: Messages) -> Pending:
        if sends:
            raise RuntimeError(_NO_EXCHANGE)
        return Done()


_NO_EXCHANGE = "a plan that moves rows needs an exchange, and this one was made without: give its LayerPlan one"


class NoExchange:
    """Of a plan in which nothing travels.

    Raises:
        RuntimeError: something is to travel.
    """

    name = "none"
    early = False

    def start(self, sends: Messages, receives: Messages, then: Round | None = None) -> Pending:
        if sends or receives or then is not None:
            raise RuntimeError(_NO_EXCHANGE)
        return Done()

    def expect(self, receives: Messages, *, sends: bool) -> Expected:
        if receives or sends:
            raise RuntimeError(_NO_EXCHANGE)
        return Nothing()

    def for_sizes(self, sizes: np.ndarray) -> NoExchange:
        return self
