# SPDX-License-Identifier: Apache-2.0
"""The decoder layers of a stage, run for the two nano-batches of a micro-batch in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from deepspeed_distca.attention_server.nano_batches import HalfPlan, NanoPair
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.huggingface.kept_attention import KeptAttention
from deepspeed_distca.huggingface.turns import Turns
from deepspeed_distca.pipeline.layers import Activations, DecoderLayer


def run_in_two(
    layers: Sequence[DecoderLayer],
    inputs: Activations,
    plan: StepPlan,
    kept: KeptAttention | None,
    *,
    checkpoint: Callable[..., Any],
    interval: int,
) -> Activations:
    """What the layers make of a micro-batch.

    Args:
        plan: of the micro-batch, in two parts.
        kept: what recomputation takes in the place of another exchange.
        checkpoint: called with a function and its arguments, and recomputes it in backward; not reentrant.
        interval: layers that are recomputed together; 0: none are.

    Raises:
        ValueError: inputs that are not the plan's.
    """
    rows, tokens = plan.rows, inputs[0].shape[1]
    if tokens != sum(rows):
        raise ValueError(f"the plan was made for {sum(rows)} tokens, got {tokens}")
    turns = Turns(inputs[0].device)
    pair = NanoPair(plan, turns.hand_over)

    def run(nano: int) -> torch.Tensor:
        first = nano * rows[0]
        # A half without tokens gets one that stands in: layers do not know what to make of none.
        hidden, positions = (t[:, first : first + rows[nano]] if rows[nano] else t[:, :1] for t in inputs)
        for start in range(0, len(layers), interval or len(layers)):
            some = partial(_block, layers[start : start + (interval or len(layers))], pair.plans[nano], kept)
            hidden, positions = checkpoint(some, hidden, positions) if interval else some(hidden, positions)
        (hidden,) = pair.close(nano, [hidden])
        return hidden[:, : rows[nano]]

    return torch.cat(turns.run(lambda: run(0), lambda: run(1)), dim=1), inputs[1]


def _block(
    layers: Sequence[DecoderLayer],
    plan: HalfPlan,
    kept: KeptAttention | None,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
) -> Activations:
    inputs = hidden_states, position_ids
    for layer in layers:
        inputs = layer(inputs, plan, kept)
    return inputs
