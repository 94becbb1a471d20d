# SPDX-License-Identifier: Apache-2.0
"""The packed-sequence collator: exact tokens, targets inside documents, every form of input, clear refusals."""

from __future__ import annotations

import logging
import pickle
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

from deepspeed_distca.data import PackedSequenceCollator
from deepspeed_distca.layout import Layout
from tests.data.batches import assert_same
from tests.distributed.harness import forking

LENGTHS = [[7], [1], [1, 1, 1, 1], [9, 8, 8, 12, 8, 12], [2, 3, 5, 7, 11, 13], [3, 1, 6], [0, 4, 0, 2, 0]]
TOKENS = ("input_ids", "labels", "shift_labels", "position_ids")


def make_features(lengths, seed=0, labels=False):
    rng = np.random.default_rng(seed)
    features = []
    for length in lengths:
        feature = {"input_ids": rng.integers(0, 1000, length).tolist()}
        if labels:
            feature["labels"] = np.where(rng.random(length) < 0.3, -100, feature["input_ids"]).tolist()
        features.append(feature)
    return features


def reference_targets(features, ignore_index=-100):
    """Targets as a plain loop: the label of the next token of the same document."""
    targets = []
    for feature in features:
        labels = feature.get("labels", feature["input_ids"])
        targets += [*labels[1:], ignore_index][: len(feature["input_ids"])]
    return targets


@pytest.mark.parametrize("with_labels", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_one_row_of_documents(lengths, with_labels):
    features = make_features(lengths, labels=with_labels)
    batch = PackedSequenceCollator()(features)
    full = [n for n in lengths if n]
    assert list(batch) == [*TOKENS, "cu_seqlens", "max_seqlen", "layout", "num_targets"]
    assert all(batch[key].shape == (1, sum(full)) and batch[key].dtype == torch.int64 for key in TOKENS)
    assert batch["input_ids"][0].tolist() == [token for f in features for token in f["input_ids"]]
    assert batch["shift_labels"][0].tolist() == reference_targets(features)
    assert batch["position_ids"][0].tolist() == [i for n in full for i in range(n)]
    assert batch["cu_seqlens"].tolist() == [0, *np.cumsum(full)] and batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_seqlen"] == max(full) and type(batch["max_seqlen"]) is int
    assert batch["layout"] == Layout.from_lengths([full])
    expected_targets = sum(t != -100 for t in reference_targets(features))
    assert batch["num_targets"] == expected_targets and type(batch["num_targets"]) is int
    # HuggingFace style labels: a model that shifts the whole row itself finds the same targets.
    shifted_by_model = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    assert torch.equal(shifted_by_model, batch["shift_labels"])


documents = st.lists(st.lists(st.integers(0, 2**40), max_size=20), max_size=12)


@settings(max_examples=200)
@given(documents, st.data())
def test_every_token_once_and_no_target_across_documents(tokens, data):
    features = []
    for ids in tokens:
        mask = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        features.append({"input_ids": ids, "labels": [-100 if m else i for i, m in zip(ids, mask, strict=True)]})
    batch = PackedSequenceCollator()(features)
    cu = batch["cu_seqlens"].tolist()
    found = [batch["input_ids"][0, a:b].tolist() for a, b in pairwise(cu)]
    assert found == [ids for ids in tokens if ids]
    assert batch["shift_labels"][0].tolist() == reference_targets(features)
    assert batch["num_targets"] == sum(t != -100 for t in reference_targets(features))
    assert batch["layout"] == Layout.from_cu_seqlens(cu)
    assert batch["position_ids"][0].tolist() == batch["layout"].position_ids(0).tolist()
    assert_same(PackedSequenceCollator()(batch), batch)  # what it gives, it takes


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda v: np.array(v, dtype=np.int32), tuple])
def test_arrays_and_tensors(kind):
    features = make_features([5, 1, 3], labels=True)
    converted = [{key: kind(value) for key, value in feature.items()} for feature in features]
    assert_same(PackedSequenceCollator()(converted), PackedSequenceCollator()(features))


