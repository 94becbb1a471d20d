# SPDX-License-Identifier: Apache-2.0
"""What a model must keep to, and how it reads what it is given.

A packed step is exact only if the model keeps a contract: a document's results depend on its own tokens and their
positions in it, whatever else is in the row and wherever the row lies; its targets' loss on nothing else. What the
model's loss makes of labels and counts differs between models, and is found out as well. Nothing here knows a model's
name: rotary embeddings are asked (see ``row_rope``), and the model runs on a few tiny documents (see ``probe``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from deepspeed_distca.huggingface.attention_function import UnsupportedModelError
from deepspeed_distca.huggingface.probe import Fault, Probe, Targets, Weighting
from deepspeed_distca.huggingface.row_rope import longest_document, row_rules
from deepspeed_distca.huggingface.tiny_forwards import TinyForwards


@dataclass(frozen=True)
class Contract:
    """How a model reads its arguments. The defaults are those of causal language models.

    Attributes:
        targets: "next": labels[i + 1] is the target of position i, the model shifts them; "same": labels[i] is; None:
            the model has no loss by token.
        takes_shift_labels: the loss uses shift_labels where they are given: the target of position i, unshifted.
        weighting: "num_items_in_batch": the loss is a sum over targets divided by it, where it is given; "mean": it is
            always the mean over the model's own targets; None: neither, so that it is not weighted.
        takes_positions: position_ids say where a token stands in its document, so that a piece of a document can be
            on a rank without its beginning.
        whole_rows: there is one result for a row, so that a row may hold one document only.
        longest_document: longer ones would change the rotary frequencies of others; None: no limit.
    """

    targets: Targets | None = "next"
    takes_shift_labels: bool = True
    weighting: Weighting | None = "num_items_in_batch"
    takes_positions: bool = True
    whole_rows: bool = False
    longest_document: int | None = None


def find_contract(
    module: nn.Module,
    decoder: PreTrainedModel,
    modules: Sequence[nn.Module],
    *,
    device: torch.device,
    probe: bool = True,
    forget: Callable[[], None] = lambda: None,
) -> Contract:
    """How a decoder reads its arguments. Under ZeRO-3 and tensor parallelism collective, like forward.

    Args:
        module: what is called in training: the decoder, with what may be around it.
        decoder: the model.
        modules: its attention modules.
        device: of its parameters.
        probe: run the model on tiny documents; otherwise it is taken for a causal language model.
        forget: see :class:`TinyForwards`.

    Raises:
        UnsupportedModelError: the model does not keep the contract.
    """
    rules = row_rules(decoder)
    longest = longest_document(rules)
    if not probe:
        return Contract(longest_document=longest)
    name = f"{type(decoder).__name__} ({decoder.config.model_type})"
    forwards = TinyForwards(module, decoder, modules, device, forget)
    try:
        with forwards.ready():
            asked = Probe(forwards, decoder, min((rule.limit for rule in rules), default=None))
            asked.neighbours()
            takes_positions = asked.alone()
            return Contract(*asked.loss(), takes_positions, whole_rows=asked.whole_rows, longest_document=longest)
    except UnsupportedModelError:
        raise
    except Fault as fault:
        raise UnsupportedModelError(f"{name}: {fault}. Set `distca.enabled` to false for this model") from None
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} failed when it was tried on tiny documents: {type(error).__name__}: {error}. Set "
            "`distca.advanced.probe` to false to go without this trial, if the model can train on such batches"
        ) from error
