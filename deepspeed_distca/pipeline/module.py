# SPDX-License-Identifier: Apache-2.0
"""A HuggingFace decoder as a PipelineModule, and back: weights come from a model and are saved as one."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from deepspeed_distca.huggingface.decoders import UnsupportedModelError, attention_windows
from deepspeed_distca.pipeline.layers import (
    DecoderLayer,
    Embedding,
    FinalNorm,
    Head,
    PackedLoss,
    StageContext,
    tied_head,
)
from deepspeed_distca.pipeline.nano_batches import run_in_two

#: Models that are embedding, decoder layers, norm and head and nothing else. Others scale embeddings or logits, or mix
#: them with something, which the layers here would leave out.
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "olmo2")
_TIED = "embedding"


class DecoderPipeline(PipelineModule):
    """The layers of a HuggingFace decoder over pipeline stages, for ``deepspeed.initialize``.

    Args:
        model: whose modules become the layers: the stage keeps its own, the others are released with the model. It
            must have the same weights on every rank.
        num_stages: pipeline stages; divides the number of ranks. Decoder layers are divided evenly.
        activation_checkpoint_interval: decoder layers that are recomputed together in backward; 0: none. The
            ``pipeline`` block of ds_config.json overrides it.
        options: further arguments of PipelineModule.

    Attributes:
        config: the model's configuration.
        context: what the stage's layers share.
        stage_windows: for each stage, the window of each of its attention layers.
        attention_scale: the factor on scores, the same in all layers.

    Raises:
        UnsupportedModelError: a model that is not of the Llama family.
        ValueError: fewer decoder layers than stages.
    """

    def __init__(
        self, model: PreTrainedModel, num_stages: int, *, activation_checkpoint_interval: int = 0, **options: Any
    ) -> None:
        check_family(model)
        config = model.config
        layers = list(model.model.layers)
        if len(layers) < num_stages:
            raise ValueError(f"{len(layers)} decoder layers cannot be divided over {num_stages} stages")
        context = StageContext(config, model.model.rotary_emb)
        modules = [layer.self_attn for layer in layers]
        windows, scale = attention_windows(modules), float(modules[0].scaling)
        specs = _layer_specs(model, context, windows)
        super().__init__(
            specs,
            num_stages=num_stages,
            **{
                "loss_fn": PackedLoss(),
                "partition_method": f"type:^{DecoderLayer.__name__}$",
                "activation_checkpoint_interval": activation_checkpoint_interval,
                # Reentrant checkpointing cannot begin with a layer of integer inputs, the embedding.
                "checkpointable_layers": [DecoderLayer.__name__],
                "dynamic_shape": True,
                **options,
            },
        )
        for spec in specs:
            spec.module_args = ()  # built: what it held of other stages goes
        self.config, self.context, self.attention_scale = config, context, scale
        for index, layer in enumerate(self.decoder_layers):
            layer.index = index
        # Layer 0 is the embedding.
        self.stage_windows: list[list[int | None]] = [
            windows[max(0, begin - 1) : max(0, end - 1)] for begin, end in pairwise(self.parts)
        ]
        self._names = _layer_names(len(layers))

    def forward(self, forward_input: Any) -> Any:
        """PipelineModule's own, with decoder layers in two nano-batches where the micro-batch's plan is in two."""
        attention = self.context.attention
        if attention is None or attention.in_two is None:
            return super().forward(forward_input)
        decoders = self.decoder_layers
        first, x = self.forward_funcs.index(decoders[0]), forward_input
        for layer in self.forward_funcs[:first]:
            x = layer(x)
        interval, checkpoint = self.activation_checkpoint_interval, self.activation_checkpoint_func
        x = run_in_two(decoders, x, attention.in_two, attention.kept, checkpoint=checkpoint, interval=interval)
        for layer in self.forward_funcs[first + len(decoders) :]:
            x = layer(x)
        return x

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """Decoder layers of this stage, in order."""
        return [layer for layer in self.forward_funcs if isinstance(layer, DecoderLayer)]

    def hf_state_dict(self) -> dict[str, torch.Tensor]:
        """This stage's parameters under the names that they have in the HuggingFace model. A tied head has none."""
        state = {}
        for index, layer in enumerate(self.forward_funcs):
            if isinstance(layer, partial):  # the tied head
                continue
            inner, outer = self._names[self.parts[self.stage_id] + index]
            for name, value in layer.state_dict().items():
                state[outer + name.removeprefix(inner)] = value.detach()
        return state

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the whole model as ``from_pretrained`` reads it: one file for each stage, an index and the
        configuration. Collective over all ranks; the folder must be the same one on all of them."""
        folder = Path(folder)
        writes = self.mpu().get_data_parallel_rank() == 0
        stage, stages = self.stage_id, self.num_stages
        folder.mkdir(parents=True, exist_ok=True)
        if writes:
            tensors = {name: value.to("cpu", copy=True).contiguous() for name, value in self.hf_state_dict().items()}
            save_file(tensors, folder / _shard_name(stage, stages), metadata={"format": "pt"})
        if dist.get_rank() == 0:
            index = self._weight_index(stages)
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
            config = type(self.config).from_dict(self.config.to_dict())
            config.architectures = [meta_model(config).__class__.__name__]
            config.dtype = next(self.parameters()).dtype
            config.save_pretrained(folder)
        dist.barrier()

    def _weight_index(self, stages: int) -> dict[str, Any]:
        """Which file holds which weight, known on every rank without asking the others."""
        weight_map, total, itemsize = {}, 0, next(self.parameters()).element_size()
        for name, value in meta_model(self.config).state_dict().items():
            if self.config.tie_word_embeddings and name.startswith("lm_head."):
                continue
            layer = next(i for i, (_, prefix) in enumerate(self._names) if name.startswith(prefix))
            weight_map[name] = _shard_name(self.stage_owner(layer), stages)
            total += value.numel() * itemsize
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _shard_name(stage: int, stages: int) -> str:
    return f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def check_family(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError unless the model is embedding, decoder layers, norm and head and nothing else."""
    kind = model.config.model_type
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    inner = getattr(model, "model", None)
    if kind not in _MODEL_TYPES or not hasattr(model, "lm_head") or not all(hasattr(inner, p) for p in parts):
        raise UnsupportedModelError(
            f"{type(model).__name__} (model type {kind!r}) cannot be divided into pipeline stages; supported are "
            f"causal language models of the types {', '.join(_MODEL_TYPES)}"
        )


