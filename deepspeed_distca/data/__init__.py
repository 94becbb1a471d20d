# SPDX-License-Identifier: Apache-2.0
"""From documents to the batches of ``engine(**batch)``: packing, row order, collating, gradient accumulation, and the
global loader, whose documents may continue on other ranks."""

from deepspeed_distca.data.accumulation import AccumulationLoader
from deepspeed_distca.data.answer_losses import answer_sums, token_logps, weighted_loss
from deepspeed_distca.data.collator import PackedSequenceCollator
from deepspeed_distca.data.global_loader import GlobalPackedLoader
from deepspeed_distca.data.packing import PackedRows, Packing, Piece, RowSampler, pack_documents
from deepspeed_distca.data.prefixes import PrefixCollator
from deepspeed_distca.data.sources import tokenize
from deepspeed_distca.data.step_packing import pack_step

__all__ = [
    "AccumulationLoader",
    "GlobalPackedLoader",
    "PackedRows",
    "PackedSequenceCollator",
    "Packing",
    "Piece",
    "PrefixCollator",
    "RowSampler",
    "answer_sums",
    "pack_documents",
    "pack_step",
    "token_logps",
    "tokenize",
    "weighted_loss",
]
