# SPDX-License-Identifier: Apache-2.0
"""What the loader reads in the DeepSpeed config, so that nobody says it twice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_distca.config import BLOCK, DistCAConfig, DistCAConfigError, get_distca_config
from deepspeed_distca.defaults import MIN_GAIN
from deepspeed_distca.given import integer, shown
from deepspeed_distca.plan_options import weights_of_servers
from deepspeed_distca.scheduler.profiles import Profile, ProfileError
from deepspeed_distca.scheduler.strict_json import loads
from deepspeed_distca.scheduler.topology import Topology

_ACCUMULATION = "gradient_accumulation_steps"
#: Arguments of earlier versions, and where they are said now.
_EARLIER = {
    _ACCUMULATION: f'"{_ACCUMULATION}"',
    "servers": f'"{BLOCK}": {{"servers": ...}}',
    "cost": f'"{BLOCK}": {{"cost_model": a file of `ds_distca profile --save`}}',
    "tolerance": f'"{BLOCK}": {{"advanced": {{"tolerance": ...}}}}',
    "server_weights": f'"{BLOCK}": {{"advanced": {{"server_weights": [...]}}}}',
    "even_enough": f'"{BLOCK}": {{"advanced": {{"min_gain": ...}}}}, of which it is the double',
}


def read_settings(
    config: Mapping[str, Any] | str | Path | None, rank: int, num_ranks: int
) -> tuple[int, int, dict[str, Any]]:
    """What batches will be trained and balanced with, by a DeepSpeed config, a mapping or a JSON file; what is so with
    an empty block for None.

    Returns:
        micro-batches of an optimizer step; consecutive ranks that share documents and attention; what ``place`` has to
        know of balancing, for the group of the rank.

    Raises:
        DistCAConfigError: a block that cannot be used, or none, or one that does not fit the ranks.
        TypeError, ValueError: no config, or a file or a number of accumulation steps that cannot be used.
    """
    values = _read(config)
    block = DistCAConfig() if config is None else get_distca_config(values)
    if block is None:
        raise DistCAConfigError(
            f"the config has no `{BLOCK}` block that is enabled, and without the plugin documents cannot go on on "
            f'other ranks; add "{BLOCK}": {{"enabled": true}}'
        )
    servers = num_ranks if block.servers is None else block.servers
    if num_ranks % servers:
        raise DistCAConfigError(f"`{BLOCK}.servers` was given {servers}; allowed: a divisor of the {num_ranks} ranks")
    advanced, cost = block.advanced, None
    if block.cost_model is not None:
        try:
            cost = Profile.load(Path(block.cost_model)).cost
        except ProfileError as error:
            raise DistCAConfigError(
                f"`{BLOCK}.cost_model` was given {block.cost_model!r}, which the loader of every rank reads: {error}"
            ) from None
    nodes = None
    if advanced.node_size is not None:
        first = rank // servers * servers
        nodes = Topology.of_size(advanced.node_size, range(first, first + servers))
    # As DeepSpeed finds it: given, or what the two batch sizes leave.
    steps = values.get(_ACCUMULATION)
    whole, micro = values.get("train_batch_size"), values.get("train_micro_batch_size_per_gpu")
    if steps is None and isinstance(whole, int) and isinstance(micro, int) and micro > 0:
        steps = whole // (micro * num_ranks)
    return (
        1 if steps is None else integer(f"{_ACCUMULATION} in the config", steps, 1),
        servers,
        {
            "cost": cost,
            "tolerance": advanced.tolerance,
            "server_weights": weights_of_servers(advanced.server_weights, num_ranks, servers, rank),
            "min_gain": MIN_GAIN if advanced.min_gain is None else advanced.min_gain,
            "nodes": nodes,
        },
    )


def refuse(arguments: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments that the loader does not have, and says where earlier ones are said now."""
    for name in arguments:
        if name in _EARLIER:
            raise TypeError(
                f"GlobalPackedLoader takes no {name}: it reads {_EARLIER[name]} in the DeepSpeed config; give that as "
                "`config`, the dict or the path of its file"
            )
        raise TypeError(f"GlobalPackedLoader got an unexpected keyword argument {name!r}")


def _read(config: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any]:
    if isinstance(config, str | Path):
        try:
            config = loads(Path(config).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"config {shown(str(config))} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"config {shown(str(config))} is not valid JSON: {error}") from error
    if not isinstance(config, Mapping | None):
        raise TypeError(f"config must be the DeepSpeed config, a dict or the path of its file, got {shown(config)}")
    return config or {}
