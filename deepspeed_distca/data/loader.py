# SPDX-License-Identifier: Apache-2.0
"""The global loader: plans the batch of all ranks, and yields the one of its own.

Every rank makes the same plan from the lengths of the documents, so that nothing is communicated here. Which documents
are in a step is decided in one pass, in the process that iterates; where their tokens are stored, and the batches, are
made in the workers, ahead of time.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from deepspeed_distca.data.documents import Document
from deepspeed_distca.data.global_packing import Fill, GlobalPacker, PackingCounts, Step
from deepspeed_distca.data.packing import Overflow
from deepspeed_distca.data.placement import PLACEMENTS, Placement
from deepspeed_distca.data.sources import IndexedDocuments, StreamedDocuments, read_source
from deepspeed_distca.data.states import check_keys, check_version, plain, whole_number
from deepspeed_distca.data.step_batches import Batch, Packs, StepBatches, divide_again, join
from deepspeed_distca.scheduler.cost_model import CostModel
from deepspeed_distca.scheduler.shares import Shares

logger = logging.getLogger(__name__)

_STATE_VERSION = 2
#: Documents whose lengths are turned into Python integers at once.
_BLOCK = 8192


class GlobalPackedLoader:
    """Micro-batches of one rank, whose documents may continue on other ranks.

    A loop over it is one epoch: every document once over all ranks. All ranks yield the same number of micro-batches,
    a multiple of the accumulation steps. After its end the next loop is the next epoch; a loop that was left early
    starts anew.

    Args:
        documents: a ``datasets.Dataset`` or ``IterableDataset`` with "input_ids" (and perhaps "labels"), a sequence or
            an iterable of token lists or of such mappings, or a function that returns an iterable. The same on every
            rank, in the same order. Texts: see :func:`deepspeed_distca.data.tokenize`.
        tokens_per_rank: the token budget of each rank for a micro-batch, one for all or one for each. A rank with a
            budget of 0 stores no tokens and only serves attention. The longest document is the sum of the budgets.
        rank, num_ranks: of the data-parallel ranks; left out, the rank and size of the default process group.
        servers: consecutive ranks that share their documents and their attention work, as in the ``distca`` block;
            left out, all.
        gradient_accumulation_steps: micro-batches of an optimizer step, as in ds_config.json.
        seed, shuffle: the order of an epoch is a shuffle that depends on (seed, epoch) only. A stream is shuffled
            within a buffer of `shuffle_buffer` documents.
        placement: "free", "whole", "contiguous" or "head_tail": which rank stores what, see
            :func:`deepspeed_distca.data.placement.place`.
        regroup: documents may change places with those of other micro-batches of their step, so that less has to move,
            see :mod:`deepspeed_distca.data.regrouping`. Left out: with "free" and "whole" placement.
        fill: "exact": every rank has exactly its budget of tokens, and a document is cut at the end of a global batch
            where no whole documents fill it. "whole": documents are never cut, and ranks may have a few tokens less.
        overflow: what becomes of documents longer than the sum of the budgets: "split", "drop" or "error".
        lookahead: documents that may change places in the order, to fill batches. The memory of streams is bounded by
            it.
        drop_last: leave the last step of an epoch out if there are too few documents for it. Otherwise its
            micro-batches are smaller, and some may be empty; the step is exact all the same.
        cost, tolerance, server_weights, window: what batches will be balanced with, which free placement looks at:
            the cost of attention (the H200 fit with 32/8 heads of 128), the tolerance and server weights of the
            ``distca`` block (one for each rank), the sliding window of most layers. Results do not depend on them.
        even_enough: of free placement, see :func:`~deepspeed_distca.data.placement.place`; 0 where the block's
            `min_gain` is 0.
        num_workers, prefetch_factor, pin_memory, multiprocessing_context: of ``torch.utils.data.DataLoader``. A worker
            makes whole steps. A stream is read by one worker, however many there are.

    A batch has ``input_ids``, ``labels``, ``shift_labels`` and ``position_ids`` (int64 [1, tokens]), ``layout`` of all
    servers of the group, ``num_targets`` of this rank, and ``step_targets``: the same over the accumulation step.

    ``state_dict`` counts the steps that were handed out whole, not what was made ahead; it is the same on every rank.
    A resumed run yields the very batches that the interrupted one would have yielded, from the beginning of the step
    that was interrupted: a checkpoint has no gradients of its first micro-batches, so they are computed again. It may
    have another number of ranks or other budgets, if their sums are the same. Global random states are not touched.

    Raises:
        TypeError, ValueError: arguments that cannot be used.
    """

    def __init__(
        self,
        documents: Any,
        tokens_per_rank: int | Sequence[int],
        *,
        rank: int | None = None,
        num_ranks: int | None = None,
        servers: int | None = None,
        gradient_accumulation_steps: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_buffer: int = 1024,
        placement: Placement = "free",
        regroup: bool | None = None,
        fill: Fill = "exact",
        overflow: Overflow = "split",
        lookahead: int = 256,
        drop_last: bool = False,
        cost: CostModel | None = None,
        tolerance: float = 0.02,
        server_weights: Sequence[int] | None = None,
        window: int | None = None,
        even_enough: float = 0.08,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        multiprocessing_context: Any = None,
    ) -> None:
        self.rank, self.num_ranks = _ranks(rank, num_ranks)
        servers = self.num_ranks if servers is None else whole_number(servers, "servers")
        if not 1 <= servers <= self.num_ranks or self.num_ranks % servers:
            raise ValueError(f"servers must be a divisor of the {self.num_ranks} ranks, got {servers}")
        for name, value, low in (
            ("gradient_accumulation_steps", gradient_accumulation_steps, 1),
            ("shuffle_buffer", shuffle_buffer, 1),
            ("num_workers", num_workers, 0),
            ("seed", seed, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be a whole number of at least {low}, got {value!r}")
        if placement not in PLACEMENTS:
            raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}")
        if regroup is None:
            regroup = placement in ("free", "whole")
        elif not isinstance(regroup, bool):
            raise ValueError(f"regroup must be True, False or None, got {regroup!r}")
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        budgets = _per_rank(tokens_per_rank, self.num_ranks, "tokens_per_rank")
        groups = [budgets[i : i + servers] for i in range(0, self.num_ranks, servers)]
        self._packer_options = {
            "capacities": [sum(group) for group in groups],
            "fill": fill,
            "overflow": overflow,
            "lookahead": lookahead,
        }
        self._packer = GlobalPacker(**self._packer_options)
        group = self.rank // servers
        weights = None if server_weights is None else _per_rank(server_weights, self.num_ranks, "server_weights")
        if weights is not None:
            for first in range(0, self.num_ranks, servers):  # of all groups: an error is one on every rank
                Shares(weights[first : first + servers], servers, 0.0)
        self._source = read_source(documents)
        self._batches = StepBatches(
            rank=self.rank % servers,
            group=group,
            budgets=groups[group],
            placement={
                "placement": placement,
                "cost": cost,
                "tolerance": tolerance,
                "server_weights": None if weights is None else weights[group * servers : (group + 1) * servers],
                "window": window,
                "even_enough": even_enough,
            },
            regroup=regroup,
        )
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self._shuffle_buffer = shuffle_buffer
        self._workers = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "pin_memory": pin_memory,
            "multiprocessing_context": multiprocessing_context if num_workers else None,
        }
        if isinstance(self._source, StreamedDocuments) and num_workers:
            if self._source.is_iterator:
                raise ValueError(
                    "an iterator cannot be read by a worker; use num_workers=0, or give something that can be "
                    "iterated anew, or a function that returns an iterator"
                )
            self._workers["num_workers"] = 1
        # All that decides which documents are in which micro-batch. Where they are stored may change in a resumed run,
        # and with it the number of ranks and their budgets, as long as their sums do not.
        self._identity = {
            **self._packer_options,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
            **self._describe_source(),
        }
        self._epoch = 0
        self._start = 0  # micro-batches of the epoch that the next loop leaves out
        self._handed_out = 0  # micro-batches of the epoch, those left out included
        self._resumed = False  # whether a place was loaded that no loop has begun at
        self._loaded = 0  # how many states were loaded, which ends the loops before
        self._length: tuple[int, int] | None = None  # epoch, micro-batches

    @property
    def epoch(self) -> int:
        """The epoch of the next loop, or of the one that runs: until that is at its end, or has its last batch where
        the loader was asked for its length."""
        return self._epoch

    @property
    def counts(self) -> PackingCounts:
        """What packing has done in the epoch that runs or has just ended, with what was planned ahead. Not for streams
        that workers read."""
        return self._packer.counts

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next loop; one that was resumed in goes on where it was."""
        if epoch == self._epoch:
            return
        if self._resumed:
            logger.warning(
                "set_epoch(%d) gives up the place that was loaded, micro-batch %d of epoch %d; loop over "
                "range(loader.epoch, epochs) to go on there", epoch, self._start, self._epoch,
            )  # fmt: skip
        self._epoch, self._start, self._handed_out, self._resumed = epoch, 0, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: at the beginning of a step, the one that is being handed out if there is one; plain
        values, the same on every rank."""
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch,
            "micro_batches": self._handed_out - self._handed_out % self.gradient_accumulation_steps,
            "identity": deepcopy(self._identity),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state_dict`` was called. Packs the epoch once, from lengths, to know that it goes that
        far; a stream tells only when it is read.

        Raises:
            TypeError: something that is no state, or a value of another type.
            ValueError: keys that are missing or unknown, a place that does not exist, or a state of other documents
                or options, under which the batches would be other ones. Nothing has changed then.
        """
        name = "the loader's state"
        check_version(state, _STATE_VERSION, name)
        check_keys(state, self.state_dict(), name)
        given, own = state["identity"], self._identity
        check_keys(given, own, f"{name}, identity")
        differing = [key for key in own if repr(plain(given[key])) != repr(own[key])]
        if differing:
            words = [f"{key} was {given[key]!r}, is {own[key]!r}" for key in differing]
            raise ValueError(f"the state belongs to other batches: {'; '.join(words)}")
        epoch = whole_number(state["epoch"], f"{name}: epoch")
        start = whole_number(state["micro_batches"], f"{name}: micro_batches")
        if start % self.gradient_accumulation_steps:
            raise ValueError(
                f"{name}: micro_batches must be a multiple of the {self.gradient_accumulation_steps} of a step, got "
                f"{start}; a run goes on at the beginning of a step, since gradients within it are not saved"
            )
        if start and isinstance(self._source, IndexedDocuments):
            whole_number(start, f"{name}: micro_batches of epoch {epoch}", high=self._count(epoch))
        self._epoch, self._start = epoch, start
        self._handed_out, self._resumed = start, True
        self._loaded += 1

    def __len__(self) -> int:
        """Micro-batches of the epoch, those before a resume included.

        Raises:
            TypeError: for a stream.
        """
        if isinstance(self._source, StreamedDocuments):
            raise TypeError("the number of micro-batches of a stream is not known beforehand")
        if self._length is None or self._length[0] != self._epoch:
            self._length = self._epoch, self._count(self._epoch)
        return self._length[1]

    def __iter__(self) -> Iterator[Batch]:
        self._handed_out = self._start  # a state asked for before the first batch is that of this loop
        return self._loop()

    def _loop(self) -> Iterator[Batch]:
        epoch, loaded = self._epoch, self._loaded
        self._handed_out, self._start, self._resumed = self._start, 0, False
        steps = self._handed_out // self.gradient_accumulation_steps
        self._packer = GlobalPacker(**self._packer_options)
        if isinstance(self._source, StreamedDocuments):
            dataset: Dataset = _StreamedSteps(self, epoch, steps)
            sampler = None
        else:
            dataset = _IndexedSteps(self._source, self._batches)
            sampler = _SkipFirst(self._steps(self._source, epoch, self._packer), steps, self._batches.group)
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            # Its own generator: the default would draw the workers' seed from the global random state.
            generator=torch.Generator().manual_seed(0),
            **self._workers,
        )
        for joined, step in loader:
            for batch in divide_again(joined, step):
                if self._loaded != loaded:
                    raise RuntimeError("a state was loaded while this loop ran; begin a new loop, which goes on there")
                self._handed_out += 1
                if self._length == (epoch, self._handed_out):
                    self._end(epoch)  # a loop of so many batches never asks for one more
                yield batch
        if self._loaded == loaded:
            self._end(epoch)
        counts = self._packer.counts
        if counts.dropped_documents:
            logger.warning("epoch %d: %s", epoch, counts)

    def _end(self, epoch: int) -> None:
        """The epoch is over, unless another one was chosen meanwhile."""
        if self._epoch == epoch:
            self._epoch, self._handed_out = epoch + 1, 0

    def _count(self, epoch: int) -> int:
        """Micro-batches of an epoch of indexed documents."""
        steps = sum(1 for _ in self._steps(self._source, epoch, GlobalPacker(**self._packer_options)))
        return steps * self.gradient_accumulation_steps

    def _steps(self, source: IndexedDocuments, epoch: int, packer: GlobalPacker) -> Iterator[Step]:
        lengths = source.lengths
        order = np.arange(len(lengths))
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(order)
        blocks = (order[i : i + _BLOCK] for i in range(0, len(order), _BLOCK))
        documents = (pair for block in blocks for pair in zip(block.tolist(), lengths[block].tolist(), strict=True))
        return packer.steps(documents, self.gradient_accumulation_steps, drop_last=self.drop_last)

    def _streamed_steps(self, epoch: int, first: int) -> Iterator[list[Batch]]:
        """Batches of the steps of a stream from step `first` on."""
        held: dict[int, Document] = {}
        left: dict[int, int] = {}  # tokens of held documents that were not in a step yet

        def documents() -> Iterator[tuple[int, int]]:
            rng = np.random.default_rng((self.seed, epoch)) if self.shuffle else None
            stream = _shuffled(self._source.read(epoch), self._shuffle_buffer, rng)
            for index, document in enumerate(stream):
                length = len(document.input_ids)
                if 0 < length <= self._packer.longest or (length and self._packer.overflow == "split"):
                    held[index], left[index] = document, length
                yield index, length

        steps = self._packer.steps(documents(), self.gradient_accumulation_steps, drop_last=self.drop_last)
        found = 0
        for number, step in enumerate(steps):
            found = number + 1
            if number >= first:
                yield self._batches([packs[self._batches.group] for packs in step], held)
            for piece in (piece for packs in step for pack in packs for piece in pack):
                left[piece.document] -= piece.length
                if not left[piece.document]:
                    del left[piece.document], held[piece.document]
        if found < first:
            raise ValueError(
                f"the stream ended after {found} steps of epoch {epoch}, but the state that was loaded is at step "
                f"{first}: it has other documents than the run that saved the state"
            )

    def _describe_source(self) -> dict[str, Any]:
        if isinstance(self._source, StreamedDocuments):
            return {"documents": "a stream", "shuffle_buffer": self._shuffle_buffer}
        lengths = self._source.lengths
        digest = hashlib.blake2b(lengths.astype("<i8").tobytes(), digest_size=8).hexdigest()
        return {"documents": f"{len(lengths)} of {int(lengths.sum())} tokens, lengths {digest}"}


