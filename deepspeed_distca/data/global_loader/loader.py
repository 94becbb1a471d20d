# SPDX-License-Identifier: Apache-2.0
"""The global loader: plans the batch of all ranks, and yields the one of its own.

Every rank makes the same plan from the lengths of the documents, so that nothing is communicated here. Which documents
are in a step is decided in one pass, in the process that iterates; where their tokens are stored, and the batches, are
made in the workers, ahead of time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from deepspeed_distca.data.checks import check_state, one_of, plain
from deepspeed_distca.data.global_loader.batches import Batch, Planner, StepBatches, Steps, divide_again
from deepspeed_distca.data.global_loader.packer import Fill
from deepspeed_distca.data.global_loader.placement import Placement
from deepspeed_distca.data.global_loader.settings import read_settings, refuse
from deepspeed_distca.data.packing import Overflow, PackingCounts
from deepspeed_distca.data.sources import StreamedDocuments, read_source
from deepspeed_distca.given import integer, integers

logger = logging.getLogger(__name__)

_STATE_VERSION = 2


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
        config: the DeepSpeed config, the dict or the path of its file, as ``deepspeed.initialize`` gets it. Read are
            `gradient_accumulation_steps`, and of the ``distca`` block `servers`, `cost_model` and, under `advanced`,
            `tolerance`, `min_gain`, `server_weights` and `node_size`. Left out: one micro-batch a step and an empty
            block.
        rank, num_ranks: of the data-parallel ranks; left out, the rank and size of the default process group.
        seed, shuffle: the order of an epoch is a shuffle that depends on (seed, epoch) only. A stream is shuffled
            within a buffer of `shuffle_buffer` documents.
        placement: "whole", "free", "contiguous" or "head_tail": which rank stores what, see
            :func:`deepspeed_distca.data.global_loader.placement.place`.
        regroup: documents may change places with those of other micro-batches of their step, so that less has to move,
            see :mod:`deepspeed_distca.data.global_loader.regrouping`. Left out: with "whole" and "free" placement.
        fill: "exact": every rank has exactly its budget of tokens, and a document is cut at the end of a global batch
            where no whole documents fill it. "whole": documents are never cut, and ranks may have a few tokens less.
        overflow: what becomes of documents longer than the sum of the budgets: "split", "drop" or "error".
        lookahead: documents that may change places in the order, to fill batches. The memory of streams is bounded by
            it.
        drop_last: leave the last step of an epoch out if there are too few documents for it. Otherwise its
            micro-batches are smaller, and some may be empty; the step is exact all the same.
        window: the sliding window of most layers, for placement.
        num_workers, prefetch_factor, pin_memory, multiprocessing_context: of ``torch.utils.data.DataLoader``. A worker
            makes whole steps. A stream is read by one worker, however many there are.

    A batch has ``input_ids``, ``labels``, ``shift_labels`` and ``position_ids`` (int64 [1, tokens]), ``layout`` of all
    servers of the group, ``num_targets`` of this rank, and ``step_targets``: the same over the accumulation step.
    After :meth:`plan_ahead` it has ``planned`` too, which is for the engine.

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
        config: Mapping[str, Any] | str | Path | None = None,
        *,
        rank: int | None = None,
        num_ranks: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_buffer: int = 1024,
        placement: Placement = "whole",
        regroup: bool | None = None,
        fill: Fill = "exact",
        overflow: Overflow = "split",
        lookahead: int = 256,
        drop_last: bool = False,
        window: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        multiprocessing_context: Any = None,
        **unknown: Any,
    ) -> None:
        refuse(unknown)
        self.rank, self.num_ranks = _ranks(rank, num_ranks)
        accumulation_steps, servers, balancing = read_settings(config, self.rank, self.num_ranks)
        integer("num_workers", num_workers)
        one_of("placement", placement, Placement)
        if regroup is None:
            regroup = placement in ("whole", "free")
        for name, value in (("regroup", regroup), ("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        budgets = _budgets(tokens_per_rank, self.num_ranks)
        groups = [budgets[i : i + servers] for i in range(0, self.num_ranks, servers)]
        group, member = divmod(self.rank, servers)
        self._source = read_source(documents)
        if not isinstance(self._source, StreamedDocuments) and not self._source.lengths.any():
            raise ValueError(f"none of the {len(self._source)} documents has a token: an epoch would have no step")
        self._steps = Steps(
            self._source,
            packing=dict(capacities=[sum(g) for g in groups], fill=fill, overflow=overflow, lookahead=lookahead),
            accumulation_steps=accumulation_steps,
            seed=integer("seed", seed),
            shuffle=shuffle,
            shuffle_buffer=integer("shuffle_buffer", shuffle_buffer, 1),
            drop_last=drop_last,
        )
        self._batches = StepBatches(
            rank=member,
            group=group,
            budgets=groups[group],
            placement={"placement": placement, "window": window, **balancing},
            regroup=regroup,
        )
        if isinstance(self._source, StreamedDocuments) and num_workers:
            if self._source.is_iterator:
                raise ValueError(
                    "an iterator cannot be read by a worker; use num_workers=0, or give something that can be "
                    "iterated anew, or a function that returns an iterator"
                )
            num_workers = 1
        self._workers: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "pin_memory": pin_memory,
            "multiprocessing_context": multiprocessing_context if num_workers else None,
        }
        self._epoch = 0
        self._start: int | None = None  # micro-batches that a loaded state is behind, until a loop begins there
        self._handed_out = 0  # micro-batches of the epoch, those before a loaded state included
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
        return self._steps.counts

    def plan_ahead(self, planner: Planner) -> None:
        """From the next loop on, micro-batches are planned where they are made: in the workers, ahead of time.
        Otherwise a step plans by itself, under the linear work of its first layer. That hides it where rows are long
        and ranks are few.

        The planner knows which ranks share a node, too, as the loader does not, unless `node_size` is in its config:
        documents are then stored by nodes. So all ranks call this before the same loop, or none.

        Args:
            planner: ``engine.distca.planner``. It is copied; a plan of another engine, or of options that have
                changed, is not used.
        """
        placement = dict(self._batches.placement)
        placement["nodes"] = getattr(planner, "nodes", None) or placement["nodes"]
        self._batches = replace(self._batches, planner=planner, placement=placement)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next loop; one that was resumed in goes on where it was."""
        if epoch == self._epoch:
            return
        if self._start is not None:
            logger.warning(
                "set_epoch(%d) gives up the place that was loaded, micro-batch %d of epoch %d; loop over "
                "range(loader.epoch, epochs) to go on there", epoch, self._start, self._epoch,
            )  # fmt: skip
        self._epoch, self._start, self._handed_out = epoch, None, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: at the beginning of a step, the one that is being handed out if there is one; plain
        values, the same on every rank."""
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch,
            "micro_batches": self._handed_out - self._handed_out % self._steps.accumulation_steps,
            "identity": deepcopy(self._steps.identity),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state_dict`` was called. Packs the epoch once, from lengths, to know that it goes that
        far; a stream tells only when it is read.

        Raises:
            TypeError: something that is no state.
            ValueError: keys that are missing or unknown, values of another type, a place that does not exist, or a
                state of other documents or options, under which the batches would be other ones. Nothing has changed
                then.
        """
        name = "the loader's state"
        check_state(state, self.state_dict(), name, _STATE_VERSION)
        given, own = state["identity"], self._steps.identity
        check_state(given, own, f"{name}, identity")
        differing = [key for key in own if repr(plain(given[key])) != repr(own[key])]
        if differing:
            words = [f"{key} was {given[key]!r}, is {own[key]!r}" for key in differing]
            raise ValueError(f"the state belongs to other batches: {'; '.join(words)}")
        epoch = integer(f"{name}: epoch", state["epoch"])
        start, steps = integer(f"{name}: micro_batches", state["micro_batches"]), self._steps.accumulation_steps
        if start % steps:
            raise ValueError(
                f"{name}: micro_batches must be a multiple of the {steps} of a step, got {start}; a run goes on at "
                "the beginning of a step, since gradients within it are not saved"
            )
        if start and not isinstance(self._source, StreamedDocuments):
            integer(f"{name}: micro_batches of epoch {epoch}", start, 0, self._steps.micro_batches(epoch))
        self._epoch, self._start, self._handed_out = epoch, start, start
        self._loaded += 1

    def __len__(self) -> int:
        """Micro-batches of the epoch, those before a resume included.

        Raises:
            TypeError: for a stream.
        """
        if self._length is None or self._length[0] != self._epoch:
            self._length = self._epoch, self._steps.micro_batches(self._epoch)
        return self._length[1]

    def __iter__(self) -> Iterator[Batch]:
        self._handed_out = self._start or 0  # a state asked for before the first batch is that of this loop
        return self._loop()

    def _loop(self) -> Iterator[Batch]:
        epoch, loaded = self._epoch, self._loaded
        self._handed_out, self._start = self._start or 0, None
        first = self._handed_out // self._steps.accumulation_steps
        dataset, sampler = self._steps.read(epoch, first, self._batches)
        loader: DataLoader = DataLoader(
            dataset,
            sampler=sampler,
            batch_size=None,
            # Its own generator: the default would draw the workers' seed from the global random state.
            generator=torch.Generator().manual_seed(0),
            **self._workers,
        )
        nothing = not self._handed_out
        for step in loader:
            nothing = False
            for batch in divide_again(*step):
                if self._loaded != loaded:
                    raise RuntimeError("a state was loaded while this loop ran; begin a new loop, which goes on there")
                self._handed_out += 1
                if self._length == (epoch, self._handed_out):
                    self._end(epoch)  # a loop of so many batches never asks for one more
                yield batch
        if nothing and not self.counts.dropped_documents:
            words = f"the stream gave no document that has a token in epoch {epoch}"
            if not self._workers["num_workers"]:
                raise ValueError(words)
            logger.warning("%s, or none that is not left out", words)  # workers keep count themselves
        if self._loaded == loaded:
            self._end(epoch)
        counts = self.counts
        if counts.dropped_documents:
            logger.warning("epoch %d: %s", epoch, counts)

    def _end(self, epoch: int) -> None:
        """The epoch is over, unless another one was chosen meanwhile."""
        if self._epoch == epoch:
            self._epoch, self._handed_out = epoch + 1, 0


def _ranks(rank: int | None, num_ranks: int | None) -> tuple[int, int]:
    if (rank is None) != (num_ranks is None):
        raise ValueError(f"give both rank and num_ranks, or neither; got {rank} and {num_ranks}")
    if rank is None:
        together = dist.is_available() and dist.is_initialized()
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    num_ranks = integer("num_ranks", num_ranks, 1)
    return integer("rank", rank, 0, num_ranks - 1), num_ranks


def _budgets(tokens: int | Sequence[int], num_ranks: int) -> list[int]:
    budgets = integers("tokens_per_rank", tokens, 0)
    if np.ndim(tokens) == 0:
        return budgets * num_ranks
    if len(budgets) != num_ranks:
        raise ValueError(f"tokens_per_rank must be one, or one for each of {num_ranks} ranks; got {len(budgets)}")
    return budgets
