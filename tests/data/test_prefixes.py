# SPDX-License-Identifier: Apache-2.0
"""Shared beginnings: exact trees, every text with its positions and targets, the same loss and gradients, refusals."""

from __future__ import annotations

import logging
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_distca.data import PackedSequenceCollator, PrefixCollator, answer_losses, weighted_loss
from deepspeed_distca.layout import Layout
from tests.data.batches import assert_same

KEYS = ["input_ids", "labels", "shift_labels", "position_ids", "row_answers", "row_weights", "layout", "num_targets"]
NONE = -100


def rows(batch, key):
    return batch[key][0].tolist()


def paths(batch):
    """Of each row the rows that it attends to, in order, itself the last: read from the layout alone."""
    layout = batch["layout"]
    branches = {(d, s): (n, p) for d, s, n, p in layout.branches.tolist()}
    found, first = [], 0
    for document, _, length in layout.rank(0):
        own = {s: v for (d, s), v in branches.items() if d == document} or {0: (length, -1)}
        above: dict[int, list[int]] = {-1: []}
        for start, (count, parent) in own.items():
            for row in range(first + start, first + start + count):
                found.append([*above[parent], *range(first + start, row + 1)])
            above[start] = found[-1]
        first += length
    return found


def texts_of(features, min_labels=NONE):
    """Ids, labels and weight of each text that the features stand for, as if they were run alone."""
    found = []
    for f in features:
        if "prompt_ids" not in f:
            found.append((f["input_ids"], f.get("labels", f["input_ids"]), 1.0))
            continue
        prompt = f.get("prompt_labels", [min_labels] * len(f["prompt_ids"]))
        for i, answer in enumerate(f["answers"]):
            labels = f["answer_labels"][i] if "answer_labels" in f else answer
            weight = f["weights"][i] if "weights" in f else 1.0
            found.append(([*f["prompt_ids"], *answer], [*prompt, *labels], weight))
    return found


def check(batch, features):
    """Every text is there with all its tokens, positions and targets; and nothing else has a target or weight."""
    ids, targets, weights = (rows(batch, key) for key in ("input_ids", "shift_labels", "row_weights"))
    seen = [tuple(ids[i] for i in path) for path in paths(batch)]
    assert rows(batch, "position_ids") == [len(text) - 1 for text in seen]
    expected, counted = Counter(), Counter()
    for text, labels, weight in texts_of(features):
        assert tuple(text) in seen or any(tuple(text) == longer[: len(text)] for longer in seen)
        for row, label in enumerate(labels[1:]):
            if label != NONE:
                key = (tuple(text[: row + 1]), text[row + 1])
                expected[key] += weight
                counted[key] += 1
    found, places = Counter(), Counter()
    for text, target, weight in zip(seen, targets, weights, strict=True):
        if target == NONE:
            assert weight == 0
        else:
            found[text, target] += weight
            places[text, target] += 1
    assert places.keys() == expected.keys()
    assert all(abs(found[key] - expected[key]) < 1e-5 * counted[key] for key in expected)
    assert batch["num_targets"] == sum(places.values())
    # A model that shifts by itself finds the same targets.
    assert torch.equal(torch.nn.functional.pad(batch["labels"], (0, 1), value=NONE)[:, 1:], batch["shift_labels"])


def check_answers(batch, features):
    """Rows of an answer, in order, are those of its targets; prompts and what documents share have none."""
    number, owners = 0, rows(batch, "row_answers")
    # As docs/data.md has it.
    order = batch["row_answers"][0].argsort(stable=True)[(batch["row_answers"] < 0).sum() :].tolist()
    assert order == sorted((i for i, owner in enumerate(owners) if owner >= 0), key=lambda i: (owners[i], i))
    for f in features:
        for i, answer in enumerate(f.get("answers", [None])):
            if answer is not None:
                labels = f["answer_labels"][i] if "answer_labels" in f else answer
                found = batch["shift_labels"][batch["row_answers"] == number].tolist()
                assert found == [label for label in labels if label != NONE]
            number += 1
    assert max(owners, default=-1) < number


