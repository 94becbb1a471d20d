# SPDX-License-Identifier: Apache-2.0
"""What of a model a step's time and memory depend on, and the options with which a GPU plans for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from deepspeed_distca.config import parse_config
from deepspeed_distca.model_sizes import heads_of, linear_flops, of_first_layer
from deepspeed_distca.plan_options import plan_options
from deepspeed_distca.scheduler.cost_model import Phase
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.worth import PlanOptions

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
#: Kinds of layers, as configurations name them, that have no attention: recurrent states, convolutions, feed-forward.
_NO_ATTENTION = {"linear_attention", "mamba", "recurrent", "conv", "mlp", "moe"}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

#: Bytes that element-wise work of a decoder layer reads and writes for a token, for each element of the hidden state,
#: of the feed-forward part, and of q, k and v's heads together. transformers' own Llama, operator by operator, in bf16
#: (tests/simulator/test_model.py counts them), and with Liger's norm, rotary embedding and SwiGLU in their place, of
#: which each reads its arguments and writes its results once.
_ELEMENTWISE: dict[tuple[bool, Phase], tuple[int, int, int]] = {
    (False, "forward"): (84, 10, 20),
    (False, "backward"): (214, 18, 28),
    (True, "forward"): (20, 6, 4),
    (True, "backward"): (42, 10, 4),
}
#: Bytes that a layer saves for its backward, for each of these elements, by the same count; and those that its
#: backward needs beside: gradients of the feed-forward part, and the norms' in fp32.
_SAVED = {False: (16, 8, 4), True: (8, 6, 4)}
_WORKSPACE = (12, 6, 0)
#: Bytes for each logit, forward and backward: cast to fp32, softmax, gradient, cast back; or Liger's loss in place.
_LOSS = {False: 36, True: 6}
#: Bytes of a logit that are there at once: bf16, fp32 and its softmax; Liger's loss has some of them at a time.
_LOGITS = {False: 10, True: 0}


@dataclass(frozen=True)
class Model:
    """A decoder's sizes.

    Attributes:
        name: for people to read.
        windows: how many layers with attention there are of each window; None is full causal attention.
        heads: of each.
        hidden, wide: elements of a hidden state, and of the feed-forward part that a token goes through.
        vocabulary: of the output layer.
        layer_flops, output_flops: of a forward of a layer's linear work, and of the output layer, for a token.
        layer_parameters, outer_parameters: of a layer, and of embedding and output together.
        no_attention: how many layers there are beside: they have recurrent states or convolutions in its place, which
            are not counted.
    """

    name: str
    windows: dict[int | None, int]
    heads: Heads
    hidden: int
    wide: int
    vocabulary: int
    layer_flops: int
    output_flops: int
    layer_parameters: int
    outer_parameters: int
    no_attention: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Model:
        """From a HuggingFace configuration (config.json).

        Raises:
            ValueError: one without the sizes of a decoder.
        """
        given = config.get("text_config") or config
        if not isinstance(given, Mapping):
            raise ValueError(f"the model's text_config must be a JSON object, got {type(given).__name__}")
        missing = [key for key in _NEEDED if type(given.get(key)) is not int or given[key] < 1]
        if missing:
            raise ValueError(f"the model's configuration has no {', '.join(missing)}; a decoder's config.json has")
        sizes = of_first_layer(SimpleNamespace(**given))
        heads = heads_of(sizes)
        layers, hidden, flops = given["num_hidden_layers"], sizes.hidden_size, linear_flops(sizes)
        projections = hidden * 2 * (heads.query + heads.key_value) * heads.head_dim
        wide = (flops // 2 - projections) // (3 * hidden)
        vocabulary = int(given.get("vocab_size") or 0)
        active = getattr(sizes, "num_experts_per_tok", None)
        experts = next((given[key] for key in _EXPERTS if type(given.get(key)) is int), 1) if active else 1
        layer = projections + 3 * hidden * wide * experts // (active or 1)
        embeddings = vocabulary * hidden * (1 if given.get("tie_word_embeddings") else 2)
        name = f"{given.get('model_type', 'model')}, {layers} layers of {hidden}"
        output = 2 * hidden * vocabulary
        windows, none = _windows(given)
        return cls(name, windows, heads, hidden, wide, vocabulary, flops, output, layer, embeddings, none)

    @property
    def layers(self) -> int:
        """How many there are."""
        return self.attention_layers + self.no_attention

    @property
    def attention_layers(self) -> int:
        """How many of them have attention."""
        return sum(self.windows.values())

    @property
    def kinds(self) -> dict[int | None, int]:
        """How many layers there are of each kind: by window, which is 0 of those without attention."""
        return {**self.windows, **({0: self.no_attention} if self.no_attention else {})}

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.layers * self.layer_parameters + self.outer_parameters

    def element_bytes(self, phase: Phase, liger: bool) -> int:
        """Bytes that a layer's element-wise work moves for a token in a phase."""
        return self._bytes(_ELEMENTWISE[liger, phase])

    def saved_bytes(self, liger: bool) -> int:
        """Bytes that a layer saves for its backward, for a token."""
        return self._bytes(_SAVED[liger])

    def workspace_bytes(self, liger: bool) -> int:
        """Bytes for a token that are there once: a layer's backward, or the logits."""
        return max(self._bytes(_WORKSPACE), _LOGITS[liger] * self.vocabulary)

    def _bytes(self, each: tuple[int, int, int]) -> int:
        heads = (self.heads.query + self.heads.key_value) * self.heads.head_dim
        return sum(n * elements for n, elements in zip(each, (self.hidden, self.wide, heads), strict=True))

    def loss_bytes(self, liger: bool) -> int:
        """Bytes that the loss moves for a token, forward and backward, beside the output's matrix products."""
        return _LOSS[liger] * self.vocabulary


def _windows(config: Mapping[str, Any]) -> tuple[dict[int | None, int], int]:
    """Layers with attention by window, as transformers' configurations describe them, and how many have none."""
    layers = config["num_hidden_layers"]
    window = None if config.get("use_sliding_window") is False else config.get("sliding_window") or None
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["sliding_attention"] * layers
    if len(kinds) != layers:
        raise ValueError(f"the model's configuration has {layers} layers, and kinds (layer_types) of {len(kinds)}")
    none = sum(kind in _NO_ATTENTION for kind in kinds)
    sliding = 0 if window is None else sum(kind == "sliding_attention" for kind in kinds)
    if none >= layers:
        raise ValueError(f"none of the model's {layers} layers has attention")
    windows = ((None, layers - none - sliding), (window and int(window), sliding))
    return {kind: count for kind, count in windows if count}, none


def training_options(config: Mapping[str, Any], ranks: int = 1, node_size: int | None = None) -> PlanOptions:
    """With which a GPU plans when the `distca` block says nothing about it.

    Args:
        config: the model's.
        ranks: that share attention.
    """
    sizes = SimpleNamespace(**(config.get("text_config") or config))
    machines = {rank: str(rank // (node_size or ranks)) for rank in range(ranks)}
    gpu: Any = SimpleNamespace(type="cuda")  # torch.device("cuda") would take torch
    return plan_options(parse_config({}), gpu, sizes, servers=machines)
