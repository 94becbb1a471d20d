# SPDX-License-Identifier: Apache-2.0
"""What one layer's core attention does in forward and in backward, step by step: dispatch, serve, collect.

The rows of a micro-batch are in one part, or in two (nano-batches). The steps are the same: rows leave for their
servers, tasks are computed in place and in the workspace, results come home. With two parts both have dispatched
before either is served; who calls says when.

Home keeps q, k, v, out and lse of its own tokens, as attention always does; the servers keep nothing between forward
and backward, so memory does not depend on the plan and backward may follow another plan than forward.

In backward a server needs, beside q, k and v, the gradient of out and two numbers per query row and head: lse and
delta = rowsum(dout * out) - dlse. Home computes delta and sends it in the place of out, which is head_dim / 2 times
larger in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import TypeVar

import torch

from deepspeed_distca.attention_server.coordination.watch import Watch
from deepspeed_distca.attention_server.exchange.base import Exchange, Messages, NoExchange, Pending
from deepspeed_distca.attention_server.kernels import BackwardInputs, Gradients, Kernel
from deepspeed_distca.attention_server.merging import merge
from deepspeed_distca.attention_server.parts import Part, Parts
from deepspeed_distca.attention_server.rank_plan import RankPlan, Run
from deepspeed_distca.attention_server.row_dots import row_dots, row_stats
from deepspeed_distca.attention_server.serving import add_gradients, attend, results_of, sum_dtype
from deepspeed_distca.attention_server.side_stream import SideStream
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.attention_server.transfers import (
    accumulate,
    add_rows,
    consecutive,
    dispatch,
    work_rows,
)
from deepspeed_distca.attention_server.workspace import WorkspaceGradients, in_dtype, permuted, serve_backward

Result = TypeVar("Result")


@dataclass
class LayerPlan:
    """How the layers of one kind (one window) compute core attention for a micro-batch.

    Attributes:
        forward, backward: this rank's part of the plan of either phase. A pipeline knows the latter only when the
            micro-batch's backward comes: None until then.
        exchange: how rows travel.
        side: where tasks in the workspace run, so that those at home hide the exchange; None: wait for it. Two parts
            hide theirs under each other; there only gradients that are sent on are added up on it.
        watch: tells the other ranks when a layer fails in backward.
    """

    forward: Parts
    backward: Parts | None
    exchange: Exchange
    side: SideStream | None
    watch: Watch | None = None

    @classmethod
    def whole(
        cls,
        forward: RankPlan,
        backward: RankPlan | None,
        exchange: Exchange | None = None,
        side: SideStream | None = None,
        watch: Watch | None = None,
    ) -> LayerPlan:
        """All rows in one part; no exchange where nothing travels."""
        later = None if backward is None else Parts.whole(backward)
        return cls(Parts.whole(forward), later, exchange or NoExchange(), side, watch)


class _Steps:
    """What both phases have in common: the workspace, what is under way, and what runs beside what."""

    def __init__(self, plan: LayerPlan, phase: Parts, spec: AttentionSpec, kernel: Kernel) -> None:
        self._phase, self._exchange, self._spec, self._kernel = phase, plan.exchange, spec, kernel
        self._beside = plan.side
        self._side = None if phase.divided else plan.side
        self._waits_first = plan.side is None and not phase.divided
        self._work: list[torch.Tensor] = []
        # By part:
        self._dispatched: dict[int, Pending] = {}
        self._returning: dict[int, Pending] = {}

    def _make_work(self, queries: list[torch.Tensor], keys: list[torch.Tensor]) -> None:
        """A workspace for rows like these. With two parts it starts from zero: rows of the other one may be on their
        way while a tile that reaches into them is loaded, and what a kernel loads must be finite."""
        routes = self._phase.parts[0].plan.routes
        new = torch.Tensor.new_zeros if self._phase.divided else torch.Tensor.new_empty
        for rows, tensors in ((routes.work_q_rows, queries), (routes.work_kv_rows, keys)):
            self._work += [new(t, (rows, *t.shape[1:])) for t in tensors]

    def _arrived(self, i: int) -> None:
        """Waits for the rows that tasks of part i read in the workspace."""
        for j, pending in self._dispatched.items():
            if j == i or self._phase.parts[i].needs_other:
                pending.wait()

    def wait(self) -> None:
        """For all that was sent and received by now."""
        for pending in (*self._dispatched.values(), *self._returning.values()):
            pending.wait()

    def _run(self, i: int, at_home: Callable[[], None], away: Callable[[], Result], device: torch.device) -> Result:
        """Tasks in place and tasks in the workspace, beside each other where there are both a side stream and the
        latter. A rank without any in its workspace only waits for its results, behind its own tasks: NCCL's receive
        would hold multiprocessors until they come."""
        if self._side is not None and self._phase.parts[i].plan.remote:
            return self._side.run(at_home, away, device)
        if self._waits_first:
            self._arrived(i)
        at_home()
        return away()

    def _keys_in_place(
        self, part: Part, i: int, both: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values for tasks in place: a document in two parts has its first ones in part 0."""
        if part.k_first == part.first:
            return both[i]
        (k_first, v_first), (k, v) = both[0], both[1]
        return torch.cat([k_first[part.k_first :], k]), torch.cat([v_first[part.k_first :], v])


