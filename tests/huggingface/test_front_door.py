# SPDX-License-Identifier: Apache-2.0
"""The front door: every description of documents alone and beside every other, targets, counts and values."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepspeed_distca.huggingface.contract import Contract
from deepspeed_distca.huggingface.front_door import Admitted, BatchError, Limits, admit, names_documents
from deepspeed_distca.huggingface.front_door.claims import unread_description
from deepspeed_distca.layout import Layout, LayoutError

LENGTHS = [3, 1, 6]
IDS = torch.arange(10)[None]
LABELS = torch.tensor([[-100, 1, 2, -100, -100, 5, 6, 7, 8, 9]])
SHIFTED = torch.tensor([[1, 2, -100, -100, 5, 6, 7, 8, 9, -100]])

#: The same three documents in every form.
DESCRIPTIONS = {
    "layout": {"layout": Layout.from_lengths([LENGTHS])},
    "cu_seqlens": {"cu_seqlens": torch.tensor([0, 3, 4, 10], dtype=torch.int32)},
    "cu_seq_lens_q": {"cu_seq_lens_q": [0, 3, 4, 10]},
    "cu_seq_lens_k": {"cu_seq_lens_k": np.array([[0, 3, 4, 10, 10, 10]])},
    "packed_seq_params": {
        "packed_seq_params": SimpleNamespace(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3, 4, 10, 10]))
    },
    "position_ids": {"position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4, 5]])},
    "attention_mask": {"attention_mask": torch.tensor([[1, 1, 1, 2, 3, 3, 3, 3, 3, 3]])},
    "seq_idx": {"seq_idx": torch.tensor([[4, 4, 4, 5, 6, 6, 6, 6, 6, 6]], dtype=torch.int32)},
}
#: The first two documents made one.
MERGED = {
    "layout": {"layout": Layout.from_lengths([[4, 6]])},
    "cu_seqlens": {"cu_seqlens": [0, 4, 10]},
    "cu_seq_lens_q": {"cu_seq_lens_q": [0, 4, 10]},
    "cu_seq_lens_k": {"cu_seq_lens_k": [0, 4, 10]},
    "packed_seq_params": {"packed_seq_params": SimpleNamespace(cu_seqlens_q=None, cu_seqlens_kv=[0, 4, 10])},
    "position_ids": {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])},
    "attention_mask": {"attention_mask": torch.tensor([[2, 2, 2, 2, 3, 3, 3, 3, 3, 3]])},
    "seq_idx": {"seq_idx": torch.tensor([[4, 4, 4, 4, 6, 6, 6, 6, 6, 6]])},
}


def padded_params(lengths: list[int], spaces: list[int]) -> SimpleNamespace:
    return SimpleNamespace(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_q_padded=torch.tensor(spaces))


def come_in(contract: Contract | None = None, **batch) -> Admitted:
    given = {"input_ids": IDS, "labels": LABELS, **batch}
    return admit(given, contract or Contract(), Limits(97, 97), place=(0, 1))


def lengths(admitted: Admitted) -> list[int]:
    return admitted.micro_batch.layout.segments[:, 3].tolist()


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_every_description_alone(name):
    admitted = come_in(**DESCRIPTIONS[name])
    assert lengths(admitted) == LENGTHS
    assert admitted.arguments["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 4, 5]]
    assert admitted.lengths.tolist() == [[3, 3, 3, 1, 6, 6, 6, 6, 6, 6]]
    assert admitted.micro_batch.targets == 7


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(DESCRIPTIONS, 2)))
def test_two_descriptions_agree_or_both_are_named(one, other):
    assert lengths(come_in(**DESCRIPTIONS[one], **DESCRIPTIONS[other])) == LENGTHS
    with pytest.raises(LayoutError, match=f"(?s){one}.*{other}|{other}.*{one}"):
        come_in(**DESCRIPTIONS[one], **MERGED[other])


@pytest.mark.parametrize("name", [key for key in DESCRIPTIONS if key != "attention_mask"])
def test_a_padding_mask_cuts_beside_every_description(name):
    """Two tokens of padding behind documents that are described with it, as one more document."""
    ids = torch.cat([IDS, torch.zeros(1, 2, dtype=torch.long)], 1)
    more = {
        "layout": Layout.from_lengths([[*LENGTHS, 2]]),
        "cu_seqlens": [0, 3, 4, 10],  # ends where padding begins
        "cu_seq_lens_q": [0, 3, 4, 12],  # the last document has the padding in it
        "cu_seq_lens_k": [0, 3, 4, 10, 12],
        "packed_seq_params": SimpleNamespace(cu_seqlens_q=[0, 3, 4, 12]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 0, 0]]),
        "seq_idx": torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2, 2]]),
    }
    mask = torch.tensor([[1] * 10 + [0] * 2])
    labels = torch.cat([LABELS, torch.zeros(1, 2, dtype=torch.long)], 1)  # on padding as well
    for kind in (torch.long, torch.bool, torch.int32):
        admitted = come_in(input_ids=ids, labels=labels, attention_mask=mask.to(kind), **{name: more[name]})
        assert (
            lengths(admitted)[:2] == LENGTHS[:2]
            and lengths(admitted)[2] in (6, 8)
            and admitted.micro_batch.targets == 7
        )
        assert admitted.lengths[0, :10].tolist() == [3, 3, 3, 1, 6, 6, 6, 6, 6, 6]
        assert admitted.arguments["attention_mask"].tolist() == mask.tolist()


def test_padding_behind_every_document_is_told_by_padded_lengths():
    """As Megatron stores documents for context parallelism: 3, 1 and 4 tokens in spaces of 4, 2 and 4."""
    admitted = come_in(packed_seq_params=padded_params([0, 3, 4, 8], [0, 4, 6, 10]))
    assert admitted.arguments["attention_mask"].tolist() == [[1, 1, 1, 0, 1, 0, 1, 1, 1, 1]]
    assert lengths(admitted) == [4, 2, 4] and "packed_seq_params" not in admitted.arguments
    assert admitted.arguments["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3]]
    assert admitted.micro_batch.targets == 2 + 3  # 1 and 2, then 7, 8 and 9
    with pytest.raises(LayoutError, match="padding before token 6 of row 0, which by position_ids"):
        come_in(packed_seq_params=padded_params([0, 3, 4, 8], [0, 4, 6, 10]), **DESCRIPTIONS["position_ids"])


def test_of_four_axes_of_positions_the_first_is_the_texts():
    text = DESCRIPTIONS["position_ids"]["position_ids"]
    four = torch.stack([text, torch.zeros_like(text), torch.zeros_like(text), text])
    admitted = come_in(position_ids=four)
    assert lengths(admitted) == LENGTHS and admitted.arguments["position_ids"] is four
    assert names_documents({"input_ids": IDS, "position_ids": four})
    assert not names_documents({"input_ids": IDS, "position_ids": torch.arange(10).expand(4, 1, 10)})
    with pytest.raises(LayoutError, match="cu_seqlens and position_ids contradict"):
        come_in(position_ids=four, **MERGED["cu_seqlens"])


@pytest.mark.parametrize("axes", [3, 4])
def test_several_axes_of_positions_for_a_model_that_has_one(axes):
    given = {"layout": DESCRIPTIONS["layout"]["layout"], "position_ids": DESCRIPTIONS["position_ids"]["position_ids"]}
    given["position_ids"] = given["position_ids"].expand(axes, 1, 10)
    assert come_in(**given).arguments["position_ids"] is given["position_ids"]
    words = rf"shape \[{axes}, 1, 10\], but Llama has rotary embeddings of one axis; allowed: \[1, 10\]"
    with pytest.raises(LayoutError, match=words):
        come_in(Contract(takes_axes=False, name="Llama"), **given)


def test_plain_and_padded_rows():
    rows = IDS.view(2, 5)
    admitted = come_in(input_ids=rows, labels=rows)
    assert lengths(admitted) == [5, 5] and "position_ids" not in admitted.arguments
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    admitted = come_in(input_ids=rows, labels=rows, attention_mask=mask)
    assert lengths(admitted) == [2, 3, 5]  # padding behind a document belongs to it
    assert admitted.arguments["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert admitted.lengths.tolist() == [[2, 2, 3, 3, 3], [4, 4, 4, 4, 4]]
    assert admitted.micro_batch.targets == 2 + 3
    ones = come_in(input_ids=rows, labels=rows, attention_mask=torch.ones_like(rows))
    assert lengths(ones) == [5, 5] and ones.arguments["attention_mask"] is None


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1, 1]])}, "several runs"),
        (
            {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1, 1, 1]]), **DESCRIPTIONS["position_ids"]},
            "padding be",
        ),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1, 1, 1]]), **DESCRIPTIONS["layout"]}, "layout"),
        ({"attention_mask": torch.tensor([[1, 1, 2, 2, 1, 1, 1, 1, 1, 1]])}, "comes back"),
        ({"attention_mask": torch.ones(1, 10)}, "float32"),
        ({"attention_mask": -torch.ones(1, 10).long()}, "-1"),
        ({"attention_mask": torch.ones(1, 11).long()}, "1 x 10"),
        ({"seq_idx": torch.tensor([[0, 0, 1, 1, 0, 0, 0, 0, 0, 0]])}, "comes back"),
        ({"seq_idx": torch.zeros(1, 10)}, "float32"),
        ({"seq_idx": torch.full((1, 10), -1)}, "-1"),
        ({"position_ids": torch.zeros(3, 1, 10, dtype=torch.long)}, "multi-axis"),
        ({"position_ids": torch.arange(5, 15)[None]}, "position 5, not 0"),
        ({"position_ids": torch.arange(10.0)[None]}, "float32"),
        ({"position_ids": torch.zeros(3, 1, 10), **DESCRIPTIONS["cu_seqlens"]}, "float32"),
        ({"position_ids": torch.zeros(1, 9, dtype=torch.long)}, "1 x 10"),
        ({"cu_seqlens": [0, 4]}, "ends at 4"),
        ({"packed_seq_params": SimpleNamespace(qkv_format="sbhd", cu_seqlens_q=[0, 10])}, "sbhd.*thd"),
        ({"packed_seq_params": SimpleNamespace(cu_seqlens=[0, 10])}, "neither cu_seqlens_q nor"),
        ({"packed_seq_params": SimpleNamespace(cu_seqlens_q=[0, 10], local_cp_size=2)}, "context parallelism"),
        ({"packed_seq_params": padded_params([0, 4, 9], [0, 3, 10])}, "none of them longer"),
        ({"packed_seq_params": padded_params([0, 3, 9], [0, 3, 11])}, "within the batch's 10"),
        ({"packed_seq_params": padded_params([0, 3, 9], [0, 10])}, "same number"),
        ({"cu_seqlens": [0, 4, 11]}, "ends at 11"),
        ({"cu_seqlens": [0, 6, 4, 10]}, "may not fall"),
        ({"cu_seqlens": [1, 10]}, "from 0"),
        ({"cu_seqlens": torch.tensor([0.0, 2.9, 10.0])}, "float32"),
        ({"cu_seqlens": [[0, 3], [1]]}, "ragged|object"),
        ({"cu_seqlens": torch.zeros(2, 2, 2).long()}, "shape"),
        ({"cu_seqlens": [0, 7, 10], "input_ids": IDS.view(2, 5), "labels": LABELS.view(2, 5)}, "crosses"),
        ({"layout": [[0, 10]]}, "must be a Layout"),
        ({"layout": Layout.from_lengths([[4]])}, "4 tokens"),
        ({"layout": Layout.from_lengths([[7, 3]]), "input_ids": IDS.view(2, 5), "labels": LABELS.view(2, 5)}, "row 0"),
    ],
)
def test_documents_that_cannot_be_told_apart_are_refused(batch, words):
    with pytest.raises(LayoutError, match=words):
        come_in(**batch)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"input_ids": IDS + 90}, "99 at token 9"),
        ({"input_ids": IDS - 1}, "-1 at token 0"),
        ({"input_ids": IDS.double()}, "float64"),
        ({"input_ids": IDS[0]}, r"\[10\]"),
        ({"input_ids": IDS.tolist()}, "tensor"),
        ({"input_ids": None}, "neither"),
        ({"labels": LABELS.masked_fill(LABELS == 5, 97)}, "97 at token 5"),
        ({"labels": LABELS.masked_fill(LABELS == 5, -7)}, "-7 at token 5"),
        ({"labels": LABELS.float()}, "float32"),
        ({"labels": LABELS[:, :9]}, r"\[1, 9\]"),
        ({"shift_labels": SHIFTED.masked_fill(SHIFTED == 5, 97)}, "shift_labels hold 97"),
        ({"num_targets": -7}, "-7"),
        ({"num_targets": 8}, "have 7 targets|10"),
        ({"num_targets": 7.0}, "must be an integer"),
        ({"num_targets": True}, "must be an integer"),
        ({"num_targets": 1 << 70}, "must be an integer >= 0 and <="),
        ({"step_targets": 6}, "has 7 targets"),
        ({"step_targets": 1 << 63}, "must be an integer >= 0 and <="),
        ({"step_targets": "7"}, "must be an integer"),
    ],
)
def test_values_that_cannot_be_used_are_refused(batch, words):
    with pytest.raises(BatchError, match=words):
        come_in(**{**DESCRIPTIONS["layout"], **batch})


def test_targets_stay_inside_documents_and_it_is_said():
    said = []
    given = {"input_ids": IDS, "labels": IDS, **DESCRIPTIONS["position_ids"]}
    admitted = admit(given, Contract(), Limits(97, 97), say=said.append)
    assert admitted.arguments["labels"].tolist() == LABELS.tolist() and admitted.micro_batch.targets == 7
    assert given["labels"] is IDS and IDS.tolist() == [list(range(10))]  # the caller's own is as it was
    assert len(said) == 1 and "left out" in said[0]
    crossing = torch.arange(1, 11)[None]
    admitted = admit({**given, "shift_labels": crossing}, Contract(), Limits(97, 97), say=said.append)
    assert admitted.arguments["shift_labels"].tolist() == SHIFTED.tolist() and admitted.micro_batch.targets == 7
    assert admit({**given, "labels": LABELS, "num_targets": 7}, Contract(), say=pytest.fail).micro_batch.targets == 7


@pytest.mark.parametrize("form", [lambda p: p[0], lambda p: p.tolist(), lambda p: p.numpy()])
def test_other_forms_of_position_ids(form):
    """A model gets a tensor of rows, and evaluation knows packed documents by them as well."""
    positions = DESCRIPTIONS["position_ids"]["position_ids"]
    given = {"input_ids": IDS, "position_ids": form(positions)}
    assert names_documents(given)
    assert torch.equal(admit(given, Contract()).arguments["position_ids"], positions)


def test_a_model_s_own_reading_of_labels():
    same = Contract(targets="same", takes_shift_labels=False)
    assert come_in(same, **DESCRIPTIONS["layout"], labels=IDS).micro_batch.targets == 10
    # A language model that does not shift gets the targets in the place of labels; a classifier keeps its labels.
    both = {"input_ids": IDS, "labels": IDS, "shift_labels": SHIFTED, **DESCRIPTIONS["layout"]}
    assert admit(both, same, Limits(97, 97)).arguments["labels"].tolist() == SHIFTED.tolist()
    tags = admit(both, same, Limits(97, 97, labels_are_tokens=False))
    assert tags.arguments["labels"].tolist() == IDS.tolist() and tags.micro_batch.targets == 10
    # A batch for next tokens has lost the classes of first tokens, without which it is another task.
    with pytest.raises(BatchError, match="classes of the tokens themselves.*leave shift_labels out"):
        admit({**both, "labels": LABELS}, same, Limits(97, 97, labels_are_tokens=False))
    without = {"input_ids": IDS, "labels": LABELS, **DESCRIPTIONS["layout"]}
    assert admit(without, same, Limits(97, 97, labels_are_tokens=False)).micro_batch.targets == 7
    # A model that shifts by itself finds the targets of shift_labels where it looks for them.
    own = admit(both, Contract(takes_shift_labels=False), Limits(97, 97))
    assert own.arguments["labels"].tolist() == LABELS.tolist() and "shift_labels" not in own.arguments
    nothing = admit(both, Contract(targets=None))
    assert nothing.micro_batch.targets == 0 and nothing.arguments["labels"] is IDS


def test_what_a_model_cannot_do_is_refused_by_document():
    with pytest.raises(LayoutError, match="a document has 6 tokens"):
        come_in(Contract(longest_document=5), **DESCRIPTIONS["layout"])
    assert come_in(Contract(longest_document=6), **DESCRIPTIONS["layout"]).micro_batch.targets == 7
    with pytest.raises(LayoutError, match="row 0 holds 3 documents"):
        come_in(Contract(whole_rows=True), **DESCRIPTIONS["layout"])
    # Long padding is no long document.
    padded = {"attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0, 0, 0]])}
    come_in(Contract(longest_document=3), **padded)
    # An answer's place in a row is found among all of its tokens.
    place = {"labels": None, "start_positions": torch.tensor([1]), "end_positions": torch.tensor([2])}
    with pytest.raises(LayoutError, match="row 0 holds 3 documents"):
        come_in(Contract(targets=None), **place, **DESCRIPTIONS["layout"])
    come_in(Contract(targets=None), **place, **padded)
    classes = {"labels": torch.tensor([1]), **padded}
    assert come_in(Contract(whole_rows=True), **classes).micro_batch.targets == 0


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("labels", torch.zeros(0, 3), [1, 3]),  # of several classes each
        ("labels", torch.zeros(0), [1]),  # numbers
        ("labels", torch.zeros(0, dtype=torch.long), [1, 1]),
        ("start_positions", torch.zeros(0, dtype=torch.long), [1]),
        ("token_type_ids", torch.zeros(0, 0, dtype=torch.long), [1, 1]),
    ],
)
def test_what_stands_in_for_a_batch_without_rows(name, given, expected):
    batch = {"input_ids": torch.zeros(0, 0, dtype=torch.long), name: given}
    admitted = admit(batch, Contract(targets=None, whole_rows=True))
    assert admitted.nothing and list(admitted.arguments[name].shape) == expected


ROWS = {"input_ids": IDS.view(2, 5), "labels": LABELS.view(2, 5)}
PADDED = {"attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])}


@pytest.mark.parametrize("description", DESCRIPTIONS)
def test_documents_that_may_not_share_a_row(description):
    alone, told = (Contract(rows=rows, why="it leaks", name="Mixer") for rows in ("alone", "told"))
    with pytest.raises(LayoutError, match="row 0 holds several documents.*Mixer.*padded on the right.*it leaks"):
        come_in(alone, **DESCRIPTIONS[description])
    # Where it is told of borders, positions from 0 are given beside them.
    admitted = come_in(told, **DESCRIPTIONS[description])
    assert lengths(admitted) == LENGTHS and admitted.arguments["position_ids"].tolist() == [[0, 1, 2, 0, *range(6)]]


def test_a_document_a_row_with_padding_behind_it():
    for rows in ("alone", "told"):
        contract = Contract(rows=rows, name="Mixer")
        admitted = come_in(contract, **ROWS, **PADDED)
        assert lengths(admitted) == [5, 5] and admitted.arguments["attention_mask"] is not None
        left = {"attention_mask": PADDED["attention_mask"].flip(1)}
        with pytest.raises(LayoutError, match="row 0 holds several documents, or padding before one.*Mixer"):
            come_in(contract, **ROWS, **left)
        with pytest.raises(LayoutError, match="row 1 holds several.*Mixer"):
            come_in(contract, **ROWS, cu_seqlens=[0, 5, 7, 10])
    # A model that counts places itself counts from another number, maybe.
    positions = {"position_ids": torch.arange(5).expand(2, 5)}
    assert "position_ids" in come_in(**ROWS, **positions).arguments
    assert "position_ids" not in come_in(Contract(rows="alone"), **ROWS, **positions).arguments


def test_a_layout_of_several_ranks():
    shared = Layout.from_ranks([[(0, 0, 6), (1, 0, 4)], [(1, 4, 3)]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    given = {"input_ids": IDS, "labels": IDS, "shift_labels": SHIFTED, "position_ids": positions, "layout": shared}
    admitted = admit(given, Contract(), place=(0, 2))
    assert admitted.micro_batch.layout is shared
    assert admitted.lengths.tolist() == [[6] * 6 + [7] * 4]
    for change, words in (
        ({"position_ids": None}, "needs position_ids"),
        ({"position_ids": positions + (positions > 2)}, "contradict"),
        ({"shift_labels": None}, "give shift_labels"),
    ):
        with pytest.raises((LayoutError, BatchError), match=words):
            admit({**given, **change}, Contract(), place=(0, 2))
    later = {"input_ids": IDS[:, :3], "position_ids": torch.tensor([[4, 5, 6]]), "layout": shared}
    assert admit(later, Contract(), place=(1, 2)).micro_batch.layout is shared
    with pytest.raises(LayoutError, match="begins at position 0, not 4"):
        admit({**later, "position_ids": torch.tensor([[0, 1, 2]])}, Contract(), place=(1, 2))
    with pytest.raises(LayoutError, match="3 tokens for rank 1, input_ids has 1 x 10"):
        admit(given, Contract(), place=(1, 2))
    with pytest.raises(LayoutError, match="the layout has 2 ranks, but 1 share attention"):
        admit(given, Contract(), place=(0, 1))
    with pytest.raises(LayoutError, match="takes no position ids"):
        admit(given, Contract(takes_positions=False), place=(0, 2))
    for rows in ("alone", "told"):
        with pytest.raises(LayoutError, match='continues on other ranks, but in Mixer .*placement="whole"'):
            admit(given, Contract(rows=rows, name="Mixer"), place=(0, 2))


def test_positions_that_rise_from_one_document_into_a_piece_of_another():
    """Stored one behind the other: a document of 9 tokens, and another's from position 9 on."""
    shared = Layout.from_ranks([[(0, 0, 9), (1, 9, 4)], [(1, 0, 9)]])
    given = {
        "input_ids": torch.arange(13)[None],
        "position_ids": torch.arange(13)[None],
        "layout": shared,
    }
    assert admit(given, Contract(), place=(0, 2)).lengths.tolist() == [[9] * 9 + [13] * 4]


