# SPDX-License-Identifier: Apache-2.0
"""Kernels of our own in Triton, and what is done where it cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Callable

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = tl = None

__all__ = ["Fused", "tl", "triton"]

logger = logging.getLogger(__name__)


class Fused:
    """A Triton kernel, as long as it works: it is compiled at its first call, for which a machine may lack a C
    compiler.

    Args:
        launch: launches it.
        otherwise: what is done without it, for the log.
    """

    def __init__(self, launch: Callable[..., None], otherwise: str) -> None:
        self._launch, self._otherwise = launch, otherwise
        self.usable = triton is not None

    def __call__(self, *arguments: object) -> bool:
        """Launches the kernel and says whether it could."""
        if self.usable:
            try:
                self._launch(*arguments)
            except Exception as error:  # whatever Triton or its compiler complain of: PyTorch's way is as exact
                logger.warning("distca: Triton cannot be used here (%s); %s", error, self._otherwise)
                self.usable = False
        return self.usable