def test_a_prompt_and_its_answers():
    batch = PrefixCollator()([{"prompt_ids": [1, 2, 3], "answers": [[4, 5], [6], [4, 7]], "weights": [0.5, 2, -1]}])
    assert list(batch) == KEYS
    assert rows(batch, "input_ids") == [1, 2, 3, 4, 5, 3, 6, 3, 4, 7]
    assert rows(batch, "shift_labels") == [NONE, NONE, 4, 5, NONE, 6, NONE, 4, 7, NONE]
    assert rows(batch, "labels") == [NONE, NONE, NONE, 4, 5, NONE, 6, NONE, 4, 7]
    assert rows(batch, "position_ids") == [0, 1, 2, 3, 4, 2, 3, 2, 3, 4]
    assert rows(batch, "row_answers") == [-1, -1, 0, 0, -1, 1, -1, 2, 2, -1]
    assert rows(batch, "row_weights") == [0, 0, 0.5, 0.5, 0, 2, 0, -1, -1, 0]
    assert batch["layout"] == Layout.from_trees([[[(2, None), (3, 0), (2, 0), (3, 0)]]])
    assert batch["num_targets"] == 5
    assert all(batch[key].dtype == torch.int64 for key in KEYS[:5]) and batch["row_weights"].dtype == torch.float32
    assert all(batch[key].shape == (1, 10) for key in KEYS[:6])


def test_labels_of_prompt_and_answers():
    feature = {
        "prompt_ids": [1, 2, 3],
        "prompt_labels": [1, NONE, 3],
        "answers": [[4, 5], [6, 7, 8]],
        "answer_labels": [[4, NONE], [6, NONE, 8]],
        "weights": [0.5, 2],
    }
    batch = PrefixCollator()(feature)
    assert rows(batch, "shift_labels") == [NONE, 3, 4, NONE, NONE, 6, NONE, 8, NONE]
    assert rows(batch, "row_weights") == [0, 2.5, 0.5, 0, 0, 2, 0, 2, 0]
    assert rows(batch, "row_answers") == [-1, -1, 0, -1, -1, 1, -1, 1, -1]
    check(batch, [feature])


def test_a_prompt_of_one_token_has_no_branch():
    batch = PrefixCollator()([{"prompt_ids": [1], "answers": [[4, 5], [6]]}])
    assert rows(batch, "input_ids") == [1, 4, 5, 1, 6] and rows(batch, "row_answers") == [0, 0, -1, 1, -1]
    assert batch["layout"] == Layout.from_lengths([[3, 2]]) and not batch["layout"].has_trees


def test_one_answer_is_a_document():
    batch = PrefixCollator()([{"prompt_ids": [1, 2, 3], "answers": [[4, 5]]}])
    assert rows(batch, "input_ids") == [1, 2, 3, 4, 5] and rows(batch, "row_answers") == [-1, -1, 0, 0, -1]
    assert batch["layout"] == Layout.from_lengths([[5]])


def test_documents_of_different_depths():
    documents = [[1, 2, 3, 4, 5], [9, 9], [1, 2, 3, 6, 7, 8], [1, 2, 3, 6, 7, 9], [1, 2]]
    batch = PrefixCollator(min_shared=2)([{"input_ids": ids} for ids in documents])
    assert rows(batch, "input_ids") == [1, 2, 3, 4, 5, 3, 6, 7, 8, 7, 9, 9, 9]
    assert batch["layout"] == Layout.from_trees([[[(2, None), (3, 0), (2, 0), (2, 2), (2, 2)], 2]])
    assert rows(batch, "shift_labels") == [2, 3, 4, 5, NONE, 6, 7, 8, NONE, 9, NONE, 9, NONE]
    assert rows(batch, "row_weights") == [4, 3, 1, 1, 0, 2, 2, 1, 0, 1, 0, 1, 0]
    assert rows(batch, "row_answers") == [-1, -1, 0, 0, -1, -1, -1, 2, -1, 3, -1, 1, -1]


def test_documents_that_go_on_from_each_other_are_one():
    """As steps of an agent: each has the last one's tokens and a new target."""
    features = [
        {"input_ids": [1, 2, 3], "labels": [NONE, NONE, 3]},
        {"input_ids": [1, 2, 3, 4, 5], "labels": [NONE, NONE, NONE, NONE, 5]},
        {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [NONE, NONE, 3, NONE, NONE, 6]},
    ]
    batch = PrefixCollator(min_shared=3)(features)
    assert rows(batch, "input_ids") == [1, 2, 3, 4, 5, 6] and not batch["layout"].has_trees
    assert rows(batch, "shift_labels") == [NONE, 3, NONE, 5, 6, NONE]
    assert rows(batch, "row_weights") == [0, 2, 0, 1, 1, 0]
    assert rows(batch, "row_answers") == [-1, -1, -1, 1, 2, -1]