def test_the_dataset_is_not_written_to():
    ids, labels = np.arange(1, 6), np.arange(1, 6)
    batch = PackedSequenceCollator()([{"input_ids": ids, "labels": labels}])
    batch["input_ids"].zero_()
    assert ids.tolist() == labels.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("features", [[], [{"input_ids": []}], [{"input_ids": [5, 6], "attention_mask": [0, 0]}]])
def test_an_empty_row(features):
    batch = PackedSequenceCollator()(features)
    assert all(batch[key].shape == (1, 0) and batch[key].dtype == torch.int64 for key in TOKENS)
    assert batch["cu_seqlens"].tolist() == [0] and batch["cu_seqlens"].dtype == torch.int32
    assert (batch["max_seqlen"], batch["num_targets"], len(batch["layout"].segments)) == (0, 0, 0)
    assert batch["layout"].num_ranks == 1


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_is_stripped(side):
    features = make_features([4, 1, 6], labels=True)
    before, after = {"left": (3, 0), "right": (0, 3), "both": (2, 1)}[side]
    padded = [
        {
            "input_ids": [0] * before + f["input_ids"] + [0] * after,
            "labels": [-100] * before + f["labels"] + [-100] * after,
            "attention_mask": [0] * before + [1] * len(f["input_ids"]) + [0] * after,
        }
        for f in features
    ]
    assert_same(PackedSequenceCollator()(padded), PackedSequenceCollator()(features))
    one_length = [f for f in padded if len(f["input_ids"]) == 7][:1] * 2
    rows = {key: torch.tensor([f[key] for f in one_length]) for key in one_length[0]}
    assert_same(PackedSequenceCollator()(rows), PackedSequenceCollator()(one_length))


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("with_labels", [False, True])
@pytest.mark.parametrize(
    ("return_flash_attn_kwargs", "return_position_ids", "return_seq_idx"),
    list(product([True, False], repeat=3))[:-1],  # a row without any of them is one document
)
def test_takes_what_transformers_flattens(
    return_flash_attn_kwargs, return_position_ids, return_seq_idx, with_labels, as_list
):
    features = make_features([9, 1, 8, 1, 1, 12], labels=with_labels)
    flat = DataCollatorWithFlattening(
        return_flash_attn_kwargs=return_flash_attn_kwargs,
        return_position_ids=return_position_ids,
        return_seq_idx=return_seq_idx,
    )(features)
    expected = PackedSequenceCollator()(features)
    assert_same(PackedSequenceCollator()([flat] if as_list else flat), expected)
    assert torch.equal(flat["labels"], expected["labels"])
    if return_position_ids:
        assert torch.equal(flat["position_ids"], expected["position_ids"])
    if return_flash_attn_kwargs:
        assert torch.equal(flat["cu_seq_lens_q"], expected["cu_seqlens"])
        assert flat["max_length_q"] == expected["max_seqlen"]


def test_flattened_rows_of_several_features_are_joined():
    features = make_features([3, 4, 5, 2])
    flatten = DataCollatorWithFlattening()
    both = [flatten(features[:2]), flatten(features[2:])]
    assert_same(PackedSequenceCollator()(both), PackedSequenceCollator()(features))
    unbatched = [{key: value[0] for key, value in row.items()} for row in both]
    assert_same(PackedSequenceCollator()(unbatched), PackedSequenceCollator()(features))


def test_ignore_index():
    features = [{"input_ids": [1, 2, 3], "labels": [1, -1, 3]}, {"input_ids": [4, 5]}]
    batch = PackedSequenceCollator(ignore_index=-1)(features)
    assert batch["labels"].tolist() == [[-1, -1, 3, -1, 5]]
    assert batch["shift_labels"].tolist() == [[-1, 3, -1, 5, -1]] and batch["num_targets"] == 2


# Overflow


def test_within_budget_nothing_changes(caplog):
    features = make_features([3, 5])
    for overflow in ("error", "split", "drop"):
        assert_same(PackedSequenceCollator(8, overflow)(features), PackedSequenceCollator()(features))
    assert not caplog.records


@pytest.mark.parametrize("lengths", [[9], [5, 4]])
def test_over_budget_is_an_error_by_default(lengths):
    with pytest.raises(ValueError, match=r"row of 9 tokens.*max_tokens=8.*raise max_tokens"):
        PackedSequenceCollator(max_tokens=8)(make_features(lengths))


