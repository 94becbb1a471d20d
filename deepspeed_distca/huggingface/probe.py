# SPDX-License-Identifier: Apache-2.0
"""Asks a model how it treats documents and their targets, by running it on tiny ones: what it does counts, and not
what it is called.

Every rank runs the same forwards with the same tokens, whatever they show, since ranks that share parameters must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from deepspeed_distca.data.from_layout import IGNORE_INDEX
from deepspeed_distca.huggingface.tiny_forwards import Like, Seen, TinyForwards

#: Relative differences below these are rounding: of one layer, since each goes on from the same values.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
_TF32 = 1e-3
#: The same of losses over some dozens of targets, by the type in which they are computed from the same scores.
#: (The largest of transformers' models: 1.6e-7 in fp32, and 0.016 in bf16.)
_ADDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 0.03}
#: Classes whose weights in the loss are looked at.
_MOST_CLASSES = 160

#: How documents may share a row: "packed", as they are; "told", where the model's forward is told of their borders;
#: "alone": not at all, a row is one document and padding behind it.
Rows = Literal["packed", "told", "alone"]
Targets = Literal["next", "same"]
Weighting = Literal["num_items_in_batch", "mean"]


class Fault(Exception):
    """What was found wrong with a model; does not name it."""


class Probe:
    """Three questions to one model, to be asked in this order: :meth:`neighbours`, :meth:`alone`, :meth:`loss`. The
    first two may be asked again for another way to give documents.

    Args:
        forwards: of the model; ready.
        longest: the longest document whose positions all rotary embeddings treat alike; None: any.

    Attributes:
        whole_rows: it has one result for a whole row.

    Raises:
        Fault: here and in every question: what a document gets is not what it gets alone.
    """

    def __init__(self, forwards: TinyForwards, decoder: PreTrainedModel, longest: int | None) -> None:
        self._forwards = forwards
        self._ordinary, self._ends = _ordinary_tokens(decoder)
        # So many as are needed, and no larger ones than must be.
        few = self._ordinary[self._ordinary < 1024]
        self._tokens, self._rounding = few[:: max(1, len(few) // 64)], _rounding(decoder)
        self._kind = next(decoder.parameters()).dtype
        self._random = np.random.RandomState(0)
        most = getattr(decoder.config.get_text_config(), "max_position_embeddings", None)
        most = min(x for x in (longest, most, 44) if x)
        # A long document, and after it three that are watched, with others between and behind.
        rest = [3, 3] * 3 if most >= 44 else [2, 1] * 3
        self._row = [max(1, most - sum(rest)), *rest]
        self._size = sum(self._row)
        self._whole = self._draw(self._size // 2)
        self._alone = forwards.run(self._whole, [len(self._whole)], positions=False)
        if not self._alone.of(self._alone.base):
            raise Fault("its base model returns no tensor with a row for each token")
        self.whole_rows = not self._alone.of(self._alone.decoder)

    def neighbours(self, rows: Rows) -> None:
        """In training, a document's results are the same beside other documents of its batch, or before padding.

        All rows are of one size here: the same tokens go through the same kernels.
        """
        # Models with one result for a row may take one row at a time, and so may kernels that are told of borders. The
        # documents watched are last: what has no room for all has none for them.
        batch = 1 if self.whole_rows or rows == "told" else 4 if rows == "alone" else 2
        if rows == "alone":
            lengths = [self._size] * batch
            begins = (np.arange(batch)[-3:] * self._size).tolist()
            watched = [slice(begin, begin + self._size // 4) for begin in begins]
        else:
            lengths = [*[self._size] * (batch - 1), *self._row]
            ends = np.cumsum(lengths).tolist()
            watched = [slice(ends[i] - lengths[i], ends[i]) for i in (-6, -4, -2)]
        # One token everywhere goes to the same experts: if those have no room for a whole batch, it shows.
        ids = np.full(sum(lengths), self._tokens[0])
        others = self._draw(len(ids))
        for document in watched:
            others[document] = ids[document]
        given = self._given(rows, lengths, batch)
        first = self._forwards.run(ids, lengths, batch=batch, training=True, **given)
        same = [Like(first, document, document) for document in watched]
        second = self._forwards.run(others, lengths, batch=batch, training=True, like=same, **given)
        # One of three documents may stand well by chance.
        error = float(np.median([_errors(second.rows(), like).max() for like in same]))
        if not error <= self._rounding:
            raise Fault(
                f"a document's results change with the other documents of its batch (by {error:.1e}): something "
                "beside core attention passes between tokens, such as a convolution, a shifted state, statistics of a "
                "row or a batch, or experts that have room for so many tokens"
            )
        self._watched, self._rows = watched, (first, second)

    def alone(self, rows: Rows) -> bool:
        """A packed document, or one before padding, has the results that it has alone, where users give no position
        ids.

        Returns:
            whether position ids say where a token stands. Where rows are packed: whether a piece of a document, given
            them and the keys before it, has the results it has in the whole document, so that documents may continue
            on other ranks.
        """
        alone, whole, size = self._alone, self._whole, self._size
        others = self._draw(size - len(whole))
        row, lengths = [others, whole], [len(others), len(whole)]
        like = Like(alone, slice(len(others), size), slice(len(whole)))
        if rows == "alone":
            row, lengths, like = [whole, others], [size], Like(alone, slice(len(whole)), slice(len(whole)))
        given = self._given(rows, lengths, 1)
        if rows == "alone":
            given["attention_mask"] = self._forwards.tensor(np.arange(size) < len(whole), 1).long()
        packed = self._forwards.run(np.concatenate(row), lengths, like=[like], **given)
        error = _most(_errors(packed.rows(), like))
        if not error <= self._rounding:
            why = (
                "position_ids, counted from 0 in each document, do not give it the positions that it counts itself, "
                "or something depends on the length of the row"
            )
            if not self._forwards.takes("position_ids"):
                why = "its forward takes no position_ids, so it counts positions through the row"
            raise Fault(f"a packed document has other results than alone (by {error:.1e}): {why}")
        if rows != "packed":
            return self._forwards.takes("position_ids")
        half = len(whole) // 2
        rest = len(whole) - half
        like = Like(alone, slice(rest), slice(half, len(whole)))
        piece = self._forwards.run(np.append(whole[half:], others), [rest, len(others)], after=alone, like=[like])
        error = _most(_errors(piece.rows(), like))
        for mine, theirs in zip(piece.attention, alone.attention, strict=True):
            # Positions change queries and keys a lot, but results hardly in a model that has learned nothing yet.
            error = max(error, _most(_errors(mine[:2], like, theirs[:2])))
        return self._forwards.takes("position_ids") and error <= self._rounding

    def loss(self) -> tuple[Targets | None, bool, Weighting | None]:
        """How the loss reads labels, shift_labels and num_items_in_batch: see ``contract.Contract``.

        Seen from how much the loss changes with the label of one token, which other losses have no part in.
        """
        place = self._watched[0].start + 1  # the target of a document's first token, or of its second
        here = 0.0 if self.whole_rows or not self._forwards.takes("labels") else self._change(place)
        if not here:
            return None, False, None
        beside = self._change(place, beside=True)
        if not abs(beside - here) <= 0.02 * abs(here):
            raise Fault(
                "the loss of a document's targets changes with the other documents of its row (one target's by "
                f"{here:.4g} in one row, by {beside:.4g} in another)"
            )
        targets: Targets = "same" if abs(self._change(0)) > 0.01 * abs(here) else "next"
        shift = self._forwards.takes("shift_labels") and abs(self._change(place, shift=True)) > 0.01 * abs(here)
        if self._forwards.takes("num_items_in_batch") and _near(2 * self._change(place, items=2.0), here):
            return targets, shift, "num_items_in_batch" if self._adds_up(summed=True) else None
        mean = _near(2 * self._change(place, items=None), self._change(place, items=None, lonely=True))
        return targets, shift, "mean" if mean and self._adds_up(summed=False) else None

    def _adds_up(self, summed: bool) -> bool:
        """Whether what a target adds to the loss is the same whatever other targets there are. Not so where classes
        have weights, and the mean is over these, or where it is one of the means of rows.

        Args:
            summed: the loss is a sum divided by num_items_in_batch; otherwise a mean.
        """
        size, batch = len(self._rows[0].ids), self._rows[0].batch
        places = np.flatnonzero(np.arange(size) % (size // batch))
        others, some = np.split(places, [len(places) // 3])  # not the same part of every row
        scores = self._rows[0].of(self._rows[0].decoder)[0].float().cpu()
        possible = scores.isfinite().all(0).numpy()  # some models set scores to minus infinity
        many = self._many(len(possible))
        many = many[possible[many]]
        if not len(many):
            return True
        labels, there = np.full(size, IGNORE_INDEX), scores[others].mean(0)[torch.from_numpy(many)]
        # A class whose loss is another than that of most.
        labels[others] = many[int((there - there.mean()).abs().argmax())]
        for begin in range(0, min(len(many), _MOST_CLASSES), len(some)):
            labels[some] = np.resize(many[begin : begin + len(some)], len(some))
            if not self._adds(labels, (some, others), summed):
                return False
        return True

    def _adds(self, labels: np.ndarray, parts: tuple[np.ndarray, np.ndarray], summed: bool) -> bool:
        """See :meth:`_adds_up`; of these labels, and two parts of their places."""
        sums, scale, kind, kinds = [], 0.0, self._kind, set[torch.dtype]()
        for given in (np.concatenate(parts), *parts):
            only = np.full(len(labels), IGNORE_INDEX)
            only[given] = labels[given]
            found = [self._loss(self._rows[0], only, items) for items in ((1.0, 2.0) if summed else (None,))]
            losses = [float(loss) for loss in found if loss is not None]
            if len(losses) < len(found):
                return False
            # Scores may have been turned into losses in the model's type, and these into fp32.
            kinds.update(t.dtype if (t.to(kind) != t).all() else kind for t in found if t is not None)
            # Beside the sum over targets may be a loss of another kind, which no count divides.
            sums.append(2 * (losses[0] - losses[1]) if summed else losses[0] * len(given))
            scale = max(scale, abs(losses[0]) * (1 if summed else len(given)))
        # By chance one may fit into the model's type.
        rounding = _ADDING.get(kinds.pop(), _ADDING[torch.bfloat16]) if len(kinds) == 1 else _ADDING[torch.float32]
        return abs(sums[0] - sums[1] - sums[2]) <= rounding * scale

    def _many(self, number: int) -> np.ndarray:
        """Of so many classes, those to be labels: first those that are likely to have weights, of texts their ends."""
        if number <= self._tokens.max():
            return np.arange(number)
        ends, ordinary = self._ends[self._ends < number], self._ordinary[self._ordinary < number]
        return np.concatenate([ends, self._random.permutation(ordinary)])

    def _change(
        self,
        place: int,
        *,
        items: float | None = 1.0,
        lonely: bool = False,
        shift: bool = False,
        beside: bool = False,
    ) -> float:
        """How much the loss changes with the label of one token; 0 if there is no loss.

        Args:
            items: num_items_in_batch, where it can be given.
            lonely: no other token has a label.
            shift: the label is among shift_labels, which say the target of each position.
            beside: in the second row of :meth:`neighbours`.
        """
        row = self._rows[beside]
        one, other = self._labels(place)
        labels = np.full(len(row.ids), IGNORE_INDEX)
        if not lonely:
            labels[self._watched[-1].start + 1] = one
        losses = []
        for label in (one, other):
            labels[place] = label
            shifted = None
            if shift:
                shifted = np.append(labels[1:], IGNORE_INDEX)
                labels[place] = one
            loss = self._loss(row, labels, items, shifted)
            if loss is None:
                return 0.0
            losses.append(float(loss))
        return losses[0] - losses[1]

    def _loss(
        self, row: Seen, labels: np.ndarray, items: float | None, shifted: np.ndarray | None = None
    ) -> torch.Tensor | None:
        """A row's loss, if there is one.

        Args:
            items: num_items_in_batch, where it can be given.
            shifted: shift_labels.
        """
        given: dict[str, Any] = {"labels": self._forwards.tensor(labels, row.batch)}
        if shifted is not None:
            given["shift_labels"] = self._forwards.tensor(shifted, row.batch)
        if items is not None and self._forwards.takes("num_items_in_batch"):
            given["num_items_in_batch"] = torch.tensor(items, device=given["labels"].device)
        output = self._forwards.again(row, **given)
        parts = output if isinstance(output, tuple) else (None,)
        loss = output.get("loss") if isinstance(output, Mapping) else parts[0]
        if not torch.is_tensor(loss) or loss.numel() != 1:
            return None
        if not torch.isfinite(loss):
            raise Fault(f"its loss is {float(loss)}")
        return loss

    def _labels(self, place: int) -> tuple[int, int]:
        """Two labels whose losses differ as much as any."""
        tokens, first = self._tokens, self._rows[0]
        scores = first.of(first.decoder)[0].float()[[max(place - 1, 0), place]].mean(0)
        if len(scores) <= tokens.max():
            return 0, min(1, len(scores) - 1)  # classes
        scores = scores[torch.from_numpy(tokens).to(scores.device)].nan_to_num(0.0, 0.0, 0.0)
        return int(tokens[int(scores.argmax())]), int(tokens[int(scores.argmin())])

    def _given(self, rows: Rows, lengths: Sequence[int], batch: int) -> dict[str, Any]:
        """What the model gets beside token ids, where documents are given in that way."""
        if rows == "told":
            shape = batch, sum(lengths) // batch
            return {key: t.to(self._forwards.device) for key, t in borders(lengths, shape).items()}
        return {"positions": rows == "packed"}

    def _draw(self, size: int) -> np.ndarray:
        return self._random.choice(self._tokens, size)


def borders(lengths: Sequence[int] | np.ndarray, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """What tells a model's forward where documents begin, as transformers hands it to the kernels of convolutions and
    recurrent layers; int32.

    Args:
        lengths: of the documents, one row after another.
        shape: of the batch, [batch, tokens].
    """
    size = torch.as_tensor(lengths)
    return {
        "seq_idx": torch.arange(len(size), dtype=torch.int32).repeat_interleave(size).view(shape),
        "cu_seq_lens_q": functional.pad(size.cumsum(0), (1, 0)).int(),
    }


def _errors(given: Sequence[torch.Tensor], like: Like, expected: Sequence[torch.Tensor] | None = None) -> np.ndarray:
    """The relative differences of tokens from those that they should be like: float64 [tensors, tokens].

    Args:
        given: [all tokens, ...] each.
        expected: the same of the other forward; left out: all that belongs to tokens.
    """
    errors = []
    for one, other in zip(given, like.seen.rows() if expected is None else expected, strict=True):
        one, other = one[like.here].flatten(1).double(), other[like.there].flatten(1).double()
        # Some models set scores to minus infinity.
        finite = one.isfinite() & other.isfinite()
        unequal = ((one != other) & ~finite & ~(one.isnan() & other.isnan())).any(1)
        one, other = one.where(finite, 0.0), other.where(finite, 0.0)
        norm = other.norm(dim=1)
        norm = norm.clamp(min=norm.median() * 0.1).clamp(min=1e-30)
        errors.append(((one - other).norm(dim=1) / norm).masked_fill(unequal | ~finite.any(1), torch.inf))
    return torch.stack(errors).cpu().numpy()


def _most(errors: np.ndarray) -> float:
    """The largest of what is wrong with most tokens: another expert for one of them is not."""
    return float(np.median(errors, axis=1).max())


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 0.1 * abs(other)


def _rounding(decoder: PreTrainedModel) -> float:
    parameter = next(decoder.parameters())
    if parameter.dtype == torch.float32 and parameter.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return _TF32
    return _ROUNDING.get(parameter.dtype, _ROUNDING[torch.bfloat16])


def _ordinary_tokens(decoder: PreTrainedModel) -> tuple[np.ndarray, np.ndarray]:
    """Token ids that stand for nothing special, and those at which texts end; int64."""
    config = decoder.config.get_text_config()
    special, ends = set[int](), set[int]()
    for key, value in {**decoder.config.to_dict(), **config.to_dict()}.items():
        if key.endswith(("token_id", "token_index", "padding_idx")) and value is not None:
            ids = value if isinstance(value, list) else [value]
            special.update(ids)
            if key == "eos_token_id":
                ends.update(ids)
    ordinary = np.setdiff1d(np.arange(config.vocab_size), list(special))
    if (ordinary < 1024).sum() < 2:
        raise Fault(f"its vocabulary of {config.vocab_size} has no two ordinary tokens")
    return ordinary, np.array(sorted(i for i in ends if 0 <= i < config.vocab_size), dtype=np.int64)
