# SPDX-License-Identifier: Apache-2.0
"""The front door of a batch: see ``admission``."""

from deepspeed_distca.huggingface.front_door.admission import (
    DESCRIPTION,
    Admitted,
    admit,
    names_documents,
    stand_in,
)
from deepspeed_distca.huggingface.front_door.values import BatchError, Limits

__all__ = ["DESCRIPTION", "Admitted", "BatchError", "Limits", "admit", "names_documents", "stand_in"]
