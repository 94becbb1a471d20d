# SPDX-License-Identifier: Apache-2.0
"""What one layer does for two nano-batches in forward and in backward, step by step; ``overlap`` says when."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed_distca.attention_server.exchange.base import Pending
from deepspeed_distca.attention_server.kernels import BackwardInputs, Gradients, Kernel
from deepspeed_distca.attention_server.nano_batches import NanoLayerPlan, NanoPart
from deepspeed_distca.attention_server.row_dots import row_dots
from deepspeed_distca.attention_server.task_batch import AttentionSpec, TaskBatch
from deepspeed_distca.attention_server.transfers import (
    accumulate,
    add_rows,
    consecutive,
    dispatch,
    give_back,
    moved_delta,
    stats_dtype,
    take_back,
)


class ForwardSteps:
    """Forward of one layer for both nano-batches: for each of them dispatch, serve, collect; no serving before both
    have dispatched."""

    def __init__(self, plan: NanoLayerPlan, spec: AttentionSpec, kernel: Kernel) -> None:
        self._phase, self._exchange = plan.forward, plan.exchange
        self._spec, self._kernel = spec, kernel
        self._q: list = [None, None]
        self._keys: list = [None, None]  # (k, v)
        self._results: list = [None, None]  # (out, lse, lse of rows that come back)
        self._dispatched: list[Pending | None] = [None, None]
        self._returning: list[Pending | None] = [None, None]
        self._work: tuple[torch.Tensor, ...] = ()

    def dispatch(self, nano: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Rows leave for the servers."""
        part = self._phase.parts[nano]
        p = part.server
        self._q[nano], self._keys[nano] = q, (k, v)
        if not self._work:
            self._work = _workspace(part, q, k, v)
        q_work, k_work, v_work = self._work
        self._dispatched[nano] = dispatch(self._exchange, p, [(q, q_work)], [(k, k_work), (v, v_work)])

    def serve(self, nano: int) -> None:
        """Tasks whose queries are of this nano-batch, at home and in the workspace; results leave."""
        part, q = self._phase.parts[nano], self._q[nano]
        p, spec, kernel = part.server, self._spec, self._kernel
        k, v = _keys(part, nano, self._keys)
        out = q.new_empty((len(q), q.shape[1], v.shape[2]))
        lse = q.new_empty((q.shape[1], len(q)), dtype=stats_dtype(q))
        if len(part.local):
            kernel.forward(q, k, v, part.local, spec, (out, lse))
        _wait(self._dispatched, nano, part.needs_other)
        lse_back = lse.new_empty((len(p.returned_rows(q.device)), q.shape[1]))
        stats = list(consecutive(lse_back, p.returned))
        out_work = lse_rows = None
        if len(p.remote):
            out_work, lse_work = kernel.forward(*self._work, p.remote, spec)
            lse_rows = {run: lse_work[:, run.at_work].t().contiguous() for run in (*p.q_in, *p.q_keep)}
        self._returning[nano] = self._exchange.start(
            [*give_back(out_work, p.q_in), *((run.peer, lse_rows[run]) for run in p.q_in)],
            [*take_back(out, p.q_out), *stats[: len(p.q_out)]],
        )
        for run, (_, row) in zip(p.q_keep, stats[len(p.q_out) :], strict=True):
            out[run.at_home].copy_(out_work[run.at_work])
            row.copy_(lse_rows[run])
        self._results[nano] = out, lse, lse_back
        if nano == 1:
            self._work = ()

    def collect(self, nano: int) -> tuple[torch.Tensor, ...]:
        """q, k, v, out and lse of this nano-batch, once its results are there."""
        part = self._phase.parts[nano]
        self._returning[nano].wait()
        out, lse, lse_back = self._results[nano]
        lse.index_copy_(1, part.server.returned_rows(out.device), lse_back.t())
        self._results[nano] = None
        return self._q[nano], *self._keys[nano], out, lse


