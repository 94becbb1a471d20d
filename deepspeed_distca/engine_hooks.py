# SPDX-License-Identifier: Apache-2.0
"""The one place that touches DeepSpeed: reads the ``distca`` block, builds the attention server, attaches it.

Importing ``deepspeed_distca`` wraps ``deepspeed.initialize`` (:func:`install`); an engine whose config has the block
gets an attribute ``engine.distca``. Without the block, or with ``"enabled": false``, the engine is returned untouched.
Nothing is added to the model's modules or state: hooks only, which :meth:`Runtime.detach` removes.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups
from transformers import PreTrainedModel

from deepspeed_distca.attention_server.agreement import Agreement, MicroBatch, agreement_group, fingerprint
from deepspeed_distca.attention_server.exchange import exchange_group
from deepspeed_distca.attention_server.exchange_choice import make_exchange
from deepspeed_distca.attention_server.kernels import KernelError, select_kernel
from deepspeed_distca.attention_server.pending import PendingPlan
from deepspeed_distca.attention_server.runtime import AttentionServer, MicroBatchPlan, NanoBatches
from deepspeed_distca.attention_server.statistics import StepStatistics
from deepspeed_distca.attention_server.tasks import AttentionSpec
from deepspeed_distca.config import BLOCK, DistCAConfig, DistCAConfigError, get_distca_config
from deepspeed_distca.integrations.cost_choice import agreed_cost_model
from deepspeed_distca.integrations.monitor import StepMonitor
from deepspeed_distca.integrations.optional_ping_pong import OptionalPingPong
from deepspeed_distca.integrations.ping_pong import PingPong, row_dependent_rope
from deepspeed_distca.integrations.pipeline.runtime import PipelineRuntime
from deepspeed_distca.integrations.plan_options import plan_options
from deepspeed_distca.integrations.server_weights import agreed_weights, weights_of_servers
from deepspeed_distca.integrations.transformers import (
    DecoderHooks,
    Description,
    attention_modules,
    attention_windows,
    find_decoder,
)
from deepspeed_distca.integrations.twice_called import TwiceCalled
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.heads import Heads

_ORIGINAL = "_distca_original"


def install() -> None:
    """Wraps ``deepspeed.initialize``; calling it again changes nothing."""
    if hasattr(deepspeed.initialize, _ORIGINAL):
        return
    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> tuple:
        result = original(*args, **kwargs)
        attach(result[0])
        return result

    setattr(initialize, _ORIGINAL, original)
    deepspeed.initialize = initialize


#: By decoder the runtime whose hooks it has. Runtimes hold the decoder, so that they are held weakly as well.
_RUNTIMES: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref[Runtime]] = weakref.WeakKeyDictionary()


def uninstall() -> None:
    """Puts DeepSpeed's own ``initialize`` back. Engines that have a runtime keep it."""
    deepspeed.initialize = getattr(deepspeed.initialize, _ORIGINAL, deepspeed.initialize)


def attach(engine: DeepSpeedEngine, config: DistCAConfig | dict | None = None) -> DeepSpeedEngine:
    """Disaggregates the core attention of an engine's model, as its config's ``distca`` block says. Collective.

    Args:
        engine: what ``deepspeed.initialize`` returned; given back, with ``engine.distca`` set if there is a block.
        config: options to use in place of the engine's block.

    Raises:
        DistCAConfigError: a block that cannot be used, or an engine with which it cannot be combined.
        UnsupportedModelError: a model whose attention cannot be dispatched exactly.
    """
    options = get_distca_config({BLOCK: config} if config is not None else engine.config)
    if options is None or getattr(engine, "distca", None) is not None:
        return engine
    _check_engine(engine)
    if isinstance(engine, PipelineEngine):
        if options.overlap == "ping_pong":
            raise DistCAConfigError(
                f'`{BLOCK}.overlap` "ping_pong" cannot be combined with pipeline stages, whose layers are not one '
                'forward; allowed: "none", "local_first"'
            )
        module = engine.module
        heads = heads_of(module.config, next(module.parameters()).dtype) if hasattr(module, "config") else None
        engine.distca = PipelineRuntime(engine, options, heads)
    else:
        earlier = _hooked(find_decoder(engine.module))
        if earlier is not None:
            # Hooks of two engines would plan every micro-batch twice, and weigh its loss by neither.
            if dist.get_rank() == 0:
                print("distca: an earlier engine of this model computes core attention without the plugin from now on")
            earlier.detach()
        engine.distca = Runtime(engine, options)
    engine._config.distca_config = options  # shown in DeepSpeed's dump of its configuration
    return engine