class ForwardSteps(_Steps):
    """Forward of one layer: for each part dispatch, serve, collect."""

    def __init__(self, plan: LayerPlan, spec: AttentionSpec, kernel: Kernel) -> None:
        super().__init__(plan, plan.forward, spec, kernel)
        # By part:
        self._q: dict[int, torch.Tensor] = {}
        self._keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # k and v
        self._results: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # out and lse
        self._lse_back: dict[int, torch.Tensor] = {}  # of rows that come back
        self._out_back: dict[int, torch.Tensor] = {}  # of the same, where they are merged with what is at home

    def dispatch(self, i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Rows of part i leave for the servers.

        Args:
            q: [rows, q_heads, head_dim]; k: [rows, kv_heads, head_dim]; v: [rows, kv_heads, v_head_dim]; contiguous.
        """
        p = self._phase.parts[i].plan
        self._q[i], self._keys[i] = q, (k, v)
        if p.is_local:
            return
        if not self._work:
            self._make_work([q], [k, v])
        q_work, k_work, v_work = self._work
        self._dispatched[i] = dispatch(self._exchange, p, [(q, q_work)], [(k, k_work), (v, v_work)])

    def lend(self, i: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keys and values of part i, which itself is not computed, leave for the tasks of the part that was dispatched
        before."""
        p = self._phase.parts[i].plan
        self._keys[i] = k, v
        if p.is_local:
            return
        if not self._work:
            self._make_work(list(self._q.values()), [k, v])
        _, k_work, v_work = self._work
        self._dispatched[i] = dispatch(self._exchange, p, [], [(k, k_work), (v, v_work)])

    def serve(self, i: int) -> None:
        """Tasks of part i, at home and in the workspace; results leave."""
        part, q = self._phase.parts[i], self._q[i]
        p, spec, kernel = part.plan, self._spec, self._kernel
        k, v = self._keys_in_place(part, i, self._keys)
        tasks_per_row = p.routes.tasks_per_row
        self._results[i] = out, lse = results_of(q, v, tasks_per_row)

        def at_home() -> None:
            attend(kernel, q, k, v, part.local, spec, (out, lse))

        if p.is_local:
            return at_home()

        stats: Messages = []
        rows: Messages = [(run.peer, out[run.at_home]) for run in p.returned]
        if p.returned:
            count = len(p.returned_rows(q.device))
            self._lse_back[i] = lse.new_empty((count, q.shape[1]))
            stats = consecutive(self._lse_back[i], p.returned)
            if tasks_per_row > 1:
                self._out_back[i] = q.new_empty((count, *out.shape[1:]))
                rows = consecutive(self._out_back[i], p.returned)
        away_from = len(p.q_out)
        returning = self._exchange.expect([*rows[:away_from], *stats[:away_from]], sends=bool(p.q_in))

        def away() -> tuple:
            self._arrived(i)
            out_work = lse_work = None
            results: Messages = []
            if p.remote:
                q_work, k_work, v_work = self._work
                out_work, lse_work = results_of(q_work, v_work, tasks_per_row)
                attend(kernel, q_work, k_work, v_work, p.remote, spec, (out_work, lse_work))
                out_work, lse_work = in_dtype(out_work, q.dtype), permuted(lse_work, 1, 0)
                results = [*work_rows(out_work, p.q_in), *work_rows(lse_work, p.q_in)]
            return out_work, lse_work, results, returning.start(results) if self._exchange.early else None

        out_work, lse_work, results, giving_back = self._run(i, at_home, away, q.device)
        self._returning[i] = giving_back or returning.start(results)
        for run, (_, row), (_, stat) in zip(p.q_keep, rows[away_from:], stats[away_from:], strict=True):
            row.copy_(out_work[run.at_work])
            stat.copy_(lse_work[run.at_work])
        if i == len(self._phase.parts) - 1:
            self._work = []

    def collect(self, i: int) -> tuple[torch.Tensor, ...]:
        """q, k, v, out [rows, q_heads, v_head_dim] and lse [q_heads, rows] of part i, once its results are there."""
        out, lse = self._results.pop(i)
        p, lse_back = self._phase.parts[i].plan, self._lse_back.pop(i, None)
        if i in self._returning:
            self._returning[i].wait()
        if i in self._out_back and lse_back is not None:
            rows, stats = (consecutive(x, p.returned) for x in (self._out_back.pop(i), lse_back))
            for run, (_, row), (_, stat) in zip(p.returned, rows, stats, strict=True):
                merge(out[run.at_home], lse[:, run.at_home], row, stat.t())
        elif lse_back is not None:
            lse.index_copy_(1, p.returned_rows(out.device), lse_back.t())
        return self._q[i], *self._keys[i], out.to(self._q[i].dtype), lse


@dataclass
class Given:
    """What backward has of a part: its rows, their results, and the gradients of these (dlse None: not used)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None


class BackwardSteps(_Steps):
    """Backward of one layer, the last part first: for each part dispatch, serve, gradients.

    Raises:
        RuntimeError: the plan of the micro-batch's backward is not made yet.
    """

    def __init__(self, plan: LayerPlan, spec: AttentionSpec, kernel: Kernel) -> None:
        if plan.backward is None:
            raise RuntimeError("the backward tick of this micro-batch is not planned yet")
        super().__init__(plan, plan.backward, spec, kernel)
        # By part:
        self._given: dict[int, Given] = {}
        self._delta: dict[int, torch.Tensor | None] = {}
        self._dq: dict[int, torch.Tensor] = {}
        self._dq_back: dict[int, torch.Tensor] = {}  # of rows that come back, where they are added to what is at home
        self._keys_back: dict[int, tuple[torch.Tensor, ...]] = {}
        self._relayed_back: dict[int, tuple[torch.Tensor, ...]] = {}
        self._behind: dict[int, Pending] = {}
        self._sums_returning: dict[int, Pending] = {}
        self._home_sums: list[torch.Tensor] = []  # dk and dv of the rank's rows
        self._work_sums: WorkspaceGradients | None = None

    def dispatch(self, i: int, given: Given) -> None:
        """Rows of part i leave for the servers."""
        p = self._phase.parts[i].plan
        q, k, v, dout = given.q, given.k, given.v, given.dout
        self._given[i] = given
        delta = None if given.dlse is None else row_dots(dout, given.out) - given.dlse
        self._delta[i] = delta
        if p.is_local:
            return
        rows = p.returned_rows(q.device)
        if delta is None:
            stats = row_stats(dout, given.out, given.lse, rows)
        else:
            stats = torch.stack([x.index_select(1, rows).t() for x in (given.lse, delta)], dim=1)
        if not self._work:
            self._make_work([q, dout, stats], [k, v])
        q_work, dout_work, stats_work, k_work, v_work = self._work
        queries, keys = [(q, q_work), (dout, dout_work)], [(k, k_work), (v, v_work)]
        self._dispatched[i] = dispatch(self._exchange, p, queries, keys, (stats, stats_work))

    def serve(self, i: int) -> None:
        """Tasks of part i, at home and in the workspace; gradients leave."""
        part, given = self._phase.parts[i], self._given[i]
        p, dtype = part.plan, self._kernel.grad_dtype(given.q.dtype)
        if not self._home_sums:
            # Rows that no task in place writes start from zero: contributions are added to them.
            new = torch.Tensor.new_empty if self._phase.written else torch.Tensor.new_zeros
            rows = self._phase.home_rows
            self._home_sums = [new(t, (rows, *t.shape[1:]), dtype=dtype) for t in (given.k, given.v)]
        tasks_per_row = p.routes.tasks_per_row
        self._dq[i] = dq = torch.empty_like(given.q, dtype=sum_dtype(given.q.dtype, tasks_per_row))
        returned: Messages = [(run.peer, dq[run.at_home]) for run in p.returned]
        if tasks_per_row > 1:
            dq.zero_()
            self._dq_back[i] = given.q.new_empty((len(p.returned_rows(dq.device)), *dq.shape[1:]))
            returned = consecutive(self._dq_back[i], p.returned)
        complete = [self._phase.parts[j].plan for j in self._phase.keys_after(i)]
        if p.is_local and not any(s.kv_in or s.touched for s in complete):
            return self._at_home(part, i)

        receives: list = list(returned[: len(p.q_out)])
        last_receives: list = []
        for j, server in zip(self._phase.keys_after(i), complete, strict=True):
            if server.touched:
                self._keys_back[j] = self._buffers(server.kv_out)
            if server.relay_out or server.back_in:
                self._relayed_back[j] = self._buffers(server.relay_out)
            for back in self._keys_back.get(j, ()):
                messages = consecutive(back, server.kv_out)
                receives += compress(messages, ~server.routes.kv_out_relayed)
                last_receives += compress(messages, server.routes.kv_out_relayed)
            receives += [m for back in self._relayed_back.get(j, ()) for m in consecutive(back, server.relay_out)]
        returning = self._exchange.expect(receives, sends=bool(p.q_in or any(s.kv_in for s in complete)))

        def away() -> tuple:
            self._arrived(i)
            dq_work, totals = self._in_workspace(part, i)
            sends = [] if dq_work is None else [*work_rows(dq_work, p.q_in)]
            for server in complete:
                for runs in (server.first_back_in, server.relay_in):
                    for total in totals:
                        sends += _in_dtype(total, runs, dtype)
            return dq_work, sends, returning.start(sends) if self._exchange.early else None

        dq_work, sends, giving_back = self._run(i, lambda: self._at_home(part, i), away, dq.device)
        self._returning[i] = giving_back or returning.start(sends)
        for run, (_, row) in zip(p.q_keep, returned[len(p.q_out) :], strict=True):
            row.copy_(dq_work[run.at_work])
        if last_receives or any(server.back_in for server in complete):
            self._return_sums(i, last_receives, dtype)
        if i == 0:
            self._work = []

    def _buffers(self, runs: list[Run]) -> tuple[torch.Tensor, ...]:
        """Into which contributions to dk and to dv are received, those of the runs one after another."""
        rows = sum(run.rows for run in runs)
        return tuple(t.new_empty((rows, *t.shape[1:])) for t in self._home_sums)

    def _return_sums(self, i: int, receives: Messages, dtype: torch.dtype) -> None:
        """The second round: gradients of keys that were sent on go home, once what others have of them is added. What
        the caller queues from now on need not wait for that, where there is a side stream."""

        def go() -> None:
            sends: list = []
            self._returning[i].wait()
            for j in self._phase.keys_after(i):
                server = self._phase.parts[j].plan
                totals = () if self._work_sums is None else self._work_sums.totals
                for total, back in zip(totals, self._relayed_back.get(j, ()), strict=False):
                    accumulate(server.relayed_sums, total, [back])
                    sends += _in_dtype(total, server.back_in, dtype)
            self._sums_returning[i] = self._exchange.start(sends, receives)

        if self._beside is None:
            go()
        else:
            self._behind[i] = self._beside.behind(go, self._dq[i].device)

    def gradients(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv of part i, like q, k and v, once all of them are there."""
        part, given = self._phase.parts[i], self._given[i]
        for returning in (self._returning, self._behind, self._sums_returning):
            for j, pending in returning.items():
                if j == i or i in self._phase.keys_after(j):
                    pending.wait()
        sums = [_rows(total, part.first, part.first + part.rows) for total in self._home_sums]
        if i in self._keys_back:
            sources = [self._keys_back[i]]
            if self._work_sums is not None:
                sources.append(self._work_sums.totals)
            for total, *contributions in zip(sums, *sources, strict=True):
                accumulate(part.plan.touched, total, contributions)
        dq, (dk, dv) = self._dq[i], sums
        if i in self._dq_back:
            for run, (_, row) in zip(
                part.plan.returned, consecutive(self._dq_back[i], part.plan.returned), strict=True
            ):
                add_rows(dq, run.at_home, row)
        return dq.to(given.q.dtype), dk.to(given.k.dtype), dv.to(given.v.dtype)

    def _at_home(self, part: Part, i: int) -> None:
        given, delta = self._given[i], self._delta[i]
        k, v = self._keys_in_place(part, i, {j: (g.k, g.v) for j, g in self._given.items()})
        dk, dv = (_rows(total, part.k_first, part.first + part.rows) for total in self._home_sums)

        inputs = BackwardInputs(given.q, k, v, given.dout, given.lse, given.out if delta is None else None, delta)

        add_gradients(self._kernel, inputs, part.local, self._spec, Gradients(self._dq[i], dk, dv))
        if part.shared is not None and len(part.shared):
            own = torch.zeros_like(dk), torch.zeros_like(dv)
            self._kernel.backward(inputs, part.shared, self._spec, Gradients(self._dq[i], *own))
            for total, contribution in zip((dk, dv), own, strict=True):
                for start, length in zip(part.shared.k_start.tolist(), part.shared.k_len.tolist(), strict=True):
                    span = slice(start, start + length)
                    add_rows(total, span, contribution[span])

    def _in_workspace(self, part: Part, i: int) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]:
        """dq of the tasks of part i in the workspace, and the sums there to which their dk and dv are added; none of
        them where no part has rows in it."""
        if not self._work:
            return None, ()
        if self._work_sums is None:
            q_work, *_, k_work, v_work = self._work
            self._work_sums = WorkspaceGradients(self._phase, k_work, v_work, self._kernel.grad_dtype(q_work.dtype))
        dq = None
        if part.plan.remote:
            dq = serve_backward(i, self._work, self._work_sums, self._spec, self._kernel)
        return dq, self._work_sums.totals


def _rows(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """x[first:last]; no view, which takes of the host, where that is all of it."""
    return x if last - first == len(x) else x[first:last]


def _in_dtype(work: torch.Tensor, runs: list[Run], dtype: torch.dtype) -> Messages:
    """The runs' rows of a workspace in a dtype, with their peers."""
    return [(peer, in_dtype(x, dtype)) for peer, x in work_rows(work, runs)]
