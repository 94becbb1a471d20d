# SPDX-License-Identifier: Apache-2.0
"""Of how many checkpointed layers there is memory to keep core attention, where ``keep_attention`` is left out.

A run that just fits must not die of what the plugin keeps. So the first steps keep nothing and show what training
takes by itself; what the device has beyond that, less a margin, is for attention. Ranks tell each other their numbers
with every micro-batch, and all go by the smallest: a layer that is not kept is exchanged again in recomputation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sized
from typing import NamedTuple

import torch

#: Optimizer steps that keep nothing. In the first one optimizers make their states, and ZeRO-3 fetches nothing ahead.
_STEPS = 2
#: Share of the device's memory that is left free. The allocator loses some to fragments: steps whose tensors took 91 %
#: of what they might ran out of it, those that took 90 % did not (two H200s, 8 layers of 8B width, ZeRO-3, 64K tokens
#: a rank, 2026-11-30).
_MARGIN = 0.15


class Memory(NamedTuple):
    """A device's, for this process.

    Attributes:
        limit: bytes that tensors may have together.
        peak: bytes that they had at most, so far.
        retries: how often the allocator had to give cached memory back to find room.
    """

    limit: int
    peak: int
    retries: int


def memory_of(device: torch.device) -> Callable[[], Memory] | None:
    """What asks the caching allocator, waiting for nothing; None where the device has none."""
    if device.type != "cuda":
        return None

    def memory() -> Memory:
        statistics = torch.cuda.memory_stats_as_nested_dict(device)  # the flat ones take three times as long
        free, total = torch.cuda.mem_get_info(device)
        limit = min(
            free + statistics["reserved_bytes"]["all"]["current"],
            int(torch.cuda.get_per_process_memory_fraction(device) * total),
        )
        return Memory(limit, statistics["allocated_bytes"]["all"]["peak"], statistics["num_alloc_retries"])

    return memory


class KeptLayers:
    """One rank's number of layers, micro-batch by micro-batch.

    Args:
        layers: attention layers of the model; 0: none is ever kept.
        token_bytes: bytes that a kept layer takes for each token: out and lse.
        steps: called for the number of optimizer steps taken.
        memory: called for the device's memory; None: it is not to be known, and all of them are kept.

    Attributes:
        measured: whether the number comes from the device's memory by now.
    """

    def __init__(
        self, layers: int, token_bytes: int, steps: Callable[[], int], memory: Callable[[], Memory] | None
    ) -> None:
        self._layers, self._token_bytes, self._steps, self._memory = layers, token_bytes, steps, memory
        self.measured = False
        self._wanted = True  # whether any layer of the last micro-batch was checkpointed
        self._first: int | None = None  # optimizer step, and that of the last micro-batch
        self._last = -1
        self._tokens = self._largest = 1  # of the last micro-batch, and of the largest one
        self._kept = 0  # bytes that were kept of the last micro-batch
        self._alone = 0  # bytes that training takes at most without what is kept
        self._most = 2**62  # bytes that may be kept, whatever is free
        self._seen = Memory(0, 0, 0)
        #: What is kept of micro-batches, as long as it is there, and their tokens.
        self._waiting: weakref.WeakKeyDictionary[Sized, int] = weakref.WeakKeyDictionary()

    def affordable(self, tokens: int) -> int:
        """How many layers' attention may be kept of a micro-batch; to be asked once before each.

        Args:
            tokens: of the micro-batch on this rank.
        """
        if self._memory is None:
            return self._layers
        if not self._wanted:
            return 0  # small steps wait for whatever is asked of the device
        memory, step = self._memory(), self._steps()
        if self._first is None:
            self._first = step
        self._look(memory)
        self._last = step
        # A micro-batch that is larger than all before takes more in the same proportion, or less.
        self._tokens, self._kept = max(1, tokens), 0
        alone = self._alone * max(1.0, self._tokens / self._largest)
        self._largest = max(self._largest, self._tokens)
        self.measured = self.measured or step >= self._first + _STEPS
        if not self.measured:
            return 0
        room = min(self._most, memory.limit * (1 - _MARGIN) - alone)
        # Of micro-batches whose backward is still to come.
        room -= self._token_bytes * sum(len(kept) * n for kept, n in self._waiting.items())
        return max(0, min(self._layers, int(room // (self._tokens * self._token_bytes))))

    def note(self, kept: Sized, wanted: bool) -> None:
        """How the micro-batch went that was asked about last.

        Args:
            kept: one item for each layer that is kept; they may become fewer.
            wanted: whether any layer was checkpointed.
        """
        self._wanted = wanted
        self._kept = len(kept) * self._tokens * self._token_bytes
        self._waiting[kept] = self._tokens

    def _look(self, memory: Memory) -> None:
        """At how the last micro-batch went."""
        if memory.peak > self._seen.peak:
            # Less than training alone took if the peak came while less was kept, but the same may be kept again.
            self._alone = max(self._alone, memory.peak - self._kept)
        if memory.retries > self._seen.retries and self._last not in (-1, self._first):
            self._most = self._kept // 2  # nothing where memory was short without
        self._seen = memory