def test_a_batch_without_tokens_gets_one_that_is_in_no_loss():
    nothing = torch.empty((1, 0), dtype=torch.long)
    for ids in ({"input_ids": nothing}, {"inputs_embeds": torch.empty(1, 0, 8)}):
        admitted = admit({**ids, "labels": nothing, "use_cache": False, "num_targets": 0}, Contract())
        assert admitted.nothing and admitted.micro_batch.targets == 0
        shapes = {key: tuple(v.shape) for key, v in admitted.arguments.items() if torch.is_tensor(v)}
        assert shapes == {**{key: (1, 1, *v.shape[2:]) for key, v in ids.items()}, "labels": (1, 1)}
        assert admitted.arguments["labels"].item() == -100 and admitted.arguments["use_cache"] is False
        assert names_documents({**ids, "position_ids": nothing})  # in evaluation too
    for shape in ((3, 1), (1,)):  # positions of three axes, and as usual
        admitted = admit({"input_ids": nothing, "position_ids": nothing.expand(*shape, 0)}, Contract())
        assert admitted.arguments["position_ids"].shape == (*shape, 1)
    padding = come_in(attention_mask=torch.zeros(1, 10).long())
    assert padding.nothing and padding.micro_batch.targets == 0 and padding.arguments["attention_mask"] is None