def test_split_makes_documents_of_the_pieces(caplog):
    collator = PackedSequenceCollator(max_tokens=8, overflow="split")
    features = make_features([20, 3, 8], labels=True)
    batch = collator(features)
    pieces = [
        {key: value[a : a + 8] for key, value in feature.items()}
        for feature in features
        for a in range(0, len(feature["input_ids"]), 8)
    ]
    assert batch["cu_seqlens"].tolist() == [0, 8, 16, 20, 23, 31]
    assert_same(batch, PackedSequenceCollator()(pieces))
    assert collator.fit(features)[1:] == (1, 0, 0)
    assert "1 documents longer than 8 tokens were split" in caplog.text and "31 tokens" in caplog.text


def test_drop_leaves_out_whole_documents_and_says_so(caplog):
    collator = PackedSequenceCollator(max_tokens=8, overflow="drop")
    features = make_features([9, 5, 4, 3, 1])
    assert_same(collator(features), PackedSequenceCollator()([features[1], features[3]]))
    assert collator.fit(features)[1:] == (0, 3, 14)
    assert "3 documents (14 tokens)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        collator(features)
    assert [r.levelno for r in caplog.records] == [logging.INFO]  # once as a warning, then as information


@settings(max_examples=100)
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 16))
def test_overflow_accounts_for_every_token(lengths, max_tokens):
    features = make_features(lengths)
    split = PackedSequenceCollator(max_tokens, "split")(features)
    assert split["input_ids"][0].tolist() == [t for f in features for t in f["input_ids"]]
    assert split["max_seqlen"] <= max_tokens
    collator = PackedSequenceCollator(max_tokens, "drop")
    kept = collator(features)["input_ids"].numel()
    assert kept <= max_tokens and kept + collator.fit(features).dropped_tokens == sum(lengths)


@pytest.mark.parametrize("max_tokens", [0, -1, 2.5, True, "8"])
def test_a_budget_that_is_none(max_tokens):
    with pytest.raises(ValueError, match="max_tokens must be an integer >= 1"):
        PackedSequenceCollator(max_tokens)


def test_an_unknown_policy():
    with pytest.raises(ValueError, match="error, split, drop, got 'truncate'"):
        PackedSequenceCollator(8, "truncate")


def test_lengths_of_rows_that_trl_has_packed():
    collator, ids = PackedSequenceCollator(), [1, 2, 3, 4, 5]
    wanted = collator([{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5]}, {"input_ids": [6]}])
    assert_same(collator([{"input_ids": ids, "seq_lengths": [2, 3]}, {"input_ids": [6], "seq_lengths": [1]}]), wanted)
    for lengths in ([2, 2], [[2, 3]], [6, -1]):
        with pytest.raises(ValueError, match="seq_lengths must be the lengths of a row's documents, 5 tokens"):
            collator([{"input_ids": ids, "seq_lengths": lengths}])
    with pytest.raises(ValueError, match="seq_lengths and position_ids contradict each other"):
        collator([{"input_ids": ids, "seq_lengths": [2, 3], "position_ids": [0, 1, 2, 3, 4]}])


def test_unknown_keys_are_reported_once(caplog):
    collator = PackedSequenceCollator()
    for _ in range(2):
        assert_same(collator([{"input_ids": [1, 2], "text": "ab"}]), collator([{"input_ids": [1, 2]}]))
    assert caplog.text.count("ignored: text") == 1


# Loaders


@pytest.mark.quick
def test_in_worker_processes():
    features = make_features([5, 3, 8, 1, 2, 9], labels=True)
    collator = PackedSequenceCollator(max_tokens=16)
    restored = pickle.loads(pickle.dumps(collator))
    # Workers that are given all they have, as spawned ones are, but have imported it already.
    options = dict(num_workers=2, multiprocessing_context=forking())
    loader = DataLoader(features, batch_size=2, collate_fn=restored, **options)
    for index, batch in enumerate(loader):
        assert_same(batch, collator(features[2 * index : 2 * index + 2]))
