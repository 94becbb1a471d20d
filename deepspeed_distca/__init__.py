# SPDX-License-Identifier: Apache-2.0
"""Core attention disaggregation for HuggingFace decoder models under DeepSpeed.

``import deepspeed_distca`` in a training script, add a ``distca`` block to ds_config.json, and the core attention of
packed documents is balanced over all data-parallel ranks.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed_distca.huggingface.trainer_callback import DistCACallback

__version__ = "0.1.0"


def _is_command() -> bool:
    """Whether this process is `ds_distca`, whose commands import what they need: neither DeepSpeed nor transformers,
    which take seconds, to show a plan."""
    return Path("".join(sys.argv[:1])).stem == "ds_distca" or "deepspeed_distca.cli" in sys.orig_argv


if not _is_command():
    from deepspeed_distca.compat.deepspeed import import_quietly

    import_quietly()

    from deepspeed_distca.config import DistCAConfig, DistCAConfigError
    from deepspeed_distca.data import AccumulationLoader, PackedSequenceCollator, pack_step
    from deepspeed_distca.engine_hooks import attach, install, uninstall
    from deepspeed_distca.engine_runtime import Runtime
    from deepspeed_distca.layout import Layout, LayoutError, Segment

    install()


def __getattr__(name: str) -> Any:
    """The callback is imported when it is asked for: transformers' Trainer imports datasets, half a second."""
    if name != "DistCACallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deepspeed_distca.huggingface.trainer_callback import DistCACallback

    return DistCACallback


__all__ = [
    "AccumulationLoader",
    "DistCACallback",
    "DistCAConfig",
    "DistCAConfigError",
    "Layout",
    "LayoutError",
    "PackedSequenceCollator",
    "Runtime",
    "Segment",
    "attach",
    "install",
    "pack_step",
    "uninstall",
]
