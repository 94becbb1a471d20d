# SPDX-License-Identifier: Apache-2.0
"""From CA-tasks to what one rank does: the rows it sends, receives and keeps, and the row ranges it computes.

A rank's own rows are its *home* buffers (q, k, v in storage order). Tasks whose queries and keys lie side by side in
them run there, in place. All other tasks of a server run in its *workspace*: one query buffer and one key/value
buffer, ordered by (document, position), into which rows are received without a detour, or copied where they are the
server's own. Each key/value row a server needs is in its workspace once, however many tasks read it.

Rows travel in runs: contiguous at home and in the workspace alike. Sender and receiver list the runs between them in
the same order, so that messages need no headers. Some key/value runs reach their server in a second round, from the
workspace of another one (see ``relays``), and their gradients go back that way. Everything here is a pure function of
(layout, tasks, nodes), in int64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepspeed_distca.layout import LENGTH, RANK, Layout, sort_rows
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.relays import DEFAULT_RULE, RelayRule, relays
from deepspeed_distca.scheduler.row_ranges import SegmentIndex, most_tasks, rows_within, task_levels, unions
from deepspeed_distca.scheduler.tasks import K_END, K_START, Q_END, Q_START, SERVER, TASK_DOCUMENT, is_full
from deepspeed_distca.scheduler.topology import Topology

#: Columns of a run: the other rank, first row at home, first row in the server's workspace, number of rows. A relayed
#: run has the row in the relay's workspace in place of the one at home.
PEER, HOME_ROW, WORK_ROW, ROWS = range(4)

#: Messages between a run's two ends in a layer, by phase: of queries (q, out and lse; q, dout, their statistics and
#: dq), and of keys (k and v; their gradients). The last are of a server with one range of queries.
_MESSAGES = {"forward": (3, 2), "backward": (4, 4)}
FEWEST_MESSAGES = {phase: sum(counts) for phase, counts in _MESSAGES.items()}

#: Of one kind of rows in all.
_MAX_BYTES = 2**61
_NONE = np.zeros(0, dtype=np.int64)

#: Of ``Tasks.rows``.
TaskCost = Callable[[np.ndarray], np.ndarray]


class Flow(NamedTuple):
    """Bytes between ranks, int64 [n] each; several may be of one pair.

    Attributes:
        sender, receiver: of the bytes.
        size: how many.
        late: which are sent only once what comes to their sender is there, bool [n]; None: as good as none.
    """

    sender: np.ndarray
    receiver: np.ndarray
    size: np.ndarray
    late: np.ndarray | None = None


NOTHING = Flow(_NONE, _NONE, _NONE)


@dataclass(frozen=True)
class TaskRanges:
    """Row ranges of tasks over a query and a key/value buffer, int64 [num_tasks] each.

    Attributes:
        q_start, q_len, k_start, k_len: 1 <= q_len <= k_len in causal tasks.
        level: 0 of causal tasks, from 1 on of full ones. Tasks of one level have no query in common.
    """

    q_start: np.ndarray
    q_len: np.ndarray
    k_start: np.ndarray
    k_len: np.ndarray
    level: np.ndarray

    @classmethod
    def of(cls, tasks: np.ndarray, q_start: np.ndarray, k_start: np.ndarray, level: np.ndarray) -> TaskRanges:
        """Of rows of ``Tasks.rows``, whose queries and keys begin at these rows of the buffers."""
        q_len, k_len = tasks[:, Q_END] - tasks[:, Q_START], tasks[:, K_END] - tasks[:, K_START]
        return cls(q_start, q_len, k_start, k_len, level)

    def __len__(self) -> int:
        return len(self.q_start)

    def take(self, index: np.ndarray | slice) -> TaskRanges:
        """The tasks at an index or under a mask."""
        columns = self.q_start, self.q_len, self.k_start, self.k_len, self.level
        return TaskRanges(*(column[index] for column in columns))


@dataclass(frozen=True)
class Routes:
    """One rank's part of a plan, the same for every layer of the micro-batch with that window.

    Attributes:
        rank: whose part this is.
        home_rows: rows of its q, k and v.
        local: tasks that run in place on the home buffers; the key ranges of one level are disjoint.
        remote: tasks that run in the workspace, in the order of their query rows there.
        waves: indices into ``remote``, one array for each backward call: tasks of one level, whose key ranges are
            disjoint, since kernels overwrite dK/dV.
        tasks_per_row: how many tasks a query row may have, here and at other servers together, whose results are
            merged. More than one in trees only.
        work_q_rows, work_kv_rows: rows of the workspace.
        q_in, kv_in: int64 [num_runs, 4], runs this rank receives as a server (peer: the home). peer == rank is a copy.
        q_out, kv_out: int64 [num_runs, 4], runs this rank sends as a home (peer: the server), without peer == rank.
        kv_in_direct: bool [num_runs], runs of ``kv_in`` that the home itself sends.
        relay_in, relay_out: int64 [num_runs, 4], the other runs of ``kv_in`` as they come from a relay's workspace
            (peer: the relay), and what this rank sends on (peer: the server).
        kv_in_relayed, kv_out_relayed: bool [num_runs], runs of ``kv_in`` and ``kv_out`` of which the server sends rows
            on. Gradients go back the way that keys came: those of these runs once the others' are added to them.
    """

    rank: int
    home_rows: int
    local: TaskRanges
    remote: TaskRanges
    waves: tuple[np.ndarray, ...]
    work_q_rows: int
    work_kv_rows: int
    q_in: np.ndarray
    kv_in: np.ndarray
    q_out: np.ndarray
    kv_out: np.ndarray
    kv_in_direct: np.ndarray
    relay_in: np.ndarray
    relay_out: np.ndarray
    kv_in_relayed: np.ndarray
    kv_out_relayed: np.ndarray
    tasks_per_row: int = 1

    @property
    def is_local(self) -> bool:
        """Nothing to send, receive or copy: the kernel runs on q, k and v as they are."""
        return not len(self.remote) and not len(self.q_out) and not len(self.kv_out)

    @property
    def received_rows(self) -> tuple[int, int]:
        """Query and key/value rows that come from other ranks."""
        q, kv = (int(runs[runs[:, PEER] != self.rank, ROWS].sum()) for runs in (self.q_in, self.kv_in))
        return q, kv


class RouteCompiler:
    """Compiles the parts of any rank from one layout and its tasks; what all ranks share is worked out once."""

    def __init__(
        self, layout: Layout, tasks: np.ndarray, nodes: Topology | None = None, rule: RelayRule = DEFAULT_RULE
    ) -> None:
        """Args:
        layout: where the tokens live.
        tasks: ``Tasks.rows`` of it.
        nodes: of the servers; None is one node.
        rule: when key/value rows are relayed among equal links.
        """
        self._layout = layout
        self._bytes: dict[tuple[Heads, str], tuple[np.ndarray, np.ndarray]] = {}  # asked for twice
        self._home_rows = layout.tokens
        index = SegmentIndex(layout)
        tasks = np.array(tasks, dtype=np.int64)
        tasks[:, TASK_DOCUMENT] = index.number(tasks[:, TASK_DOCUMENT])
        tasks = tasks[sort_rows(tasks[:, SERVER], tasks[:, TASK_DOCUMENT], tasks[:, Q_START])]
        self._tasks_per_row = most_tasks(layout.branches)
        self._shared = self._tasks_per_row > 1
        self._split(index, tasks)
        self._q_runs: np.ndarray
        self._kv_runs: np.ndarray
        self._place(index)
        self._kv_source: np.ndarray = _NONE
        # Within a node a second round is short.
        self._far_relays = nodes is not None and nodes.size == layout.num_ranks > 1
        if len(self._kv_runs):
            self._kv_runs, self._kv_source = relays(self._kv_runs, layout.num_ranks, rule, nodes)

    def _split(self, index: SegmentIndex, tasks: np.ndarray) -> None:
        """Which tasks run in place: keys and queries in one segment of the server's own, the first of its unit."""
        document, k_start, q_end = tasks[:, TASK_DOCUMENT], tasks[:, K_START], tasks[:, Q_END]
        segment = index.find(document, k_start)
        in_place = (index.rank[segment] == tasks[:, SERVER]) & (q_end <= index.end[segment])
        # A second task over the same unit would overlap its keys in backward: it takes the workspace. A document that
        # is no tree is one unit; in a tree each has its own first key for each of the two kinds.
        repeated = np.zeros(len(tasks), dtype=bool)
        if len(tasks):
            place = np.flatnonzero(in_place)
            key = (tasks[:, SERVER] * (int(document.max()) + 1) + document)[place]
            if self._shared:
                unit = np.where(index.is_tree[document[place]], 2 * k_start[place] + is_full(tasks[place]), -1)
                order = sort_rows(key, unit)
                place, key, unit = place[order], key[order], unit[order]
                repeated[place[1:]] = (key[1:] == key[:-1]) & (unit[1:] == unit[:-1])
            else:
                repeated[place[1:]] = key[1:] == key[:-1]
        in_place &= ~repeated
        self._local, self._local_segment = tasks[in_place], segment[in_place]
        self._local_shift = index.row[self._local_segment] - index.start[self._local_segment]
        self._remote = tasks[~in_place]
        self._local_level, self._remote_level = task_levels(self._local), task_levels(self._remote)

    def _place(self, index: SegmentIndex) -> None:
        """Gives every workspace task its rows and lists the runs that fill the workspaces."""
        t = self._remote
        if not len(t):  # small steps wait for a plan: nothing is worked out for nothing
            self._q_runs = self._kv_runs = np.zeros((0, 5), dtype=np.int64)
            self._q_work = self._k_work = self._wave = _NONE
            return
        server, document = t[:, SERVER], t[:, TASK_DOCUMENT]
        q_server, q_document, q_lo, q_hi, of_task = server, document, t[:, Q_START], t[:, Q_END], np.arange(len(t))
        if self._shared:  # the union of the tasks' queries, as of keys below
            q_server, q_document, q_lo, q_hi, of_task = unions(server, document, q_lo, q_hi, joined=False)
        q_row = rows_within(q_server, q_hi - q_lo)
        self._q_work = q_row[of_task] + t[:, Q_START] - q_lo[of_task]
        which, home, home_row, offset, rows = index.pieces(q_document, q_lo, q_hi)
        self._q_runs = np.stack([q_server[which], home, home_row, q_row[which] + offset, rows], axis=1)

        # Key/value intervals: the union of the tasks' key ranges for each (server, document). Of ranges that begin
        # together the longest is first, so that without a window the first wave covers all keys.
        order = np.lexsort((-t[:, K_END], t[:, K_START], document, server))
        ranges = server[order], document[order], t[order, K_START], t[order, K_END]
        i_server, i_document, i_lo, i_hi, interval = unions(*ranges, joined=True)
        first = np.flatnonzero(np.append(1, np.diff(interval)))
        i_row = rows_within(i_server, i_hi - i_lo)
        which, home, home_row, offset, rows = index.pieces(i_document, i_lo, i_hi)
        self._kv_runs = np.stack([i_server[which], home, home_row, i_row[which] + offset, rows], axis=1)

        self._k_work = np.empty(len(t), dtype=np.int64)
        self._k_work[order] = i_row[interval] + t[order, K_START] - i_lo[interval]
        self._wave = np.empty(len(t), dtype=np.int64)
        self._wave[order] = np.arange(len(t)) - first[interval]
        if self._shared:  # tasks of one wave are of one level
            _, self._wave = np.unique(self._wave + len(t) * self._remote_level, return_inverse=True)

    def relayed(self) -> np.ndarray:
        """Relayed runs, int64 [num_runs, 6]: (server, relay, home, row in the relay's workspace, row in the server's,
        rows)."""
        index = np.flatnonzero(self._kv_source >= 0)
        run, via = self._kv_runs[index], self._kv_runs[self._kv_source[index]]
        row = via[:, 3] + run[:, 2] - via[:, 2]
        return np.stack([run[:, 0], via[:, 0], run[:, 1], row, run[:, 3], run[:, 4]], axis=1)

    @property
    def moves_rows(self) -> bool:
        """Any row travels between any two ranks."""
        return any(bool((runs[:, 0] != runs[:, 1]).any()) for runs in (self._q_runs, self._kv_runs))

    def messages(self, phase: str) -> np.ndarray:
        """How many messages each rank sends or receives in one layer, int64 [num_ranks]."""
        queries, keys = self._q_runs, self._kv_runs
        ends = (queries[:, 0], queries[:, 1]), (keys[:, 0], self._key_senders())
        counts = np.zeros(self._layout.num_ranks, dtype=np.int64)
        for (server, other), messages in zip(ends, _MESSAGES[phase], strict=True):
            for end in (server, other):
                np.add.at(counts, end[server != other], messages)
        return counts

    def bytes_between(self, heads: Heads, phase: str) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of one layer from each rank to each, out and back: int64 [sender, receiver] each, not to be changed.

        Raises:
            OverflowError: see :func:`bytes_of`.
        """
        if (heads, phase) not in self._bytes:
            ranks = self._layout.num_ranks
            out, back = (np.zeros((ranks, ranks), dtype=np.int64) for _ in range(2))
            for size, flow in zip((out, back), self.flows(heads, phase), strict=True):
                np.add.at(size, (flow.sender, flow.receiver), flow.size)
            self._bytes[heads, phase] = out, back
        return self._bytes[heads, phase]

    def flows(self, heads: Heads, phase: str) -> tuple[Flow, Flow]:
        """The same as they are made up, out and back: of hundreds of ranks few pairs have any.

        Raises:
            OverflowError: see :func:`bytes_of`.
        """
        row = heads.moved(phase)
        queries, keys = self._q_runs, self._kv_runs
        q_away, k_away = queries[:, 0] != queries[:, 1], keys[:, 0] != keys[:, 1]
        queries, keys, senders = queries[q_away], keys[k_away], self._key_senders()[k_away]
        server, sender = np.append(queries[:, 0], keys[:, 0]), np.append(queries[:, 1], senders)
        out, back = (
            np.append(bytes_of(queries[:, 4], query), bytes_of(keys[:, 4], key))
            for query, key in ((row.query_out, row.key_out), (row.query_back, row.key_back))
        )
        first = then = None
        if self._far_relays and (self._kv_source >= 0).any():
            # Gradients go the other way: who sent rows on waits for what comes back.
            relayed, sends_on = self._kv_source >= 0, np.zeros(len(k_away), dtype=bool)
            sends_on[self._kv_source[relayed]] = True
            first, then = (np.append(np.zeros(len(queries), dtype=bool), x[k_away]) for x in (relayed, sends_on))
        there = Flow(sender, server, out, first)
        if phase == "forward":  # keys have nothing to return
            return there, Flow(server[: len(queries)], sender[: len(queries)], back[: len(queries)])
        return there, Flow(server, sender, back, then)

    def key_rows(self) -> np.ndarray:
        """Key/value rows that each rank sends to each, int64 [sender, receiver]."""
        found = np.zeros((self._layout.num_ranks,) * 2, dtype=np.int64)
        np.add.at(found, (self._key_senders(), self._kv_runs[:, 0]), self._kv_runs[:, 4])
        np.fill_diagonal(found, 0)
        return found

    def _key_senders(self) -> np.ndarray:
        """Who sends each key/value run, and gets its gradients: its home or a relay."""
        return np.where(self._kv_source < 0, self._kv_runs[:, 1], self._kv_runs[self._kv_source, 0])

    def loads(self, cost: TaskCost) -> tuple[np.ndarray, np.ndarray]:
        """Cost of each server's tasks in place and in its workspace, int64 [num_ranks] each.

        Args:
            cost: of tasks.
        """
        found = []
        for tasks in (self._local, self._remote):
            load = np.zeros(self._layout.num_ranks, dtype=np.int64)
            np.add.at(load, tasks[:, SERVER], cost(tasks))
            found.append(load)
        return found[0], found[1]

    def rank(self, rank: int) -> Routes:
        """The part of one rank."""
        mine = self._local[:, SERVER] == rank
        t, shift = self._local[mine], self._local_shift[mine]
        local = TaskRanges.of(t, t[:, Q_START] + shift, t[:, K_START] + shift, self._local_level[mine])
        local = local.take(np.argsort(local.q_start, kind="stable"))
        home_rows = int(self._home_rows[rank])
        if not len(self._remote):
            return _at_home(rank, home_rows, local, self._tasks_per_row)

        mine = self._remote[:, SERVER] == rank
        remote = TaskRanges.of(self._remote[mine], self._q_work[mine], self._k_work[mine], self._remote_level[mine])
        wave = self._wave[mine]
        waves = tuple(found for w in range(int(wave.max(initial=-1)) + 1) if len(found := np.flatnonzero(wave == w)))
        q_arrives, kv_arrives = (runs[:, 0] == rank for runs in (self._q_runs, self._kv_runs))
        q_leaves, kv_leaves = ((runs[:, 1] == rank) & (runs[:, 0] != rank) for runs in (self._q_runs, self._kv_runs))
        q_in, kv_in = self._q_runs[q_arrives][:, 1:], self._kv_runs[kv_arrives][:, 1:]
        direct, relayed = self._kv_source < 0, self.relayed()
        sent_on = np.zeros(len(direct), dtype=bool)
        sent_on[self._kv_source[~direct]] = True
        kv_leaves &= direct
        return Routes(
            rank=rank,
            home_rows=home_rows,
            local=local,
            remote=remote,
            waves=waves,
            work_q_rows=int(q_in[:, ROWS].sum()),
            work_kv_rows=int(kv_in[:, ROWS].sum()),
            q_in=q_in,
            kv_in=kv_in,
            q_out=self._q_runs[q_leaves][:, [0, 2, 3, 4]],
            kv_out=self._kv_runs[kv_leaves][:, [0, 2, 3, 4]],
            kv_in_direct=direct[kv_arrives],
            relay_in=relayed[relayed[:, 0] == rank][:, [1, 3, 4, 5]],
            relay_out=relayed[relayed[:, 1] == rank][:, [0, 3, 4, 5]],
            kv_in_relayed=sent_on[kv_arrives],
            kv_out_relayed=sent_on[kv_leaves],
            tasks_per_row=self._tasks_per_row,
        )


def home_routes(layout: Layout, rank: int) -> Routes:
    """A rank's part of the plan that computes everything at home, of a layout of whole documents, none a tree: the
    same as :class:`RouteCompiler` gives for ``home_tasks``."""
    mine = layout.segments[layout.segments[:, RANK] == rank, LENGTH]
    start = np.cumsum(mine) - mine
    return _at_home(rank, int(mine.sum()), TaskRanges(start, mine, start, mine, 0 * mine))


def _at_home(rank: int, rows: int, local: TaskRanges, tasks_per_row: int = 1) -> Routes:
    none, nobody = np.zeros((0, 4), dtype=np.int64), np.zeros(0, dtype=bool)
    tasks = TaskRanges(*(_NONE,) * 5)
    runs = none, none, none, none, nobody, none, none, nobody, nobody
    return Routes(rank, rows, local, tasks, (), 0, 0, *runs, tasks_per_row)


def bytes_of(rows: np.ndarray, size: int) -> np.ndarray:
    """Bytes of so many rows of a size, int64 like `rows`.

    Raises:
        OverflowError: all of them together would leave int64, or sums of two of them.
    """
    if float(rows.sum(dtype=np.float64)) * size > _MAX_BYTES:
        raise OverflowError(f"moved rows of {size} bytes exceed {_MAX_BYTES} bytes in all: the heads are too large")
    return rows * size
