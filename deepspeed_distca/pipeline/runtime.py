# SPDX-License-Identifier: Apache-2.0
"""``engine.distca`` of a PipelineEngine: plans the ticks of its batches and runs its schedules with them.

Touches of the engine, all on the instance, by ``compat.deepspeed``, and all undone by :meth:`PipelineRuntime.detach`:
how it runs a schedule (reads and agrees on the batch first, and runs the same-phase schedule in the place of
DeepSpeed's where the whole grid shares attention), its instructions (forward and backward passes run with their plans;
two instructions more, for ranks that serve) and, during a batch, where it takes a micro-batch from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import logger

from deepspeed_distca.attention_server.coordination.hello import Meeting, machine
from deepspeed_distca.attention_server.coordination.watch import Watch
from deepspeed_distca.attention_server.statistics import StepStatistics
from deepspeed_distca.building import Sharing, attention_dtype, build_server, describe_nodes
from deepspeed_distca.compat.deepspeed import (
    own_schedule,
    replace_next_batch,
    replace_schedule,
    restore_schedule,
    schedule_is_replaced,
)
from deepspeed_distca.compat.transformers import attention_name, set_attention_name
from deepspeed_distca.config import BLOCK, DistCAConfig, DistCAConfigError
from deepspeed_distca.cost_choice import cost_to_say, own_cost_model, said_cost_model
from deepspeed_distca.huggingface.attention_function import FIRST, NAME
from deepspeed_distca.huggingface.contract import Contract
from deepspeed_distca.huggingface.decoders import attention_modules
from deepspeed_distca.layout import Layout
from deepspeed_distca.monitor import events
from deepspeed_distca.pipeline.batches import CONTRACT, describe, from_message, merge, pipeline_batch, to_message
from deepspeed_distca.pipeline.module import DecoderPipeline, meta_model
from deepspeed_distca.pipeline.plans import MicroBatchAttention, Slots, TickPlanner
from deepspeed_distca.pipeline.schedule import (
    SamePhaseEvaluation,
    SamePhaseSchedule,
    ServeBackward,
    ServeForward,
    passes,
)
from deepspeed_distca.plan_options import plan_options
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.profiles import Choice
from deepspeed_distca.scheduler.ticks import Tick


@dataclass(frozen=True)
class PreparedPipeline:
    """What a rank knows of its pipeline before it meets the others.

    Attributes:
        topology: which ranks share attention; slots: which plan each of their layers follows.
        heads: of the model's attention.
        contract: how the model reads its batches.
        choice: the cost model, on rank 0 alone.
        same, own: what it says of itself: see :class:`~deepspeed_distca.attention_server.coordination.hello.Hello`.
    """

    topology: _Topology
    slots: Slots
    heads: Heads
    contract: Contract
    choice: Choice | None
    same: dict[str, Any]
    own: dict[str, Any]


class PipelineRuntime:
    """Attention over the stages and replicas of a pipeline.

    Args:
        engine: its module must be a :class:`DecoderPipeline`. Collective over all ranks.
        config: the options in force.
        prepared: see :meth:`prepare`.
        meeting: of all ranks.

    Attributes:
        config: the options in force.
        server: this rank's attention server.
        detached: whether it is out of use.
    """

    def __init__(
        self, engine: PipelineEngine, config: DistCAConfig, prepared: PreparedPipeline, meeting: Meeting
    ) -> None:
        self.config, self.detached = config, False
        self._watch = Watch(meeting.name, config.timeout_seconds)
        try:
            with self._watch.phase("attach"):
                self._set_up(engine, config, prepared, meeting)
        except BaseException:
            self._watch.close()
            raise

    @staticmethod
    def prepare(engine: PipelineEngine, config: DistCAConfig, heads: Heads) -> PreparedPipeline:
        """All that this rank can find out about its engine alone, before it meets the others.

        Args:
            engine: that came through :func:`check_engine`.
            heads: of the model's attention.

        Raises:
            DistCAConfigError: options or an engine that do not go together with the pipeline.
            UnsupportedModelError: a model whose attention cannot be planned exactly.
        """
        module: DecoderPipeline = engine.module
        attention_modules(meta_model(module.config))
        if config.advanced.server_weights is not None:
            raise DistCAConfigError(
                f"`{BLOCK}.advanced.server_weights` cannot be combined with a PipelineModule, whose stages have "
                "different work; remove it"
            )
        topology = _Topology(engine, config.advanced.pipeline_scope, config.servers)
        try:
            slots = Slots([module.stage_windows[s] for s in topology.stages])
        except ValueError as error:
            raise DistCAConfigError(
                f'{error}. Choose `{BLOCK}.advanced.pipeline_scope` "stage", or another number of stages'
            ) from None
        # Stages know positions only, not how long a token's document is as a whole, so none may be longer than rows
        # whose rotary frequencies are all the same.
        contract = replace(CONTRACT, longest_document=min((r.limit for r in module.context.rules), default=None))
        dtype = attention_dtype(engine)
        same = {
            "the class of the model": type(module.config).__name__,
            "the windows of attention layers, by stage": module.stage_windows,
            "the attention heads": asdict(heads),
            "the data type of attention": str(dtype),
            "the number of replicas": topology.all_replicas,
        }
        window = next((w for stage in module.stage_windows for w in stage), None)
        choice = own_cost_model(config, heads, device=engine.device, dtype=dtype, window=window)
        own = {"machine": machine(), **cost_to_say(choice)}
        return PreparedPipeline(topology, slots, heads, contract, choice, same, own)

    def _set_up(
        self, engine: PipelineEngine, config: DistCAConfig, prepared: PreparedPipeline, meeting: Meeting
    ) -> None:
        """Collective: makes the groups, and all that lives on them."""
        module: DecoderPipeline = engine.module
        self._engine, self._module, watch = engine, module, self._watch
        self._scope = config.advanced.pipeline_scope
        topology, slots, heads, dtype = prepared.topology, prepared.slots, prepared.heads, attention_dtype(engine)
        choice = said_cost_model(meeting.hellos[0].own, heads, prepared.choice)
        own_servers = next(group for group in topology.groups if dist.get_rank() in group)
        machines = {rank: meeting.hellos[rank].own["machine"] for rank in own_servers}
        options = plan_options(config, engine.device, module.config, servers=machines)
        built = build_server(
            engine,
            config,
            Sharing(topology.groups, topology.groups, topology.server, topology.all_replicas),
            watch,
            cost=choice.cost,
            options=options,
            windows=module.stage_windows[engine.stage_id],
            # All but the nodes of this rank's servers, which other groups know as those of their own.
            common=(
                replace(options, topology=None),
                config.advanced.node_size,
                choice.cost,
                module.stage_windows,
                dtype,
            ),
            exchange=config.advanced.exchange or "nccl",  # peer copies were never tried beside the stages' own sends
        )
        self.server, self._agreement, self._groups = built.server, built.everyone, built.groups
        self._topology, self._contract = topology, prepared.contract
        self._planner = TickPlanner(
            self.server,
            slots,
            topology.place,
            topology.stages.index(engine.stage_id),
            len(module.stage_windows[engine.stage_id]),
            heads=heads,
            dtype=dtype,
            scale=module.attention_scale,
            device=engine.device,
        )
        if config.overlap == "ping_pong" or (config.overlap is None and options.nodes is not None):
            problem = not_in_two(module, slots, prepared.contract)
            if problem and config.overlap == "ping_pong":
                raise DistCAConfigError(f'`{BLOCK}.overlap` "ping_pong" does not work here: {problem}')
            if problem and dist.get_rank() == 0:
                print(
                    f'distca: `overlap` is "local_first", where "ping_pong" would hide more over nodes: {problem}',
                    flush=True,
                )
            self._planner.able = not problem
        self._weight_loss = config.token_weighted_loss and hasattr(module.loss_fn, "divisor")
        if config.token_weighted_loss and not self._weight_loss:
            logger.warning(
                "distca: the module's loss_fn has no attribute `divisor`, so the loss is not weighted over the batch"
            )
        self._install()
        if dist.get_rank() == 0:
            # Printed, not logged: DeepSpeed's logger shows warnings only.
            print(
                f"distca: {sum(map(len, module.stage_windows))} attention layers in {engine.num_stages} stages, "
                f"{topology.place.size} attention servers in {len(topology.groups)} group(s) (scope {self._scope})"
                f"{describe_nodes(options, choice.cost)}; "
                f"kernel {config.kernel or 'automatic'}, "
                f"overlap {'ping_pong' if self._planner.able else config.overlap or 'local_first'}, "
                f"cost model {choice.source}, tolerance {config.advanced.tolerance:g}",
                flush=True,
            )

    @property
    def stats(self) -> StepStatistics:
        """Statistics of the last training step; reading the kernels' time on a GPU waits for them."""
        return self.server.stats

    @property
    def history(self) -> list[StepStatistics]:
        """See ``deepspeed_distca.engine_runtime.Runtime``."""
        return self.server.history

    def detach(self) -> None:
        """Gives the engine its own methods back; ``engine.distca`` stays, out of use, until the plugin is attached
        anew. To be called on all ranks."""
        if self.detached:
            return
        self.detached = True
        self._watch.close()
        restore_schedule(self._engine)

    def _install(self) -> None:
        engine = self._engine
        self._run_schedule, own = own_schedule(engine)
        self._forward_pass, self._backward_pass = own[ds.ForwardPass], own[ds.BackwardPass]
        instructions: dict[type, Callable[..., Any]] = {
            **own,
            ds.ForwardPass: lambda _, buffer_id: self._forward(buffer_id),
            ds.BackwardPass: lambda _, buffer_id: self._backward(buffer_id),
            ServeForward: lambda _: self._serve_forward(),
            ServeBackward: lambda _: self._serve_backward(),
        }
        replace_schedule(engine, self._run, instructions)

    # -- a batch

    def _run(self, schedule: ds.PipeSchedule) -> None:
        """In the place of the engine's own way to run a schedule."""
        training = isinstance(schedule, ds.TrainSchedule)
        if not training and not isinstance(schedule, ds.InferenceSchedule):
            raise DistCAConfigError(
                f"the `{BLOCK}` block does not know the schedule {type(schedule).__name__}; supported are DeepSpeed's "
                "TrainSchedule and InferenceSchedule"
            )
        if self._scope == "grid":
            ours = SamePhaseSchedule if training else SamePhaseEvaluation
            schedule = ours(schedule.micro_batches, schedule.stages, schedule.stage_id)
            ticks = schedule.ticks()
        else:
            ticks = passes(schedule)
        try:
            self._watch.begin()
            try:
                self._begin(ticks, schedule.micro_batches, training)
            finally:
                self._watch.given_up()
            with self._watch.phase("the pipeline's schedule"):
                self._run_schedule(schedule)
        finally:
            replace_next_batch(self._engine, None)
            self._planner.end()
            if self._weight_loss:
                self._module.loss_fn.divisor = None
        engine = self._engine
        if training and engine.global_rank == 0 and engine.monitor.enabled:
            engine.monitor.write_events(events(self.server.planned, engine.global_samples))

    def _begin(self, ticks: list[Tick], micro_batches: int, training: bool) -> None:
        """Reads the batch where it is loaded, tells every rank what is in it, and plans the first tick."""
        batches: list[Any] = []
        given: np.ndarray | Exception = np.array([micro_batches], dtype=np.int64)
        if self._engine.is_first_stage() or self._engine.is_last_stage():
            try:
                described = []
                for index in range(micro_batches):
                    batch, description = self._read(index, micro_batches)
                    batches.append(batch)
                    described.append(description)
                given = to_message(described)
            except Exception as error:  # whatever it is, the other ranks must not wait for this one
                given = error
        messages = self._agreement.gather_values(given)
        layouts, targets = self._understand(messages)
        if self._weight_loss:
            # The engine averages over micro-batches and replicas.
            self._module.loss_fn.divisor = targets / (micro_batches * self._topology.all_replicas) or 1.0
        loaded = iter(batches)
        replace_next_batch(self._engine, lambda: next(loaded))
        self._planner.begin(ticks, layouts, training=training)

    def _read(self, index: int, micro_batches: int) -> tuple[Any, Any]:
        iterator = self._engine.data_iterator
        if iterator is None:
            raise DistCAConfigError("no data: give train_batch or eval_batch an iterator on the first and last stage")
        try:
            batch = next(iterator)
        except StopIteration:
            raise StopIteration(f"the data ended after {index} of the batch's {micro_batches} micro-batches") from None
        given = batch if self._engine.batch_fn is None else self._engine.batch_fn(batch)
        place = self._topology.replica, self._topology.replicas
        description = describe(batch if isinstance(batch, Mapping) else given, place, self._contract)
        return pipeline_batch(given), description

    def _understand(self, messages: list[np.ndarray]) -> tuple[list[Layout], int]:
        """Layouts of the micro-batches over this rank's servers, and the targets of the batch over all replicas. Every
        rank looks at everything, so that all of them find the same faults."""
        t, counts = self._topology, [int(message[0]) for message in messages]
        if len(set(counts)) > 1:
            raise DistCAConfigError(
                f"the ranks were asked for different numbers of micro-batches, by rank {counts}; give eval_batch the "
                "same `num_micro_batches` on all of them"
            )
        first, last = ([messages[t.rank(s, d)] for d in range(t.all_replicas)] for s in (0, t.all_stages - 1))
        for replica, (a, b) in enumerate(zip(first, last, strict=True)):
            if not np.array_equal(a, b):
                raise DistCAConfigError(
                    f"the first and the last stage of replica {replica} loaded different micro-batches; their loaders "
                    "must yield the same ones in the same order, divided by data-parallel rank, not by global rank"
                )
        replicas = [from_message(message) for message in first]
        groups = {
            start: [merge([replicas[d][m] for d in range(start, start + t.replicas)]) for m in range(counts[0])]
            for start in range(0, t.all_replicas, t.replicas)
        }
        return groups[t.first_replica], sum(m.targets for replica in replicas for m in replica)

    # -- instructions

    def _forward(self, buffer_id: int) -> None:
        with self._with_plans(self._planner.forward()):
            self._forward_pass(self._engine, buffer_id)
        self._serve_forward()

    def _backward(self, buffer_id: int) -> None:
        attention = self._planner.backward()
        self._planner.serve_backward()
        with self._with_plans(attention):
            self._backward_pass(self._engine, buffer_id)
        self._planner.next()

    def _serve_forward(self) -> None:
        self._planner.serve_forward()
        self._planner.next()

    def _serve_backward(self) -> None:
        self._planner.serve_backward()
        self._planner.next()

    @contextmanager
    def _with_plans(self, attention: MicroBatchAttention) -> Iterator[None]:
        """Layers that run in here, for the first time or in recomputation, follow these plans."""
        context, config = self._module.context, self._module.config
        ordinary = attention_name(config)
        context.attention = attention
        set_attention_name(config, NAME)
        try:
            yield
        finally:
            context.attention = None
            set_attention_name(config, "sdpa" if ordinary in (NAME, FIRST) else ordinary)


