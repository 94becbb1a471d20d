# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation with the exact token mean: every micro-batch learns the targets of its whole step.

The loss of a step is the sum over the targets of the global batch divided by their number. That number is known only
once all micro-batches of the step are, so the loader reads one accumulation step ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from deepspeed_distca.data.collator import PackedSequenceCollator

logger = logging.getLogger(__name__)

LastWindow = Literal["drop", "pad", "error"]
LAST_WINDOW: tuple[LastWindow, ...] = ("drop", "pad", "error")


class AccumulationLoader:
    """Wraps a loader of packed micro-batches and adds ``step_targets`` to each of them.

    Args:
        loader: an iterable of the collator's batches; each must carry ``num_targets``. Every rank's loader must
            yield the same number of micro-batches.
        gradient_accumulation_steps: micro-batches of a step, as in ds_config.json.
        last_window: what becomes of the last micro-batches when they are too few for a step. DeepSpeed counts
            micro-batches and would not step on them, but keep their gradients for the next step, whose targets were
            counted without them.
            "drop": they are left out; their number is logged.
            "pad": the step is filled up with empty micro-batches, so that it is taken and exact.
            "error": refused.

    ``step_targets`` (int) is the number of targets of *this rank* over the accumulation step, the same in each of its
    micro-batches. The plugin sums it over the ranks. Batches are copied shallowly; other keys stay as they are.

    ``len()`` counts the micro-batches that are yielded. ``set_epoch`` goes to the loader or its sampler.
    ``state_dict`` and ``load_state_dict`` exist where the loader has them and account for what was read ahead. All
    other attributes are the loader's own.
    """

    def __init__(
        self,
        loader: Iterable[Mapping[str, Any]],
        gradient_accumulation_steps: int,
        *,
        last_window: LastWindow = "drop",
    ) -> None:
        if isinstance(gradient_accumulation_steps, bool) or not isinstance(gradient_accumulation_steps, int):
            raise TypeError(f"gradient_accumulation_steps must be an integer, got {gradient_accumulation_steps!r}")
        if gradient_accumulation_steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be at least 1, got {gradient_accumulation_steps}")
        if last_window not in LAST_WINDOW:
            raise ValueError(f"last_window must be one of {', '.join(LAST_WINDOW)}, got {last_window!r}")
        self.loader = loader
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.last_window = last_window
        self._window_state: Any = None  # the loader's state before the window that is being handed out
        self._handed_out = 0  # micro-batches of that window
        self._skip = 0  # micro-batches of the first window that were handed out before a resume

    def __iter__(self) -> Iterator[dict[str, Any]]:
        iterator = iter(self.loader)
        skip, self._skip, self._handed_out = self._skip, 0, 0
        while True:
            self._window_state = self._loader_state()
            window = self._read_window(iterator)
            if not window:
                self._window_state = None
                return
            # Accelerate steps as soon as its loader says that it has ended: not before the last micro-batch.
            ended = getattr(self.loader, "end_of_dataloader", False)
            step_targets = sum(_num_targets(batch) for batch in window)
            for index, batch in enumerate(window):
                self._handed_out = (index + 1) % len(window)
                if ended:
                    self.loader.end_of_dataloader = index + 1 == len(window)  # type: ignore[attr-defined]
                if index >= skip:
                    yield {**batch, "step_targets": step_targets}
            skip = 0

    def __len__(self) -> int:
        micro_batches, size = len(self.loader), self.gradient_accumulation_steps  # type: ignore[arg-type]
        steps = micro_batches // size if self.last_window == "drop" else -(-micro_batches // size)
        return steps * size

    def set_epoch(self, epoch: int) -> None:
        """Tells the loader, or else its sampler or batch sampler, which epoch comes next."""
        samplers = (getattr(self.loader, name, None) for name in ("batch_sampler", "sampler"))
        batch_sampler, sampler = samplers
        for target in (self.loader, batch_sampler, sampler, getattr(batch_sampler, "sampler", None)):
            if hasattr(target, "set_epoch"):
                target.set_epoch(epoch)
                return

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: while unpickling
            raise AttributeError(name)
        inner = getattr(self.loader, name)
        own: dict[str, Callable] = {"state_dict": self._state_dict, "load_state_dict": self._load_state_dict}
        return own.get(name, inner)

    def _read_window(self, iterator: Iterator[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        window: list[Mapping[str, Any]] = []
        for batch in iterator:
            window.append(batch)
            if len(window) == self.gradient_accumulation_steps:
                return window
        missing = self.gradient_accumulation_steps - len(window)
        if not window or self.last_window == "pad":
            return window + [PackedSequenceCollator()([]) for _ in range(missing)] if window else []
        message = (
            f"the loader ended with {len(window)} micro-batches ({sum(map(_num_targets, window))} targets), too few "
            f"for a step of {self.gradient_accumulation_steps}"
        )
        if self.last_window == "error":
            raise ValueError(
                f'{message}; choose last_window="pad" or "drop", or let the loader yield a multiple of it'
            )
        logger.warning("%s; they are left out", message)
        return []

    def _loader_state(self) -> Any:
        try:
            return self.loader.state_dict()  # type: ignore[attr-defined]
        except AttributeError:
            # There is none; Accelerate's loaders have one that fails unless the loader inside is a stateful one.
            return None

    def _state_dict(self) -> dict[str, Any]:
        """The loader's state before the window that is being handed out, and how much of the window was."""
        if self._handed_out:
            return {"loader": self._window_state, "handed_out": self._handed_out}
        return {"loader": self._loader_state(), "handed_out": 0}

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        self._skip = int(state["handed_out"])
        self._window_state, self._handed_out = state["loader"], self._skip  # until a loop begins


def _num_targets(batch: Mapping[str, Any]) -> int:
    if "num_targets" not in batch:
        raise KeyError(
            f"num_targets is missing in a batch with the keys {sorted(map(str, batch))}: use PackedSequenceCollator "
            "as the loader's collate_fn"
        )
    return int(batch["num_targets"])
