# SPDX-License-Identifier: Apache-2.0
"""Key/value rows that travel on from server to server: a second round of the same exchange. Gradients of keys go back
the way that keys came; who sent rows on adds what comes back to its own.

*Between nodes* a row travels once to a node, and is sent on within it, where links carry much more. Servers that need
other rows of one home need prefixes of one another's, as a rule: the one with the most gets them from the home. Where
these are many, they would all enter the node by that server's NIC, and NCCL would let all of them leave by the one of
the same place in the other node. So the servers of the node carry equal parts of them, needed or not.

*Among equal links*, within one node or where every server is a node of its own, a document that exceeds what one
server should compute by much is attended on many servers, and each needs nearly all of its keys. Sent by their home
alone, these rows make it the rank with by far the most bytes, for which everybody waits. So the home sends them to a
few servers, and these, once they have them, to the others.
"""

from __future__ import annotations

from heapq import heapify, heapreplace
from math import isqrt
from typing import NamedTuple

import numpy as np

from deepspeed_distca.scheduler.row_ranges import rows_within
from deepspeed_distca.scheduler.topology import Topology

#: Columns of a run between ranks: see ``RouteCompiler``.
SERVER, HOME, HOME_ROW, WORK_ROW, ROWS = range(5)
#: More rows than any run has.
_ENDLESS = 2**62


class RelayRule(NamedTuple):
    """When rows are relayed among equal links.

    Attributes:
        least_rows: key/value rows that a home must have to send in all. A second round costs some latency, about
            0.1 ms with NCCL over NVLink; 32768 rows of Llama 3 8B's 8 key/value heads are 128 MiB, 0.4 ms.
        factor: and it must have to send so many times the mean over all ranks, to which it is brought down.
        carried_rows: between nodes, the fewest rows of a part that a server carries for another one: 4096 rows are 16
            MiB of Llama 3 8B's heads, and take a NIC of 50 GB/s 0.3 ms.
    """

    least_rows: int = 32768
    factor: int = 4
    carried_rows: int = 4096


DEFAULT_RULE = RelayRule()