def test_labels_become_what_losses_take():
    made = come_in(labels=LABELS.int(), shift_labels=LABELS.roll(-1).int()).arguments
    assert made["labels"].dtype == made["shift_labels"].dtype == torch.int64
    given = LABELS.int()
    assert come_in(labels=given).arguments["labels"].dtype == torch.int64 and given.dtype == torch.int32


def test_tokens_have_a_digest_where_it_is_wanted():
    digests = [admit({"input_ids": IDS + n}, Contract(), digest=True).micro_batch.tokens_digest for n in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2] and all(0 < d < 1 << 63 for d in digests)
    assert admit({"input_ids": IDS}, Contract()).micro_batch.tokens_digest == 0


def test_which_batches_name_documents_in_evaluation():
    ones = torch.ones(1, 10, dtype=torch.long)
    for description in DESCRIPTIONS.values():
        assert names_documents({"input_ids": IDS, **description})
    assert not names_documents({"input_ids": IDS, "attention_mask": ones, "position_ids": IDS})
    # Positions of padding, as generate() makes them.
    left = {"attention_mask": torch.tensor([[0, 0, 1, 1]]), "position_ids": torch.tensor([[0, 0, 0, 1]])}
    assert not names_documents({"input_ids": IDS[:, :4], **left})
    assert not names_documents({"input_ids": IDS, "position_ids": torch.arange(5, 15)[None]})


