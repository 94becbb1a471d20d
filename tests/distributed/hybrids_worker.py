# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank: the sweep over models, where the kernels of their other mixers are installed."""

from __future__ import annotations

from typing import Any

from tests.distributed import mixer_kernels, models_worker


def run(names: list[str]) -> list[dict[str, Any]]:
    """See ``models_worker.run``."""
    mixer_kernels.install()
    return models_worker.run(names)
