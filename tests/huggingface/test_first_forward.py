# SPDX-License-Identifier: Apache-2.0
"""The witness of the first forward tells rules of masks apart, by transformers' own mask functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import masking_utils

from deepspeed_distca.huggingface.decoders import UnsupportedModelError
from deepspeed_distca.huggingface.first_forward import FirstForward

POSITIONS = torch.cat([torch.arange(13), torch.arange(20), torch.arange(7)])[None]
TOKENS = POSITIONS.shape[1]


class Attention(nn.Module):
    pass


def witness(*windows: int | None, positions: torch.Tensor | None = POSITIONS) -> tuple[FirstForward, list[Attention]]:
    modules = [Attention() for _ in windows]
    return FirstForward(nn.Module(), dict(zip(modules, windows, strict=True)), positions), modules


def packed(rule):
    """As transformers combines a rule with packed documents."""
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # since transformers 5.18 or later
        rule = masking_utils.remap_positions_for_packed_sequence(rule, POSITIONS)
    document = torch.cumsum(torch.diff(POSITIONS, prepend=POSITIONS[:, :1] - 1) != 1, 1)
    return masking_utils.and_masks(rule, masking_utils.packed_sequence_mask_function(document))


def rule_of(first: FirstForward, function, window: int | None = None) -> torch.Tensor:
    arguments = {} if window is None else {"local_size": window}
    return first.mask_rule(mask_function=function, q_length=TOKENS, kv_length=TOKENS, device="cpu", **arguments)


def test_the_rules_of_the_plan_pass():
    first, (full, sliding) = witness(None, 5)
    causal = rule_of(first, packed(masking_utils.causal_mask_function))
    windowed = rule_of(first, packed(masking_utils.sliding_window_causal_mask_function(5)), 5)
    assert first.attention_call(full, None, causal)
    assert first.attention_call(sliding, 5, windowed[:, :, :, :1])  # a slice stands for the mask as well
    first.finish()


def test_a_mask_that_knows_nothing_of_packing_passes():
    first, (module,) = witness(None)
    assert first.attention_call(module, None, rule_of(first, masking_utils.causal_mask_function))


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)), None),
        (masking_utils.bidirectional_mask_function, None),
        (
            masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: (k < 9) & (q < 9)),
            None,
        ),
        (masking_utils.sliding_window_causal_mask_function(6), 5),
    ],
    ids=["chunks", "bidirectional", "a block", "another window than it says"],
)
def test_other_rules_are_refused(function, window):
    first, (module,) = witness(window)
    token = rule_of(first, function, window)
    with pytest.raises(UnsupportedModelError, match="causal attention inside documents"):
        first.attention_call(module, window, token)


def test_windows_must_agree():
    first, (module,) = witness(None)
    with pytest.raises(UnsupportedModelError, match="window of 5"):
        first.attention_call(module, 5, None)
    token = rule_of(first, packed(masking_utils.sliding_window_causal_mask_function(5)), 5)
    with pytest.raises(UnsupportedModelError, match="what only a mask conveys"):
        first.attention_call(module, None, token)


def test_a_mask_that_stands_for_no_rule_is_not_taken_for_one():
    first, (module,) = witness(None)
    assert not first.attention_call(module, None, torch.ones(1, 1, 1, 1, dtype=torch.bool))


def test_every_module_must_call_once():
    first, (one, _) = witness(None, None)
    first.attention_call(one, None, None)
    with pytest.raises(UnsupportedModelError, match="1 attention calls"):
        first.finish()
    first.attention_call(one, None, None)
    with pytest.raises(UnsupportedModelError, match="2 attention calls"):
        first.finish()