def test_prompts_share_as_well():
    """A feature for each answer, as rollouts often come, and a second prompt with the same instructions."""
    features = [
        {"prompt_ids": [1, 2, 3, 4], "answers": [[7, 7]]},
        {"prompt_ids": [1, 2, 3, 5, 6], "answers": [[8], [9]]},
        {"prompt_ids": [1, 2, 3, 4], "answers": [[7, 8]]},
    ]
    batch = PrefixCollator(min_shared=2)(features)
    assert rows(batch, "input_ids") == [1, 2, 3, 4, 7, 7, 4, 7, 8, 3, 5, 6, 8, 6, 9]
    assert batch["layout"] == Layout.from_trees([[[(2, None), (1, 0), (3, 1), (3, 1), (2, 0), (2, 4), (2, 4)]]])
    assert rows(batch, "row_answers") == [-1, -1, -1, 0, 0, -1, 3, 3, -1, -1, -1, 1, -1, 2, -1]
    check(batch, features)


@pytest.mark.parametrize(("shared", "tokens"), [(127, 2 * 130), (128, 127 + 2 * 3)])
def test_the_least_that_is_shared(shared, tokens):
    documents = [[*range(shared), 1000 + i, *range(129 - shared)] for i in range(2)]
    assert PrefixCollator()([{"input_ids": ids} for ids in documents])["input_ids"].numel() == tokens


def test_nothing_in_common_is_as_without():
    features = [{"input_ids": [1, 2, 3], "labels": [1, NONE, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}]
    batch, plain = PrefixCollator()(features), PackedSequenceCollator()(features)
    for key in ("input_ids", "labels", "shift_labels", "position_ids"):
        assert torch.equal(batch[key], plain[key]), key
    assert batch["layout"] == plain["layout"] and batch["num_targets"] == plain["num_targets"]


@pytest.mark.parametrize("features", [[], [{"input_ids": []}]])
def test_an_empty_row(features):
    batch = PrefixCollator()(features)
    assert list(batch) == KEYS and all(batch[key].shape == (1, 0) for key in KEYS[:6])
    assert batch["num_targets"] == 0 and batch["layout"] == Layout.from_lengths([[]])
    logits = torch.randn(1, 1, 8, requires_grad=True)  # the row that the plugin puts there
    weighted_loss(logits, batch, 3).backward()
    assert not logits.grad.any()


def labelled(data, ids):
    mask = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    return [NONE if m else i for i, m in zip(ids, mask, strict=True)]


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@settings(max_examples=300)
@given(st.lists(tokens, max_size=7), st.integers(2, 5), st.data())
def test_every_document_with_any_beginnings(documents, min_shared, data):
    features = [{"input_ids": ids, "labels": labelled(data, ids)} for ids in documents]
    batch = PrefixCollator(min_shared=min_shared)(features)
    check(batch, features)
    parents = {(d, p) for d, _, _, p in batch["layout"].branches.tolist()}
    for document, start, length, parent in batch["layout"].branches.tolist():
        if (document, start) in parents:
            assert length + 1 >= min_shared
        assert parent == -1 or (document, parent) in parents
    assert batch["input_ids"].numel() <= sum(map(len, documents))


@settings(max_examples=300)
@given(st.lists(st.tuples(tokens, st.lists(tokens, max_size=4)), max_size=5), st.integers(2, 4), st.data())
def test_prompts_and_documents_together(given, min_shared, data):
    features = []
    for ids, answers in given:
        if answers:
            feature = {"prompt_ids": ids, "answers": answers}
            if data.draw(st.booleans()):
                feature["weights"] = [data.draw(st.integers(-8, 8)) / 4 for _ in answers]
                feature["prompt_labels"] = labelled(data, ids)
                feature["answer_labels"] = [labelled(data, answer) for answer in answers]
            features.append(feature)
        else:
            features.append({"input_ids": ids, "labels": labelled(data, ids)})
    batch = PrefixCollator(min_shared=min_shared)(features)
    check(batch, features)
    check_answers(batch, features)
    assert_same(PrefixCollator(min_shared=min_shared)(features), batch)


def test_long_documents_with_nested_beginnings():
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 9, 300)]
    for _ in range(40):
        other = documents[draw.integers(len(documents))]
        documents.append(np.concatenate([other[: draw.integers(60, len(other))], draw.integers(0, 9, 50)]))
    features = [{"input_ids": ids.tolist()} for ids in documents]
    batch = PrefixCollator(min_shared=32)(features)
    check(batch, features)
    depths: dict[int, int] = {}
    for _, start, _, parent in batch["layout"].branches.tolist():
        depths[start] = depths.get(parent, 0) + 1
    assert len(batch["layout"].segments) == 1 and max(depths.values()) >= 3
    assert batch["input_ids"].numel() < sum(map(len, documents)) * 0.7


