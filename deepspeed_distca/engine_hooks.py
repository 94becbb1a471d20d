# SPDX-License-Identifier: Apache-2.0
"""The one place that touches DeepSpeed: reads the ``distca`` block, builds the attention server, attaches it.

Importing ``deepspeed_distca`` wraps ``deepspeed.initialize`` (:func:`install`); an engine whose config has the block
gets an attribute ``engine.distca``. Without the block, or with ``"enabled": false``, the engine is returned untouched.
Nothing is added to the model's modules or state: hooks only, which :meth:`Runtime.detach` removes.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups
from transformers import PreTrainedModel

import deepspeed_distca
from deepspeed_distca.attention_server.agreement import (
    Agreement,
    AgreementError,
    MicroBatch,
    agreement_group,
    fingerprint,
)
from deepspeed_distca.attention_server.exchange.base import exchange_group
from deepspeed_distca.attention_server.exchange.choice import make_exchange
from deepspeed_distca.attention_server.hello import Hello, Meeting, say_hello
from deepspeed_distca.attention_server.kernels import KernelError, select_kernel
from deepspeed_distca.attention_server.plan_request import PlanRequest
from deepspeed_distca.attention_server.server import AttentionServer, NanoBatches
from deepspeed_distca.attention_server.statistics import StepStatistics
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.attention_server.watch import Watch
from deepspeed_distca.config import (
    BLOCK,
    DistCAConfig,
    DistCAConfigError,
    get_distca_config,
    named_options,
    parse_config,
)
from deepspeed_distca.cost_choice import cost_to_say, own_cost_model, said_cost_model
from deepspeed_distca.huggingface.adapter import (
    DecoderHooks,
    UnsupportedModelError,
    attention_modules,
    attention_windows,
    find_decoder,
)
from deepspeed_distca.huggingface.contract import find_contract
from deepspeed_distca.huggingface.ping_pong import PingPong
from deepspeed_distca.huggingface.twice_called import TwiceCalled
from deepspeed_distca.layout import Layout
from deepspeed_distca.monitor import StepMonitor
from deepspeed_distca.pipeline.runtime import PipelineRuntime, PreparedPipeline
from deepspeed_distca.plan_options import of_first_layer, plan_options, weights_of_servers
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.profiles import Choice

_ORIGINAL = "_distca_original"
#: Seconds that a rank without a block waits for the others, which may have one.
_QUIET_SECONDS = 30.0
_ATTACHED = "whether the engine has the plugin already"


def install() -> None:
    """Wraps ``deepspeed.initialize``; calling it again changes nothing."""
    if hasattr(deepspeed.initialize, _ORIGINAL):
        return
    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> tuple:
        try:
            result = original(*args, **kwargs)
        except Exception as error:
            _tell_of(error)
            raise
        attach(result[0])
        return result

    setattr(initialize, _ORIGINAL, original)
    deepspeed.initialize = initialize


def _tell_of(error: Exception) -> None:
    """Ranks whose engine is made must not wait for this one, whose is not."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with suppress(AgreementError):
            say_hello(Hello("unknown", error=f"deepspeed.initialize raised {type(error).__name__}: {error}"), 0.0)


#: By decoder the runtime whose hooks it has. Runtimes hold the decoder, so that they are held weakly as well.
_RUNTIMES: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref[Runtime]] = weakref.WeakKeyDictionary()


def uninstall() -> None:
    """Puts DeepSpeed's own ``initialize`` back. Engines that have a runtime keep it."""
    deepspeed.initialize = getattr(deepspeed.initialize, _ORIGINAL, deepspeed.initialize)


