# SPDX-License-Identifier: Apache-2.0
"""What a model must keep to, and how it reads what it is given.

A packed step is exact only if the model keeps a contract: a document's results depend on its own tokens and their
positions in it, whatever else is in the row and wherever the row lies; its targets' loss on nothing else. What the
model's loss makes of labels and counts differs between models, and is found out as well. Nothing here knows a model's
name: rotary embeddings are asked (see ``row_rope``), and the model runs on a few tiny documents (see ``probe``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from deepspeed_distca.huggingface.decoders import DISABLE, UnsupportedModelError, other_mixing
from deepspeed_distca.huggingface.probe import Fault, Probe, Rows, Targets, Weighting
from deepspeed_distca.huggingface.row_rope import longest_document, row_rules, takes_axes
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
            on a rank without its beginning, where rows are "packed".
        whole_rows: there is one result for a row, so that a row may hold one document only.
        longest_document: longer ones would change the rotary frequencies of others; None: no limit.
        rope_limits: lengths beyond which a document has other rotary frequencies.
        takes_axes: position_ids may have several axes, [axes, batch, tokens], or it is not known that they may not.
        rows: how documents may share a row. Unless it is "packed", something beside core attention passes through a
            document (a convolution, a recurrent state, a count of places), and each must be whole on one rank.
        why: what was found with several documents in a row, where each must have its own.
        name: of the model, for errors.
    """

    targets: Targets | None = "next"
    takes_shift_labels: bool = True
    weighting: Weighting | None = "num_items_in_batch"
    takes_positions: bool = True
    whole_rows: bool = False
    longest_document: int | None = None
    rows: Rows = "packed"
    why: str = field(default="", compare=False)
    name: str = field(default="this model", compare=False)
    rope_limits: tuple[int, ...] = ()
    takes_axes: bool = True


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
    longest, limits = longest_document(rules), tuple(sorted({rule.limit for rule in rules if rule.two_sided}))
    name, axes = f"{type(decoder).__name__} ({decoder.config.model_type})", takes_axes(decoder)
    if not probe:
        mixing = other_mixing(decoder)
        if mixing:
            raise UnsupportedModelError(
                f"{name} mixes tokens by {mixing} beside attention; how it takes documents is found by trying it: "
                "leave `distca.advanced.probe` on"
            )
        return Contract(longest_document=longest, rope_limits=limits, takes_axes=axes)
    forwards = TinyForwards(module, decoder, modules, device, forget)
    try:
        with forwards.ready():
            asked = Probe(forwards, decoder, min((rule.limit for rule in rules), default=None))
            rows, takes_positions, why = _rows(asked)
            loss = asked.loss()
            return Contract(*loss, takes_positions, asked.whole_rows, longest, rows, why, name, limits, axes)
    except UnsupportedModelError:
        raise
    except Fault as fault:
        raise UnsupportedModelError(f"{name}: {fault}. {DISABLE}") from None
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} failed when it was tried on tiny documents: {type(error).__name__}: {error}. Set "
            "`distca.advanced.probe` to false to go without this trial, if the model can train on such batches"
        ) from error


def _rows(asked: Probe) -> tuple[Rows, bool, str]:
    """How documents may share a row; whether they may continue on other ranks; and what is wrong where each needs a
    row of its own. Where not even that is exact, raises what is wrong with packed ones."""
    try:
        asked.neighbours("packed")
        return "packed", asked.alone("packed"), ""
    except UnsupportedModelError:
        raise
    except Exception as fault:
        packed = why = fault
    rows: Rows = "alone"
    try:
        asked.neighbours("told")
        asked.alone("told")
        rows = "told"
    except Exception as fault:
        if not isinstance(fault, TypeError):  # a forward that takes no such arguments, which says nothing
            why = fault
    # After it, since ZeRO-3 lets go of what a forward that failed has gathered in the next one.
    try:
        asked.neighbours("alone")
        positions = asked.alone("alone")
    except Exception:
        raise packed from None
    return rows, positions, str(why) if rows == "alone" else ""
