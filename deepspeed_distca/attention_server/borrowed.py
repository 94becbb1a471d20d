# SPDX-License-Identifier: Apache-2.0
"""Tensors made of another stream's memory.

torch's allocator keeps the memory of each stream for itself. A side stream that works for some micro-batches only
would hold the most that any of them ever asked of it, while the caller's stream has that much to spare at the time. So
what is made on it is made by the functions here, which take the caller's memory while a :class:`Lender` is in force
and are torch's own otherwise. A library's functions get them by ``kernels.repeated``. What is made in C++ stays the
side stream's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class Lender:
    """Within it, on this thread, the functions of this module make tensors of the owner's memory.

    Args:
        owner: the stream whose memory is lent.
        user: the stream that is current within, on which zeros are written.
    """

    def __init__(self, owner: torch.cuda.Stream, user: torch.cuda.Stream) -> None:
        self._owner, self._user = owner, user
        self._kept: list[torch.Tensor] = []

    def __enter__(self) -> Lender:
        _here.lender = self
        return self

    def __exit__(self, *_: object) -> None:
        _here.lender = None

    def make(self, maker: Callable[..., torch.Tensor], args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """What the maker gives, in the owner's memory; kept until :meth:`release`."""
        torch.cuda.set_stream(self._owner)
        try:
            tensor = maker(*args, **kwargs)
        finally:
            torch.cuda.set_stream(self._user)
        self._kept.append(tensor)
        return tensor

    def release(self) -> None:
        """Lets go of the tensors: the owner must be behind what was done with them."""
        self._kept.clear()


class _Here(threading.local):
    lender: Lender | None = None


_here = _Here()


def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
    """``torch.empty``, and so for the others."""
    return torch.empty(*args, **kwargs) if _here.lender is None else _here.lender.make(torch.empty, args, kwargs)


def empty_like(*args: Any, **kwargs: Any) -> torch.Tensor:
    lender = _here.lender
    return torch.empty_like(*args, **kwargs) if lender is None else lender.make(torch.empty_like, args, kwargs)


def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
    # Filled by the user: on the owner's stream that could come too late.
    return empty(*args, **kwargs).zero_()


def zeros_like(*args: Any, **kwargs: Any) -> torch.Tensor:
    return empty_like(*args, **kwargs).zero_()
