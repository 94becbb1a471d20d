# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a watch have written for each other in the store."""

from __future__ import annotations

import torch.distributed as dist

from deepspeed_distca.attention_server.coordination.signs import Sign
from deepspeed_distca.attention_server.coordination.store import store_of


class Board:
    """Of one watch. Whatever a method does is a request to the store, and raises RuntimeError where it is gone.

    Keys: ``sign/<rank>``, written by that rank; ``alarm``, by whoever is first; ``heard``, how many ranks know of it;
    ``note``, by the last rank that left a micro-batch before its plan was made; ``layers/<rank>``, by that rank where
    its forward went through another number of attention layers than the model has.

    Args:
        name: of the watch, the same on all ranks.
    """

    def __init__(self, name: str) -> None:
        self._store = store_of(f"distca/watch/{name}")
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def after(self, rank: int) -> int:
        """The rank that follows, this one left out."""
        following = (rank + 1) % self._world
        return following if following != self._rank else (following + 1) % self._world

    def give_sign(self, sign: Sign) -> None:
        self._store.set(f"sign/{self._rank}", sign.to_text())

    def sign_of(self, rank: int) -> Sign:
        text = self._read(f"sign/{rank}")
        return Sign() if text is None else Sign.from_text(text)

    def others(self) -> dict[int, Sign]:
        """The last signs of all ranks but this one."""
        return {rank: self.sign_of(rank) for rank in range(self._world) if rank != self._rank}

    def leave_note(self, number: int, text: str) -> None:
        self._store.set("note", f"{number} {text}")

    def note(self) -> tuple[int, str] | None:
        """Which micro-batch some rank has left before its plan was made, and why."""
        text = self._read("note")
        if text is None:
            return None
        number, why = text.split(" ", 1)
        return int(number), why

    def say_layers(self, number: int, layers: int) -> None:
        """This rank's forward of a micro-batch went through so many attention layers."""
        self._store.set(f"layers/{self._rank}", f"{number} {layers}")

    def layers_of(self, rank: int, number: int) -> int | None:
        """The same of another rank; None: it has said nothing of that micro-batch."""
        said, layers = (self._read(f"layers/{rank}") or "-1 0").split()
        return int(layers) if int(said) == number else None

    def raise_alarm(self, text: str) -> str:
        """The alarm, which is an earlier one if there is one."""
        return self._store.compare_set("alarm", "", text).decode()

    def alarm(self) -> str | None:
        return self._read("alarm")

    def hear(self) -> None:
        """This rank knows of the alarm."""
        self._store.add("heard", 1)

    def all_have_heard(self) -> bool:
        return self._store.add("heard", 0) >= self._world

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None
