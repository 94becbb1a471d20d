# SPDX-License-Identifier: Apache-2.0
"""Forwards of a whole model on a few tokens, with core attention of our own and on this rank alone."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from deepspeed_distca.attention_server.kernels.reference import ReferenceKernel
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch
from deepspeed_distca.huggingface.attention_function import FIRST, PLAN, WITNESS
from deepspeed_distca.huggingface.attention_names import AttentionNames
from deepspeed_distca.huggingface.decoders import (
    UnsupportedModelError,
    attention_windows,
    base_of,
    layers_and_parts,
    takes,
)
from deepspeed_distca.huggingface.first_forward import FirstForward
from deepspeed_distca.huggingface.untouched import untouched

_SEED = 1234
#: What one attention module was given: q, k and v, each [tokens, heads, ...].
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Seen:
    """One forward: what it was given, and what hooks have noted of it.

    Attributes:
        ids: int64 [tokens], one row of the batch after another, and the lengths of its documents.
        given: what the decoder got in addition.
        like: see :meth:`TinyForwards.run`.
        attention: of every attention module, in the order of their calls.
        entered: whether the decoder was called.
        decoder, base: what the model returned, and what its base model did, which has all attention modules.
        steps: what layers and their parts returned for each token, in the order of their calls.
    """

    ids: np.ndarray
    lengths: Sequence[int]
    batch: int
    given: dict[str, Any]
    like: Sequence[Like] = ()
    attention: list[QKV] = field(default_factory=list)
    entered: bool = False
    decoder: Any = None
    base: Any = None
    steps: list[torch.Tensor] = field(default_factory=list)

    def rows(self) -> list[torch.Tensor]:
        """All that belongs to tokens, as [tokens, features] each."""
        return [*self.steps, *self.of(self.base), *self.of(self.decoder)]

    def of(self, output: Any) -> list[torch.Tensor]:
        """What of an output belongs to tokens."""
        return _of_tokens(output, self.batch, len(self.ids))


class Like(NamedTuple):
    """Tokens that should have the results of others, in another forward."""

    seen: Seen
    here: slice
    there: slice


class TinyForwards:
    """Runs a model on rows of a few tokens; neither gradients nor anything else is left behind.

    Args:
        module: what is called in training: the decoder, with what may be around it.
        decoder: the model.
        modules: its attention modules.
        device: where its parameters are.
        forget: called around every forward: who shards parameters may expect one to go as the one before.
    """

    def __init__(
        self,
        module: nn.Module,
        decoder: PreTrainedModel,
        modules: Sequence[nn.Module],
        device: torch.device,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._module, self._decoder, self.device, self._forget = module, decoder, device, forget
        self._modules = list(modules)
        self._base = base_of(decoder, self._modules)
        self._windows = dict(zip(self._modules, attention_windows(self._modules), strict=True))
        self._signature = inspect.signature(decoder.forward)

    def takes(self, argument: str) -> bool:
        """Whether the decoder's forward can be given an argument."""
        return takes(self._signature, argument)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Forwards run inside of this."""
        self._names = AttentionNames(self._modules)
        handles = [self._decoder.register_forward_pre_hook(self._before, with_kwargs=True)]
        handles += [m.register_forward_hook(self._after) for m in {self._decoder, self._base}]
        handles += [m.register_forward_hook(self._step) for m in layers_and_parts(self._base, self._modules)]
        try:
            # Compiled models would be compiled for these rows alone.
            eager = torch.compiler.set_stance("force_eager")
            with untouched(self._module, self.device), eager, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            self._forget()
            for handle in handles:
                handle.remove()
            self._names.remove()

    def run(
        self,
        ids: np.ndarray,
        lengths: Sequence[int],
        *,
        batch: int = 1,
        training: bool = False,
        positions: bool = True,
        after: Seen | None = None,
        like: Sequence[Like] = (),
        **given: Any,
    ) -> Seen:
        """One forward.

        Args:
            ids: int64 [tokens], one row of the batch after another.
            lengths: of the documents.
            batch: so many rows of the same length.
            positions: give position ids, if the model takes any.
            after: the first document begins in the middle, and its keys before are the first ones of that forward.
            like: tokens that, behind every layer and every part of one, go on with what others got there. So each step
                shows for itself, and what rounding did in one of them is not made larger by all that follow.
            given: more arguments of the decoder.

        Raises:
            UnsupportedModelError: the model attends by another rule than it is planned by.
        """
        begins = 0 if after is None else len(after.ids) - lengths[0]
        plan = _Plan(lengths, begins, [] if after is None else after.attention)
        if positions and self.takes("position_ids"):
            counted = np.concatenate([np.arange(n) for n in lengths])
            counted[: lengths[0]] += begins
            given["position_ids"] = self.tensor(counted, batch)
        witness = FirstForward(self._decoder, self._windows, given.get("position_ids"))
        seen = Seen(ids, lengths, batch, {PLAN: plan, WITNESS: witness, **given}, like, plan.attention)
        self._names.use(FIRST)
        witness.start()
        try:
            self._call(seen, training)
        finally:
            witness.stop()
            self._names.restore()
        witness.finish()
        return seen

    def again(self, seen: Seen, **given: Any) -> Any:
        """What the decoder returns for a row that was seen, in training, given more arguments that its base model does
        not see. The base model is not run again, unless it is the decoder itself."""
        if self._base is self._decoder:
            return self.run(seen.ids, seen.lengths, batch=seen.batch, training=True, **given).decoder
        own = self._base.__dict__.get("forward")
        self._base.forward = lambda *args, **kwargs: seen.base
        again = Seen(seen.ids, seen.lengths, seen.batch, given)
        try:
            self._call(again, training=True)
        finally:
            del self._base.forward
            if own is not None:
                self._base.forward = own
        return again.decoder

    def tensor(self, values: np.ndarray, batch: int) -> torch.Tensor:
        """Values of tokens as [batch, tokens of a row] on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).view(batch, -1).to(self.device)

    def _call(self, seen: Seen, training: bool) -> None:
        """Calls the whole module, as training does. What is around the decoder may want more than token ids, or a loss
        of the decoder: it does not matter once the decoder ran, and if it did not, the decoder is called alone."""
        self._now = seen
        self._forget()
        self._module.train(training)
        for module in self._module.modules():
            # Quantised weights may be packed another way in evaluation, for good, and then give no gradients.
            if not all(p.is_floating_point() for p in module.parameters(recurse=False)):
                module.training = True
        torch.default_generator.manual_seed(_SEED)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(_SEED)
        ids = self.tensor(seen.ids, seen.batch)
        try:
            self._module(input_ids=ids)
        except Exception:
            if seen.entered and seen.decoder is None:
                raise
        if not seen.entered:
            self._decoder(input_ids=ids)

    def _before(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self._now.entered = True
        given = {"attention_mask": None, "use_cache": False, **self._now.given}
        return (), {**self._signature.bind_partial(*args).arguments, **kwargs, **given}

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        if module is self._base:
            self._now.base = output
        if module is self._decoder:
            self._now.decoder = output

    def _step(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Notes what a layer or a part of one returned, and has tokens go on with what others got."""
        if isinstance(output, tuple):
            return tuple(self._step(module, args, part) for part in output)
        now = self._now
        rows = now.of(output)
        if not torch.is_tensor(output) or not rows:
            return output
        now.steps.append(rows[0].clone())  # models may change it in place
        if not now.like:
            return output
        forced = rows[0].clone()
        for seen, here, there in now.like:
            forced[here] = seen.steps[len(now.steps) - 1][there]
        return forced.view_as(output)


def _of_tokens(output: Any, batch: int, tokens: int) -> list[torch.Tensor]:
    """The tensors in a model's output that have a row for each of so many tokens, each as [tokens, features]."""
    if torch.is_tensor(output):
        by_token = output.ndim > 1 and (output.shape[:2] == (batch, tokens // batch) or len(output) == tokens)
        return [output.reshape(tokens, -1)] if by_token and output.is_floating_point() else []
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [t for value in values for t in _of_tokens(value, batch, tokens)]


class _Plan:
    """Core attention of documents on this rank; keeps what it was given.

    Args:
        lengths: of the row's documents.
        begins: position of the first document's first token.
        before: has the keys of the tokens before it as its first ones, by attention module.
    """

    def __init__(self, lengths: Sequence[int], begins: int, before: list[QKV]) -> None:
        self.attention: list[QKV] = []
        self._begins, self._before = begins, before
        size = np.array(lengths, dtype=np.int64)
        start = np.cumsum(size) - size
        k_start, k_size = start + begins, size.copy()
        k_start[0], k_size[0] = 0, size[0] + begins
        self._tokens = int(size.sum())
        self._tasks = TaskBatch(start, size, k_start, k_size, self._tokens, self._tokens + begins)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``attention_function.Plan``."""
        if len(q) != self._tokens:
            raise UnsupportedModelError(
                f"attention has {len(q)} rows for the {self._tokens} tokens that were given: only a batch's own "
                "tokens can be planned, no others that are put before them, as prompt tuning does. Set "
                "`distca.enabled` to false for this model"
            )
        index = len(self.attention)
        self.attention.append((q, k, v))
        if self._begins:
            _, *before = self._before[index]
            k, v = (torch.cat([first[: self._begins], t]) for first, t in zip(before, (k, v), strict=True))
        return ReferenceKernel().forward(q, k, v, self._tasks, spec)