def test_a_thousand_documents_that_end_inside_each_other():
    text = list(range(1, 1200))
    features = [{"input_ids": text[:n]} for n in range(200, 1200)]
    batch = PrefixCollator()(features)
    assert rows(batch, "input_ids") == text and batch["row_weights"].sum() == sum(n - 1 for n in range(200, 1200))


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, lambda v: np.array(v, dtype=np.int32)])
def test_arrays_and_tensors(kind):
    plain = {"prompt_ids": [1, 2, 3], "answers": [[4, 5], [6]], "weights": [0.5, 2]}
    given = {"prompt_ids": kind([1, 2, 3]), "answers": [kind([4, 5]), kind([6])], "weights": torch.tensor([0.5, 2])}
    batch = PrefixCollator()([given])
    assert_same(batch, PrefixCollator()([plain]))
    batch["input_ids"].zero_()
    assert list(given["prompt_ids"]) == [1, 2, 3]


def test_it_can_go_to_a_worker():
    features = [{"prompt_ids": [1, 2], "answers": [[3], [4]]}]
    collator = PrefixCollator(100, min_shared=3)
    assert_same(pickle.loads(pickle.dumps(collator))(features), collator(features))


def test_ignored_keys_are_named_once(caplog):
    collator = PrefixCollator()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            collator([{"input_ids": [1, 2], "loss_mask": [0, 1]}])
    assert len(caplog.records) == 1 and "'loss_mask'" in caplog.text


PROMPT = {"prompt_ids": [1, 2], "answers": [[3], [4]]}


@pytest.mark.parametrize(
    ("feature", "error", "words"),
    [
        ({**PROMPT, "answers": []}, ValueError, "answers is empty"),
        ({**PROMPT, "answers": [[3], []]}, ValueError, r"answers\[1\] must be a list of token ids, at least one"),
        ({**PROMPT, "answers": np.array([[3], [0]])}, ValueError, "answers must be a list .*unpadded"),
        ({**PROMPT, "answers": [[3], [[4]]]}, ValueError, r"answers\[1\] must be a list of token ids"),
        ({**PROMPT, "answers": [[3], [4.5]]}, ValueError, r"answers\[1\] must hold integers, got float64"),
        ({**PROMPT, "answers": [[3], [-1]]}, ValueError, r"answers\[1\] must be .* none negative"),
        ({**PROMPT, "prompt_ids": []}, ValueError, "prompt_ids must be a list of token ids, at least one"),
        ({**PROMPT, "prompt_ids": "ab"}, ValueError, "prompt_ids must hold integers"),
        ({"prompt_ids": [1]}, ValueError, "answers missing"),
        ({"answers": [[1]]}, ValueError, "prompt_ids missing"),
        ({**PROMPT, "input_ids": [1]}, ValueError, "ordinary document has input_ids .*got input_ids as well"),
        ({**PROMPT, "weigths": [1, 2]}, ValueError, "got weigths as well"),
        ({"input_ids": [1], "weights": [1.0]}, ValueError, "prompt_ids, answers missing"),
        ({**PROMPT, "weights": [1.0]}, ValueError, "weights must be 2 finite numbers"),
        ({**PROMPT, "weights": [1.0, float("nan")]}, ValueError, "weights must be 2 finite numbers"),
        ({**PROMPT, "weights": [1.0, 1e300]}, ValueError, "weights must be 2 finite numbers"),
        ({**PROMPT, "weights": ["1", "2"]}, ValueError, "weights must be numbers"),
        ({**PROMPT, "prompt_labels": [1]}, ValueError, r"prompt_labels has shape \[1\]"),
        ({**PROMPT, "prompt_labels": [1, 5]}, ValueError, "prompt_labels has 5 at place 1, where the token is 2"),
        ({**PROMPT, "answer_labels": [[3]]}, ValueError, "answer_labels has 1 lists for 2 answers"),
        ({**PROMPT, "answer_labels": [[3], [5]]}, ValueError, r"answer_labels\[1\] has 5 at place 0"),
        ({"input_ids": [1, 2], "labels": [1, 7]}, ValueError, "labels has 7 at place 1, where the token is 2"),
        ({"input_ids": [1.5]}, ValueError, "input_ids must hold integers"),
        ({"text": "a"}, TypeError, 'expected a mapping with "input_ids", or "prompt_ids" and "answers", got the keys'),
        ([1, 2], TypeError, r"expected a mapping .* got \[1, 2\]"),
    ],
)
def test_refusals_name_the_feature(feature, error, words):
    with pytest.raises(error, match=rf"^feature 1: .*{words}"):
        PrefixCollator()([{"input_ids": [1]}, feature])


