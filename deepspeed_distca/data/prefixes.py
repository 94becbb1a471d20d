# SPDX-License-Identifier: Apache-2.0
"""The collator of texts that begin alike: what they share is in the row once, as the upper branches of a tree.

Answers to one prompt, or documents with common beginnings. The token behind a shared beginning differs by text, so the
last shared token is not in the shared branch: each branch below begins with a copy of it, whose logits predict what
comes next there. Every text keeps its positions and all its targets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from deepspeed_distca.data.documents import KNOWN_KEYS, Features, listed, read_feature
from deepspeed_distca.data.from_layout import IGNORE_INDEX
from deepspeed_distca.data.integers import integers, like_tokens
from deepspeed_distca.defaults import GRANULARITY
from deepspeed_distca.given import integer, shown
from deepspeed_distca.layout import Layout

logger = logging.getLogger(__name__)

PROMPT_KEYS = ("prompt_ids", "answers", "weights", "prompt_labels", "answer_labels")
#: What is known of every row of a batch.
_ROW = np.dtype([("input_ids", "i8"), ("targets", "i8"), ("answers", "i8"), ("weights", "f8")])


class _Text(NamedTuple):
    """A document, a prompt, or an answer that begins with its prompt's last token.

    Attributes:
        ids: int64 [length].
        counts: bool [length], whether the next token is a target; False on the last one.
        weight: of its targets.
        number: its place among all answers and documents of the batch; -1 of a prompt.
        answers: of a prompt.
    """

    ids: np.ndarray
    counts: np.ndarray
    weight: float
    number: int
    answers: list[_Text]


class _Branch(NamedTuple):
    """Rows of a tree, and the place of the branch above in the list of all; None where a document begins."""

    rows: np.ndarray
    parent: int | None


class PrefixCollator:
    """Packs texts into one row without padding; beginnings that they share are there once.

    Args:
        max_tokens: the budget; a row of more is refused. None for no limit. No token is ever dropped or cut off.
        min_shared: how many tokens documents, or prompts, must share for a branch of their own, at least 2. A branch
            costs each text below it one row, the copied token, and makes the planner's units and the kernel's calls
            smaller; so the default is the planner's unit, 128 rows, about a tile of an attention kernel.
        ignore_index: the label of a token that has no loss, in what is given and in what is returned.

    Features are of two kinds, also in one batch. Ids are lists, arrays or tensors of integers, [length].

    - ``{"prompt_ids", "answers"}``: a prompt, and a list of the ids of each answer. Optional: ``weights``, a float for
      each answer, of all its targets (1); ``prompt_labels`` and ``answer_labels``, labels as long as the ids
      (left out: no target in the prompt, all of the answers). Answers share their prompt, and nothing else. Prompts
      that begin alike share that, so a feature for each answer, with its prompt, does as well.
    - ``{"input_ids"}`` and optionally ``labels``: ordinary documents, as :class:`PackedSequenceCollator` takes them.
      Common beginnings are found; branches have branches where some documents share more.

    A label is the token itself or `ignore_index`. A target that several documents have in common is there once, with
    the sum of the weights of those that count it (1 for each document, those of its answers for a prompt).

    The batch:

    ==============  =======================================================================================
    input_ids       int64 [1, tokens], trees one after another, depth first
    labels          int64 [1, tokens], ``shift_labels`` one row later, for a model that shifts by itself
    shift_labels    int64 [1, tokens], the target of each position, ``ignore_index`` where there is none
    position_ids    int64 [1, tokens], of each token in its text
    layout          :class:`deepspeed_distca.layout.Layout` of one rank, with trees
    num_targets     int, positions that have a target
    row_answers     int64 [1, tokens], for a loss of your own: whose target a position has, by the place among all
                    answers and documents in the order given (empty documents are not counted); -1 where there is no
                    target, where several have it, and in prompts
    row_weights     float32 [1, tokens], for a loss of your own: of each target, 0 where there is none
    ==============  =======================================================================================

    No features at all give a row of no tokens. Stateless and free of communication, as
    :class:`PackedSequenceCollator` is.
    """

    def __init__(
        self, max_tokens: int | None = None, *, min_shared: int = GRANULARITY, ignore_index: int = IGNORE_INDEX
    ) -> None:
        self.max_tokens = None if max_tokens is None else integer("max_tokens", max_tokens, 1)
        self.min_shared = integer("min_shared", min_shared, 2)
        self.ignore_index = int(ignore_index)
        self._reported: set[str] = set()  # of messages only; no batch depends on it

    def __call__(self, features: Features) -> dict[str, Any]:
        """One row of the given texts.

        Raises:
            TypeError, ValueError: features that cannot be read, or a row over budget.
        """
        branches = _grow(self._read(features), self.min_shared, self.ignore_index)
        rows = np.concatenate([np.zeros(0, _ROW), *(branch.rows for branch in branches)])
        if self.max_tokens is not None and len(rows) > self.max_tokens:
            raise ValueError(
                f"a row of {len(rows)} tokens, what is shared counted once, exceeds max_tokens={self.max_tokens}; put "
                "fewer answers or documents into it, or raise max_tokens"
            )
        layout = _layout(branches)
        shifted = rows["targets"]
        columns = {
            "input_ids": rows["input_ids"],
            "labels": np.append(self.ignore_index, shifted[:-1])[: len(rows)],
            "shift_labels": shifted,
            "position_ids": layout.position_ids(0),
            "row_answers": rows["answers"],
            "row_weights": rows["weights"].astype(np.float32),
        }
        batch: dict[str, Any] = {
            key: torch.from_numpy(np.ascontiguousarray(values))[None] for key, values in columns.items()
        }
        return {**batch, "layout": layout, "num_targets": int((shifted != self.ignore_index).sum())}

    def _read(self, features: Features) -> list[_Text]:
        texts: list[_Text] = []
        number = 0
        for index, feature in enumerate(listed(features)):
            if not isinstance(feature, Mapping) or not {"input_ids", *PROMPT_KEYS} & set(feature):
                got = f"the keys {sorted(map(str, feature))}" if isinstance(feature, Mapping) else shown(feature)
                raise TypeError(
                    f'feature {index}: expected a mapping with "input_ids", or "prompt_ids" and "answers", got {got}'
                )
            try:
                if set(PROMPT_KEYS) & set(feature):
                    texts.append(_read_prompt(feature, number, self.ignore_index))
                    number += len(texts[-1].answers)
                    continue
                for ids, labels in read_feature(feature, self.ignore_index):
                    targets = _targets("labels", ids, labels, self.ignore_index)
                    texts.append(_Text(ids, np.append(targets[1:], False), 1.0, number, []))
                    number += 1
            except (TypeError, ValueError) as error:
                raise type(error)(f"feature {index}: {error}") from None
            for key in sorted(map(str, set(feature) - KNOWN_KEYS)):
                if key not in self._reported:
                    logger.warning("prefix collator: the key %r of a document is ignored", key)
                self._reported.add(key)
        return texts


def _read_prompt(feature: Mapping[str, Any], number: int, ignore_index: int) -> _Text:
    """A prompt with its answers, which are counted from `number`."""
    unknown = sorted(map(str, set(feature) - set(PROMPT_KEYS)))
    missing = [key for key in ("prompt_ids", "answers") if key not in feature]
    if unknown or missing:
        raise ValueError(
            f"a prompt with answers has the keys {', '.join(PROMPT_KEYS)} (the last three may be left out), and an "
            "ordinary document has input_ids and none of these; "
            + (f"{', '.join(missing)} missing" if missing else f"got {', '.join(unknown)} as well")
        )
    prompt = _token_ids("prompt_ids", feature["prompt_ids"])
    answers = _list("answers", feature["answers"])
    if not answers:
        raise ValueError("answers is empty; a prompt needs at least one answer, or leave the feature out")
    labels = [None] * len(answers)
    if feature.get("answer_labels") is not None:
        labels = _list("answer_labels", feature["answer_labels"])
        if len(labels) != len(answers):
            raise ValueError(f"answer_labels has {len(labels)} lists for {len(answers)} answers; give one for each")
    weights = _weights(feature.get("weights"), len(answers))
    texts = []
    for place, (given, said, weight) in enumerate(zip(answers, labels, weights, strict=True)):
        ids = _token_ids(f"answers[{place}]", given)
        targets = _targets(f"answer_labels[{place}]", ids, ids if said is None else said, ignore_index)
        texts.append(_Text(np.append(prompt[-1:], ids), np.append(targets, False), weight, number + place, []))
    said = feature.get("prompt_labels")
    targets = _targets(
        "prompt_labels", prompt, np.full_like(prompt, ignore_index) if said is None else said, ignore_index
    )
    return _Text(prompt, np.append(targets[1:], False), sum(weights), -1, texts)


def _list(name: str, given: Any) -> list[Any]:
    if not isinstance(given, list | tuple):
        raise ValueError(f"{name} must be a list with one list of ids for each answer, unpadded, got {shown(given)}")
    return list(given)


def _token_ids(name: str, given: Any) -> np.ndarray:
    ids = integers(name, given)
    if ids.ndim != 1 or not ids.size or ids.min() < 0:
        raise ValueError(f"{name} must be a list of token ids, at least one and none negative, got {shown(given)}")
    return ids


def _weights(given: Any, answers: int) -> list[float]:
    if given is None:
        return [1.0] * answers
    try:
        weights = torch.as_tensor(given, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"weights must be numbers, got {shown(given)}") from None
    if weights.shape != (answers,) or not weights.float().isfinite().all():
        raise ValueError(f"weights must be {answers} finite numbers, one for each answer, got {shown(given)}")
    return list(map(float, weights))


def _targets(name: str, ids: np.ndarray, given: Any, ignore_index: int) -> np.ndarray:
    """Which tokens are targets, by labels as long as they are."""
    labels = like_tokens(name, given, 1, len(ids))
    wrong = np.flatnonzero((labels != ids) & (labels != ignore_index))
    if wrong.size:
        raise ValueError(
            f"{name} has {labels[wrong[0]]} at place {wrong[0]}, where the token is {ids[wrong[0]]}; where beginnings "
            f"are shared a label is the token itself, or {ignore_index} for no target"
        )
    return labels != ignore_index


def _grow(texts: list[_Text], min_shared: int, ignore_index: int) -> list[_Branch]:
    """The branches of all trees, depth first, in the order of the first text of each."""
    found: list[_Branch] = []

    def add(parent: int | None, *parts: tuple[list[_Text], int, int]) -> int:
        found.append(_Branch(np.concatenate([_rows(*part, ignore_index) for part in parts]), parent))
        return len(found) - 1

    waiting: list[tuple[list[_Text], int, int | None]] = [(t, 0, None) for t in _alike(texts, 0, min_shared)[::-1]]
    while waiting:
        group, start, parent = waiting.pop()
        if len(group) == 1:
            _add_alone(add, group[0], start, parent)
            continue
        longest = max(group, key=lambda text: len(text.ids))
        same = [(_same(text.ids, longest.ids, start), text) for text in group]
        # Documents that end inside of another need no branch of their own.
        borders = [length for length, text in same if length < len(text.ids) or text.answers]
        if not borders:
            add(parent, (group, start, len(longest.ids)))
            continue
        shared = min(borders) - 1
        place = add(parent, (group, start, shared))
        below = [text for text in group if len(text.ids) > shared + 1 or text.answers]
        waiting += [(t, shared, place) for t in _alike(below, shared, min_shared)[::-1]]
    return found


def _add_alone(add: Callable[..., int], text: _Text, start: int, parent: int | None) -> None:
    """A text that shares nothing from `start` on, with its answers."""
    if not text.answers:
        add(parent, ([text], start, len(text.ids)))
        return
    shared = len(text.ids) - 1
    if len(text.answers) == 1:
        add(parent, ([text], start, shared), (text.answers, 0, len(text.answers[0].ids)))
        return
    if shared > start:
        parent = add(parent, ([text], start, shared))
    for answer in text.answers:
        add(parent, ([answer], 0, len(answer.ids)))


def _alike(texts: list[_Text], start: int, min_shared: int) -> list[list[_Text]]:
    """Texts that have min_shared tokens from `start` on in common; shorter ones alone."""
    found: dict[Any, list[_Text]] = {}
    for place, text in enumerate(texts):
        tokens = text.ids[start : start + min_shared]
        found.setdefault(tokens.tobytes() if len(tokens) == min_shared else place, []).append(text)
    return list(found.values())


def _same(a: np.ndarray, b: np.ndarray, start: int) -> int:
    """How many tokens are the same from 0 on, where those before `start` are."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[start:length] != b[start:length])
    return start + int(differ[0]) if differ.size else length


def _rows(texts: list[_Text], start: int, end: int, ignore_index: int) -> np.ndarray:
    """Tokens [start, end) that texts have in common, where some may have ended before."""
    ids = max((text.ids for text in texts), key=len)
    rows = np.zeros(end - start, dtype=_ROW)
    rows["input_ids"] = ids[start:end]
    counted = np.zeros(len(rows), dtype=np.int64)
    for text in texts:
        here = np.flatnonzero(text.counts[start:end])
        counted[here] += 1
        rows["weights"][here] += text.weight
        rows["answers"][here] = text.number
    rows["answers"][counted != 1] = -1
    rows["targets"] = ignore_index
    here = np.flatnonzero(counted)
    rows["targets"][here] = ids[start + 1 + here]
    return rows


def _layout(branches: list[_Branch]) -> Layout:
    documents: list[list[tuple[int, int | None]]] = []
    first = 0
    for place, (rows, parent) in enumerate(branches):
        if parent is None:
            documents.append([])
            first = place
        documents[-1].append((len(rows), None if parent is None else parent - first))
    return Layout.from_trees([[tree[0][0] if len(tree) == 1 else tree for tree in documents]])
