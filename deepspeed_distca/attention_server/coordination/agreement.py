# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other about a micro-batch before it is planned.

One small collective per micro-batch, off the device. It also carries bad news: a rank whose input cannot be used says
so here, and every rank raises the same error instead of waiting for one that has stopped.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from deepspeed_distca.attention_server.coordination.errors import (
    AgreementError,
    MicroBatchLeftError,
    OutOfStepError,
)
from deepspeed_distca.attention_server.coordination.messages import Kind, Messenger, first_message
from deepspeed_distca.attention_server.coordination.micro_batch import GlobalMicroBatch, MicroBatch
from deepspeed_distca.attention_server.coordination.watch import Watch
from deepspeed_distca.layout import Layout

logger = logging.getLogger(__name__)

_NONE = np.zeros(0, dtype=np.int64)
#: What is the same on all ranks of a replica, by its name in messages.
_OF_REPLICA = {
    "layout_ranks": "documents",
    "layout_digest": "documents",
    "targets": "targets",
    "step_targets": "targets of the step",
    "tokens_digest": "tokens",
}


class Agreement:
    """Gathers integers over ranks.

    Args:
        group: a process group for CPU tensors (gloo), or None for a single process.
        servers: consecutive replicas of the model that share their work.
        fingerprint: of everything else a plan depends on (options, cost model, heads); must be the same on all ranks.
        watch: tells when another rank will not come.
        shards: consecutive ranks of the group that hold one replica among them (tensor parallelism): they have the
            same micro-batch and the same plan.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        servers: int,
        fingerprint: int,
        watch: Watch | None = None,
        shards: int = 1,
    ) -> None:
        self._messenger, self._servers, self._fingerprint = Messenger(group, watch), servers, fingerprint
        self._shards = shards
        self._compared = False  # whether ranks have been told that all of them have the same tokens
        self._asked = True  # for what the last gathering gave

    def gather(self, micro_batch: MicroBatch | Exception) -> Callable[[], GlobalMicroBatch]:
        """Collective. Sends this rank's part of a micro-batch without waiting for the others.

        Args:
            micro_batch: this rank's part, or the error that its input gave.

        Returns:
            Collective too, to be called once, and before anything else is gathered: waits for the micro-batch as all
            ranks together see it. It raises AgreementError on every rank if a rank has an error or the ranks' inputs
            do not fit together. Where the micro-batch failed before it could be called, on all ranks alike, the next
            one may be gathered. If only some ranks left it, that is an error on the others: while they still agree on
            it, or else, with the next one, on all ranks.
        """
        if isinstance(micro_batch, MicroBatch) and (problem := micro_batch.problem()):
            micro_batch = ValueError(problem)
        lengths = self._lengths_to_send(micro_batch)
        message = self._message(micro_batch, lengths)
        message["left"], self._asked = not self._asked, False
        arrived = self._messenger.send(message)

        def together() -> GlobalMicroBatch:
            self._asked = True
            try:
                firsts = self._in_step(arrived, message)
            except MicroBatchLeftError:
                self._asked = False  # this rank has left it as well
                raise
            mine = self._messenger.without_errors(firsts, micro_batch, "use its micro-batch")
            self._check_left(firsts)
            self._check_fingerprint(firsts)
            if self._shards > 1:
                self._check_shards(firsts)
            self._check_layouts(firsts)
            self._check_steps(firsts)
            layout = self._layout(firsts, mine.layout, lengths)
            kept_layers, in_two = int(firsts["kept_layers"].min()), bool(firsts["in_two"].all())
            firsts = firsts[:: self._shards]  # one of each replica
            self._compare_tokens(firsts["tokens_digest"])
            steps = firsts["step_targets"].tolist()
            return GlobalMicroBatch(
                layout,
                sum(firsts["targets"].tolist()),
                None if min(steps) < 0 else sum(steps),
                kept_layers=kept_layers,
                in_two=in_two,
            )

        return together

    def _lengths_to_send(self, micro_batch: MicroBatch | Exception) -> np.ndarray:
        """Of this rank's documents, int64 [n] (``Layout.to_integers``); none where all servers have the layout."""
        if isinstance(micro_batch, Exception) or self._servers == 1 or micro_batch.layout.num_ranks > 1:
            return _NONE
        return micro_batch.layout.to_integers()

    def _message(self, micro_batch: MicroBatch | Exception, lengths: np.ndarray) -> np.ndarray:
        if isinstance(micro_batch, Exception):
            return first_message(Kind.MICRO_BATCH, lengths, failed=1)
        layout, step = micro_batch.layout, micro_batch.step_targets
        return first_message(
            Kind.MICRO_BATCH,
            lengths,
            layout_ranks=layout.num_ranks,
            targets=micro_batch.targets,
            step_targets=-1 if step is None else step,
            fingerprint=self._fingerprint,
            layout_digest=fingerprint(layout.segments, layout.branches)
            if layout.num_ranks > 1 or self._shards > 1
            else 0,
            tokens_digest=micro_batch.tokens_digest,
            kept_layers=micro_batch.kept_layers,
            in_two=micro_batch.in_two and not layout.has_trees,
        )

    def _in_step(self, arrived: Callable[[], np.ndarray], message: np.ndarray) -> np.ndarray:
        """The first messages of all ranks, once they are at the same micro-batch."""
        try:
            return arrived()
        except OutOfStepError:
            if not message["left"]:
                raise
        # The others were still at the micro-batch that this rank left; now they have raised and come to this one.
        message["left"] = 0
        return self._messenger.send(message)()

    def _layout(self, firsts: np.ndarray, own: Layout, lengths: np.ndarray) -> Layout:
        """Of this rank's group; see :meth:`gather`."""
        if self._servers == 1 or own.num_ranks > 1:
            return own
        ranks = self._servers * self._shards
        begin = self._messenger.rank // ranks * ranks
        return Layout.from_integers(self._messenger.all_values(firsts, lengths)[begin : begin + ranks : self._shards])

    def _compare_tokens(self, digests: np.ndarray) -> None:
        if self._compared or len(digests) == 1 or not digests[0] or (digests != digests[0]).any():
            return
        self._compared = True
        if self._messenger.rank == 0:
            logger.warning(
                "distca: all %d ranks were given the very same tokens. A DataLoader needs a DistributedSampler (or "
                "another division of the data among ranks); as it is, every rank does the same work, and there is "
                "nothing to balance",
                len(digests),
            )

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Collective at its end, around what every rank does by itself. Raises on every rank if a rank has an error:
        its own, or else an AgreementError.

        Args:
            what: it was doing, as in "cannot ...".
        """
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        self.gather_values(_NONE if failure is None else failure, what)

    def gather_values(self, values: np.ndarray | Exception, what: str = "use its micro-batch") -> list[np.ndarray]:
        """Collective. The integers of every rank, any number of them from each.

        Args:
            values: int64 [n], or the error that this rank met instead.
            what: it could not do then, as in "cannot ...".

        Raises:
            AgreementError: on every rank, if a rank has an error or runs with other options.
        """
        own = _NONE if isinstance(values, Exception) else values
        message = first_message(Kind.VALUES, own, failed=own is not values, fingerprint=self._fingerprint)
        firsts = self._messenger.send(message)()
        self._messenger.without_errors(firsts, values, what)
        self._check_fingerprint(firsts)
        return self._messenger.all_values(firsts, own)

    def same(self, digest: int, what: str, wanted: bool | None = None) -> Callable[[], None]:
        """Collective. Sends a digest without waiting for the others.

        Args:
            wanted: whether this rank's backward comes to the first attention layer; None: that is not known.

        Returns:
            Collective too: raises AgreementError on every rank unless all servers of each group have the same one, and
            their backwards come as far, as far as that is known.
        """
        mine = np.array([digest, -1 if wanted is None else wanted], dtype=np.int64)
        arrived = self._messenger.send_values(Kind.DIGEST, mine)

        def compare() -> None:
            digests, wants = arrived()[:, :2].T
            self._check_wanted(wants)
            if not self._differ(digests, self._servers * self._shards):
                return
            table = ", ".join(f"rank {r}: {d:016x}" for r, d in zip(self._messenger.ranks, digests, strict=True))
            raise AgreementError(
                f"the ranks disagree on {what} ({table}); do all of them run the same versions of Python, NumPy and "
                "deepspeed_distca with the same `distca` block?"
            )

        return compare

    def _check_wanted(self, wants: np.ndarray) -> None:
        """Within each group nobody has 1 where another one has 0; -1 is not known. int64 [ranks of the group]."""
        together = wants.reshape(-1, self._servers * self._shards)
        if ((together == 0).any(axis=1) & (together == 1).any(axis=1)).any():
            raise AgreementError(
                f"ranks {self._messenger.named(wants == 1)} need gradients of what comes into their first attention "
                f"layer, ranks {self._messenger.named(wants == 0)} do not: these would not take part in its backward, "
                "for which the others wait. Give all ranks inputs of one kind (input_ids, or inputs_embeds that need "
                "gradients), or call model.enable_input_require_grads() on all of them"
            )

    @staticmethod
    def _differ(values: np.ndarray, ranks: int) -> bool:
        """Whether there are different ones among some consecutive ranks.

        Args:
            values: int64 [ranks of the group].
        """
        together = values.reshape(-1, ranks)
        return bool((together != together[:, :1]).any())

    def _check_left(self, firsts: np.ndarray) -> None:
        left = firsts["left"]
        if left.any() and not left.all():
            raise AgreementError(
                f"ranks {self._messenger.named(left != 0)} left the last micro-batch before its first attention "
                "layer, the others did not; look for an earlier error on them. To go on, all ranks must be at the "
                "same micro-batch of their optimizer step again: load a checkpoint, or begin the step anew"
            )

    def _check_fingerprint(self, firsts: np.ndarray) -> None:
        prints = firsts["fingerprint"]
        if (prints != prints[0]).any():
            raise AgreementError(
                f"ranks {self._messenger.named(prints != prints[0])} run with another `distca` block, cost model or "
                f"model than rank {self._messenger.ranks[0]}; all must be the same"
            )

    def _check_steps(self, firsts: np.ndarray) -> None:
        """Where some ranks know the targets of a step of several micro-batches, and others do not, the loss would be
        the mean over those of this micro-batch."""
        said, left_out = firsts["step_targets"], firsts["step_targets"] < 0
        if left_out.any() and (~left_out & (said != firsts["targets"])).any():
            raise AgreementError(
                f"ranks {self._messenger.named(left_out)} gave no step_targets, the others did; the loss of an "
                "accumulation step is the mean over the targets of all ranks: give each batch of each rank its "
                "step_targets (AccumulationLoader does), also those without tokens"
            )

    def _check_shards(self, firsts: np.ndarray) -> None:
        for name, words in _OF_REPLICA.items():
            if self._differ(firsts[name], self._shards):
                of_replica = firsts[name].reshape(-1, self._shards)
                first = int((of_replica != of_replica[:, :1]).any(axis=1).argmax()) * self._shards
                raise AgreementError(
                    f"ranks {self._messenger.ranks[first : first + self._shards]} hold one replica of the model among "
                    f"them (tensor parallelism), but were given different {words}; they need the very same "
                    "micro-batch. Samplers and loaders take the data-parallel rank, "
                    "dist.get_rank(engine.data_parallel_group), and the number of these ranks"
                )

    def _check_layouts(self, firsts: np.ndarray) -> None:
        kinds = firsts["layout_ranks"]
        if (kinds != kinds[0]).any():
            raise AgreementError(
                f"layouts of {kinds.tolist()} ranks were given on ranks {self._messenger.ranks}; give either each "
                "rank's own documents or the layout of all servers, on all ranks alike"
            )
        if kinds[0] > 1:
            if kinds[0] != self._servers:
                raise AgreementError(f"the layout has {kinds[0]} ranks, but {self._servers} servers share attention")
            if self._differ(firsts["layout_digest"], self._servers * self._shards):
                raise AgreementError("the servers were given different layouts for one micro-batch")


def fingerprint(*values: object) -> int:
    """63 bits of a hash of arrays, strings and numbers, the same in every process."""
    state = hashlib.blake2b(digest_size=8)
    for value in values:
        state.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        state.update(b"\0")
    return int.from_bytes(state.digest(), "little") >> 1


def agreement_group(ranks: list[list[int]], timeout: timedelta) -> dist.ProcessGroup:
    """The CPU group over which this rank's group agrees. Collective over all ranks.

    Raises:
        ValueError: this rank is in none of the groups.
    """
    mine = None
    for members in ranks:
        group = dist.new_group(members, backend="gloo", timeout=timeout)
        if dist.get_rank() in members:
            mine = group
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is in none of the groups {ranks}")
    return mine