@dataclass
class Given:
    """What backward has of a nano-batch."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None


class BackwardSteps:
    """Backward of one layer for both nano-batches, nano-batch 1 first: for each of them dispatch, serve, gradients; no
    serving before both have dispatched."""

    def __init__(self, plan: NanoLayerPlan, spec: AttentionSpec, kernel: Kernel) -> None:
        self._phase, self._exchange, self._late_keys = plan.backward, plan.exchange, plan.late_keys
        self._spec, self._kernel = spec, kernel
        self._given: list[Given | None] = [None, None]
        self._delta: list[torch.Tensor | None] = [None, None]
        self._dq: list[torch.Tensor | None] = [None, None]
        self._dispatched: list[Pending | None] = [None, None]
        self._returning: list[Pending | None] = [None, None]
        self._keys_back: list[tuple[torch.Tensor, torch.Tensor] | None] = [None, None]
        self._work: tuple[torch.Tensor, ...] = ()

    def dispatch(self, nano: int, given: Given) -> None:
        """Rows leave for the servers."""
        part = self._phase.parts[nano]
        p = part.server
        q, k, v, dout = given.q, given.k, given.v, given.dout
        self._given[nano] = given
        delta = None if given.dlse is None else row_dots(dout, given.out) - given.dlse
        self._delta[nano] = delta
        rows = p.returned_rows(q.device)
        moved = moved_delta(dout, given.out, p.returned, q.shape[1]) if delta is None else delta[:, rows].t()
        stats = torch.stack([given.lse[:, rows].t(), moved], dim=1)  # [rows, 2, q_heads]
        if not self._work:
            q_work, k_work, v_work = _workspace(part, q, k, v)
            dout_work, stats_work = (t.new_zeros((len(q_work), *t.shape[1:])) for t in (dout, stats))
            self._work = q_work, k_work, v_work, dout_work, stats_work
        q_work, k_work, v_work, dout_work, stats_work = self._work
        queries, keys = [(q, q_work), (dout, dout_work)], [(k, k_work), (v, v_work)]
        self._dispatched[nano] = dispatch(self._exchange, p, queries, keys, (stats, stats_work))

    def serve(self, nano: int) -> None:
        """Tasks whose queries are of this nano-batch, at home and in the workspace; gradients leave."""
        if nano == 1:
            self._start_gradients()
        part, given = self._phase.parts[nano], self._given[nano]
        p = part.server
        self._dq[nano] = dq = torch.empty_like(given.q)
        self._at_home(nano)
        _wait(self._dispatched, nano, part.needs_other)

        dq_work = self._serve_workspace(part)
        sends: list = give_back(dq_work, p.q_in)
        receives: list = take_back(dq, p.q_out)
        for keys in self._keys_after(nano):
            runs = self._phase.parts[keys].server
            back = tuple(t.new_empty((sum(r.rows for r in runs.kv_out), *t.shape[1:])) for t in (self._dk, self._dv))
            self._keys_back[keys] = back
            for work, rows in zip((self._dk_work, self._dv_work), back, strict=True):
                sends += [(run.peer, work[run.at_work].to(rows.dtype)) for run in runs.kv_in]
                receives += consecutive(rows, runs.kv_out)
        self._returning[nano] = self._exchange.start(sends, receives)
        for run in p.q_keep:
            dq[run.at_home].copy_(dq_work[run.at_work])
        if nano == 0:
            self._work = ()

    def gradients(self, nano: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv of this nano-batch, once all of them are there."""
        part, given = self._phase.parts[nano], self._given[nano]
        _wait(self._returning, nano, nano == 1 and self._late_keys)
        rows = slice(part.first, part.first + part.rows)
        dk, dv = self._dk[rows], self._dv[rows]
        for total, back, work in zip((dk, dv), self._keys_back[nano], (self._dk_work, self._dv_work), strict=True):
            accumulate(part.server, total, (back, work))
        return self._dq[nano], dk.to(given.k.dtype), dv.to(given.v.dtype)

    def _start_gradients(self) -> None:
        """Buffers for dk and dv of the rank's rows and of the workspace. Rows that not exactly one task in place
        writes start from zero, and so does the workspace where tasks share keys: contributions are added to them."""
        k, v = self._given[1].k, self._given[1].v
        dtype = self._kernel.grad_dtype(self._given[1].q.dtype)
        home = self._phase.home_rows
        new = torch.Tensor.new_empty if self._phase.written else torch.Tensor.new_zeros
        self._dk, self._dv = (new(t, (home, *t.shape[1:]), dtype=dtype) for t in (k, v))
        works = self._work[1:3]
        if self._phase.one_wave:
            self._dk_work, self._dv_work = (torch.empty_like(t, dtype=dtype) for t in works)
        else:
            total = torch.promote_types(dtype, torch.float32)
            self._dk_work, self._dv_work = (torch.zeros_like(t, dtype=total) for t in works)

    def _at_home(self, nano: int) -> None:
        part, given = self._phase.parts[nano], self._given[nano]
        k, v = _keys(part, nano, [(g.k, g.v) for g in self._given])
        delta = self._delta[nano]
        inputs = BackwardInputs(given.q, k, v, given.dout, given.lse, given.out if delta is None else None, delta)

        def run(tasks: TaskBatch, dk: torch.Tensor, dv: torch.Tensor) -> None:
            self._kernel.backward(inputs, tasks, self._spec, Gradients(self._dq[nano], dk, dv))

        rows = slice(part.k_first, part.first + part.rows)
        if len(part.local):
            run(part.local, self._dk[rows], self._dv[rows])
        if len(part.shared):
            dk, dv = torch.zeros_like(self._dk[rows]), torch.zeros_like(self._dv[rows])
            run(part.shared, dk, dv)
            for start, length in zip(part.shared.k_start.tolist(), part.shared.k_len.tolist(), strict=True):
                span = slice(start, start + length)
                add_rows(self._dk[rows], span, dk[span])
                add_rows(self._dv[rows], span, dv[span])

    def _serve_workspace(self, part: NanoPart) -> torch.Tensor | None:
        """dq of the tasks in the workspace; dk and dv are added to what is there."""
        p, kernel = part.server, self._kernel
        if not len(p.remote):
            return None
        q, k, v, dout, stats = self._work
        lse, delta = (t.t().contiguous() for t in stats.unbind(1))
        inputs = BackwardInputs(q, k, v, dout, lse, delta=delta)
        dq = torch.empty_like(q)
        grad_dtype = kernel.grad_dtype(q.dtype)
        for tasks in p.waves:
            dk, dv = self._dk_work, self._dv_work
            if not self._phase.one_wave:
                dk, dv = torch.empty_like(k, dtype=grad_dtype), torch.empty_like(v, dtype=grad_dtype)
            kernel.backward(inputs, tasks, self._spec, Gradients(dq, dk, dv))
            if not self._phase.one_wave:
                for span in tasks.key_spans:
                    self._dk_work[span] += dk[span]
                    self._dv_work[span] += dv[span]
        return dq

    def _keys_after(self, nano: int) -> tuple[int, ...]:
        """Whose keys have their gradients once this nano-batch was served."""
        if nano == 0:
            return (0, 1) if self._late_keys else (0,)
        return () if self._late_keys else (1,)


def _workspace(part: NanoPart, q, k, v) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeros: rows of the other nano-batch may be on their way while a tile that reaches into them is loaded, and what
    a kernel loads must be finite."""
    plan = part.server.plan
    return tuple(
        t.new_zeros((rows, *t.shape[1:]))
        for t, rows in ((q, plan.work_q_rows), (k, plan.work_kv_rows), (v, plan.work_kv_rows))
    )


def _keys(part: NanoPart, nano: int, both: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Keys and values for tasks in place: a document of both nano-batches has its first ones in nano-batch 0."""
    if part.k_first == part.first:
        return both[nano]
    return tuple(torch.cat([first[part.k_first :], second]) for first, second in zip(*both, strict=True))


def _wait(pending: list[Pending | None], nano: int, other: bool) -> None:
    pending[nano].wait()
    if other:
        pending[1 - nano].wait()
