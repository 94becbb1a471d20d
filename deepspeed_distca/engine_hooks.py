# SPDX-License-Identifier: Apache-2.0
"""Attaches the plugin to DeepSpeed engines: reads the ``distca`` block, has the ranks meet, makes ``engine.distca``.

Importing ``deepspeed_distca`` wraps ``deepspeed.initialize`` (:func:`install`); an engine whose config has the block
gets an attribute ``engine.distca``. Without the block, or with ``"enabled": false``, the engine is returned as it is,
but that it refuses batches with trees, which no model can attend by itself.
Nothing is added to the model's modules or state: hooks only, which ``engine.distca.detach()`` removes. What it builds
is in ``engine_runtime`` and ``pipeline.runtime``, and for both in ``building``.

DeepSpeed is touched there and here, in ``monitor``, in the rest of ``pipeline`` and in ``huggingface.twice_called``;
what is not public of it, of torch and of transformers goes through ``compat`` alone, which is asked for all of it
first.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

import deepspeed_distca
from deepspeed_distca.attention_server.coordination.agreement import AgreementError
from deepspeed_distca.attention_server.coordination.hello import Hello, Meeting, say_hello
from deepspeed_distca.compat import Need, check
from deepspeed_distca.compat.deepspeed import show_in_config
from deepspeed_distca.config import (
    BLOCK,
    DistCAConfig,
    DistCAConfigError,
    get_distca_config,
    named_options,
    parse_config,
)
from deepspeed_distca.engine_runtime import PreparedDecoder, Runtime, hooked
from deepspeed_distca.layout import Layout, LayoutError
from deepspeed_distca.model_sizes import heads_of
from deepspeed_distca.overlap import needs_of_turns
from deepspeed_distca.pipeline.runtime import PipelineRuntime, PreparedPipeline, check_engine

_ORIGINAL = "_distca_original"
#: Seconds that a rank without a block waits for the others, which may have one.
_QUIET_SECONDS = 30.0
_ATTACHED = "whether the engine has the plugin already"
_GUARDED = "_distca_refuses_trees"


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
        CompatError: a version of torch, DeepSpeed or transformers that lacks a name which is needed and not public.
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
    if not hasattr(engine, _GUARDED):
        setattr(engine, _GUARDED, engine.register_forward_pre_hook(_refuse_trees, with_kwargs=True))
    if options is None or prepared is None:
        return engine
    if isinstance(prepared, PreparedPipeline):
        engine.distca = PipelineRuntime(engine, options, prepared, meeting)
    else:
        earlier = hooked(prepared.decoder)
        if earlier is not None:
            # Hooks of two engines would plan every micro-batch twice, and weigh its loss by neither.
            if dist.get_rank() == 0:
                print("distca: an earlier engine of this model computes core attention without the plugin from now on")
            earlier.detach()
        engine.distca = Runtime(engine, options, prepared, meeting)
    show_in_config(engine, "distca_config", options)
    return engine


def _refuse_trees(engine: DeepSpeedEngine, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises LayoutError where a model would take the branches of a tree for one text."""
    layout, runtime = kwargs.get("layout"), getattr(engine, "distca", None)
    if isinstance(layout, Layout) and layout.has_trees and (runtime is None or runtime.detached):
        raise LayoutError(
            f"a batch with trees was given to an engine without the plugin; only with a `{BLOCK}` block that is "
            "enabled, and not detached, do branches attend to what they go on from"
        )


def _prepare(engine: DeepSpeedEngine, options: DistCAConfig) -> PreparedDecoder | PreparedPipeline:
    """What this rank can find out alone."""
    check(*_needs(engine, options))
    if engine.is_deepcompile_enabled():
        raise DistCAConfigError(
            f"the `{BLOCK}` block cannot be combined with DeepCompile (given: `compile.deepcompile` true): its graphs "
            "end at the plugin's attention, and weights before it were found not to be trained; set "
            "`compile.deepcompile` to false: engine.compile() without it is exact"
        )
    if not isinstance(engine, PipelineEngine):
        return Runtime.prepare(engine, options)
    check_engine(engine)
    heads = heads_of(engine.module.config, next(engine.module.parameters()).dtype.itemsize)
    return PipelineRuntime.prepare(engine, options, heads)


def _needs(engine: DeepSpeedEngine, options: DistCAConfig) -> list[Need]:
    """What is needed of names that are not public."""
    if isinstance(engine, PipelineEngine):
        return ["engine", "pipeline"]
    needs: list[Need] = ["engine"]
    zero_3 = engine.zero_optimization_stage() == 3
    if zero_3:
        needs.append("zero_3")
    if options.overlap == "ping_pong":
        needs += needs_of_turns(engine)
    return needs


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
