# SPDX-License-Identifier: Apache-2.0
"""Core attention disaggregation for HuggingFace decoder models under DeepSpeed.

``import deepspeed_distca`` in a training script, add a ``distca`` block to ds_config.json, and the core attention of
packed documents is balanced over all data-parallel ranks.
"""

import logging
import sys

if "deepspeed" not in sys.modules:
    # DeepSpeed warns on standard output, at import, that it found no accelerator: among what `ds_distca plan --json`
    # prints that would be no JSON. A script that imports DeepSpeed first sees all it has to say.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import deepspeed  # noqa: F401
    finally:
        logging.disable(before)

from deepspeed_distca.config import DistCAConfig, DistCAConfigError
from deepspeed_distca.data import AccumulationLoader, PackedSequenceCollator
from deepspeed_distca.engine_hooks import attach, install, uninstall
from deepspeed_distca.engine_runtime import Runtime
from deepspeed_distca.layout import Layout, LayoutError, Segment

__version__ = "0.1.0"
__all__ = [
    "AccumulationLoader",
    "DistCAConfig",
    "DistCAConfigError",
    "Layout",
    "LayoutError",
    "PackedSequenceCollator",
    "Runtime",
    "Segment",
    "attach",
    "install",
    "uninstall",
]

install()
