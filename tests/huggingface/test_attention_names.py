# SPDX-License-Identifier: Apache-2.0
"""Which attention function configurations name: what interrupts a recomputed layer leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

from deepspeed_distca.huggingface.attention_function import NAME, PLAN
from deepspeed_distca.huggingface.attention_names import AttentionNames
from tests.distributed.engine_worker import tiny_llama


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, ValueError])
def test_an_interrupted_recomputation(interrupt) -> None:
    model = tiny_llama()
    modules = [layer.self_attn for layer in model.model.layers]
    names = AttentionNames(modules)
    seen = []

    def stop(*_) -> None:
        seen.append(model.config._attn_implementation)
        raise interrupt

    own = model.config._attn_implementation
    modules[0].q_proj.register_forward_pre_hook(stop)
    with pytest.raises(interrupt):
        modules[0](torch.zeros(1, 3, model.config.hidden_size), None, None, **{PLAN: object()})
    assert seen == [NAME]
    names.restore()
    assert model.config._attn_implementation == own != NAME
    names.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)
