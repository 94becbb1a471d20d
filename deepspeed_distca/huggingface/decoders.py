# SPDX-License-Identifier: Apache-2.0
"""What is known of a HuggingFace decoder before it runs: its attention modules, their windows, and what is refused.

A model is refused by name here, before the first step, where its attention cannot be honoured exactly. What only shows
while it runs is caught in the first forward (see ``first_forward``).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from deepspeed_distca.compat.transformers import can_choose_attention, has_recurrent_state
from deepspeed_distca.model_sizes import UnsupportedModelError as UnsupportedModelError

#: What to do with a model that is refused.
DISABLE = "Set `distca.enabled` to false for this model"
#: Kinds of layers, as configurations name them, whose mixing of tokens is all core attention.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
#: Kinds that a trial on a few tokens can judge: layers without attention, convolutions, recurrent states. Whatever
#: selects or compresses keys may take all of them in a short row.
_TRIED_LAYERS = {*_ATTENTION_LAYERS, "linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"}
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def find_decoder(model: nn.Module) -> PreTrainedModel:
    """The outermost HuggingFace model in a module: itself, or inside wrappers such as PEFT's or torch.compile's. Of
    several beside each other the one that is trained, as a student beside its teacher.

    Raises:
        UnsupportedModelError: there is none, or several decoders that are trained.
    """
    outermost: list[PreTrainedModel] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # parents come before their children
        if isinstance(module, PreTrainedModel) and module not in inside:
            outermost.append(module)
            inside.update(module.modules())
    if not outermost:
        raise UnsupportedModelError(
            f"{type(model).__name__} holds no HuggingFace model; the `distca` block needs one whose attention goes "
            f"through transformers' attention interface. {DISABLE}"
        )
    decoders = [m for m in outermost if any(map(_is_attention, m.modules()))] or outermost
    trained: list[PreTrainedModel] = []
    for found in decoders:
        layers = {m for m in found.modules() if _is_attention(m)}
        of_another = layers and any(layers <= set(other.modules()) for other in trained)  # with a head of its own
        if not of_another and any(p.requires_grad for p in found.parameters()):
            trained.append(found)
    if len(trained) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} holds {len(trained)} decoders that are trained, "
            f"{', '.join(type(m).__name__ for m in trained)}; attention can be planned for one only. Give each an "
            f"engine of its own, or freeze all but one (requires_grad) before. {DISABLE}"
        )
    return (trained or decoders)[0]


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that call the attention interface once in every forward.

    Raises:
        UnsupportedModelError: there is none, or the model is known not to be honoured; names the model.
    """
    name = f"{type(model).__name__} ({model.config.model_type})"
    found = [m for m in model.modules() if _is_attention(m)]
    config = model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False) or model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only causal decoders are supported. {DISABLE}")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{name} is configured for bidirectional attention. {DISABLE}")
    if getattr(config, "attention_chunk_size", None):
        raise UnsupportedModelError(
            f"{name} uses chunked attention, which only its mask conveys; it is not supported. {DISABLE}"
        )
    selecting = _selects_keys(config)
    if selecting:
        raise UnsupportedModelError(
            f"{name} mixes tokens by {selecting} beside attention, which knows nothing of documents and of other "
            f"ranks. {DISABLE}"
        )
    if not found or not can_choose_attention(model):
        raise UnsupportedModelError(
            f"{name} does not go through transformers' attention interface, so its core attention cannot be "
            f"dispatched. {DISABLE}"
        )
    if getattr(config, "layerdrop", 0.0):
        raise UnsupportedModelError(
            f"{name} leaves out layers at random (layerdrop {config.layerdrop}), other ones on every rank, where "
            "ranks compute each other's attention; set config.layerdrop to 0"
        )
    for module in found:
        for key in _DROPOUT:
            rate = getattr(module, key, 0.0)
            rate = rate.p if isinstance(rate, nn.Dropout) else rate
            if isinstance(rate, int | float) and rate:
                in_config = next((k for k in _DROPOUT if getattr(config, k, 0.0)), "attention_dropout")
                raise UnsupportedModelError(f"{name} uses attention dropout {rate}; set config.{in_config} to 0")
    return found