def _hooked(decoder: PreTrainedModel) -> Runtime | None:
    """The runtime whose hooks a decoder has."""
    found = _RUNTIMES.get(decoder)
    return None if found is None else found()


class Runtime:
    """``engine.distca``: plans the engine's micro-batches and tells how it went.

    Attributes:
        config: the options in force.
        server_weights: of the data-parallel ranks, as given or as measured; None where none were asked for.
        server: this rank's attention server.
        place: its number among the servers that share attention, and how many these are.
    """

    def __init__(self, engine: DeepSpeedEngine, config: DistCAConfig) -> None:
        self._decoder = decoder = find_decoder(engine.module)
        modules = attention_modules(decoder)
        windows = attention_windows(modules)
        heads = heads_of(decoder.config.get_text_config(), next(decoder.parameters()).dtype)
        dtype = _attention_dtype(engine)
        choice = agreed_cost_model(config, heads, device=engine.device, dtype=dtype, window=windows[0])
        cost, source = choice.cost, choice.source
        self.config = config
        timeout = timedelta(seconds=config.timeout_seconds)
        rank_groups = _data_parallel_groups(engine)
        mine = next(g for g in rank_groups if dist.get_rank() in g)
        servers = config.servers or len(mine)
        if len(mine) % servers:
            raise DistCAConfigError(
                f"`{BLOCK}.servers` was given {servers}; allowed: a divisor of the {len(mine)} data-parallel ranks"
            )
        server_groups = [g[i : i + servers] for g in rank_groups for i in range(0, len(g), servers)]
        self.place = mine.index(dist.get_rank()) % servers, servers
        self.server_weights = agreed_weights(config, engine.device, rank_groups, servers)
        weights = weights_of_servers(self.server_weights, len(mine), servers, mine.index(dist.get_rank()))
        options = plan_options(config, engine.device, decoder.config.get_text_config(), weights)
        nano_batches = _nano_batches(config, engine, decoder, servers, len(mine))
        # All ranks have the same options but for the weights of their servers.
        common = fingerprint(
            replace(options, server_weights=None),
            self.server_weights,
            cost,
            windows,
            config.kernel,
            config.token_weighted_loss,
            config.keep_attention,
            nano_batches,
        )
        self._groups = [exchange_group(server_groups, engine.device, timeout)]
        agreement = agreement_group(rank_groups, timeout)
        self._groups.append(agreement)
        if engine.device.type == "cuda":
            # Sets the communicator up while all ranks are here: later calls may involve only some of them.
            dist.barrier(self._groups[0], device_ids=[engine.device.index])
        exchange = make_exchange(
            config.exchange,
            self._groups[0],
            engine.device,
            timeout=config.timeout_seconds,
            staging_mib=config.staging_mib,
        )
        self.server = AttentionServer(
            agreement=Agreement(agreement, servers, common),
            exchange=exchange,
            server=self.place[0],
            cost=cost,
            options=options,
            windows=windows,
            kernel=config.kernel,
            local_first=config.overlap != "none",
            check_plan=config.check_plan,
            accumulation_steps=engine.gradient_accumulation_steps,
            ranks=len(mine),
            step=lambda: engine.global_steps,
            ping_pong=nano_batches,
        )
        self._hooks = DecoderHooks(
            decoder,
            modules,
            windows,
            self,
            weight_loss=config.token_weighted_loss,
            keep_attention=config.keep_attention,
        )
        _RUNTIMES[decoder] = weakref.ref(self)
        self._ping_pong: PingPong | OptionalPingPong | None = None
        if config.overlap == "ping_pong":
            self._ping_pong = PingPong(decoder, modules)
        elif nano_batches == "exposed":
            self._ping_pong = OptionalPingPong(decoder, modules, engine.module)
        self._twice_called = None
        if isinstance(self._ping_pong, PingPong) and engine.zero_optimization_stage() == 3:
            self._twice_called = TwiceCalled(engine.module, self._ping_pong)
        self._monitor = StepMonitor(engine, lambda: self.server.planned, dist.get_rank())
        if dist.get_rank() == 0:
            # Printed, not logged: DeepSpeed's logger shows warnings only, and without this line a run that ignores the
            # block looks like one that honours it.
            kernel = _kernel_in_words(engine, config, heads, windows)
            overlap = "local_first or ping_pong" if nano_batches == "exposed" else config.overlap or "local_first"
            print(
                f"distca: {len(modules)} attention layers of {type(decoder).__name__}{_describe_windows(windows)} "
                f"over {servers} attention servers in {len(server_groups)} group(s); kernel {kernel}, overlap "
                f"{overlap}, exchange {exchange.name}, cost model {source} ({heads.query}/"
                f"{heads.key_value} heads of {heads.head_dim}), tolerance {config.tolerance:g}",
                flush=True,
            )

    @property
    def stats(self) -> StepStatistics:
        """Statistics of the last step; reading the kernels' time on a GPU waits for them."""
        return self.server.stats

    def plan(self, description: Description | Exception, device: torch.device) -> tuple[PendingPlan, torch.Tensor]:
        """See ``integrations.transformers.Planner``."""
        given = description
        if isinstance(description, Description):
            optional = isinstance(self._ping_pong, OptionalPingPong)
            in_two = optional and self._ping_pong.ready(self.server.favoured_two)
            given = MicroBatch(description.layout, description.targets, description.step_targets, in_two)
        pending = PendingPlan(self.server.gather(given), self.server.plan, device)
        if isinstance(given, Exception):
            pending.result()  # raises: the model could not run on such an input anyway
        return pending, pending.divisor

    def plan_alone(self, layout: Layout, device: torch.device) -> MicroBatchPlan:
        """See ``integrations.transformers.Planner``."""
        return self.server.plan_alone(layout)

    def detach(self) -> None:
        """Removes the hooks; the model runs as it did before. ``engine.distca`` stays, out of use. Attention modules
        keep theirs until the last forward is gone whose backward may recompute them."""
        if _hooked(self._decoder) is self:
            del _RUNTIMES[self._decoder]
        self._hooks.remove()
        self._monitor.remove()
        for part in (self._ping_pong, self._twice_called):
            if part is not None:
                part.remove()