UNREAD = {
    "cu_seqlens_q": torch.tensor([0, 5, 12]),
    "seq_lens": [5, 7],
    "sequence_lengths": torch.tensor([5, 7, 0]),
    "packed_lengths": [[5, 7]],
    "document_ids": torch.tensor([[3] * 5 + [9] * 7]),
    "doc_idx": np.array([0] * 5 + [1] * 7),
}


@pytest.mark.parametrize("name", UNREAD)
def test_descriptions_that_nothing_reads_are_known_by_their_numbers(name):
    given = {"input_ids": torch.arange(12)[None], "labels": None, name: UNREAD[name]}
    assert unread_description(given, {"input_ids"}) == name
    assert unread_description(given, {"input_ids", name}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence_lengths", torch.tensor([6, 4])),  # of padded rows
        ("seq_lens", [6, 6]),  # of full ones
        ("document_ids", torch.tensor([[1] * 6, [2] * 6])),
        ("sample_ids", torch.tensor([17, 4])),
        ("token_type_ids", torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)),
        ("max_length", 6),
        ("doc_names", ["a", "b"]),
        ("seq_scores", torch.rand(2, 6)),
        ("lengths", []),
    ],
)
def test_what_says_nothing_of_documents_may_be_given(name, value):
    assert unread_description({"input_ids": torch.arange(12).view(2, 6), name: value}, {"input_ids"}) is None