def base_of(decoder: PreTrainedModel, modules: list[nn.Module]) -> PreTrainedModel:
    """The innermost model that has all attention modules."""
    found = decoder
    for model in decoder.modules():
        if isinstance(model, PreTrainedModel) and set(modules) <= set(model.modules()):
            found = model
    return found


def layers_and_parts(base: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The largest modules that have one attention module each, the layers beside them that have none, and what these
    consist of."""
    attention = set(modules)
    found: dict[nn.Module, None] = {}
    done: set[nn.Module] = set()
    lists = [list(m) for m in base.modules() if isinstance(m, nn.ModuleList)]
    for module in base.modules():  # parents come before their children
        mine = attention & set(module.modules())
        called = module is not base and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if len(mine) == 1 and called and not mine <= done:
            done |= mine
            # Beside it may be layers of other kinds.
            for layer in next((layers for layers in lists if module in layers), [module]):
                if len(attention & set(layer.modules())) < 2:
                    parts = (m for m in layer.children() if any(True for _ in m.parameters()))
                    found.update(dict.fromkeys([*parts, layer]))
    return list(found)


def takes(signature: inspect.Signature, argument: str) -> bool:
    """Whether a forward with that signature can be given a keyword argument."""
    parameters = signature.parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def attention_windows(modules: list[nn.Module]) -> list[int | None]:
    """The sliding window of each attention module (keys a query sees, its own included); None: all keys before it.

    Modules keep it as ``sliding_window``, or take it from their configuration at every call; then the configuration's
    ``layer_types`` say which layers have it.
    """
    return [_window(module) for module in modules]


def _window(module: nn.Module) -> int | None:
    config: Any = module.config
    window: Any
    if hasattr(module, "sliding_window"):
        window = module.sliding_window
        return window if getattr(module, "is_sliding", True) is not False else None
    window = getattr(config, "sliding_window", None)
    if not window or not _reads_window_from_config(module):
        return None
    types, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if types is not None and layer is not None and types[layer] != "sliding_attention":
        return None
    return window


def _reads_window_from_config(module: nn.Module) -> bool:
    """Whether the module's forward looks the window up in its configuration: its code mentions the name."""
    code = getattr(type(module).forward, "__wrapped__", type(module).forward).__code__
    return "sliding_window" in (*code.co_names, *code.co_consts)


def other_mixing(model: PreTrainedModel) -> str | None:
    """What else passes information between tokens, as far as names tell: state-space, linear-attention and convolution
    layers. The probe needs no names; this is for models that are not tried."""
    kinds = _kinds(model.config.get_text_config()) - _ATTENTION_LAYERS
    if kinds:
        return f"layers of kind {', '.join(sorted(kinds))}"
    if has_recurrent_state(model):
        return "a recurrent state"
    convolution = next((n for n, m in model.named_modules() if isinstance(m, nn.Conv1d)), None)
    return f"a convolution ({convolution})" if convolution else None


def _selects_keys(config: Any) -> str | None:
    kinds = _kinds(config) - _TRIED_LAYERS
    if kinds:
        return f"layers of kind {', '.join(sorted(kinds))}"
    return "an indexer that selects keys" if getattr(config, "index_topk", None) else None


def _kinds(config: Any) -> set[str]:
    return set(map(str, getattr(config, "layer_types", None) or ()))


def _is_attention(module: nn.Module) -> bool:
    cls = type(module)
    owner = sys.modules.get(cls.__module__)
    return (
        "Attention" in cls.__name__
        and hasattr(owner, "ALL_ATTENTION_FUNCTIONS")
        and hasattr(module, "config")
        and getattr(module, "is_causal", True) is True
        and not any(_is_attention(child) for child in module.children())
    )
