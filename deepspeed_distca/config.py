# SPDX-License-Identifier: Apache-2.0
"""The ``distca`` block of ds_config.json: every option, what it means and what is allowed.

A key that is left out is chosen automatically. The string "auto" is refused: Accelerate stops at it and DeepSpeed's
config model drops it without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ConfigDict, Field, ValidationError

BLOCK = "distca"


class DistCAConfigError(ValueError):
    """A ``distca`` block that cannot be used; the message names the key, what was given and what is allowed."""


class PipelineConfig(DeepSpeedConfigModel):
    """Options of ``distca.pipeline``, for engines with pipeline stages."""

    model_config = ConfigDict(strict=True, extra="forbid")

    scope: Literal["stage", "grid"] = "grid"
    """ Which ranks share attention: "stage", the replicas of one stage, under DeepSpeed's own schedule; "grid", all
    stages and replicas, under a schedule in which all stages are in the same phase at any time. Left out: "grid". """

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(strict=True, **data)


class DistCAConfig(DeepSpeedConfigModel):
    """Options of the ``distca`` block."""

    # Strict scalars: "0.1" or 1 for true would otherwise be accepted without a word.
    model_config = ConfigDict(strict=True, extra="forbid")

    enabled: bool = True
    """ Balance core attention over the data-parallel ranks. False leaves DeepSpeed untouched, as no block does. """

    tolerance: float = Field(0.005, ge=0.0, le=1.0, allow_inf_nan=False)
    """ The largest load may exceed the mean by this share (0.005 = 0.5 %) before work is moved, and after. Others wait
    for that share in every layer; what a larger one saves is bytes, a few percent of them on up to 8 servers. """

    granularity: int = Field(128, ge=1)
    """ Query rows a cut is rounded to; 128 is the tile of the flash-attention kernels. """

    min_shard_tokens: int | None = Field(None, ge=1)
    """ Query rows below which no piece of a document is moved. Left out: one granule. """

    min_gain: float | None = Field(None, ge=0.0, allow_inf_nan=False)
    """ What balance must save in a layer's forward or backward, less transfers that tasks do not cover, before rows
    are moved, as a share of the time of its linear work and of core attention on the busiest server; all of it
    predicted. Steps in which rows move run at lower clocks, and so do ranks that no longer wait. 0: rows move whatever
    it costs. Left out: 0.04 on GPUs, 0 on CPUs. """

    kernel: Literal["flash_attn_4", "flash_attn_3", "flash_attn_2", "torch_varlen", "reference"] | None = None
    """ What computes core attention. Left out: the best that is installed and fits the device and data type. """

    overlap: Literal["none", "local_first", "ping_pong"] | None = None
    """ When rows travel: "none" waits for every exchange, "local_first" hides them under the tasks that stay at home,
    "ping_pong" runs a micro-batch as two nano-batches and hides one's under the other's layers as well. Left out:
    "local_first". """

    exchange: Literal["nccl", "peer_copy"] | None = None
    """ How rows travel between GPUs: "nccl", sends and receives over a process group; "peer_copy", copy engines and
    memory that the GPUs of a node share, which takes no multiprocessors from attention. Where "peer_copy" cannot be
    had on every rank, "nccl" is used and a line says why. Left out: "peer_copy" where it can be had, else "nccl",
    and a line says so if `staging_mib` did not fit into memory; "nccl" with pipelines. """

    staging_mib: int = Field(1536, ge=1)
    """ MiB of every GPU's memory that `exchange` "peer_copy" sets aside, divided among the other servers by what each
    micro-batch sends them. It should hold what a GPU sends in a layer's backward: rows beyond it travel in several
    goes, and those hardly while attention runs. """

    cost_model: str | None = Field(None, min_length=1)
    """ A stored cost model (`ds_distca profile --save FILE`) by which tasks are weighed; rank 0 reads it. Left out:
    what `ds_distca profile` measured on rank 0's device, else one shipped for the device, else one of an H200. """

    servers: int | None = Field(None, ge=1)
    """ Ranks that share their attention work: consecutive data-parallel ranks, a divisor of their number.
    Left out: all of them. """

    server_weights: list[int] | None = None
    """ Relative speeds of the data-parallel ranks' devices, a whole number of 0 to 1000000 for each: attention is
    spread so that a layer's linear work and attention are predicted to end at the same time on all of them. A rank of
    weight 0 computes none. Left out: attention is spread equally. """

    max_received_rows: int | None = Field(None, ge=1)
    """ The most query and key/value rows that a server may receive for a micro-batch: a cap on memory which may cost
    balance. It is raised only where ranks of weight 0 leave no other way. Left out: no cap. """

    check_plan: bool = True
    """ Compare a digest of the plan over all ranks before it is used; a mismatch is an error on every rank. """

    token_weighted_loss: bool = True
    """ Weight the model's loss so that its mean over ranks and micro-batches is the mean over all target tokens. """

    keep_attention: bool = True
    """ Keep output and lse of core attention in layers under activation checkpointing, so that recomputation neither
    computes nor exchanges it again. Costs tokens x heads x (v_head_dim x bytes of an element + 4) bytes a layer until
    backward. Pipelines always keep it. """

    probe: bool = True
    """ Run the model on two handfuls of tiny documents when the engine is made, and refuse it where one document
    changes another's result, or a packed document's is not that of the document alone. """

    pipeline: PipelineConfig | None = None
    """ Pipeline parallelism; other engines pay no attention to it. """

    timeout_seconds: float = Field(600.0, gt=0.0, allow_inf_nan=False)
    """ How long a rank waits for the others before it stops with an error. """

    def __init__(self, strict: bool = False, **data: Any) -> None:
        # DeepSpeedConfigModel would drop "auto"; strict=True keeps it, and it is refused as a wrong value.
        super().__init__(strict=True, **data)


def parse_config(block: Any) -> DistCAConfig:
    """The validated options of a ``distca`` block.

    Raises:
        DistCAConfigError: not a mapping, an unknown key, a wrong type, a value out of range, or "auto".
    """
    if isinstance(block, DistCAConfig):
        return block
    if not isinstance(block, Mapping):
        raise DistCAConfigError(f'`{BLOCK}` must be a block of options like {{"enabled": true}}, got {block!r}')
    problems = [
        f'`{BLOCK}.{key}` is "auto", which is not supported: leave the key out and it is chosen automatically'
        for key, value in block.items()
        if value == "auto"
    ]
    if not problems:
        try:
            return DistCAConfig(**block)
        except ValidationError as error:
            # A value that is none of several things has an error for each of them.
            problems = list(dict.fromkeys(_explain(item, block) for item in error.errors()))
    raise DistCAConfigError("; ".join(problems))


def get_distca_config(param_dict: Mapping[str, Any]) -> DistCAConfig | None:
    """The options in a whole DeepSpeed config, or None where there is no block or it is disabled."""
    if param_dict.get(BLOCK) is None:
        return None
    config = parse_config(param_dict[BLOCK])
    return config if config.enabled else None


def _explain(item: Any, block: Mapping[str, Any]) -> str:
    if item["loc"][0] == "server_weights":
        given = block["server_weights"]
        return f"`{BLOCK}.server_weights` was given {given!r}; allowed: a list of whole numbers"
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        options = ", ".join((PipelineConfig if item["loc"][0] == "pipeline" else DistCAConfig).model_fields)
        return f"`{BLOCK}.{key}` is not an option (given: {item['input']!r}); options: {options}"
    return f"`{BLOCK}.{key}` was given {item['input']!r}; allowed: {item['msg'].removeprefix('Input should be ')}"
