# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: a HuggingFace decoder over the stages of DeepSpeed's PipelineEngine, attention shared."""

from deepspeed_distca.pipeline.batches import pipeline_batch
from deepspeed_distca.pipeline.layers import PackedLoss
from deepspeed_distca.pipeline.module import DecoderPipeline
from deepspeed_distca.pipeline.runtime import PipelineRuntime
from deepspeed_distca.pipeline.schedule import SamePhaseEvaluation, SamePhaseSchedule

__all__ = [
    "DecoderPipeline",
    "PackedLoss",
    "PipelineRuntime",
    "SamePhaseEvaluation",
    "SamePhaseSchedule",
    "pipeline_batch",
]
