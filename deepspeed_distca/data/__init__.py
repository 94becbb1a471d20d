# SPDX-License-Identifier: Apache-2.0
"""From documents to the batches of ``engine(**batch)``: packing, row order, collating, gradient accumulation, and the
global loader, whose documents may continue on other ranks."""

from deepspeed_distca.data.accumulation import AccumulationLoader
from deepspeed_distca.data.collator import PackedSequenceCollator
from deepspeed_distca.data.loader import GlobalPackedLoader
from deepspeed_distca.data.packing import Packing, Piece, pack_documents
from deepspeed_distca.data.rows import PackedRows, RowSampler
from deepspeed_distca.data.sources import tokenize

__all__ = [
    "AccumulationLoader",
    "GlobalPackedLoader",
    "PackedRows",
    "PackedSequenceCollator",
    "Packing",
    "Piece",
    "RowSampler",
    "pack_documents",
    "tokenize",
]