def _nano_batches(
    config: DistCAConfig, engine: DeepSpeedEngine, decoder: PreTrainedModel, servers: int, ranks: int
) -> NanoBatches:
    """Which micro-batches run as two nano-batches. Ranks must go through a model's modules in the same order, for
    ZeRO-3's sake and tensor parallelism's, so groups of servers do not decide each for itself."""
    if servers == 1 or config.overlap in ("none", "local_first"):
        return "never"
    if config.overlap == "ping_pong":
        return "moved" if servers == ranks else "always"
    possible = (
        servers == dist.get_world_size()
        # Its bookkeeping would need hooks on every module (``TwiceCalled``).
        and engine.zero_optimization_stage() < 3
        # DeepSpeed's own experts have room for so many tokens of a call.
        and not engine.has_moe_layers
        and row_dependent_rope(decoder.config.get_text_config()) is None
        # Without GPUs the cost model is another device's, unless one was named.
        and (engine.device.type == "cuda" or config.cost_model is not None)
    )
    return "exposed" if possible else "never"


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
    """The attention heads that a HuggingFace decoder's configuration describes."""
    query = config.num_attention_heads
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


def _data_parallel_groups(engine: DeepSpeedEngine) -> list[list[int]]:
    """The global ranks of every data-parallel group, the same list on all ranks. Collective."""
    world = dist.get_world_size()
    mine = torch.full((world,), -1, dtype=torch.int64, device=engine.device)
    members = sorted(dist.get_process_group_ranks(engine.data_parallel_group))
    mine[: len(members)] = torch.tensor(members, device=engine.device)
    gathered = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(gathered, mine)
    rows = torch.stack(gathered).cpu().tolist()
    return [list(g) for g in sorted({tuple(r for r in row if r >= 0) for row in rows})]