def attach(engine: DeepSpeedEngine, config: DistCAConfig | dict | None = None) -> DeepSpeedEngine:
    """Disaggregates the core attention of an engine's model, as its config's ``distca`` block says. To be called on
    all ranks, also on those without a block: before anything else they tell each other what they run.

    Args:
        engine: what ``deepspeed.initialize`` returned; given back, with ``engine.distca`` set if there is a block. An
            engine that has the plugin already is given back as it is; one that was detached gets it anew.
        config: options to use in place of the engine's block.

    Raises:
        DistCAConfigError: a block that cannot be used, or an engine with which it cannot be combined.
        UnsupportedModelError: a model whose attention cannot be dispatched exactly.
        AgreementError: another rank has no block, another one, another model, or an error; on all ranks, within the
            block's ``timeout_seconds``.
    """
    options, prepared, error = None, None, None
    hello, seconds = Hello("off"), _QUIET_SECONDS
    attached = getattr(engine, "distca", None)
    if attached is not None and attached.detached:
        attached = None
    try:
        given = {BLOCK: config} if config is not None else engine.config
        if attached is not None:
            if config is not None:
                raise DistCAConfigError("the engine has the plugin already; call engine.distca.detach() first")
            hello, seconds = Hello("on", {_ATTACHED: True}), attached.config.timeout_seconds
        elif (options := get_distca_config(given)) is not None:
            seconds = options.timeout_seconds
            prepared = _prepare(engine, options)
            hello = Hello("on", {_ATTACHED: False, **_facts(engine, options), **prepared.same}, prepared.own)
        elif given.get(BLOCK) is not None:
            seconds = min(seconds, parse_config(given[BLOCK]).timeout_seconds)
    except Exception as raised:  # whatever it is, all ranks must know
        error = raised
        hello = Hello("on", error=f"{type(raised).__name__}: {raised}")
    meeting = _meet(hello, seconds, error)
    if attached is not None or options is None:
        return engine
    if isinstance(engine, PipelineEngine):
        engine.distca = PipelineRuntime(engine, options, prepared, meeting)
    else:
        earlier = _hooked(prepared.decoder)
        if earlier is not None:
            # Hooks of two engines would plan every micro-batch twice, and weigh its loss by neither.
            if dist.get_rank() == 0:
                print("distca: an earlier engine of this model computes core attention without the plugin from now on")
            earlier.detach()
        engine.distca = Runtime(engine, options, prepared, meeting)
    engine._config.distca_config = options  # shown in DeepSpeed's dump of its configuration
    return engine


def _prepare(engine: DeepSpeedEngine, options: DistCAConfig) -> PreparedDecoder | PreparedPipeline:
    """What this rank can find out alone."""
    if not isinstance(engine, PipelineEngine):
        return Runtime.prepare(engine, options)
    if options.overlap == "ping_pong":
        raise DistCAConfigError(
            f'`{BLOCK}.overlap` "ping_pong" cannot be combined with pipeline stages, whose layers are not one '
            'forward; allowed: "none", "local_first"'
        )
    module = engine.module
    heads = heads_of(module.config, next(module.parameters()).dtype) if hasattr(module, "config") else None
    return PipelineRuntime.prepare(engine, options, heads)


