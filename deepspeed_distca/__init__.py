# SPDX-License-Identifier: Apache-2.0
"""Core attention disaggregation for HuggingFace decoder models under DeepSpeed.

``import deepspeed_distca`` in a training script, add a ``distca`` block to ds_config.json, and the core attention of
packed documents is balanced over all data-parallel ranks.
"""

from deepspeed_distca.config import DistCAConfig, DistCAConfigError
from deepspeed_distca.data import AccumulationLoader, PackedSequenceCollator
from deepspeed_distca.engine_hooks import Runtime, attach, install, uninstall
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