def relays(
    runs: np.ndarray, num_ranks: int, rule: RelayRule, nodes: Topology | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Which runs are sent by another server than their home, and by which.

    Args:
        runs: int64 [num_runs, 5], columns (server, home, row at home, row in the server's workspace, rows): all
            key/value rows that servers need. The runs of a server fill its workspace.
        num_ranks: of servers.
        rule: when to relay.
        nodes: of the servers; None is one node.

    Returns:
        The runs, some of them in parts, with those that are carried for others behind a server's own, by server and
        row in the workspace; and int64 [runs]: the index of the run that brings the same rows, and maybe more, from
        the same home to the server that sends them on; -1 for a run that its home sends itself. Who sends on receives
        from the home.
    """
    source = np.full(len(runs), -1, dtype=np.int64)
    if nodes is not None and 1 < nodes.size < num_ranks:
        return _carried(runs, *_once_a_node(runs, nodes.node_of), rule.carried_rows, nodes)
    travels = np.flatnonzero(runs[:, SERVER] != runs[:, HOME])
    sent = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(sent, runs[travels, HOME], runs[travels, ROWS])
    limit = rule.factor * int(sent.sum()) // num_ranks
    heavy = np.flatnonzero((sent > limit) & (sent >= rule.least_rows))
    if not len(heavy):
        return runs, source
    load = sent.tolist()
    for home in sorted(heavy.tolist(), key=lambda r: (-load[r], r)):
        mine = travels[runs[travels, HOME] == home]
        mine = mine[np.lexsort((runs[mine, SERVER], runs[mine, HOME_ROW], -runs[mine, ROWS]))]
        _relay(mine.tolist(), runs[mine].tolist(), home, limit, load, source)
    return runs, source


def _once_a_node(runs: np.ndarray, node: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the runs from one home to the servers of another node, those within a longer one come from its server.

    Args:
        node: of each server.

    Returns:
        int64 [runs]: the longer one, itself for a run that its home sends, -1 within nodes; and bool [runs]: which
        share no row with another one that the home sends to that node.
    """
    relay, apart = np.full(len(runs), -1, dtype=np.int64), np.zeros(len(runs), dtype=bool)
    server, home, first, rows = runs[:, SERVER], runs[:, HOME], runs[:, HOME_ROW], runs[:, ROWS]
    far = np.flatnonzero(node[server] != node[home])
    # By node and home, and there by where they begin, the longest first. Of equal ones another server is first for
    # each home, so that all of a node's NICs have their part.
    turn = (server - home) % len(node)
    order = far[np.lexsort((turn[far], -rows[far], first[far], home[far], node[server[far]]))]
    if not len(order):
        return relay, apart
    begin, end = first[order], first[order] + rows[order]
    group = node[server[order]] * len(node) + home[order]
    begins = np.append(True, group[1:] != group[:-1])
    lift = np.cumsum(begins) * (int(end.max()) + 1)
    reach = np.maximum.accumulate(end + lift) - lift  # the furthest end so far within the group
    from_home, new = begins.copy(), begins.copy()
    from_home[1:] |= end[1:] > reach[:-1]
    new[1:] |= begin[1:] >= reach[:-1]
    # Whoever begins no later and ends the furthest so far gets its rows from the home, and has these, too.
    longest = np.flatnonzero(from_home)
    relay[order] = order[np.maximum.accumulate(np.where(from_home, np.arange(len(order)), 0))]
    apart[order[longest]] = new[longest] & np.append(new[longest[1:]], True)
    return relay, apart


def _carried(
    runs: np.ndarray, longest: np.ndarray, apart: np.ndarray, least: int, nodes: Topology
) -> tuple[np.ndarray, np.ndarray]:
    """Divides what crosses to a node among its servers: see :func:`relays` for what it gives.

    Args:
        longest, apart: of :func:`_once_a_node`.
        least: rows of a part.
    """
    # Every run that a home sends to another node is in one part or more, which lie one after another below.
    size = np.bincount(nodes.node_of)[nodes.node_of[runs[:, SERVER]]]
    part_rows = np.where(apart, -(-runs[:, ROWS] // np.maximum(np.minimum(size, runs[:, ROWS] // least), 1)), _ENDLESS)
    parts = -(-runs[:, ROWS] // part_rows)
    first = np.cumsum(parts) - parts
    run, place = _spread(parts)
    begin = place * part_rows[run]
    rows = np.minimum(part_rows[run], runs[run, ROWS] - begin)

    # All runs are cut where those parts end.
    holds = np.where(longest < 0, np.arange(len(runs)), longest)
    low = runs[:, HOME_ROW] - runs[holds, HOME_ROW]
    high = low + runs[:, ROWS]
    of_run, part = _spread((high - 1) // part_rows[holds] - low // part_rows[holds] + 1)
    part += (low // part_rows[holds])[of_run]
    start = np.maximum(part * part_rows[holds[of_run]], low[of_run])
    cut = runs[of_run]
    cut[:, [HOME_ROW, WORK_ROW]] += (start - low[of_run])[:, None]
    cut[:, ROWS] = np.minimum((part + 1) * part_rows[holds[of_run]], high[of_run]) - start
    part += first[holds[of_run]]

    # Each part is carried by one server, by another one first for each home, or by that with the longest run: where
    # there is one part, and where the carrier has some of its rows for itself, which it would then have twice.
    carrier = nodes.table[nodes.node_of[runs[run, SERVER]], (place + runs[run, HOME]) % size[run]]
    some = (cut[:, SERVER] == carrier[part]) & (cut[:, ROWS] < rows[part])
    alone = parts[run] == 1
    alone[part[some]] = True
    carrier = np.where(alone, runs[run, SERVER], carrier)
    brings = np.full(len(run), -1, dtype=np.int64)  # the run of the carrier
    all_of_it = np.flatnonzero((cut[:, SERVER] == carrier[part]) & (cut[:, ROWS] == rows[part]))
    brings[part[all_of_it]] = all_of_it
    for_others = np.flatnonzero((brings < 0) & ~alone)
    brings[for_others] = len(cut) + np.arange(len(for_others))
    carried = np.stack([carrier, runs[run, HOME], runs[run, HOME_ROW] + begin, 0 * begin, rows], axis=1)[for_others]
    order = np.argsort(carried[:, SERVER], kind="stable")
    own = np.bincount(runs[:, SERVER], runs[:, ROWS], minlength=len(nodes.nodes)).astype(np.int64)
    carried[order, WORK_ROW] = own[carried[order, SERVER]] + rows_within(*carried[order][:, [SERVER, ROWS]].T)

    sent_on = (longest[of_run] >= 0) & (cut[:, SERVER] != carrier[part])
    source = np.append(np.where(sent_on, brings[part], -1), np.full(len(carried), -1))
    found = np.concatenate([cut, carried])
    order = np.lexsort((found[:, WORK_ROW], found[:, SERVER]))
    at = np.empty(len(order), dtype=np.int64)
    at[order] = np.arange(len(order))
    return found[order], np.where(source < 0, -1, at[source])[order]


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of so many items of each entry, one entry after another: whose they are, and their number there."""
    entry = np.repeat(np.arange(len(counts)), counts)
    return entry, np.arange(len(entry)) - (np.cumsum(counts) - counts)[entry]


def _relay(
    index: list[int], runs: list[list[int]], home: int, limit: int, load: list[int], source: np.ndarray
) -> None:
    """Relays what a home has to send, its runs largest first; updates what ranks send and where runs come from."""
    # The home goes on sending to so many servers: those that the limit allows, or else about as many as each of them
    # then sends on to, which is the least for two rounds together.
    kept, direct = load[home], len(runs)
    while direct > max(1, isqrt(len(runs))) and kept > limit:
        direct -= 1
        kept -= runs[direct][ROWS]
    senders = [(load[run[SERVER]], place) for place, run in enumerate(runs[:direct])]
    heapify(senders)
    for run, place in zip(runs[direct:], index[direct:], strict=True):
        sends, relay = senders[0]
        _, _, first, _, rows = runs[relay]
        covered = first <= run[HOME_ROW] and run[HOME_ROW] + run[ROWS] <= first + rows
        if not covered or sends + run[ROWS] >= load[home] or runs[relay][SERVER] == run[SERVER]:
            continue
        source[place] = index[relay]
        load[home] -= run[ROWS]
        load[runs[relay][SERVER]] = sends + run[ROWS]
        heapreplace(senders, (sends + run[ROWS], relay))
