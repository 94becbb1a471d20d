# SPDX-License-Identifier: Apache-2.0
"""Trees at every door: what is refused, in which words, and what comes out of a batch that names branches."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepspeed_distca.attention_server.parts import two_parts
from deepspeed_distca.data import PrefixCollator
from deepspeed_distca.data.documents import read_documents
from deepspeed_distca.data.from_layout import batch_from_layout
from deepspeed_distca.huggingface.contract import Contract
from deepspeed_distca.huggingface.front_door import BatchError, admit
from deepspeed_distca.layout import Layout, LayoutError
from deepspeed_distca.pipeline.batches import describe
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.tasks import home_tasks
from deepspeed_distca.scheduler.traffic import rows_between
from tests.distributed.random_plans import random_layout, random_tasks

#: A prompt of 5 tokens, of which 4 are shared, with answers of 2 and 3.
BATCH = PrefixCollator()([{"prompt_ids": [1, 2, 3, 4, 5], "answers": [[6, 7], [8, 9, 10]]}])
LAYOUT = BATCH["layout"]


def test_positions_and_targets_follow_the_branches() -> None:
    given = {key: BATCH[key] for key in ("input_ids", "layout")} | {"labels": BATCH["input_ids"].clone()}
    arguments = admit({**given, "labels": BATCH["labels"]}, Contract()).arguments
    assert arguments["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7]]
    said: list[str] = []
    made = admit(given, Contract(), say=said.append).arguments["labels"].tolist()
    # The model shifts: a label at the second branch's first row would be the target of the first branch's last one.
    assert made == [[-100, 2, 3, 4, 5, 6, 7, -100, 8, 9, 10]] and said


def test_the_first_branch_may_be_the_target_of_its_parent() -> None:
    """Where all branches begin alike, as with the copied token."""
    shifted = BATCH["shift_labels"].clone()
    shifted[0, 3] = 5
    batch = {**BATCH, "shift_labels": shifted, "num_targets": 6}
    assert admit(batch, Contract()).arguments["shift_labels"][0, 3] == 5
    ids = BATCH["input_ids"].clone()
    ids[0, 7] = 11
    with pytest.raises(BatchError, match=r"token 3 has the target 5, .* begin with \[5, 11\]"):
        admit({**batch, "input_ids": ids}, Contract())


def test_other_documents_may_go_on_beside_a_tree() -> None:
    """A token at the end of a piece has its target, wherever the next piece lies."""
    segments = np.array([[0, 0, 0, 3], [0, 1, 0, 3], [1, 1, 3, 2]])
    layout = Layout(segments, 2, np.array([[0, 0, 1, -1], [0, 1, 1, 0], [0, 2, 1, 0]]))
    ids, shifted = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[-100, -100, -100, 5, 6, 7]])
    positions = torch.from_numpy(layout.position_ids(0))[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions, "layout": layout}
    admitted = admit({**batch, "shift_labels": shifted, "num_targets": 3}, Contract(), place=(0, 2))
    assert admitted.arguments["shift_labels"].tolist() == shifted.tolist()
    with pytest.raises(BatchError, match="a document continues on other ranks, .* which labels cannot say"):
        admit({**batch, "labels": torch.tensor([[-100, -100, -100, -100, 5, 6]])}, Contract(), place=(0, 2))


def test_labels_of_tokens_are_not_shifted() -> None:
    """What a token-classification model says of the prompt's last row is no target of a branch behind it."""
    labels = torch.arange(11)[None]
    given = {"input_ids": torch.arange(20, 31)[None], "layout": LAYOUT, "labels": labels}
    assert torch.equal(admit(given, Contract("same", False, "mean")).arguments["labels"], labels)
    with pytest.raises(BatchError, match="A token has one target"):
        admit(given, Contract())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"cu_seqlens": [0, 11]}, "cu_seqlens was given beside a layout with trees"),
        ({"seq_idx": torch.zeros(1, 11, dtype=torch.int64)}, "seq_idx was given beside"),
        ({"packed_seq_params": SimpleNamespace(cu_seqlens_q=[0, 4, 11])}, "was given beside a layout with trees"),
        ({"attention_mask": torch.tensor([[1] * 10 + [0]])}, "no padding"),
        ({"position_ids": torch.arange(11)[None]}, "token 7 of row 0 has position 7, in the layout 4 tokens"),
        ({"position_ids": torch.zeros(3, 1, 11, dtype=torch.int64)}, r"shape \[3, 1, 11\]"),
    ],
)
def test_other_descriptions(more: dict, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        admit({**BATCH, **more}, Contract())


def test_rows_end_where_documents_do() -> None:
    with pytest.raises(LayoutError, match="the end of row 0 lies inside a document"):
        ids = torch.ones(2, 4, dtype=torch.int64)
        admit({"input_ids": ids, "layout": Layout.from_trees([[3, [(3, None), (2, 0)]]])}, Contract())


@pytest.mark.parametrize(
    ("contract", "words"),
    [
        (Contract(rows="told"), "something beside core attention"),
        (Contract(takes_positions=False), "takes no position ids"),
        (Contract(whole_rows=True), "one result for a row"),
        (Contract(rope_limits=(6,)), "up to 6 tokens and longer ones"),
        (Contract(longest_document=6), "a document has 7 tokens"),
    ],
)
def test_models_that_cannot(contract: Contract, words: str) -> None:
    layout = Layout.from_trees([[[(4, None), (2, 0), (3, 0)]]])
    with pytest.raises(LayoutError, match=words):
        admit({"input_ids": torch.ones(1, 9, dtype=torch.int64), "layout": layout}, contract)


def test_other_doors() -> None:
    with pytest.raises(LayoutError, match="pipelines take no trees"):
        describe(BATCH, (0, 1))
    with pytest.raises(ValueError, match="layout has trees"):
        read_documents({"input_ids": BATCH["input_ids"], "layout": LAYOUT}, -100)
    with pytest.raises(LayoutError, match="PrefixCollator makes such batches"):
        batch_from_layout({0: list(range(11))}, LAYOUT, 0)
    with pytest.raises(LayoutError, match="segments alone"):
        LAYOUT.to_ranks()
    routes = RouteCompiler(LAYOUT, home_tasks(LAYOUT)).rank(0)
    with pytest.raises(ValueError, match="not divided into nano-batches"):
        two_parts(routes, np.array([5]), None, backward=False, crossed=(False, False))
    with pytest.raises(LayoutError, match=r"Layout\.for_window"):
        home_tasks(LAYOUT, 6)


@pytest.mark.parametrize("seed", range(30))
def test_rows_are_counted_as_they_are_sent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout, heads = random_layout(rng, 3, documents=6, longest=60, trees=0.6), Heads(4, 2, 8)
    tasks = random_tasks(rng, layout, None)
    queries, keys = rows_between(layout, tasks)
    compiler = RouteCompiler(layout, tasks)
    assert np.array_equal(keys, compiler.key_rows())
    for phase in ("forward", "backward"):
        out, back = compiler.bytes_between(heads, phase)
        row = heads.moved(phase)
        assert np.array_equal(out, queries * row.query_out + keys * row.key_out)
        assert np.array_equal(back.T, queries * row.query_back + keys * row.key_back)
