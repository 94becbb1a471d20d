# SPDX-License-Identifier: Apache-2.0
"""Tiny decoders that break the contract in ways that no list of names knows, and the model they are made of."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests import tiny_llama

SIZES = {**tiny_llama.SIZES, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(cls: type = LlamaForCausalLM, **options) -> LlamaForCausalLM:
    return tiny_llama.llama(cls, **{**SIZES, **options})


class Around(nn.Module):
    """An MLP of a layer, and something before it."""

    def __init__(self, inner: nn.Module, change: nn.Module | Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + self.change(x))


class Convolution(nn.Module):
    """Over the three tokens before, by a matrix product: no module and no function has the name."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.full((4, 32), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (functional.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1) * self.taps.t()).sum(-1)


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


class Experts(nn.Module):
    """Each token goes to one of four experts, which have room for half as many tokens again as come on average."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        chosen = self.gate(tokens).argmax(-1)
        room = -(-len(tokens) * 3 // 8)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()[:room]
            out[rows] = expert(tokens[rows])
        return out.view_as(x)


def in_a_layer(change) -> LlamaForCausalLM:
    model = llama()
    layer = model.model.layers[0]
    layer.mlp = Around(layer.mlp, change)
    return model


class Places(nn.Module):
    """Token embeddings with places counted from `first` on through the row."""

    def __init__(self, tokens: nn.Embedding, first: int) -> None:
        super().__init__()
        self.tokens, self.first = tokens, first
        self.places = nn.Embedding(300, 32)
        self.given: torch.Tensor | None = None

    @property
    def num_embeddings(self) -> int:
        return self.tokens.num_embeddings

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)[None] + self.first
        return self.tokens(ids) + 0.02 * self.places(places if self.given is None else self.given)


class NoPositions(LlamaForCausalLM):
    """Takes no position ids, and counts places itself."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens = Places(self.model.embed_tokens, 0)

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None, distca_plan=None, **rest):
        rest.pop("position_ids", None)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            labels=labels,
            use_cache=use_cache,
            distca_plan=distca_plan,
            **rest,
        )


class NamedNoPositions(NoPositions):
    """The same, said by its signature."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        labels=None,
        use_cache=None,
        distca_plan=None,
        distca_witness=None,
        num_items_in_batch=None,
    ):
        return super().forward(
            input_ids,
            attention_mask,
            labels,
            use_cache,
            distca_plan,
            distca_witness=distca_witness,
            num_items_in_batch=num_items_in_batch,
        )


class Offset(LlamaForCausalLM):
    """Counts from 2 where it is given no position ids, and takes those it is given as they are."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens = Places(self.model.embed_tokens, 2)

    def forward(self, input_ids=None, position_ids=None, **rest):
        self.model.embed_tokens.given = position_ids
        return super().forward(input_ids=input_ids, position_ids=position_ids, **rest)


class Dropping(LlamaDecoderLayer):
    """Keeps keyword arguments from attention."""

    def forward(self, hidden_states, attention_mask=None, position_ids=None, position_embeddings=None, **rest):
        return super().forward(
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=position_embeddings,
        )


def dropping() -> LlamaForCausalLM:
    model = llama()
    for layer in model.model.layers:
        layer.__class__ = Dropping
    return model


class TwoAhead(LlamaForCausalLM):
    """A loss on the token after next as well, which may be another document's."""

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, **rest):
        output = super().forward(input_ids=input_ids, labels=labels, num_items_in_batch=num_items_in_batch, **rest)
        if labels is not None:
            targets = functional.pad(labels, (0, 2), value=-100)[:, 2:]
            further = functional.cross_entropy(output.logits.transpose(1, 2).float(), targets, reduction="sum")
            output.loss = output.loss + 0.3 * further / (1 if num_items_in_batch is None else num_items_in_batch)
        return output


class Pooled(LlamaForCausalLM):
    """Its head's scores depend on the row's mean, its base model's states do not."""

    def forward(self, input_ids=None, **rest):
        output = super().forward(input_ids=input_ids, **rest)
        output.logits = output.logits - output.logits.mean(1, keepdim=True)
        return output


class Raising(LlamaForCausalLM):
    def forward(self, input_ids=None, **rest):
        raise KeyError("pixel_values")


#: What is wrong, the model, and what the error must say.
FAULTS: dict[str, tuple[Callable[[], LlamaForCausalLM], str]] = {
    "a convolution": (lambda: in_a_layer(Convolution()), "passes between tokens"),
    "a shifted state": (lambda: in_a_layer(lambda x: x.roll(1, 1)), "passes between tokens"),
    "a row's mean": (lambda: in_a_layer(lambda x: x.mean(1, keepdim=True)), "passes between tokens"),
    "a running sum": (lambda: in_a_layer(lambda x: 0.1 * x.cumsum(1)), "passes between tokens"),
    "a row's largest value": (lambda: in_a_layer(lambda x: x / x.abs().amax()), "passes between tokens"),
    "a mean over rows": (lambda: in_a_layer(lambda x: x - x.mean(0, keepdim=True)), "passes between tokens"),
    "a row's first token": (lambda: in_a_layer(lambda x: x[:, :1]), "passes between tokens"),
    "a row's last token": (lambda: in_a_layer(lambda x: x[:, -1:]), "passes between tokens"),
    "a row's length": (lambda: in_a_layer(lambda x: x * math.log(x.shape[1])), "the length of the row"),
    "statistics of a batch": (lambda: in_a_layer(BatchNorm()), "passes between tokens"),
    "experts with limited room": (lambda: in_a_layer(Experts()), "passes between tokens"),
    "a mean in the head": (lambda: llama(Pooled), "passes between tokens"),
    "no position ids": (lambda: llama(NoPositions), "position_ids"),
    "no position ids, by its signature": (lambda: llama(NamedNoPositions), "takes no position_ids"),
    "positions from elsewhere": (lambda: llama(Offset), "position_ids"),
    "arguments that do not reach attention": (dropping, "keyword arguments"),
    "targets of other documents": (lambda: llama(TwoAhead), "loss of a document's targets"),
    "an error": (lambda: llama(Raising), "KeyError.*`distca.advanced.probe`"),
}
#: Of these, what is no fault as long as a row holds one document, and padding behind it.
FINE_ALONE = {
    "a convolution",
    "a running sum",
    "a row's first token",
    "no position ids",
    "no position ids, by its signature",
    "positions from elsewhere",
}
