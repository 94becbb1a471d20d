# SPDX-License-Identifier: Apache-2.0
"""What is not public of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed_distca.compat import private

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_NAME = "transformers.configuration_utils.PreTrainedConfig._attn_implementation"


@private(_NAME)
def attention_name(config: PreTrainedConfig) -> str | None:
    """The attention function that a configuration names. It can be set by a public way, but not be read."""
    return config._attn_implementation


@private(_NAME)
def set_attention_name(config: PreTrainedConfig, name: str | None) -> None:
    """Changes :func:`attention_name` of one configuration. ``model.set_attn_implementation`` changes all those of a
    model, and looks names up, which is too slow for every forward."""
    config._attn_implementation = name


@private("transformers.PreTrainedModel._can_set_attn_implementation")
def can_choose_attention(model: PreTrainedModel) -> bool:
    """Whether a model's attention is called by the name in its configuration. ``set_attn_implementation`` only warns
    where it is not."""
    return model._can_set_attn_implementation()


@private("transformers.PreTrainedModel._is_stateful")
def has_recurrent_state(model: PreTrainedModel) -> bool:
    """Whether a model carries a state from token to token beside attention's keys and values. generate() asks the
    same."""
    return getattr(model, "_is_stateful", False)


@private("transformers.modeling_utils: self._loss_function")
def own_loss_function(model: PreTrainedModel) -> Any:
    """The ``loss_function`` that was set on a model, None where it has its class's. The property itself warns where
    the class has none."""
    return getattr(model, "_loss_function", None)
