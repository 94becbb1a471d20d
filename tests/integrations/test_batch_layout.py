# SPDX-License-Identifier: Apache-2.0
"""Documents and targets as a batch describes them, and position ids where none were given."""

from __future__ import annotations

import pytest
import torch

from deepspeed_distca.integrations.batch_layout import (
    DESCRIPTION,
    batch_layout,
    count_targets,
    filled,
    with_position_ids,
)
from deepspeed_distca.layout import Layout, LayoutError

IDS = torch.arange(10)[None]


def description(**given) -> dict:
    return {key: given.get(key) for key in DESCRIPTION}


def lengths(layout: Layout) -> list[int]:
    return layout.segments[:, 3].tolist()


def test_every_way_to_describe_documents():
    cu = torch.tensor([0, 3, 4, 10], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4, 5]])
    for kwargs, given in (
        ({}, description(layout=Layout.from_lengths([[3, 1, 6]]))),
        ({}, description(cu_seqlens=cu)),
        ({"cu_seq_lens_q": cu}, description()),
        ({"position_ids": positions}, description()),
    ):
        assert lengths(batch_layout({"input_ids": IDS, **kwargs}, given)) == [3, 1, 6]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    assert lengths(batch_layout({"input_ids": IDS.view(2, 5), "attention_mask": mask}, description())) == [2, 3, 4, 1]
    assert lengths(batch_layout({"input_ids": IDS.view(2, 5)}, description())) == [5, 5]


def test_position_ids_are_made_from_boundaries_alone():
    layout = Layout.from_lengths([[3, 1, 6]])
    made = with_position_ids({"input_ids": IDS}, description(layout=layout), layout)
    assert made["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 4, 5]]
    # A batch that describes nothing is the model's own to number; given ids stay.
    assert "position_ids" not in with_position_ids({"input_ids": IDS}, description(), layout)
    given = {"input_ids": IDS, "position_ids": IDS}
    assert with_position_ids(given, description(layout=layout), layout) is given
    spanning = Layout.from_ranks([[(0, 0, 10)], [(0, 10, 10)]])
    with pytest.raises(LayoutError, match="position_ids"):
        with_position_ids({"input_ids": IDS}, description(layout=spanning), spanning)


def test_targets_are_counted_as_the_loss_counts_them():
    labels = torch.tensor([[5, -100, 7, 8]])
    assert count_targets({"labels": labels}, description()) == 2
    assert count_targets({"labels": labels, "shift_labels": labels}, description()) == 3
    assert count_targets({"labels": labels}, description(num_targets=9)) == 9
    assert count_targets({}, description()) == 0


@pytest.mark.parametrize(
    ("kwargs", "given", "words"),
    [
        ({"position_ids": torch.zeros(3, 1, 10, dtype=torch.long)}, {}, "multi-axis"),
        ({}, {"layout": Layout.from_lengths([[4]])}, "4 tokens"),
        ({}, {"cu_seqlens": [0, 4]}, "10 tokens"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1, 1]])}, {}, "several runs"),
    ],
)
def test_what_cannot_be_read_is_refused(kwargs, given, words):
    with pytest.raises(LayoutError, match=words):
        batch_layout({"input_ids": IDS, **kwargs}, description(**given))


def test_a_layout_of_several_ranks_is_compared_with_this_rank_s_part():
    shared = description(layout=Layout([(0, 0, 0, 6), (0, 1, 0, 4), (1, 1, 4, 3)], 2))
    assert batch_layout({"input_ids": IDS}, shared, (0, 2)) is shared["layout"]
    assert batch_layout({"input_ids": IDS}, shared) is shared["layout"]  # not known which part is this rank's
    with pytest.raises(LayoutError, match="3 tokens for rank 1, input_ids has 1 x 10"):
        batch_layout({"input_ids": IDS}, shared, (1, 2))
    with pytest.raises(LayoutError, match="the layout has 2 ranks, but 1 share attention"):
        batch_layout({"input_ids": IDS}, shared, (0, 1))


def test_an_empty_batch_gets_one_token_without_a_target():
    nothing = torch.empty((1, 0), dtype=torch.long)
    for given in ({"input_ids": nothing}, {"inputs_embeds": torch.empty(1, 0, 8)}):
        batch = filled({**given, "labels": nothing, "use_cache": False})
        assert {key: tuple(value.shape) for key, value in batch.items() if torch.is_tensor(value)} == {
            **{key: (1, 1, *value.shape[2:]) for key, value in given.items()},
            "labels": (1, 1),
        }
        assert batch["labels"].item() == -100 and batch["use_cache"] is False
