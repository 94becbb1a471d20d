# SPDX-License-Identifier: Apache-2.0
"""A loader with a state, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class StatefulLoader:
    """A loader that can be stopped and resumed, like torchdata's; it counts what was read from it."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches, self.position, self.start, self.epoch = batches, 0, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.position, self.start = self.start, 0
        return self._loop()

    def _loop(self) -> Iterator[Any]:
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]
