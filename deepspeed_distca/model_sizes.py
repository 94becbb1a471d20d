# SPDX-License-Identifier: Apache-2.0
"""What planning has to know of a decoder's sizes, from its HuggingFace configuration alone: weights may be elsewhere
(ZeRO-3), or not made yet."""

from __future__ import annotations

from typing import Any

from deepspeed_distca.scheduler.heads import Heads


class UnsupportedModelError(ValueError):
    """A model, or an argument of its forward, whose attention the plugin cannot honour exactly."""


def heads_of(config: Any, element_size: int = 2, shards: int = 1) -> Heads:
    """The attention heads of a rank, as a HuggingFace decoder's configuration describes them.

    Args:
        element_size: bytes of an element of q, k and v.
        shards: ranks among which they are divided (tensor parallelism). Those of the rank with the most: the same on
            all of them, so that they make the same plans.

    Raises:
        UnsupportedModelError: it does not, or there are fewer than ranks.
    """
    config = of_first_layer(config)
    query = getattr(config, "num_attention_heads", None)
    if query is None:
        raise UnsupportedModelError(
            f"the configuration of {config.model_type} does not say how many attention heads there are "
            "(num_attention_heads). Set `distca.enabled` to false for this model"
        )
    key_value = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query
    if getattr(config, "qk_nope_head_dim", None):  # multi-head latent attention: every head has its own keys
        key_value, head_dim = query, config.qk_nope_head_dim + config.qk_rope_head_dim
    key_value = key_value or query
    if key_value < shards:
        raise UnsupportedModelError(
            f"{shards} tensor-parallel ranks share {key_value} key/value heads, so that some have none and no part in "
            f"attention; choose a `tensor_parallel.autotp_size` of at most {key_value}, or set `distca.enabled` to "
            "false"
        )
    most = -(-key_value // shards)
    return Heads(
        query=query * most // key_value,
        key_value=most,
        head_dim=head_dim,
        value_dim=getattr(config, "v_head_dim", None),
        element_size=element_size,
    )


def linear_flops(model: Any) -> int:
    """Floating-point operations of a decoder layer's linear work in forward, for a token: projections of attention,
    and a gated feed-forward part, of which a token goes through the experts that it is given to. An estimate."""
    model = of_first_layer(model)
    hidden, query = model.hidden_size, model.num_attention_heads
    head_dim = getattr(model, "head_dim", None) or hidden // query
    key_value = getattr(model, "num_key_value_heads", None) or query
    experts = getattr(model, "num_experts_per_tok", None)
    wide = getattr(model, "intermediate_size", None) or 4 * hidden
    if isinstance(wide, list | tuple):  # one for each layer
        wide = sum(wide) // len(wide)
    if experts:
        wide = experts * (getattr(model, "moe_intermediate_size", None) or wide)
    return 2 * hidden * (2 * (query + key_value) * head_dim + 3 * wide)


def of_first_layer(model: Any) -> Any:
    """A configuration's sizes; of the first layer, where layers have different ones (Gemma 4)."""
    return model.per_layer_config[0] if getattr(model, "is_heterogeneous", False) else model
