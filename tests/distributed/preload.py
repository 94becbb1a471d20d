# SPDX-License-Identifier: Apache-2.0
"""What every rank on CPU imports, once for all of them: harness.py forks ranks from a process that did."""

from __future__ import annotations

import atexit
import gc

import deepspeed

# ZeRO imports it when an engine is made, and with it torch's compiler: 1.5 to 3 s of a core for each rank otherwise.
import deepspeed.runtime.zero.muon.muon_optimizer

from tests.distributed import engine_worker  # noqa: F401 -- torch, transformers and the plugin

# The shared-memory collectives would be compiled on first use (45 s) and leave 69 MB behind per rank.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# Ranks collect their own garbage, not half a million objects that are there for good.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # or Triton prints a page about what is left when the server ends
