# SPDX-License-Identifier: Apache-2.0
"""The cost model of a run: rank 0 chooses it, every rank gets its terms as integers.

Plans are computed on every rank and must be equal. Profiles lie in a user's cache, which nodes need not share, and
ranks may have different GPUs; comparing what each of them finds would turn every such difference into an error, so
rank 0's choice counts. A file that the block names has to be on rank 0's node only. The choice travels in the hello by
which ranks meet, and so does an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.kernels import Kernel, KernelError, select_kernel
from deepspeed_distca.attention_server.setting import setting_of
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.config import BLOCK, DistCAConfig, DistCAConfigError
from deepspeed_distca.scheduler.cost_model import CostModel
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.profiles import Choice, ProfileError, cache_folder, choose


def find_cost_model(
    config: DistCAConfig, heads: Heads, *, device: torch.device, dtype: torch.dtype, window: int | None = None
) -> Choice:
    """The cost model that this rank would choose.

    Args:
        heads: of the model; a profile of others is scaled to them.
        device: this rank's.
        dtype: of q, k and v.
        window: of the model's first layer; some kernels take none.

    Raises:
        DistCAConfigError: the file that `distca.cost_model` names cannot be used.
    """
    try:
        kernel = choose_kernel(config.kernel, heads, device, dtype, window).name
    except KernelError:
        kernel = None  # the first layer complains
    try:
        wanted = setting_of(device, dtype, kernel)
        return choose(wanted, heads, config.cost_model, folder=cache_folder())
    except ProfileError as error:
        raise DistCAConfigError(
            f"`{BLOCK}.cost_model` was given {config.cost_model!r}, which cannot be used: {error}"
        ) from None


def own_cost_model(config: DistCAConfig, heads: Heads, **setting: Any) -> Choice | None:
    """See :func:`find_cost_model`, on rank 0; None on the other ranks, whose own choice does not count."""
    return None if dist.is_initialized() and dist.get_rank() > 0 else find_cost_model(config, heads, **setting)


def cost_to_say(choice: Choice | None) -> dict[str, list[int]]:
    """What rank 0 tells the others of its choice."""
    return {} if choice is None else {"cost": [int(term) for term in choice.cost.terms]}


def said_cost_model(said: Mapping[str, Any], heads: Heads, own: Choice | None) -> Choice:
    """The cost model that all ranks use, the same on every one; its source is in words on rank 0 alone.

    Args:
        said: by rank 0, see :func:`cost_to_say`.
        heads: of the model.
        own: rank 0's choice.
    """
    return own or Choice(CostModel.from_terms(heads, said["cost"]), "of rank 0's choice")


def choose_kernel(
    name: str | None, heads: Heads, device: torch.device, dtype: torch.dtype, window: int | None
) -> Kernel:
    """The kernel that layers of these heads and this window will get; each layer chooses for what it is really given.

    Raises:
        KernelError: none fits.
    """
    return select_kernel(
        name,
        device=device,
        dtype=dtype,
        q_heads=heads.query,
        kv_heads=heads.key_value,
        head_dim=heads.head_dim,
        v_head_dim=heads.value_dim,
        spec=AttentionSpec(heads.head_dim**-0.5, window),
    )
