# SPDX-License-Identifier: Apache-2.0
"""The attention function "distca" under transformers' interface: from its arguments to a planned core attention.

Two names are registered. "distca" has no mask function, so that transformers builds no mask at all: documents are in
the plan, and a mask would cost memory and a synchronisation. "distca_first" is the same for a model's first planned
forward and does have one, which builds no mask either but looks at the rule that transformers would have built it from
(see ``first_forward``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from deepspeed_distca.attention_server.nano_batches import HalfPlan
from deepspeed_distca.attention_server.plan_request import PlanRequest
from deepspeed_distca.attention_server.step_plan import StepPlan
from deepspeed_distca.attention_server.task_batch import AttentionSpec
from deepspeed_distca.huggingface.decoders import UnsupportedModelError
from deepspeed_distca.huggingface.first_forward import FirstForward
from deepspeed_distca.huggingface.kept_attention import KeptAttention

NAME = "distca"
FIRST = "distca_first"
#: The keyword arguments of forward that carry a micro-batch's plan, what is kept of its attention for recomputation,
#: and the witness of the first forward.
PLAN = "distca_plan"
KEPT = "distca_kept"
WITNESS = "distca_witness"

#: What a layer may get as its plan: of a whole micro-batch, made or asked for, or of a half of one.
Plan = StepPlan | PlanRequest | HalfPlan


def distca_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function behind ``attn_implementation="distca"``, with transformers' signature.

    Args:
        query: [batch, q_heads, tokens, head_dim]; key, value: [batch, kv_heads, tokens, ...]. Rows of the batch are
            stored one after another, as the layout counts them.
        sliding_window: keys a query sees, its own included.
        s_aux: attention sinks [q_heads]: a logit that takes part in the softmax and has no value.

    Returns:
        [batch, tokens, q_heads, v_head_dim], and None for the weights.

    Raises:
        UnsupportedModelError: no plan, or something that a plan cannot honour.
    """
    plan: Plan | None = kwargs.get(PLAN)
    name = type(module).__name__
    if plan is None and FirstForward.under_way:
        raise UnsupportedModelError(
            f"{name}: the decoder layer around it does not pass keyword arguments on, which carry the plan. "
            "Set `distca.enabled` to false for this model"
        )
    if plan is None:
        raise UnsupportedModelError(
            f'{name}: attention "{NAME}" was called without a plan. It works inside a model given to '
            "deepspeed.initialize with a `distca` block; elsewhere choose another attn_implementation"
        )
    witness: FirstForward | None = kwargs.get(WITNESS)
    if witness is not None and witness.attention_call(module, sliding_window, attention_mask):
        attention_mask = None
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{name} passes an attention mask of shape {list(attention_mask.shape)}; only causal attention inside "
            "documents is supported. Leave the mask out, or set `distca.enabled` to false for this model"
        )
    if dropout:
        raise UnsupportedModelError(f"{name} uses attention dropout {dropout}; set attention dropout to 0")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} is not causal; core attention is planned for causal decoders only")
    if query.shape[2] != key.shape[2]:
        raise UnsupportedModelError(
            f"{name}: {query.shape[2]} queries against {key.shape[2]} keys in training; run without a KV cache "
            "(use_cache=False) and without cross attention"
        )
    scores = query.shape[2], key.shape[2]
    bias = next((n for n, t in kwargs.items() if torch.is_tensor(t) and t.ndim > 3 and t.shape[-2:] == scores), None)
    if bias is not None:
        raise UnsupportedModelError(
            f"{name} adds to its scores: it passes {bias} of shape {list(kwargs[bias].shape)}, a number for each "
            "query and key, which plans know nothing of. Set `distca.enabled` to false for this model"
        )
    if torch.is_autocast_enabled(query.device.type):
        # As scaled_dot_product_attention does; RoPE may have left q and k wider than v.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch, _, tokens, head_dim = query.shape
    spec = AttentionSpec(head_dim**-0.5 if scaling is None else float(scaling), sliding_window, softcap)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    kept: KeptAttention | None = kwargs.get(KEPT)
    if isinstance(plan, PlanRequest):
        # A collective, in the first layer of a micro-batch.
        plan = plan.result(any(t.requires_grad for t in (q, k, v)) if torch.is_grad_enabled() else None)
    if s_aux is not None and isinstance(plan, HalfPlan):
        s_aux = s_aux.clone()  # ZeRO-3 may free the parameter while the other nano-batch runs
    out, lse = plan.attend(q, k, v, spec) if kept is None else kept.attend(module, plan, q, k, v, spec)
    if s_aux is not None:
        # The sink adds exp(sink) to the softmax's denominator: out * exp(lse) / (exp(lse) + exp(sink)).
        out = out * torch.sigmoid(lse.t() - s_aux).unsqueeze(-1).to(out.dtype)
    return out.unflatten(0, (batch, tokens)), None


def _no_mask(**arguments: Any) -> torch.Tensor | None:
    """The mask function of "distca_first": no mask, but the witness learns the rule."""
    witnesses = FirstForward.under_way
    return witnesses[-1].mask_rule(**arguments) if witnesses else None


for _name in (NAME, FIRST):
    # Opaque to torch.compile: exchanges and plans are no tensors of a graph.
    AttentionInterface.register(_name, torch.compiler.disable(distca_attention))
AttentionMaskInterface.register(FIRST, torch.compiler.disable(_no_mask))