def _meet(hello: Hello, seconds: float, error: Exception | None) -> Meeting:
    """Says hello, and raises where the ranks cannot go on together: this rank's own error, if it has one."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        try:
            number, hellos = say_hello(hello, seconds)
        except AgreementError:
            if error is not None:
                raise error from None
            raise
        return Meeting(f"engine{number}", hellos or [])
    if error is not None:
        raise error
    return Meeting("alone", [hello])


def _facts(engine: DeepSpeedEngine, options: DistCAConfig) -> dict[str, Any]:
    """What must be the same on all ranks whatever the kind of engine, by the name that an error gives it."""
    return {
        "the version of deepspeed_distca": deepspeed_distca.__version__,
        "the class of the engine": type(engine).__name__,
        **named_options(options),
        "the ZeRO stage": engine.zero_optimization_stage(),
        "the number of gradient accumulation steps": engine.gradient_accumulation_steps(),
        "the kind of device": engine.device.type,
    }


def _hooked(decoder: PreTrainedModel) -> Runtime | None:
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

    def __init__(
        self, engine: DeepSpeedEngine, config: DistCAConfig, prepared: PreparedDecoder, meeting: Meeting
    ) -> None:
        self.config, self.detached = config, False
        self._engine, self._decoder = engine, prepared.decoder
        self._watch = Watch(meeting.name, config.timeout_seconds)
        self._wrapped: dict[str, Any] = {}
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
        _check_engine(engine)
        decoder = find_decoder(engine.module)
        modules = attention_modules(decoder)
        windows = attention_windows(modules)
        heads = heads_of(decoder.config.get_text_config(), next(decoder.parameters()).dtype)
        dtype = _attention_dtype(engine)
        ranks = sorted(dist.get_process_group_ranks(engine.data_parallel_group))
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
        return PreparedDecoder(decoder, modules, windows, heads, choice, same, {"ranks": ranks, **cost_to_say(choice)})

    def _set_up(
        self, engine: DeepSpeedEngine, config: DistCAConfig, prepared: PreparedDecoder, meeting: Meeting
    ) -> None:
        """Collective: makes the groups, and all that lives on them."""
        decoder, modules, windows, heads = prepared.decoder, prepared.modules, prepared.windows, prepared.heads
        watch, timeout = self._watch, timedelta(seconds=config.timeout_seconds)
        choice = said_cost_model(meeting.hellos[0].own, heads, prepared.choice)
        cost, source = choice.cost, choice.source
        rank_groups = [list(ranks) for ranks in sorted({tuple(hello.own["ranks"]) for hello in meeting.hellos})]
        mine = next(g for g in rank_groups if dist.get_rank() in g)
        servers = config.servers or len(mine)
        server_groups = [g[i : i + servers] for g in rank_groups for i in range(0, len(g), servers)]
        self.place = mine.index(dist.get_rank()) % servers, servers
        # First of all: what follows is said and done on groups with a time limit.
        everyone = agreement_group([list(range(dist.get_world_size()))], timeout)
        watch.cover(everyone)
        self._everyone = Agreement(everyone, 1, 0, watch)
        weights = weights_of_servers(config.advanced.server_weights, len(mine), servers, mine.index(dist.get_rank()))
        options = plan_options(config, engine.device, decoder.config.get_text_config(), weights)
        nano_batches = _nano_batches(config, servers, len(mine))
        # The block is the same on all ranks; this is what else plans depend on, but for the weights of their servers.
        common = fingerprint(
            replace(options, server_weights=None), config.advanced.server_weights, cost, windows, nano_batches
        )
        exchanging = exchange_group(server_groups, engine.device, timeout)
        agreeing = everyone if len(rank_groups) == 1 else agreement_group(rank_groups, timeout)
        self._groups = [everyone, exchanging, agreeing]
        if agreeing is not everyone:
            watch.cover(agreeing)
        if engine.device.type == "cuda":
            # Sets the communicator up while all ranks are here: later calls may involve only some of them.
            dist.barrier(exchanging, device_ids=[engine.device.index])
            watch.cover_device(exchanging.abort)
        else:
            watch.cover(exchanging)
        exchange = make_exchange(
            config.advanced.exchange,
            exchanging,
            engine.device,
            timeout=config.timeout_seconds,
            staging_mib=config.advanced.staging_mib,
            watch=watch,
        )
        self.server = AttentionServer(
            agreement=Agreement(agreeing, servers, common, watch),
            exchange=exchange,
            server=self.place[0],
            cost=cost,
            options=options,
            windows=windows,
            kernel=config.kernel,
            local_first=config.overlap != "none",
            check_plan=True,
            accumulation_steps=engine.gradient_accumulation_steps,
            ranks=len(mine),
            step=lambda: engine.global_steps,
            ping_pong=nano_batches,
            watch=watch,
        )
        with self._everyone.all_or_none("use its model"):
            contract = find_contract(
                engine.module,
                decoder,
                modules,
                device=engine.device,
                probe=config.advanced.probe,
                forget=functools.partial(_forget_trace, engine),
            )
        unweighted = config.token_weighted_loss and contract.weighting is None
        if unweighted and "labels" in inspect.signature(decoder.forward).parameters and dist.get_rank() == 0:
            print(
                f"distca: the loss of {type(decoder).__name__} is no mean over tokens that could be weighted: it "
                "stays as it is on every rank",
                flush=True,
            )
        self._hooks = DecoderHooks(
            decoder,
            modules,
            windows,
            self,
            contract=contract,
            weight_loss=config.token_weighted_loss,
            keep_attention=config.keep_attention,
        )
        _RUNTIMES[decoder] = weakref.ref(self)
        self._forward_end = decoder.register_forward_hook(torch.compiler.disable(self._forward_over))
        for name, phase in (("backward", "backward"), ("step", "optimizer step")):
            self._follow(name, phase)
        # An engine that is dropped takes its watch along.
        weakref.finalize(engine, self._watch.close).atexit = False
        self._ping_pong = PingPong(decoder, modules) if config.overlap == "ping_pong" else None
        self._twice_called = None
        if self._ping_pong is not None and engine.zero_optimization_stage() == 3:
            self._twice_called = TwiceCalled(engine.module, self._ping_pong)
        self._monitor = StepMonitor(engine, lambda: self.server.planned, dist.get_rank())
        if dist.get_rank() == 0:
            # Printed, not logged: DeepSpeed's logger shows warnings only, and without this line a run that ignores the
            # block looks like one that honours it.
            kernel = _kernel_in_words(engine, config, heads, windows)
            overlap = config.overlap or "local_first"
            print(
                f"distca: {len(modules)} attention layers of {type(decoder).__name__}{_describe_windows(windows)} "
                f"over {servers} attention servers in {len(server_groups)} group(s); kernel {kernel}, overlap "
                f"{overlap}, exchange {exchange.name}, cost model {source} ({heads.query}/"
                f"{heads.key_value} heads of {heads.head_dim}), tolerance {config.advanced.tolerance:g}",
                flush=True,
            )

    @property
    def stats(self) -> StepStatistics:
        """Statistics of the last step; reading the kernels' time on a GPU waits for them."""
        return self.server.stats

    def request(self, given: MicroBatch | Exception, device: torch.device) -> PlanRequest:
        """See ``huggingface.adapter.Planner``."""
        self._watch.begin()
        request = self.server.request(given, device)
        if isinstance(given, Exception):
            request.result()  # raises: the model could not run on such an input anyway
        return request

    def plan_alone(self, layout: Layout) -> StepPlan:
        """See ``huggingface.adapter.Planner``."""
        return self.server.plan_alone(layout)

    def failed(self, error: BaseException) -> None:
        """See ``huggingface.adapter.Planner``."""
        self._watch.failed(error)

    def _forward_over(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        if model is self._decoder:  # not a copy, which brought this hook along
            self._watch.forward_over()

    def _follow(self, name: str, phase: str) -> None:
        """Wraps a method of this engine alone: what it raises must reach the other ranks."""
        own, watch = getattr(self._engine, name), self._watch

        @functools.wraps(own)
        def followed(*args: Any, **kwargs: Any) -> Any:
            with watch.phase(phase):
                return own(*args, **kwargs)

        setattr(self._engine, name, followed)
        self._wrapped[name] = followed

    def detach(self) -> None:
        """Removes the hooks; the model runs as it did before. ``engine.distca`` stays, out of use, until the plugin is
        attached anew. To be called on all ranks. Attention modules keep their hooks until the last forward is gone
        whose backward may recompute them."""
        if self.detached:
            return
        self.detached = True
        self._watch.close()
        self._forward_end.remove()
        for name, followed in self._wrapped.items():
            if self._engine.__dict__.get(name) is followed:
                del self._engine.__dict__[name]
        if _hooked(self._decoder) is self:
            del _RUNTIMES[self._decoder]
        self._hooks.remove()
        self._monitor.remove()
        for part in (self._ping_pong, self._twice_called):
            if part is not None:
                part.remove()


def _forget_trace(engine: DeepSpeedEngine) -> None:
    """ZeRO-3 records the order in which a step's modules fetch parameters, and expects the next step to keep it."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    coordinator = None if offload is None else offload.get_param_coordinator()
    if coordinator is not None and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def _nano_batches(config: DistCAConfig, servers: int, ranks: int) -> NanoBatches:
    """Which micro-batches run as two nano-batches. Ranks must go through a model's modules in the same order, for
    ZeRO-3's sake and tensor parallelism's, so groups of servers do not decide each for itself."""
    if servers == 1 or config.overlap != "ping_pong":
        return "never"
    return "moved" if servers == ranks else "always"


def _describe_windows(windows: list[int | None]) -> str:
    """ " (3 with windows of 4096, 512 keys)", or nothing where there is none."""
    sizes = sorted({w for w in windows if w})
    if not sizes:
        return ""
    return f" ({sum(bool(w) for w in windows)} with windows of {', '.join(map(str, sizes))} keys)"


def _kernel_in_words(engine: DeepSpeedEngine, config: DistCAConfig, heads: Heads, windows: list[int | None]) -> str:
    """The kernel that layers will get, for the line at start-up; each layer chooses for what it is really given."""
    try:
        return select_kernel(
            config.kernel,
            device=engine.device,
            dtype=_attention_dtype(engine),
            q_heads=heads.query,
            kv_heads=heads.key_value,
            head_dim=heads.head_dim,
            v_head_dim=heads.value_dim,
            spec=AttentionSpec(heads.head_dim**-0.5, windows[0], None),
        ).name
    except KernelError as error:
        return f"none that fits ({error})"


def _attention_dtype(engine: DeepSpeedEngine) -> torch.dtype:
    if getattr(engine, "torch_autocast_enabled", bool)():
        return engine.torch_autocast_dtype()
    return next(engine.module.parameters()).dtype


def heads_of(config: Any, dtype: torch.dtype) -> Heads:
    """The attention heads that a HuggingFace decoder's configuration describes.

    Raises:
        UnsupportedModelError: it does not.
    """
    config = of_first_layer(config)
    query = getattr(config, "num_attention_heads", None)
    if query is None:
        raise UnsupportedModelError(
            f"the configuration of {config.model_type} does not say how many attention heads there are "
            "(num_attention_heads). Set `distca.enabled` to false for this model"
        )
    key_value = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query
    if getattr(config, "qk_nope_head_dim", None):  # multi-head latent attention: every head has its own keys
        key_value, head_dim = query, config.qk_nope_head_dim + config.qk_rope_head_dim
    return Heads(
        query=query,
        key_value=key_value or query,
        head_dim=head_dim,
        value_dim=getattr(config, "v_head_dim", None),
        element_size=dtype.itemsize,
    )


def _check_engine(engine: DeepSpeedEngine) -> None:
    refused = {
        "sequence parallelism (Ulysses, ALST)": groups._get_sequence_parallel_world_size() > 1,
    }
    for what, found in refused.items():
        if found:
            raise DistCAConfigError(f"the `{BLOCK}` block cannot be combined with {what}; remove one of the two")
