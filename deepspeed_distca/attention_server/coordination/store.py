# SPDX-License-Identifier: Apache-2.0
"""The key-value store by which torch's processes have met, and a way to end the waits of a gloo group.

Ranks tell each other by the store what cannot be said by a collective: that a rank differs, has failed or is gone, at
a time when the others may wait in any collective, or in none.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from deepspeed_distca.compat import torch as compat

#: No message of ours or of torch's has it.
_NO_MESSAGE = 0x64697374
#: By default process group.
_CONNECTIONS: MutableMapping[dist.ProcessGroup, dist.Store] = WeakKeyDictionary()


class StoreError(RuntimeError):
    """There is no store by which ranks could talk."""


def default_store() -> dist.Store:
    """The store of the default process group: a connection of its own, where the store's kind has such, so that nobody
    waits for a call of torch's own; one for all of this process, since they may be slow to make.

    Raises:
        StoreError: torch no longer has that name, or the process group was made without a store.
    """
    world: Any = dist.group.WORLD
    if world in _CONNECTIONS:
        return _CONNECTIONS[world]
    store: Any  # torch's annotations leave clone() out
    try:
        store = compat.default_store()
    except (AttributeError, ValueError, KeyError) as error:
        raise StoreError(
            f"torch {torch.__version__} has no store by which the ranks could say what they run ({error}); "
            "initialize torch.distributed with gloo or nccl, under a version of torch that the README names"
        ) from error
    if store is None:
        raise StoreError("the default process group has no store; initialize torch.distributed with gloo or nccl")
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        store = store.clone()
    _CONNECTIONS[world] = store
    return store


def store_of(name: str) -> dist.Store:
    """A part of the default store, whose keys are of one matter.

    Args:
        name: of the matter, the same on all ranks, and of no other one in all of the store's life.

    Raises:
        StoreError: see :func:`default_store`.
    """
    return dist.PrefixStore(name, default_store())


def close_connections(group: dist.ProcessGroup) -> None:
    """Ends all waits in a gloo group, of this process and of those that wait for it, with an error; the group is of no
    use afterwards. gloo's own `abort` ends none (torch 2.13). A receive that is not over in time closes all
    connections of its group, and this one, which nobody answers, is not.
    """
    peer = (group.rank() + 1) % group.size()
    if peer != group.rank():
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, _NO_MESSAGE).wait(timedelta(milliseconds=1))
