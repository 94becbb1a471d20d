# SPDX-License-Identifier: Apache-2.0
"""The batches of all ranks, planned together: which documents are in a step (``packer``), in which micro-batch of it
(``regrouping``), on which ranks (``placement``, ``whole_documents``), and a rank's part of them (``batches``)."""

from deepspeed_distca.data.global_loader.loader import GlobalPackedLoader

__all__ = ["GlobalPackedLoader"]
