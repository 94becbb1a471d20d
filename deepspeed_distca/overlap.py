# SPDX-License-Identifier: Apache-2.0
"""Which overlap an engine's training micro-batches get: whole ones, or two nano-batches in turns ("ping_pong").

Who asks for two gets them, or an error. Where nobody has said, and the servers are on several nodes, they are tried:
between nodes the tasks at home do not hide all that travels (docs/nodes.md).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import PreTrainedModel

from deepspeed_distca import compat
from deepspeed_distca.config import DistCAConfigError
from deepspeed_distca.huggingface.contract import Contract
from deepspeed_distca.huggingface.decoders import UnsupportedModelError
from deepspeed_distca.huggingface.ping_pong import PingPong
from deepspeed_distca.huggingface.twice_called import TwiceCalled


class Overlap:
    """Of one engine.

    Args:
        engine, decoder, modules, contract: see :class:`PingPong`.
        asked: what the block says.
        tries_two: whether two nano-batches are tried where it says nothing.

    Attributes:
        ping_pong: what makes the decoder run its micro-batches as two nano-batches; None: they are whole.

    Raises:
        CompatError, DistCAConfigError, UnsupportedModelError: two nano-batches were asked for, and cannot be had.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        decoder: PreTrainedModel,
        modules: list[torch.nn.Module],
        contract: Contract,
        asked: str | None,
        *,
        tries_two: bool,
    ) -> None:
        self._engine, self._asked = engine, asked
        self.ping_pong: PingPong | None = None
        self._twice_called: TwiceCalled | None = None
        if asked == "ping_pong":
            self._take_turns(decoder, modules, contract)
        elif asked is None and tries_two:
            try:
                compat.check(*needs_of_turns(engine))
                self._take_turns(decoder, modules, contract)
            except (compat.CompatError, UnsupportedModelError, DistCAConfigError) as error:
                self._give_two_up(str(error))

    @property
    def name(self) -> str:
        """For people to read."""
        return "ping_pong" if self.ping_pong is not None else self._asked or "local_first"

    @property
    def in_two(self) -> bool:
        """Whether micro-batches that can be divided are."""
        return self.ping_pong is not None and self.ping_pong.problem is None

    @property
    def ready(self) -> bool:
        """Whether the next one can be."""
        return self.ping_pong is not None and self.ping_pong.ready

    def forward_over(self) -> None:
        """A training forward has shown whether two nano-batches, which nobody asked for, are possible."""
        turns = self.ping_pong
        if turns is None or self._asked is not None:
            return
        if self._engine.is_compiled:
            turns.problem = "compiled graphs end where a forward is divided"
        # A forward that was divided needs the hooks until its backward: the next one is whole.
        if turns.problem is not None and not turns.split:
            self._give_two_up(turns.problem)

    def remove(self) -> None:
        """Gives the model its own forward back."""
        for part in (self.ping_pong, self._twice_called):
            if part is not None:
                part.remove()

    def _take_turns(self, decoder: PreTrainedModel, modules: list[torch.nn.Module], contract: Contract) -> None:
        ping_pong = PingPong(decoder, modules, contract, asked=self._asked is not None)
        try:
            if self._engine.zero_optimization_stage() == 3:
                self._twice_called = TwiceCalled(self._engine.module, ping_pong)
        except DistCAConfigError:
            ping_pong.remove()
            raise
        self.ping_pong = ping_pong

    def _give_two_up(self, reason: str) -> None:
        self.remove()
        self.ping_pong = self._twice_called = None
        if dist.get_rank() == 0:
            print(
                f'distca: `overlap` is "local_first", where "ping_pong" would hide more over nodes: {reason}',
                flush=True,
            )


def needs_of_turns(engine: DeepSpeedEngine) -> list[compat.Need]:
    """What two nano-batches need of names that are not public."""
    return ["ping_pong_zero_3"] if engine.zero_optimization_stage() == 3 else []
