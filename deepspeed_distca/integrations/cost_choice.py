# SPDX-License-Identifier: Apache-2.0
"""The cost model of a run: rank 0 chooses it, every rank gets its terms as integers.

Plans are computed on every rank and must be equal. Profiles lie in a user's cache, which nodes need not share, and
ranks may have different GPUs; comparing what each of them finds would turn every such difference into an error, so
rank 0's choice counts. A file that the block names has to be on rank 0's node only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from deepspeed_distca.attention_server.kernels import KernelError, select_kernel
from deepspeed_distca.attention_server.setting import setting_of
from deepspeed_distca.attention_server.tasks import AttentionSpec
from deepspeed_distca.config import BLOCK, DistCAConfig, DistCAConfigError
from deepspeed_distca.scheduler.cost_model import CostModel
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.profiles import Choice, ProfileError, cache_folder, choose

_ERROR_BYTES = 1024


def agreed_cost_model(
    config: DistCAConfig, heads: Heads, *, device: torch.device, dtype: torch.dtype, window: int | None = None
) -> Choice:
    """The cost model that all ranks use. Collective over the default process group, where there is one.

    Args:
        heads: of the model; a profile of others is scaled to them.
        device: this rank's, on which its part of the default group communicates.
        dtype: of q, k and v.
        window: of the model's first layer; some kernels take none.

    Returns:
        The same cost model on every rank; its source is in words on rank 0 alone.

    Raises:
        DistCAConfigError: on every rank, if the file that `distca.cost_model` names cannot be used.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    choice, problem = None, ""
    if alone or dist.get_rank() == 0:
        try:
            wanted = setting_of(device, dtype, _kernel(config.kernel, heads, device, dtype, window))
            choice = choose(wanted, heads, config.cost_model, folder=cache_folder())
        except ProfileError as error:
            problem = f"`{BLOCK}.cost_model` was given {config.cost_model!r}, which cannot be used: {error}"
    if alone:
        if choice is None:
            raise DistCAConfigError(problem)
        return choice

    words = problem.encode()[:_ERROR_BYTES]
    mine = [len(words), *(choice.cost.terms if choice else [0] * len(CostModel().terms))]
    length, *terms = _broadcast(torch.tensor(mine), device).tolist()
    if length:
        raw = torch.zeros(length, dtype=torch.int64)
        if words:
            raw[:] = torch.tensor(list(words))
        raise DistCAConfigError(bytes(_broadcast(raw, device).tolist()).decode(errors="replace"))
    return Choice(CostModel.from_terms(heads, terms), choice.source if choice else "of rank 0's choice")


def _kernel(
    name: str | None, heads: Heads, device: torch.device, dtype: torch.dtype, window: int | None
) -> str | None:
    """The kernel that layers will get; None where none fits, of which the first layer complains."""
    try:
        return select_kernel(
            name,
            device=device,
            dtype=dtype,
            q_heads=heads.query,
            kv_heads=heads.key_value,
            head_dim=heads.head_dim,
            v_head_dim=heads.value_dim,
            spec=AttentionSpec(heads.head_dim**-0.5, window),
        ).name
    except KernelError:
        return None


def _broadcast(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Rank 0's int64 values, on every rank."""
    on_device = values.to(device)
    dist.broadcast(on_device, 0)
    return on_device.cpu()