class _SkipFirst:
    """Steps of one group as a sampler, without the first ones."""

    def __init__(self, steps: Iterator[Step], first: int, group: int) -> None:
        self._steps, self._first, self._group = steps, first, group

    def __iter__(self) -> Iterator[Packs]:
        for number, step in enumerate(self._steps):
            if number >= self._first:
                yield [packs[self._group] for packs in step]


class _IndexedSteps(Dataset):
    """Batches of steps, whose packs are the index."""

    def __init__(self, documents: IndexedDocuments, batches: StepBatches) -> None:
        self._documents, self._batches = documents, batches

    def __getitem__(self, packs: Packs) -> tuple[torch.Tensor, list[Batch]]:
        return join(self._batches(packs, self._documents))


class _StreamedSteps(IterableDataset):
    """Batches of the steps of a stream, read where they are made."""

    def __init__(self, loader: GlobalPackedLoader, epoch: int, first: int) -> None:
        self._loader, self._epoch, self._first = loader, epoch, first

    def __iter__(self) -> Iterator[tuple[torch.Tensor, list[Batch]]]:
        return map(join, self._loader._streamed_steps(self._epoch, self._first))


def _shuffled(documents: Iterator[Document], size: int, rng: np.random.Generator | None) -> Iterator[Document]:
    """Draws from a buffer of `size` documents that is filled up again; in order without a generator."""
    if rng is None:
        yield from documents
        return
    buffer: list[Document] = []
    for document in documents:
        if len(buffer) < size:
            buffer.append(document)
            continue
        index = int(rng.integers(size))
        yield buffer[index]
        buffer[index] = document
    for index in rng.permutation(len(buffer)).tolist():
        yield buffer[index]


def _ranks(rank: int | None, num_ranks: int | None) -> tuple[int, int]:
    if (rank is None) != (num_ranks is None):
        raise ValueError(f"give both rank and num_ranks, or neither; got {rank} and {num_ranks}")
    if rank is None:
        together = dist.is_available() and dist.is_initialized()
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    num_ranks = whole_number(num_ranks, "num_ranks", low=1)
    return whole_number(rank, "rank", high=num_ranks - 1), num_ranks


def _per_rank(values: int | Sequence[int], num_ranks: int, name: str) -> list[int]:
    if isinstance(values, str) or not isinstance(values, int | np.integer | Iterable):
        raise ValueError(f"{name} must be a whole number, or one for each of {num_ranks} ranks; got {values!r}")
    given = [values] * num_ranks if isinstance(values, int | np.integer) else list(values)
    if len(given) != num_ranks:
        raise ValueError(f"{name} must be one number, or one for each of {num_ranks} ranks; got {len(given)}")
    if any(isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0 for n in given):
        raise ValueError(f"{name} must be whole numbers of at least 0, got {given}")
    return [int(n) for n in given]
