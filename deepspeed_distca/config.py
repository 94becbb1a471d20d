# SPDX-License-Identifier: Apache-2.0
"""The ``distca`` block of ds_config.json: every option, what it means and what is allowed.

A key that is left out is chosen automatically. The string "auto" is refused: Accelerate stops at it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepspeed_distca.defaults import GRANULARITY, TOLERANCE

BLOCK = "distca"
_ADVANCED = "advanced"


class DistCAConfigError(ValueError):
    """A ``distca`` block that cannot be used; the message names the key, what was given and what is allowed."""


class _Options(BaseModel):
    # Strict scalars: "0.1" or 1 for true would otherwise be accepted without a word.
    model_config = ConfigDict(strict=True, extra="forbid")


class AdvancedConfig(_Options):
    """Options of ``distca.advanced``: what planning and exchanges are made of."""

    tolerance: float = Field(default=TOLERANCE, ge=0.0, le=1.0, allow_inf_nan=False)
    """ The largest load may exceed the mean by this share (0.005 = 0.5 %) before work is moved, and after. """

    granularity: int = Field(default=GRANULARITY, ge=1)
    """ Query rows a cut is rounded to; 128 is the tile of the flash-attention kernels. """

    min_gain: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """ What balance must save in a layer's forward or backward, less transfers that tasks do not cover, before rows
    are moved, as a share of the time of its linear work and of core attention on the busiest server; all of it
    predicted. Steps in which rows move run at lower clocks, and so do ranks that no longer wait. 0: rows move whatever
    it costs. Left out: 0.04 on GPUs, 0 on CPUs. """

    exchange: Literal["nccl", "peer_copy"] | None = None
    """ How rows travel between GPUs: "nccl", sends and receives over a process group; "peer_copy", copy engines and
    memory that the GPUs of a node share, which takes no multiprocessors from attention. Where "peer_copy" cannot be
    had on every rank, "nccl" is used and a line says why. Left out: "peer_copy" where it can be had, else "nccl",
    and a line says so if `staging_mib` did not fit into memory; "nccl" with pipelines. """

    staging_mib: int = Field(default=1536, ge=1)
    """ MiB of every GPU's memory that `exchange` "peer_copy" sets aside, divided among the other servers by what each
    micro-batch sends them. It should hold what a GPU sends in a layer's backward: rows beyond it travel in several
    goes, and those hardly while attention runs. """

    server_weights: list[int] | None = None
    """ Relative speeds of the data-parallel ranks' devices, a whole number of 0 to 1000000 for each: attention is
    spread so that a layer's linear work and attention are predicted to end at the same time on all of them. A rank of
    weight 0 computes none. Left out: attention is spread equally. """

    max_received_rows: int | None = Field(default=None, ge=1)
    """ The most query and key/value rows that a server may receive for a micro-batch: a cap on memory which may cost
    balance. It is raised only where ranks of weight 0 leave no other way; what a server carries for others of its node
    comes on top. Left out: no cap. """

    node_size: int | None = Field(default=None, ge=1)
    """ GPUs of a node, where that is not what ranks find out: those on one machine are a node. Nodes are
    balanced first, and bytes that cross them are priced by what a NIC carries (the cost model says how much).
    """

    probe: bool = True
    """ Run the model on two handfuls of tiny documents when the engine is made, and refuse it where one document
    changes another's result, or a packed document's is not that of the document alone. """

    pipeline_scope: Literal["stage", "grid"] = "grid"
    """ With pipeline stages, which ranks share attention: "stage", the replicas of one stage, under DeepSpeed's own
    schedule; "grid", all stages and replicas, under a schedule in which all stages are in the same phase at any
    time. """


class DistCAConfig(_Options):
    """Options of the ``distca`` block."""

    enabled: bool = True
    """ Balance core attention over the data-parallel ranks. False leaves DeepSpeed untouched, as no block does. """

    overlap: Literal["none", "local_first", "ping_pong"] | None = None
    """ When rows travel: "none" waits for every exchange, "local_first" hides them under the tasks that stay at home,
    "ping_pong" runs a micro-batch as two nano-batches and hides one's under the other's layers as well. Left out:
    "local_first"; over several nodes "ping_pong", where the model can do it. """

    kernel: Literal["flash_attn_4", "flash_attn_3", "flash_attn_2", "torch_varlen", "reference"] | None = None
    """ What computes core attention. Left out: the best that is installed and fits the device and data type. """

    cost_model: str | None = Field(default=None, min_length=1)
    """ A stored cost model (`ds_distca profile --save FILE`) by which tasks are weighed; rank 0 reads it, and every
    rank that makes a `GlobalPackedLoader` by this block. Left out: what `ds_distca profile` measured on rank 0's
    device, else one shipped for the device, else one of an H200. """

    servers: int | None = Field(default=None, ge=1)
    """ Ranks that share their attention work: consecutive data-parallel ranks, a divisor of their number.
    Left out: all of them. """

    keep_attention: bool | None = None
    """ Keep output and lse of core attention in layers under activation checkpointing, so that recomputation neither
    computes nor exchanges it again. Costs tokens x heads x (v_head_dim x bytes of an element + 4) bytes a layer until
    backward. Pipelines always keep it. Left out: of as many layers as there is memory for on every rank, once two
    steps have shown what training takes; of all on CPUs. """

    token_weighted_loss: bool = True
    """ Weight the model's loss so that its mean over ranks and micro-batches is the mean over all target tokens. """

    timeout_seconds: float = Field(default=600.0, gt=0.0, allow_inf_nan=False)
    """ How long a rank waits for the others before it stops with an error. """

    advanced: AdvancedConfig = Field(default_factory=AdvancedConfig)
    """ What hardly anybody changes. """


