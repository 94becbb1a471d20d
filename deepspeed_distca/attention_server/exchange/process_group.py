# SPDX-License-Identifier: Apache-2.0
"""The exchange over torch.distributed: grouped sends and receives, NCCL's on GPUs and gloo's on CPUs."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.coordination.watch import Watch, explained
from deepspeed_distca.attention_server.exchange.base import Done, Exchange, Expected, Messages, Pending, Round


class _Works:
    def __init__(self, works: list[dist.Work], keep: Messages, watch: Watch | None) -> None:
        self._works, self._keep, self._watch = works, keep, watch  # the tensors must outlive the transfer

    def wait(self) -> None:
        # gloo would wait for another message if a finished send or receive were waited for again.
        works, self._works = self._works, []
        _wait(works, self._watch)
        self._keep = ()


class PeerToPeerExchange:
    """Grouped sends and receives over a process group: one NCCL launch on GPUs, sockets through gloo on CPU.

    Args:
        group: of the servers.
        watch: tells, when an exchange fails, which rank is to blame.

    A wait, or a start, raises AgreementError where a rank of the group does not do its part.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch | None = None) -> None:
        self.group, self.name, self._watch = group, dist.get_backend(group), watch
        self._on_host = self.name != "nccl"
        self.early = self._on_host
        self._global_rank = dist.get_process_group_ranks(group)

    def start(self, sends: Messages, receives: Messages, then: Round | None = None) -> Pending:
        works = self._start(sends, receives)
        keep = [*sends, *receives]
        if then is not None:
            if self._on_host and then[0]:
                # What NCCL sends on follows what it receives, on its own stream; here it must have arrived.
                _wait(works, self._watch)
                works = []
            works += self._start(*then)
            keep += [*then[0], *then[1]]
        return _Works(works, keep, self._watch) if works else Done()

    def for_sizes(self, sizes: np.ndarray) -> PeerToPeerExchange:
        """See :class:`Exchange`. It has no memory of its own."""
        return self

    def expect(self, receives: Messages, *, sends: bool) -> Expected:
        """See :class:`Exchange`. One launch holds all sends and receives, so nothing starts before the sends."""
        return ReceivesLater(self, receives)

    def _start(self, sends: Messages, receives: Messages) -> list[dist.Work]:
        operations = [
            dist.P2POp(operation, tensor, self._global_rank[peer], self.group)
            for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in messages
            if tensor.numel()
        ]
        try:
            return dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise explained(self._watch, error) from error


def _wait(works: list[dist.Work], watch: Watch | None) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise explained(watch, error) from error


class ReceivesLater:
    """Receives that start together with the sends."""

    def __init__(self, exchange: Exchange, receives: Messages) -> None:
        self._exchange, self._receives = exchange, receives

    def start(self, sends: Messages) -> Pending:
        """See :class:`Expected`."""
        return self._exchange.start(sends, self._receives)


def exchange_group(ranks: list[list[int]], device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """The process group in which this rank serves, apart from the training's own collectives.

    On GPUs its communication kernels get a high-priority stream: launched beside an attention kernel they would
    otherwise wait for its SMs to drain (measured: DESIGN, "local_first over NCCL").

    Args:
        ranks: the global ranks of every group, the same on all ranks; collective over the default group.
    """
    options, backend = None, "gloo"
    if device.type == "cuda":
        backend = "nccl"
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    mine = None
    for members in ranks:
        group = dist.new_group(members, backend=backend, timeout=timeout, pg_options=options)
        if dist.get_rank() in members:
            mine = group
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is in none of the groups {ranks}")
    return mine
