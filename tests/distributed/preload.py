# SPDX-License-Identifier: Apache-2.0
"""What every rank on CPU imports, once for all of them: harness.py forks ranks from a process that did."""

from __future__ import annotations

import deepspeed

from tests.distributed import engine_worker  # noqa: F401 -- torch, transformers and the plugin

# The shared-memory collectives would be compiled on first use (45 s) and leave 69 MB behind per rank.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