_KEYS = tuple(key for key in DistCAConfig.model_fields if key != _ADVANCED)
_ADVANCED_KEYS = tuple(AdvancedConfig.model_fields)

#: Options that were taken out, and why nobody misses them.
_GONE = {
    "check_plan": "plans are always compared over the ranks",
    "min_shard_tokens": "the cost model knows the smallest piece that is worth moving",
}


def parse_config(block: Any) -> DistCAConfig:
    """The validated options of a ``distca`` block.

    Raises:
        DistCAConfigError: not a mapping, an unknown key, one at the wrong level, a wrong type, a value out of range,
            or "auto"; the message tells all that is wrong.
    """
    if isinstance(block, DistCAConfig):
        return block
    if not isinstance(block, Mapping):
        raise DistCAConfigError(f'`{BLOCK}` must be a block of options like {{"enabled": true}}, got {block!r}')
    values, problems = _by_level(block)
    try:
        config = DistCAConfig(**values)
    except ValidationError as error:
        # A value that is none of several things has an error for each of them.
        problems += dict.fromkeys(_explain(item, values) for item in error.errors())
    if problems:
        raise DistCAConfigError("; ".join(problems))
    return config


def get_distca_config(param_dict: Mapping[str, Any]) -> DistCAConfig | None:
    """The options in a whole DeepSpeed config, or None where there is no block or it is disabled."""
    if param_dict.get(BLOCK) is None:
        return None
    config = parse_config(param_dict[BLOCK])
    return config if config.enabled else None


def named_options(config: DistCAConfig) -> dict[str, Any]:
    """Every option's value, for JSON, by the name that errors give it, such as "`distca.advanced.tolerance`"."""
    values = config.model_dump(mode="json")
    advanced = values.pop(_ADVANCED)
    return {f"`{BLOCK}.{key}`": value for key, value in values.items()} | {
        f"`{BLOCK}.{_ADVANCED}.{key}`": value for key, value in advanced.items()
    }


def _by_level(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options of a block, each at its level, but for those that are refused; and what is wrong with the keys."""
    top: dict[str, Any] = {}
    under: dict[str, Any] = {}
    moved, problems = [], []
    inner = block.get(_ADVANCED, {})
    found = []
    if isinstance(inner, Mapping):
        found = [(f"{BLOCK}.{_ADVANCED}", key, value) for key, value in inner.items()]
    found += [(BLOCK, key, value) for key, value in block.items() if key != _ADVANCED]
    for where, key, value in found:
        name = f"`{where}.{key}`"
        if key == "pipeline" and where == BLOCK:
            key, value = "pipeline_scope", value.get("scope", "grid") if isinstance(value, Mapping) else value
        if isinstance(value, str) and value == "auto":
            problems.append(
                f'{name} is "auto", which is not supported: leave the key out and it is chosen automatically'
            )
        elif key in _ADVANCED_KEYS:
            under[key] = value
            if where == BLOCK:
                moved.append(name)
        elif key in _KEYS and where == BLOCK:
            top[key] = value
        elif key in _KEYS:
            problems.append(f'{name} does not belong there: write {_json({key: value})} beside "{_ADVANCED}"')
        elif key in _GONE:
            problems.append(f"{name} was taken out: {_GONE[key]}; remove it")
        else:
            problems.append(_unknown(name, key, value))
    if moved:
        names, belong = " and ".join(moved), "belongs" if len(moved) == 1 else "belong"
        problems.append(f'{names} {belong} under "{_ADVANCED}": write {_json({_ADVANCED: under})}')
    return {**top, _ADVANCED: under if isinstance(inner, Mapping) else inner}, problems


def _unknown(name: str, key: str, value: Any) -> str:
    near = get_close_matches(str(key), [*_KEYS, *_ADVANCED_KEYS], 1)
    levels = f'options: {", ".join(_KEYS)}; under "{_ADVANCED}": {", ".join(_ADVANCED_KEYS)}'
    hint = f"did you mean `{BLOCK}.{f'{_ADVANCED}.' * (near[0] in _ADVANCED_KEYS)}{near[0]}`? " if near else ""
    return f"{name} is not an option (given: {value!r}); {hint}{levels}"


def _explain(item: Any, values: Mapping[str, Any]) -> str:
    where = [str(part) for part in item["loc"]]
    given, allowed = item["input"], item["msg"].removeprefix("Input should be ")
    if where == [_ADVANCED]:
        allowed = 'a block of options like {"tolerance": 0.01}'
    elif "server_weights" in where:  # the error is of one of its items
        where, given = where[:2], values[_ADVANCED]["server_weights"]
        allowed = "a list of whole numbers"
    return f"`{BLOCK}.{'.'.join(where)}` was given {given!r}; allowed: {allowed}"


def _json(values: Mapping[str, Any]) -> str:
    """As it is written inside a block."""
    return json.dumps(values, default=repr)[1:-1]
