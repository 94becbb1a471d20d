# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation with the exact token mean: every micro-batch learns the targets of its whole step.

The loss of a step is the sum over the targets of the global batch divided by their number. That number is known only
once all micro-batches of the step are, so the loader reads one accumulation step ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from deepspeed_distca.data.checks import check_state, one_of
from deepspeed_distca.data.collator import PackedSequenceCollator
from deepspeed_distca.given import integer

logger = logging.getLogger(__name__)

LastWindow = Literal["drop", "pad", "error"]
_STATE_VERSION = 1


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
    ``state_dict`` and ``load_state_dict`` exist where the loader has them and account for what was read ahead. A state
    is at the beginning of a step: within one, whose gradients no checkpoint has, it is the step's own. (The loader's
    state must be that of a new loop as soon as that was begun, before its first batch.) All other attributes are the
    loader's own.
    """

    def __init__(
        self,
        loader: Iterable[Mapping[str, Any]],
        gradient_accumulation_steps: int,
        *,
        last_window: LastWindow = "drop",
    ) -> None:
        one_of("last_window", last_window, LastWindow)
        self.loader: Any = loader  # it may have a length, a state and samplers
        self.gradient_accumulation_steps = integer("gradient_accumulation_steps", gradient_accumulation_steps, 1)
        self.last_window = last_window
        self._begin: Any = None  # the loader's state before the step that is being handed out
        self._within = False  # whether a step is, or was loaded and no loop has begun

    def __iter__(self) -> Iterator[dict[str, Any]]:
        iterator = iter(self.loader)
        self._within = False
        return self._loop(iterator)

    def _loop(self, iterator: Iterator[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        while True:
            self._begin = self._loader_state()
            window = self._read_window(iterator)
            if not window:
                return
            # Accelerate steps as soon as its loader says that it has ended: not before the last micro-batch.
            ended = getattr(self.loader, "end_of_dataloader", False)
            step_targets = sum(_num_targets(batch) for batch in window)
            for left, batch in zip(reversed(range(len(window))), window, strict=True):
                self._within = left > 0
                if ended:
                    self.loader.end_of_dataloader = not left
                yield {**batch, "step_targets": step_targets}

    def __len__(self) -> int:
        micro_batches, size = len(self.loader), self.gradient_accumulation_steps
        steps = micro_batches // size if self.last_window == "drop" else -(-micro_batches // size)
        return steps * size

    def set_epoch(self, epoch: int) -> None:
        """Tells the loader, or else its sampler or batch sampler, which epoch comes next."""
        samplers = (getattr(self.loader, name, None) for name in ("batch_sampler", "sampler"))
        batch_sampler, sampler = samplers
        for target in (self.loader, batch_sampler, sampler, getattr(batch_sampler, "sampler", None)):
            set_epoch = getattr(target, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
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
            return self.loader.state_dict()
        except AttributeError:
            # There is none; Accelerate's loaders have one that fails unless the loader inside is a stateful one.
            return None

    def _state_dict(self) -> dict[str, Any]:
        begun = self._within and self._begin is not None
        # A loader that has no state in spite of its method says so itself.
        loader = self._begin if begun else self.loader.state_dict()
        return {"version": _STATE_VERSION, "loader": loader}

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, ("version", "loader"), "the accumulation loader's state", _STATE_VERSION)
        self.loader.load_state_dict(state["loader"])
        self._begin, self._within = state["loader"], True


def _num_targets(batch: Mapping[str, Any]) -> int:
    if "num_targets" not in batch:
        raise KeyError(
            f"num_targets is missing in a batch with the keys {sorted(map(str, batch))}: use PackedSequenceCollator "
            "as the loader's collate_fn"
        )
    found, ids = batch["num_targets"], batch.get("input_ids")
    if torch.is_tensor(found) and found.numel() == 1:
        found = found.item()
    return integer("num_targets of a batch", found, high=ids.numel() if torch.is_tensor(ids) else None)