class _Topology:
    """Which ranks share attention.

    Attributes:
        all_stages, all_replicas: of the whole job.
        stages: the stages that share; replicas: how many replicas of them; first_replica: the first of this rank's.
        replica: this rank's place among these replicas.
        groups: global ranks of every group of servers.
        place: int64 [stages, replicas], the number of each rank of this rank's group; server: this rank's own.
    """

    def __init__(self, engine: PipelineEngine, scope: str, servers: int | None) -> None:
        self._grid = engine.grid
        self.all_stages, self.all_replicas = engine.num_stages, engine.grid.data_parallel_size
        every = list(range(self.all_stages))
        sets = [every] if scope == "grid" else [[stage] for stage in every]
        self.stages = next(some for some in sets if engine.stage_id in some)
        stages = len(self.stages)
        servers = servers or stages * self.all_replicas
        if servers % stages or self.all_replicas % (servers // stages):
            raise DistCAConfigError(
                f"`{BLOCK}.servers` was given {servers}; with scope {scope!r} allowed: {stages} (stages) times a "
                f"divisor of the {self.all_replicas} replicas"
            )
        self.replicas = servers // stages
        mine = engine.grid.get_data_parallel_rank()
        self.first_replica, self.replica = mine // self.replicas * self.replicas, mine % self.replicas
        starts = range(0, self.all_replicas, self.replicas)
        self.groups = [sorted(self._members(some, start).ravel().tolist()) for some in sets for start in starts]
        members = self._members(self.stages, self.first_replica)
        # Process groups number their ranks in the order of global ranks.
        self.place = np.searchsorted(np.sort(members.ravel()), members)
        self.server = int(self.place[self.stages.index(engine.stage_id), self.replica])

    def rank(self, stage: int, replica: int) -> int:
        """The global rank."""
        return self._grid.stage_to_global(stage_id=stage, data=replica)

    def _members(self, stages: list[int], start: int) -> np.ndarray:
        return np.array([[self.rank(s, start + d) for d in range(self.replicas)] for s in stages])


def not_in_two(module: DecoderPipeline, slots: Slots, contract: Contract) -> str:
    """Why micro-batches of a pipeline cannot run as two nano-batches; empty where they can. The same on every rank."""
    reentrant = module.activation_checkpoint_func is not non_reentrant_checkpoint
    if module.activation_checkpoint_interval and reentrant:
        return 'reentrant checkpointing computes gradients once for each; set "pipeline": {"use_reentrant": false}'
    if len({kind.window for kind in slots.kinds}) < len(slots.kinds):
        return "stages have different numbers of attention layers"
    if module.seed_layers:
        return "layers that begin with a seed of their own (seed_layers) would draw the same numbers in both halves"
    if contract.longest_document is not None:
        return "rotary embeddings depend on the longest position of a row, which halves would not share"
    return ""


def check_engine(engine: PipelineEngine) -> None:
    """What can be told before the model's attention is known.

    Raises:
        DistCAConfigError: an engine whose pipeline is none that the plugin knows.
    """
    if not isinstance(engine.module, DecoderPipeline):
        raise DistCAConfigError(
            f"the `{BLOCK}` block works with a pipeline of a HuggingFace decoder; build the module with "
            f"deepspeed_distca.pipeline.DecoderPipeline (given: {type(engine.module).__name__})"
        )
    if engine.grid.model_parallel_size > 1:
        raise DistCAConfigError(f"the `{BLOCK}` block cannot be combined with tensor parallelism in a pipeline")
    if schedule_is_replaced(engine):
        raise DistCAConfigError("the engine's _exec_schedule was replaced by something else")
