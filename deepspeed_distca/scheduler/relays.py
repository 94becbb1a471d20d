# SPDX-License-Identifier: Apache-2.0
"""Key/value rows that travel on from server to server: a second round of the same exchange. Gradients of keys go back
the way that keys came; who sent rows on adds what comes back to its own.

*Between nodes* a row travels once to a node, and is sent on within it, where links carry much more. Servers that need
other rows of one home need prefixes of one another's, as a rule: the one with the most gets them from the home.

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

from deepspeed_distca.scheduler.topology import Topology

#: Columns of a run between ranks: see ``RouteCompiler``.
SERVER, HOME, HOME_ROW, WORK_ROW, ROWS = range(5)


class RelayRule(NamedTuple):
    """When rows are relayed among equal links.

    Attributes:
        least_rows: key/value rows that a home must have to send in all. A second round costs some latency, about
            0.1 ms with NCCL over NVLink; 32768 rows of Llama 3 8B's 8 key/value heads are 128 MiB, 0.4 ms.
        factor: and it must have to send so many times the mean over all ranks, to which it is brought down.
    """

    least_rows: int = 32768
    factor: int = 4


DEFAULT_RULE = RelayRule()


def relays(runs: np.ndarray, num_ranks: int, rule: RelayRule, nodes: Topology | None = None) -> np.ndarray:
    """Which runs are sent by another server than their home, and by which.

    Args:
        runs: int64 [num_runs, 5], columns (server, home, row at home, row in the server's workspace, rows): all
            key/value rows that servers need.
        num_ranks: of servers.
        rule: when to relay among equal links.
        nodes: of the servers; None is one node.

    Returns:
        int64 [num_runs]: the index of the run that brings the same rows, and maybe more, from the same home to the
        server that sends them on; -1 for a run that its home sends itself. Who sends on receives from the home.
    """
    source = np.full(len(runs), -1, dtype=np.int64)
    if nodes is not None and 1 < nodes.size < num_ranks:
        return _once_a_node(runs, np.array(nodes.nodes, dtype=np.int64))
    travels = np.flatnonzero(runs[:, SERVER] != runs[:, HOME])
    sent = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(sent, runs[travels, HOME], runs[travels, ROWS])
    limit = rule.factor * int(sent.sum()) // num_ranks
    heavy = np.flatnonzero((sent > limit) & (sent >= rule.least_rows))
    if not len(heavy):
        return source
    load = sent.tolist()
    for home in sorted(heavy.tolist(), key=lambda r: (-load[r], r)):
        mine = travels[runs[travels, HOME] == home]
        mine = mine[np.lexsort((runs[mine, SERVER], runs[mine, HOME_ROW], -runs[mine, ROWS]))]
        _relay(mine.tolist(), runs[mine].tolist(), home, limit, load, source)
    return source


def _once_a_node(runs: np.ndarray, node: np.ndarray) -> np.ndarray:
    """Of the runs from one home to the servers of another node, those within a longer one come from its server.

    Args:
        node: of each server.
    """
    source = np.full(len(runs), -1, dtype=np.int64)
    server, home, first, rows = runs[:, SERVER], runs[:, HOME], runs[:, HOME_ROW], runs[:, ROWS]
    far = np.flatnonzero(node[server] != node[home])
    # By node and home, and there by where they begin, the longest first. Of equal ones another server is first for
    # each home, so that all of a node's NICs have their part.
    turn = (server - home) % len(node)
    order = far[np.lexsort((turn[far], -rows[far], first[far], home[far], node[server[far]]))]
    if len(order) < 2:
        return source
    ends = first[order] + rows[order]
    group = node[server[order]] * len(node) + home[order]
    begins = np.append(True, group[1:] != group[:-1])
    lift = np.cumsum(begins) * (int(ends.max()) + 1)
    reach = np.maximum.accumulate(ends + lift) - lift  # the furthest end so far within the group
    from_home = begins.copy()
    from_home[1:] |= ends[1:] > reach[:-1]
    # Whoever begins no later and ends the furthest so far gets its rows from the home, and has these, too.
    relay = order[np.maximum.accumulate(np.where(from_home, np.arange(len(order)), 0))]
    # A server that has rows twice, for texts that share them, is sent them twice.
    on = ~from_home & (server[order] != server[relay])
    source[order[on]] = relay[on]
    return source


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
