# SPDX-License-Identifier: Apache-2.0
"""What is not public of torch."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_distca.compat import private

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@private("torch._C._current_graph_task_id")
def in_backward() -> bool:
    """Whether autograd is running a backward on this thread. No public way asks it; DeepSpeed asks the same."""
    return torch._C._current_graph_task_id() != -1


@private("torch.autograd.Variable._execution_engine.queue_callback")
def after_backward(callback: Callable[[], None]) -> None:
    """Has autograd call something when the backward that is running is over. Only a backward can be told so. Public
    hooks are of a tensor or a node, none of the whole backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


@private("torch._C._autograd._top_saved_tensors_default_hooks")
def saved_tensor_hooks() -> tuple[Callable, Callable] | None:
    """The innermost pair of hooks (pack, unpack) on what autograd saves, of this thread. The public
    ``saved_tensors_hooks`` sets them and does not tell them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@private(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch.utils.checkpoint: _checkpoint_hook",
    "torch.utils.checkpoint: class _recomputation_hook",
)
def in_checkpoint() -> bool:
    """Whether this is the first pass of a checkpointed region, as far as it shows: reentrant ones turn gradients off,
    others hook what autograd saves. Hooks of another kind (``save_on_cpu``) recompute nothing. A region cannot be
    asked whether it is one; torch and DeepSpeed both have "checkpoint" in the name of the hooks' module, and in that
    of the hooks in recomputation "recomputation" or "replay"."""
    if not torch.is_grad_enabled():
        return True
    hooks = saved_tensor_hooks()
    if hooks is None or "checkpoint" not in getattr(hooks[0], "__module__", ""):
        return False
    name = getattr(hooks[0], "__qualname__", "")
    return "recomputation" not in name and "replay" not in name


@private("torch.utils.checkpoint: class _StopRecomputationError(Exception)")
def recomputation_is_over(error: BaseException) -> bool:
    """Whether it only says that a checkpoint's recomputation has all that backward needs, and goes no further. Neither
    the exception nor what catches it is public."""
    return type(error).__qualname__ == "_StopRecomputationError"


@private("torch.utils._python_dispatch._disable_current_modes")
def without_modes() -> AbstractContextManager:
    """Runs operations that no dispatch mode sees, such as selective checkpointing's. A mode cannot be left from inside
    by public means."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


@private("torch.Tensor._version")
def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place. Autograd uses it for its own errors; it has no public name."""
    return tensor._version


@private("torch.nn.modules.module: _buffers")
def buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers, to be read and changed. ``named_buffers`` leaves out those that are None."""
    return module._buffers


@private(
    "torch.nn.modules.module: _buffers", "torch.nn.modules.module: _modules", "torch.nn.modules.module: _forward_hooks"
)
def copy_on_host(module: nn.Module) -> nn.Module:
    """A copy without hooks, which may lead to anything (an engine), and with state of its own on the host.
    ``copy.deepcopy`` takes hooks along."""
    twin = object.__new__(type(module))
    for key, value in module.__dict__.items():
        if key.endswith("_hooks") or key == "forward":
            continue
        if key == "_buffers":
            value = {k: None if b is None else b.detach().to("cpu", copy=True) for k, b in value.items()}
        elif key == "_modules":
            value = {k: None if m is None else copy_on_host(m) for k, m in value.items()}
        elif torch.is_tensor(value):
            value = value.detach().to("cpu", copy=True)
        elif isinstance(value, dict):
            value = dict(value)
        twin.__dict__[key] = value
    twin.__dict__.update({k: OrderedDict() for k in module.__dict__ if k.endswith("_hooks")})
    return twin


@private("torch.distributed.distributed_c10d._get_default_store")
def default_store() -> dist.Store | None:
    """The store by which the default process group has met, if it has one. A public one would be a second rendezvous,
    with an address and a port of its own.

    Raises:
        ValueError, KeyError: there is no default process group, or torch does not know its store.
    """
    return dist.distributed_c10d._get_default_store()


@private("torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p", need="peer_copy")
def shareable_memory(size: int, device: torch.device) -> torch.Tensor:
    """Bytes [size] on a GPU that other processes can map, straight from the driver, not from the caching allocator.
    Symmetric memory's ``empty`` may take them from a pool, and lies in a private module as well."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)


@private(
    "torch.distributed._symmetric_memory.rendezvous",
    "torch._C._distributed_c10d._SymmetricMemory.get_buffer",
    need="peer_copy",
)
def share_memory(memory: torch.Tensor, group: dist.ProcessGroup) -> tuple[object, list[torch.Tensor]]:
    """Maps every rank's :func:`shareable_memory` into this process. Collective over the group. torch has no public way
    to share memory of GPUs without a copy by a process that holds it open.

    Returns:
        what must live as long as the memory is used; and each rank's memory, as this process sees it.
    """
    from torch.distributed._symmetric_memory import rendezvous

    with without_multicast():
        handle = rendezvous(memory, group)
    return handle, [handle.get_buffer(peer, memory.shape, memory.dtype) for peer in range(group.size())]


@contextmanager
def without_multicast() -> Iterator[None]:
    """The rendezvous sets NVLink multicast up where the fabric claims to have it. Peer copies have no use for it, and
    the only switch is in the environment."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


@private("torch.ops.aten._flash_attention_forward", need="torch_varlen")
def flash_attention_forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """The operator below ``torch.nn.attention.varlen.varlen_attn``: (out, lse, random state and two more). The public
    function takes grouped-query attention from torch 2.12 on only, and its backward needs a graph of its own."""
    return torch.ops.aten._flash_attention_forward(*args, **kwargs)


@private("torch.ops.aten._flash_attention_backward", need="torch_varlen")
def flash_attention_backward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of :func:`flash_attention_forward`, which has no public name either."""
    return torch.ops.aten._flash_attention_backward(*args, **kwargs)


def undecorated(function: Callable) -> Callable:
    """The function that a custom operator of torch was made from, for its signature; any other as it is. Operators
    keep it under a private name; one that did not would show a signature without names."""
    return getattr(function, "_init_fn", function)
