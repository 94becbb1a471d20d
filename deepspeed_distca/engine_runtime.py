# SPDX-License-Identifier: Apache-2.0
"""``engine.distca`` of an engine without pipeline stages: gives its micro-batches their plans."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import PreTrainedModel

from deepspeed_distca.attention_server.coordination.agreement import MicroBatch
from deepspeed_distca.attention_server.coordination.hello import Meeting, machine
from deepspeed_distca.attention_server.coordination.watch import Watch
from deepspeed_distca.attention_server.kernels import KernelError
from deepspeed_distca.attention_server.phase_planner import MicroBatchPlanner
from deepspeed_distca.attention_server.plan_request import PlanRequest
from deepspeed_distca.attention_server.statistics import StepStatistics
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.building import Sharing, attention_dtype, build_server, describe_nodes
from deepspeed_distca.compat.deepspeed import forget_trace, sequence_parallel_size
from deepspeed_distca.config import BLOCK, DistCAConfig, DistCAConfigError
from deepspeed_distca.cost_choice import choose_kernel, cost_to_say, own_cost_model, said_cost_model
from deepspeed_distca.huggingface.adapter import DecoderHooks
from deepspeed_distca.huggingface.contract import Contract, find_contract
from deepspeed_distca.huggingface.decoders import (
    attention_modules,
    attention_windows,
    find_decoder,
)
from deepspeed_distca.huggingface.early_gradients import EarlyGradients
from deepspeed_distca.huggingface.kept_attention import KeptAttention
from deepspeed_distca.huggingface.kept_layers import KeptLayers, memory_of
from deepspeed_distca.layout import Layout
from deepspeed_distca.model_sizes import UnsupportedModelError, heads_of
from deepspeed_distca.monitor import StepMonitor
from deepspeed_distca.overlap import Overlap
from deepspeed_distca.plan_options import plan_options, weights_of_servers
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.profiles import Choice

logger = logging.getLogger(__name__)

#: By decoder the runtime whose hooks it has. Runtimes hold the decoder, so that they are held weakly as well.
_RUNTIMES: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref[Runtime]] = weakref.WeakKeyDictionary()


def hooked(decoder: PreTrainedModel) -> Runtime | None:
    """The runtime whose hooks a decoder has."""
    found = _RUNTIMES.get(decoder)
    return None if found is None else found()


@dataclass(frozen=True)
class PreparedDecoder:
    """What a rank knows of its engine's model before it meets the others.

    Attributes:
        choice: the cost model, on rank 0 alone.
        same, own: what it says of itself: see :class:`Hello`.
    """

    decoder: PreTrainedModel
    modules: list[torch.nn.Module]
    windows: list[int | None]
    heads: Heads
    choice: Choice | None
    same: dict[str, Any]
    own: dict[str, Any]


class Runtime:
    """``engine.distca``: plans the engine's micro-batches and tells how it went.

    Attributes:
        config: the options in force.
        server: this rank's attention server.
        detached: whether it is out of use.
        place: its number among the servers that share attention, and how many these are.
    """

    _early_gradients: EarlyGradients | None

    def __init__(
        self, engine: DeepSpeedEngine, config: DistCAConfig, prepared: PreparedDecoder, meeting: Meeting
    ) -> None:
        self.config, self.detached = config, False
        self._engine, self._decoder = engine, prepared.decoder
        self._watch = Watch(meeting.name, config.timeout_seconds)
        # Of the micro-batches of an optimizer step until now, their targets here and what they say of the step's.
        self._targets, self._said, self._warned_of_steps = 0, set[int | None](), False
        try:
            with self._watch.phase("attach"):
                self._set_up(engine, config, prepared, meeting)
        except BaseException:
            self._watch.close()
            raise

    @staticmethod
    def prepare(engine: DeepSpeedEngine, config: DistCAConfig) -> PreparedDecoder:
        """All that this rank can find out about its engine alone, before it meets the others.

        Raises:
            DistCAConfigError, UnsupportedModelError: see :func:`attach`.
        """
        if sequence_parallel_size() > 1:
            raise DistCAConfigError(
                f"the `{BLOCK}` block cannot be combined with sequence parallelism (Ulysses, ALST); remove one of the "
                "two"
            )
        decoder = find_decoder(engine.module)
        modules = attention_modules(decoder)
        windows = attention_windows(modules)
        ranks = sorted(dist.get_process_group_ranks(engine.data_parallel_group))
        shards = dist.get_world_size() // len(ranks)
        heads = heads_of(decoder.config.get_text_config(), next(decoder.parameters()).dtype.itemsize, shards)
        dtype = attention_dtype(engine)
        if len(ranks) % (config.servers or 1):
            raise DistCAConfigError(
                f"`{BLOCK}.servers` was given {config.servers}; allowed: a divisor of the {len(ranks)} data-parallel "
                "ranks"
            )
        same = {
            "the class of the model": type(decoder).__name__,
            "the number of attention layers": len(modules),
            "the windows of attention layers": windows,
            "the attention heads": asdict(heads),
            "the data type of attention": str(dtype),
            "the number of data-parallel ranks": len(ranks),
        }
        choice = own_cost_model(config, heads, device=engine.device, dtype=dtype, window=windows[0])
        own = {"ranks": ranks, "machine": machine(), **cost_to_say(choice)}
        return PreparedDecoder(decoder, modules, windows, heads, choice, same, own)

    def _set_up(
        self, engine: DeepSpeedEngine, config: DistCAConfig, prepared: PreparedDecoder, meeting: Meeting
    ) -> None:
        """Collective: makes the groups, and all that lives on them."""
        decoder, modules, windows, heads = prepared.decoder, prepared.modules, prepared.windows, prepared.heads
        choice = said_cost_model(meeting.hellos[0].own, heads, prepared.choice)
        sharing = Sharing.of_replicas([hello.own["ranks"] for hello in meeting.hellos], config.servers)
        self._servers = sharing.own
        self.place, self._shards = (sharing.server, sharing.servers), sharing.shards
        machines = {rank: meeting.hellos[rank].own["machine"] for rank in sharing.own}
        replica = prepared.own["ranks"].index(dist.get_rank())
        weights = weights_of_servers(config.advanced.server_weights, sharing.replicas, sharing.servers, replica)
        options = plan_options(
            config, engine.device, decoder.config.get_text_config(), weights, machines, sharing.shards
        )
        built = build_server(
            engine,
            config,
            sharing,
            self._watch,
            cost=choice.cost,
            options=options,
            windows=windows,
            # All but the weights and nodes of this rank's servers, which other ranks know as those of all.
            common=(
                replace(options, server_weights=None, topology=None),
                config.advanced.node_size,
                config.advanced.server_weights,
                choice.cost,
                windows,
            ),
            exchange=config.advanced.exchange,
        )
        self.server, self._everyone, self._groups = built.server, built.everyone, built.groups
        with self._everyone.all_or_none("use its model"), _first_check_kept(engine):
            contract = find_contract(
                engine.module,
                decoder,
                modules,
                device=engine.device,
                probe=config.advanced.probe,
                forget=functools.partial(forget_trace, engine),
            )
        self._weigh_loss(contract)
        self._hooks = DecoderHooks(
            decoder,
            modules,
            self,
            contract=contract,
            weight_loss=config.token_weighted_loss,
            outer=engine.module,
        )
        self._kept_layers = KeptLayers(
            0 if config.keep_attention is False else len(modules),
            replace(heads, element_size=attention_dtype(engine).itemsize).return_bytes,
            lambda: engine.global_steps - engine.skipped_steps,
            # Whoever has decided it needs no memory to be known.
            memory_of(engine.device) if config.keep_attention is None else None,
        )
        self._kept_said = 2 * len(modules) + 1 if config.keep_attention is None and dist.get_rank() == 0 else 0
        _RUNTIMES[decoder] = weakref.ref(self)
        self._forward_end = decoder.register_forward_hook(torch.compiler.disable(self._forward_over))
        self._monitor = StepMonitor(engine, lambda: self.server.planned, dist.get_rank())
        self._unfollow = [_follow(engine, "backward", self._in_backward), _follow(engine, "step", self._in_step)]
        # An engine that is dropped takes its watch along.
        weakref.finalize(engine, self._watch.close).atexit = False
        several_nodes = options.nodes is not None and sharing.servers == sharing.replicas
        self._overlap = Overlap(engine, decoder, modules, contract, config.overlap, tries_two=several_nodes)
        if dist.get_rank() == 0:
            try:
                kernel = choose_kernel(config.kernel, heads, engine.device, attention_dtype(engine), windows[0]).name
            except KernelError as error:
                kernel = f"none that fits ({error})"
            # Printed, not logged: DeepSpeed's logger shows warnings only, and without this line a run that ignores the
            # block looks like one that honours it.
            print(
                f"distca: {len(modules)} attention layers of {type(decoder).__name__}{_describe_windows(windows)} "
                f"over {sharing.servers} attention servers in {len(sharing.groups)} group(s)"
                f"{describe_nodes(options, choice.cost)}; kernel {kernel}, overlap {self._overlap.name}, exchange "
                f"{built.exchange}, cost model {choice.source} ({heads.query}/{heads.key_value} heads of "
                f"{heads.head_dim}), tolerance {config.advanced.tolerance:g}",
                flush=True,
            )

    def _weigh_loss(self, contract: Contract) -> None:
        """Prepares for a loss that is weighted over ranks and micro-batches, or says that it cannot be."""
        decoder, self._early_gradients = self._decoder, None
        if not self.config.token_weighted_loss:
            return
        if contract.weighting is None:
            if "labels" in inspect.signature(decoder.forward).parameters and dist.get_rank() == 0:
                print(
                    f"distca: the loss of {type(decoder).__name__} is no mean over tokens that could be weighted: it "
                    "stays as it is on every rank",
                    flush=True,
                )
        elif contract.weighting == "mean" or self._engine.gradient_accumulation_steps() > 1:
            self._early_gradients = EarlyGradients(decoder, self.failed)

    @property
    def stats(self) -> StepStatistics:
        """Statistics of the last step; reading the kernels' time on a GPU waits for them."""
        return self.server.stats

    @property
    def history(self) -> list[StepStatistics]:
        """Of the last 1000 steps, what was planned, and how long each took of the host's time: never waits for the
        device. ``deepspeed_distca.report.write_run`` makes a page of it."""
        return self.server.history

    @property
    def planner(self) -> MicroBatchPlanner:
        """Plans micro-batches as this engine does: for ``GlobalPackedLoader.plan_ahead``."""
        return self.server.planner(in_two=self._overlap.in_two)

    def request(self, given: MicroBatch | Exception, device: torch.device) -> PlanRequest:
        """See ``huggingface.adapter.Planner``."""
        self._watch.begin()
        if isinstance(given, MicroBatch):
            tokens = given.layout.tokens
            mine = int(tokens[self.place[0] if len(tokens) > 1 else 0])
            in_two = given.in_two and self._overlap.ready
            self._targets += given.targets
            self._said.add(given.step_targets)
            given = replace(given, kept_layers=self._kept_layers.affordable(mine), in_two=in_two)
        request = self.server.request(given, device)
        if isinstance(given, Exception):
            request.result()  # raises: the model could not run on such an input anyway
        elif self._shards > 1:
            # Shards may need each other before the first layer's attention (embeddings), where whoever learns of
            # another rank's error only then is waited for.
            try:
                request.result()
            except Exception as error:
                self._watch.failed(error)
                raise
        return request

    def _compare_step_targets(self) -> None:
        """Warns, once, where the micro-batches of an optimizer step that ends have said something else of its targets
        than what they had."""
        said, self._said, targets, self._targets = self._said, set(), self._targets, 0
        wrong = len(said) > 1 or any(number is not None and targets < number for number in said)
        if wrong and targets and not self._warned_of_steps:
            self._warned_of_steps = True
            numbers = " and ".join(sorted(map(str, said)))
            logger.warning(
                "distca: an optimizer step had %d targets on this rank, but its micro-batches gave step_targets %s. "
                "These are the rank's targets over all micro-batches of the step, the same number in each "
                "(AccumulationLoader counts them, given gradient_accumulation_steps of the engine); as it is, the "
                "losses do not add up to the mean over the step's targets",
                targets,
                numbers,
            )

    def plan_alone(self, layout: Layout) -> StepPlan:
        """See ``huggingface.adapter.Planner``."""
        return self.server.plan_alone(layout)

    def kept(self, kept: KeptAttention) -> None:
        """See ``huggingface.adapter.Planner``."""
        self._kept_layers.note(kept, kept.wanted > 0)
        self.server.note_kept(len(kept))
        self._overlap.forward_over()
        if kept.wanted and self._kept_layers.measured and 2 * len(kept) < self._kept_said:
            self._kept_said = len(kept)  # and again when it is less than half of that
            print(
                f"distca: there is memory to keep core attention of {len(kept)} of {kept.wanted} checkpointed layers; "
                "recomputation repeats that of the others (`keep_attention` is left out)",
                flush=True,
            )

    def failed(self, error: BaseException) -> None:
        """See ``huggingface.adapter.Planner``."""
        self._watch.failed(error)

    def _forward_over(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        if model is self._decoder:  # not a copy, which brought this hook along
            self._compare_layers()
            self._watch.forward_over()

    def _compare_layers(self) -> None:
        """Where this rank's forward left attention layers out, or went through some again: what is exchanged in each
        would meet that of another layer, or of backward, if the other servers did not do the same."""
        others = self._watch.other_layers(self._servers) if self.server.moving else None
        if others is not None:
            error = UnsupportedModelError(
                f"this rank's forward went through {self._watch.layers}, but "
                f"{others}. Ranks compute each other's attention layer by layer: all must leave out as many (draw "
                f"them from the same seed on all ranks), or `{BLOCK}.enabled` be false"
            )
            self._watch.failed(error)
            raise error

    # What these methods of the engine raise must reach the other ranks.

    def _in_backward(self) -> AbstractContextManager[None]:
        self._hooks.backward_begins()
        return self._watch.phase("backward")

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        if self._engine.is_gradient_accumulation_boundary():
            self._compare_step_targets()
        with self._monitor.step(), self._watch.phase("optimizer step"):
            yield

    def detach(self) -> None:
        """Removes the hooks; the model runs as it did before. ``engine.distca`` stays, out of use, until the plugin is
        attached anew. To be called on all ranks. Attention modules keep their hooks until the last forward is gone
        whose backward may recompute them."""
        if self.detached:
            return
        self.detached = True
        self._watch.close()
        self._forward_end.remove()
        for unfollow in self._unfollow:
            unfollow()
        if hooked(self._decoder) is self:
            del _RUNTIMES[self._decoder]
        self._hooks.remove()
        self._overlap.remove()
        if self._early_gradients is not None:
            self._early_gradients.remove()


def _follow(engine: Any, name: str, around: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Runs a method of this engine alone within a context, until what is returned is called. That puts back what was
    there, unless somebody else has wrapped the method since: his wrapper stays, and goes on to what was there."""
    own, earlier, ended = getattr(engine, name), vars(engine).get(name), False

    @functools.wraps(own)
    def followed(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if ended else around():
            return own(*args, **kwargs)

    def end() -> None:
        nonlocal ended
        ended = True
        if vars(engine).get(name) is not followed:
            return
        if earlier is None:
            delattr(engine, name)
        else:
            setattr(engine, name, earlier)

    setattr(engine, name, followed)
    return end


def _describe_windows(windows: list[int | None]) -> str:
    """ " (3 with windows of 4096, 512 keys)", or nothing where there is none."""
    sizes = sorted({w for w in windows if w})
    if not sizes:
        return ""
    return f" ({sum(bool(w) for w in windows)} with windows of {', '.join(map(str, sizes))} keys)"


@contextmanager
def _first_check_kept(engine: DeepSpeedEngine) -> Iterator[None]:
    """DeepSpeed compares the arguments of tensor-parallel ranks in their first forward, and then no longer: tiny
    forwards are not to be that one."""
    check = getattr(engine, "first_dataloader_check", None)
    if check is not None:
        engine.first_dataloader_check = SimpleNamespace(remove=lambda: None)
    try:
        yield
    finally:
        if check is not None:
            engine.first_dataloader_check = check
