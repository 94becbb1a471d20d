# SPDX-License-Identifier: Apache-2.0
"""A HuggingFace decoder's parts as pipeline layers: embedding, decoder layers, final norm, head, and the loss.

Between layers, and so between stages, travels the pair (hidden_states [1, tokens, hidden_size], position_ids int64
[1, tokens]). The float tensor is the first: DeepSpeed's receive buffers depend on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from deepspeed_distca.data.from_layout import IGNORE_INDEX
from deepspeed_distca.huggingface.attention_function import KEPT, PLAN, Plan
from deepspeed_distca.huggingface.kept_attention import KeptAttention
from deepspeed_distca.huggingface.row_rope import RowRule, row_rules
from deepspeed_distca.pipeline.plans import MicroBatchAttention

Activations = tuple[torch.Tensor, torch.Tensor]


class StageContext:
    """What the layers of one stage share, and what the engine tells them before it runs a micro-batch.

    It is no module: neither DeepSpeed's conversion to bf16 nor a state dict reaches it. The rotary embedding lives
    here because its frequencies must stay in fp32.

    Attributes:
        attention: of the planned micro-batch that runs, forward or backward.
    """

    def __init__(self, config: Any, rotary: nn.Module) -> None:
        self.config = config
        self.attention: MicroBatchAttention | None = None
        self._rotary = rotary

    @property
    def rules(self) -> list[RowRule]:
        """By which rotary embeddings depend on a row."""
        return row_rules(nn.ModuleDict({"rotary": self._rotary}))

    def rotary(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of true positions, in the dtype of the hidden states."""
        self._rotary = self._rotary.to(hidden_states.device)
        return self._rotary(hidden_states, position_ids=position_ids)


class Embedding(nn.Module):
    """(input_ids, position_ids) to (hidden_states, position_ids)."""

    def __init__(self, embed_tokens: nn.Embedding) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens

    def forward(self, inputs: Activations) -> Activations:
        input_ids, position_ids = inputs
        hidden_states = self.embed_tokens(input_ids)
        if torch.is_grad_enabled() and not hidden_states.requires_grad:
            # As DeepSpeed has it for what other stages receive. Layers of all stages share attention in backward, so
            # backward has to come to those that are frozen, too.
            hidden_states.requires_grad_()
        return hidden_states, position_ids


class DecoderLayer(nn.Module):
    """One decoder layer.

    With a plan its core attention follows the plan. Without one it is transformers' own, with the masks that
    transformers makes of packed position ids.

    Args:
        layer: the HuggingFace layer.
        window: its sliding window, None for full causal attention.

    Attributes:
        index: its place among the layers of its stage, which the stage tells it.
    """

    def __init__(self, layer: nn.Module, context: StageContext, window: int | None) -> None:
        super().__init__()
        self.layer = layer
        self.context, self.window, self.index = context, window, 0

    def forward(self, inputs: Activations, plan: Plan | None = None, kept: KeptAttention | None = None) -> Activations:
        """Args:
        plan, kept: of the nano-batch whose rows these are; left out: those of the context.
        """
        hidden_states, position_ids = inputs
        arguments: dict[str, Any] = {}
        attention = self.context.attention
        if plan is None and attention is not None:
            plan, kept = attention.layers[self.index], attention.kept
        if plan is None:
            arguments["attention_mask"] = self._mask(hidden_states, position_ids)
        else:
            arguments[PLAN] = plan
            if kept is not None:
                arguments[KEPT] = kept
        output = self.layer(
            hidden_states,
            position_ids=position_ids,
            position_embeddings=self.context.rotary(hidden_states, position_ids),
            use_cache=False,
            **arguments,
        )
        return output[0] if isinstance(output, tuple) else output, position_ids

    def _mask(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor | None:
        create = create_causal_mask if self.window is None else create_sliding_window_causal_mask
        return create(self.context.config, hidden_states, None, None, position_ids=position_ids)


class FinalNorm(nn.Module):
    """The norm after the last decoder layer; position ids end here."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, inputs: Activations) -> torch.Tensor:
        return self.norm(inputs[0])


class Head(nn.Module):
    """Hidden states to logits [1, tokens, vocabulary]."""

    def __init__(self, lm_head: nn.Module) -> None:
        super().__init__()
        self.lm_head = lm_head

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_states)


def tied_head(embedding: Embedding, hidden_states: torch.Tensor) -> torch.Tensor:
    """The head of a model whose head is its embedding."""
    return nn.functional.linear(hidden_states, embedding.embed_tokens.weight)


class PackedLoss:
    """Cross entropy of logits [1, tokens, vocabulary] against shifted labels [1, tokens], -100 where there is none.

    Attributes:
        divisor: of the summed loss. None: the number of targets of the micro-batch. The runtime sets it before every
            batch such that the mean over micro-batches and replicas is the mean over all targets of the batch.
    """

    def __init__(self) -> None:
        self.divisor: float | None = None

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        if self.divisor is not None:
            return total / self.divisor
        return total / (labels != IGNORE_INDEX).sum().clamp(min=1)
