# SPDX-License-Identifier: Apache-2.0
"""Documents out of features: every description of their boundaries, and clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepspeed_distca.data import PackedSequenceCollator
from deepspeed_distca.layout import Layout
from tests.data.batches import assert_same


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        ("text", TypeError, "expected a list of features"),
        ([[1, 2, 3]], TypeError, r"feature 0.*\[1, 2, 3\]"),
        ([{"input_ids": [1]}, {"ids": [1]}], TypeError, r"feature 1.*\['ids'\]"),
        ([{"input_ids": [1.5, 2.0]}], ValueError, "input_ids must hold integers, got float64"),
        ([{"input_ids": torch.rand(3)}], ValueError, "input_ids must hold integers, got float32"),
        ([{"input_ids": ["a"]}], ValueError, "must hold integers"),
        ([{"input_ids": [[1, 2], [3]]}], ValueError, "ragged"),
        ([{"input_ids": np.ones((1, 2, 3), int)}], ValueError, r"got shape \[1, 2, 3\]"),
        ([{"input_ids": [1, 2], "labels": [1]}], ValueError, r"labels has shape \[1\], but the batch has 1 x 2"),
        ([{"input_ids": [1, 2], "shift_labels": [2, -100]}], ValueError, "shift_labels without labels"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], ValueError, "attention_mask has shape"),
        ([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}], ValueError, "several runs of real tokens"),
        ([{"input_ids": [1, 2, 3], "attention_mask": [1, 1, -1]}], ValueError, "attention_mask holds -1; allowed"),
        (
            [{"input_ids": [1, 2, 3], "attention_mask": [1.0, 1, 0]}],
            ValueError,
            "attention_mask must hold integers .*got float64",
        ),
        ([{"input_ids": [1, 2, 3], "attention_mask": [1, 2, 1]}], ValueError, "attention_mask: number 1 comes back"),
        ([{"input_ids": [1, 2, 3], "attention_mask": [2, 0, 2]}], ValueError, "attention_mask: number 2 comes back"),
        ([{"input_ids": [1, 2, 3], "seq_idx": [0, 1, 0]}], ValueError, "seq_idx: number 0 comes back"),
        ([{"input_ids": [1, 2, 3], "seq_idx": [0, 0, -1]}], ValueError, "seq_idx holds -1 on a token"),
        (
            [{"input_ids": [1] * 4, "attention_mask": [1, 1, 2, 2], "position_ids": [0, 1, 2, 3]}],
            ValueError,
            "by attention_mask a document begins at token 2 of row 0, by position_ids none",
        ),
        (
            [{"input_ids": [1] * 4, "attention_mask": [2, 2, 2, 3], "seq_idx": [0, 0, 1, 1]}],
            ValueError,
            "attention_mask and seq_idx contradict.*by seq_idx a document begins at token 2",
        ),
        (
            [{"input_ids": [1] * 4, "attention_mask": [1, 1, 2, 0], "cu_seqlens": [0, 1, 3]}],
            ValueError,
            "by cu_seqlens a document begins at token 1 of row 0, by attention_mask none",
        ),
        (
            [{"input_ids": [1] * 4, "attention_mask": [1, 0, 1, 1], "position_ids": [0, 1, 2, 3]}],
            ValueError,
            "padding before token 2 of row 0, which by position_ids goes on",
        ),
        (
            [{"input_ids": [1] * 3, "attention_mask": [0, 1, 1], "position_ids": [0, 1, 2]}],
            ValueError,
            "at token 1 of row 0 begins at position 1, not 0",
        ),
        ([{"input_ids": [1, -1]}], ValueError, "input_ids holds -1; token ids are never negative"),
        ([{"input_ids": [1, 2], "labels": [1, -1]}], ValueError, "labels holds -1; .* -100 where there is no target"),
        ([{"input_ids": [1, 2], "labels": [1.0, 2.0]}], ValueError, "labels must hold integers, got float64"),
        ([{"input_ids": [1, 2], "labels": [float("nan"), 2]}], ValueError, "labels must hold integers"),
        ([{"input_ids": [True, False]}], ValueError, "input_ids must hold integers, got bool"),
        ([{"input_ids": [1, None]}], ValueError, "input_ids must hold integers"),
        ([{"input_ids": 5}], ValueError, r"got shape \[\]"),
        ([{"input_ids": [], "cu_seqlens": [0, 3]}], ValueError, "cu_seqlens ends at 3, but the batch has 1 x 0"),
        (
            [{"input_ids": [1] * 3, "cu_seqlens": [0, 2]}],
            ValueError,
            "unless attention_mask says that the rest is padding",
        ),
        ([{"input_ids": [1] * 3, "cu_seqlens": [[[0, 3]]]}], ValueError, r"of shape \[1, 1, 2\]"),
        ([{"input_ids": [1] * 3, "cu_seqlens": [0.0, 3.0]}], ValueError, "cu_seqlens must hold integers"),
        ([{"input_ids": [1] * 3, "cu_seqlens": []}], ValueError, "cu_seqlens must be cumulative lengths .* from 0"),
        ([{"input_ids": [1] * 3, "layout": [3]}], ValueError, "layout must be a Layout of one rank, .* got \\[3\\]"),
        ([{"input_ids": [1] * 3, "layout": Layout.from_lengths([[3], [3]])}], ValueError, "num_ranks=2"),
        (
            [{"input_ids": np.ones((2, 2), int), "cu_seqlens": [[1, 2], [0, 2]]}],
            ValueError,
            "each line must rise from 0 to the row's 2",
        ),
        ([{"input_ids": [1] * 3, "layout": Layout.from_ranks([[(0, 1, 2), (0, 0, 1)]])}], ValueError, "are whole"),
        ([{"input_ids": [1] * 3, "layout": Layout.from_lengths([[4]])}], ValueError, "layout ends at 4"),
        (
            [{"input_ids": [1] * 3, "layout": Layout.from_lengths([[1, 2]]), "position_ids": [0, 1, 2]}],
            ValueError,
            "by layout a document begins at token 1 of row 0, by position_ids none",
        ),
        (
            [{"input_ids": [1, 2, 3], "labels": [1, 2, 3], "shift_labels": [2, 9, -100]}],
            ValueError,
            "shift_labels are not the next token's labels",
        ),
        ([{"input_ids": np.ones((1, 6), int), "position_ids": np.zeros((3, 1, 6), int)}], ValueError, r"\[3, 1, 6\]"),
        ([{"input_ids": np.ones(6, int), "position_ids": np.zeros((3, 6), int)}], ValueError, r"\[3, 6\]"),
        ([{"input_ids": [1] * 6, "position_ids": [5, 6, 7, 0, 1, 2]}], ValueError, "begins at position 5, not 0"),
        ([{"input_ids": [1] * 4, "position_ids": [2, 3, 2, 3], "cu_seqlens": [0, 2, 4]}], ValueError, "position 2"),
        ([{"input_ids": [1] * 4, "cu_seqlens": [0, 2, 5]}], ValueError, "cu_seqlens ends at 5.*1 x 4 tokens"),
        ([{"input_ids": [1] * 4, "cu_seqlens": [1, 4]}], ValueError, "from 0 to 4"),
        ([{"input_ids": [1] * 4, "cu_seqlens": [0, 3, 2, 4]}], ValueError, "may not fall"),
        (
            [{"input_ids": [1] * 4, "cu_seqlens": [0, 1, 4], "position_ids": [0, 1, 0, 1]}],
            ValueError,
            "must describe the same",
        ),
        (
            [{"input_ids": [1] * 4, "cu_seqlens": [0, 2, 4], "position_ids": [0, 1, 2, 3]}],
            ValueError,
            "must describe the same",
        ),
        (
            [{"input_ids": [1] * 4, "cu_seq_lens_q": [0, 4], "cu_seq_lens_k": [0, 2, 4]}],
            ValueError,
            "cu_seq_lens_q and cu_seq_lens_k contradict",
        ),
        (
            [{"input_ids": np.ones((2, 2), int), "cu_seqlens": [0, 1, 3, 4]}],
            ValueError,
            "crosses the end of row 0",
        ),
        (
            [{"input_ids": np.ones((2, 2), int), "cu_seqlens": [[0, 1], [0, 2]]}],
            ValueError,
            "each line must rise from 0 to the row's 2",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(features, error, message):
    with pytest.raises(error, match=message):
        PackedSequenceCollator()(features)


PACKED = [1, 1, 1, 2, 2, 3, 0, 0]  # documents of 3, 2 and 1 tokens, and padding
POSITIONS = [0, 1, 2, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    "described",
    [
        {"attention_mask": PACKED},
        {"attention_mask": [7 - n if n else 0 for n in PACKED]},  # any numbers
        {"attention_mask": PACKED, "position_ids": POSITIONS},
        {"attention_mask": PACKED, "seq_idx": [5, 5, 5, 2, 2, 9, -1, -1]},
        {"attention_mask": [min(n, 1) for n in PACKED], "position_ids": POSITIONS},
        {"attention_mask": [n > 0 for n in PACKED], "seq_idx": [0, 0, 0, 1, 1, 2, 2, 2]},
    ],
)
def test_masks_that_number_documents_and_masks_beside_other_descriptions(described, left):
    ids = [11, 12, 13, 21, 22, 31, 0, 0]
    feature = {"input_ids": ids, "labels": [*ids[:6], -100, -100], **described}
    if left:
        feature = {key: [*values[6:], *values[:6]] for key, values in feature.items()}
    expected = PackedSequenceCollator()([{"input_ids": part} for part in (ids[:3], ids[3:5], ids[5:6])])
    assert_same(PackedSequenceCollator()(feature), expected)
    rows = {key: torch.tensor([values, values]) for key, values in feature.items()}
    doubled = [{"input_ids": part} for part in (ids[:3], ids[3:5], ids[5:6]) * 2]
    assert_same(PackedSequenceCollator()(rows), PackedSequenceCollator()(doubled))


@pytest.mark.parametrize(
    ("cu_seqlens", "mask"),
    [
        ([0, 3, 5, 6], None),
        ([[0, 3, 5, 6]], None),
        ([0, 3, 5, 6, 6, 6], None),
        ([[0, 3, 3, 5, 6, 6]], None),
        ([[0, 3, 5, 6, 6]], PACKED),  # the padding is not described
        ([0, 3, 5, 6, 8], PACKED),  # or a document of its own
        ([0, 3, 5, 8], [min(n, 1) for n in PACKED]),  # or the end of the last one
    ],
)
def test_cumulative_lengths_in_every_usual_shape(cu_seqlens, mask):
    ids = [11, 12, 13, 21, 22, 31, 0, 0]
    feature = {"input_ids": ids[: 6 if mask is None else 8], "cu_seqlens": torch.tensor(cu_seqlens)}
    if mask is not None:
        feature["attention_mask"] = mask
    expected = [{"input_ids": part} for part in (ids[:3], ids[3:5], ids[5:6])]
    assert_same(PackedSequenceCollator()(feature), PackedSequenceCollator()(expected))


def test_cumulative_lengths_of_rows():
    rows = np.arange(8).reshape(2, 4)
    documents = [{"input_ids": part} for part in ([0, 1, 2], [3], [4, 5, 6, 7])]
    for cu_seqlens in ([0, 3, 4, 8], [[0, 3, 4, 8]], [[0, 3, 4], [0, 4, 4]]):
        batch = PackedSequenceCollator()({"input_ids": rows, "cu_seqlens": np.array(cu_seqlens)})
        assert_same(batch, PackedSequenceCollator()(documents))