def test_other_refusals():
    with pytest.raises(TypeError, match="expected a list of features like .*, got str"):
        PrefixCollator()("ab")
    with pytest.raises(ValueError, match="min_shared must be an integer >= 2, got 1"):
        PrefixCollator(min_shared=1)
    with pytest.raises(ValueError, match="max_tokens must be an integer >= 1, got 0"):
        PrefixCollator(0)
    assert PrefixCollator(5)([PROMPT])["input_ids"].numel() == 5
    with pytest.raises(ValueError, match=r"a row of 5 tokens, what is shared counted once, exceeds max_tokens=4; put"):
        PrefixCollator(4)([PROMPT])


class Model(torch.nn.Module):
    """One layer of attention, whose mask is given."""

    def __init__(self, vocabulary=13, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(99, width)
        self.q, self.k, self.v = (torch.nn.Linear(width, width) for _ in range(3))
        self.head = torch.nn.Linear(width, vocabulary)
        self.double()

    def forward(self, ids, positions, mask):
        x = self.tokens(ids) + self.positions(positions)
        scores = (self.q(x) @ self.k(x).transpose(-1, -2) / 2).masked_fill(~mask, -torch.inf)
        return self.head(x + scores.softmax(-1) @ self.v(x))


def one_by_one(model, features):
    """The weighted loss of all texts, each run alone."""
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels, weight in texts_of(features):
        n = len(ids)
        logits = model(torch.tensor(ids), torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril())
        losses = torch.nn.functional.cross_entropy(
            logits[:-1], torch.tensor(labels[1:], dtype=torch.int64), reduction="sum"
        )
        total = total + weight * losses
    return total


@pytest.mark.parametrize("block", [answer_losses._BLOCK, 13 * 2])
def test_loss_and_gradients_are_those_of_texts_alone(block, monkeypatch):
    monkeypatch.setattr(answer_losses, "_BLOCK", block)
    draw = np.random.default_rng(0)
    ids = [draw.integers(0, 13, n).tolist() for n in (9, 4, 6, 1, 7)]
    features = [
        {"prompt_ids": ids[0], "answers": ids[1:], "weights": [0.5, -2.0, 1.25, 0.0]},
        {"prompt_ids": ids[0][:5], "prompt_labels": ids[0][:5], "answers": [ids[1], ids[2]]},
        *({"input_ids": ids[1] + more, "labels": [NONE] * 2 + (ids[1] + more)[2:]} for more in (ids[2], ids[3])),
        {"input_ids": ids[1]},
    ]
    model = Model()
    expected = one_by_one(model, features) / 7
    batch = PrefixCollator(min_shared=2)(features)
    assert len(batch["layout"].branches) > 6
    mask = torch.zeros(batch["input_ids"].numel(), batch["input_ids"].numel(), dtype=torch.bool)
    for row, path in enumerate(paths(batch)):
        mask[row, path] = True
    logits = model(batch["input_ids"], batch["position_ids"], mask)
    loss = weighted_loss(logits, batch, 7)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(
        *(torch.autograd.grad(v, list(model.parameters())) for v in (loss, expected)), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)