def meta_model(config: Any) -> PreTrainedModel:
    """The whole model of a configuration, on no device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _layer_specs(model: PreTrainedModel, context: StageContext, windows: list[int | None]) -> list[LayerSpec]:
    inner = model.model
    decoders = [
        LayerSpec(DecoderLayer, layer, context, window) for layer, window in zip(inner.layers, windows, strict=True)
    ]
    norm = LayerSpec(FinalNorm, inner.norm)
    if not model.config.tie_word_embeddings:
        return [LayerSpec(Embedding, inner.embed_tokens), *decoders, norm, LayerSpec(Head, model.lm_head)]
    tie: dict[str, Any] = {"tied_weight_attr": "embed_tokens.weight"}
    return [
        TiedLayerSpec(_TIED, Embedding, inner.embed_tokens, **tie),
        *decoders,
        norm,
        TiedLayerSpec(_TIED, Embedding, inner.embed_tokens, forward_fn=tied_head, **tie),
    ]


def _layer_names(decoders: int) -> list[tuple[str, str]]:
    """For each layer, the prefix of its parameters in it and in the HuggingFace model."""
    return [
        ("embed_tokens.", "model.embed_tokens."),
        *(("layer.", f"model.layers.{i}.") for i in range(decoders)),
        ("norm.", "model.norm."),
        ("lm_head.", "lm_head."),
    ]
