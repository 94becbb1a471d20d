# SPDX-License-Identifier: Apache-2.0
"""The accumulation loader: every micro-batch knows the targets of its step; resume, epochs and short ends."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from deepspeed_distca.data import AccumulationLoader, PackedSequenceCollator
from tests.data.stateful import StatefulLoader


def make_batches(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [PackedSequenceCollator()([{"input_ids": rng.integers(0, 99, n).tolist()}]) for n in lengths]


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_step_targets_are_those_of_the_whole_step(steps):
    batches = make_batches([4, 9, 2, 7, 1, 5])
    loader = AccumulationLoader(batches, steps)
    found = list(loader)
    assert len(loader) == len(found) == 6
    for index, batch in enumerate(found):
        first = index // steps * steps
        assert batch["step_targets"] == sum(b["num_targets"] for b in batches[first : first + steps])
        assert type(batch["step_targets"]) is int
        assert all(batch[key] is value for key, value in batches[index].items())
    assert "step_targets" not in batches[0]


def test_weights_make_the_mean_over_ranks_and_micro_batches_the_token_mean():
    """What step_targets is for, in plain numbers: two ranks, three micro-batches, uneven targets, one rank empty."""
    rng = np.random.default_rng(1)
    lengths = [[4, 9, 1], [7, 0, 3]]
    ranks = [list(AccumulationLoader(make_batches(row), 3)) for row in lengths]
    losses = [[rng.random(batch["num_targets"]) for batch in rank] for rank in ranks]
    targets = sum(rank[0]["step_targets"] for rank in ranks)
    scaled = [loss.sum() * 2 * 3 / targets for rank in losses for loss in rank]
    np.testing.assert_allclose(np.mean(scaled), np.concatenate([*losses[0], *losses[1]]).mean(), rtol=1e-12)


def test_reads_one_step_ahead_and_no_more():
    inner = StatefulLoader(make_batches([3] * 6))
    iterator = iter(AccumulationLoader(inner, 2))
    read = []
    for _ in range(5):
        next(iterator)
        read.append(inner.position)
    assert read == [2, 2, 4, 4, 6]


def test_short_last_window(caplog):
    batches = make_batches([4, 9, 2, 7, 5])
    dropped = AccumulationLoader(batches, 3)
    assert len(dropped) == 3 and [b["num_targets"] for b in dropped] == [3, 8, 1]
    assert "2 micro-batches (10 targets), too few for a step of 3; they are left out" in caplog.text
    padded = list(AccumulationLoader(batches, 3, last_window="pad"))
    assert [b["num_targets"] for b in padded] == [3, 8, 1, 6, 4, 0]
    assert [b["step_targets"] for b in padded] == [12] * 3 + [10] * 3
    assert padded[-1]["input_ids"].shape == (1, 0)
    assert len(AccumulationLoader(batches, 3, last_window="pad")) == 6
    with pytest.raises(ValueError, match='2 micro-batches .*"pad" or "drop"'):
        list(AccumulationLoader(batches, 3, last_window="error"))
    assert list(AccumulationLoader([], 3, last_window="pad")) == []


@pytest.mark.parametrize("stop", range(8))
def test_a_resume_begins_with_a_step(stop):
    """A checkpoint has no gradients of an unfinished step's first micro-batches: they are handed out again."""
    batches = make_batches([4, 9, 2, 7, 5, 6, 8, 3])
    whole = list(AccumulationLoader(batches, 3, last_window="pad"))
    first = AccumulationLoader(StatefulLoader(batches), 3, last_window="pad")
    iterator = iter(first)
    before = [next(iterator) for _ in range(stop)]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = AccumulationLoader(StatefulLoader(batches), 3, last_window="pad")
    second.load_state_dict(state)
    assert second.state_dict() == state  # as long as no loop has begun
    resumed = before[: stop // 3 * 3] + list(second)
    assert [b["num_targets"] for b in resumed] == [b["num_targets"] for b in whole]
    assert [b["step_targets"] for b in resumed] == [b["step_targets"] for b in whole]
    assert len(list(second)) == len(whole)  # the epoch after that is a whole one


def test_the_state_of_a_loop_that_has_begun_is_not_that_of_the_one_before():
    loader = AccumulationLoader(StatefulLoader(make_batches([3] * 8)), 2)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    assert loader.state_dict()["loader"] == {"position": 4}
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["loader"] == {"position": 0}


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (None, TypeError, r"must be what state_dict\(\) returned, got None"),
        ({"loader": {"position": 2}, "handed_out": 1}, ValueError, "'version' is missing, 'handed_out' is unknown"),
        ({"version": 1}, ValueError, "'loader' is missing"),
        ({"version": True, "loader": {"position": 2}}, ValueError, "expected version 1, got True"),
        ({"version": 2, "loader": {"position": 2}}, ValueError, "expected version 1, got 2"),
        ({"version": 1, "loader": {}}, KeyError, "position"),
    ],
)
def test_wrong_states_change_nothing(state, error, words):
    loader = AccumulationLoader(StatefulLoader(make_batches([3] * 6)), 3)
    iterator = iter(loader)
    next(iterator)
    before = loader.state_dict()
    with pytest.raises(error, match=words):
        loader.load_state_dict(state)
    assert loader.state_dict() == before and len(list(iterator)) == 5


def test_a_loader_without_a_state_inside_says_so():
    """Accelerate's loaders have the method even where it cannot work."""

    class Shard(StatefulLoader):
        def state_dict(self):
            raise AttributeError("no stateful loader inside")

    loader = AccumulationLoader(Shard(make_batches([3] * 4)), 2)
    for _ in loader:
        with pytest.raises(AttributeError, match="no stateful loader inside"):
            loader.state_dict()


def test_state_only_where_the_loader_has_one():
    assert not hasattr(AccumulationLoader(make_batches([3]), 1), "state_dict")
    assert hasattr(AccumulationLoader(StatefulLoader([]), 1), "load_state_dict")


def test_epochs_and_attributes_go_to_the_loader():
    features = [{"input_ids": list(range(n))} for n in (3, 5, 2, 4, 6, 1)]
    sampler = DistributedSampler(features, num_replicas=2, rank=0, seed=1)
    inner = DataLoader(features, batch_size=1, sampler=sampler, collate_fn=PackedSequenceCollator())
    loader = AccumulationLoader(inner, 3)
    assert loader.dataset is features and loader.sampler is sampler and len(loader) == 3
    orders = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert sampler.epoch == epoch
        orders.append([batch["input_ids"].numel() for batch in loader])
    assert len(set(map(tuple, orders))) > 1

    class Own(StatefulLoader):
        def set_epoch(self, epoch):
            self.epoch = epoch

    own = Own([])
    AccumulationLoader(own, 2).set_epoch(7)
    assert own.epoch == 7
    AccumulationLoader([], 2).set_epoch(7)  # nothing to tell
    with pytest.raises(AttributeError, match="no_such"):
        _ = loader.no_such
    assert pickle.loads(pickle.dumps(AccumulationLoader([1, 2], 2))).loader == [1, 2]


def test_refusals():
    with pytest.raises(KeyError, match="num_targets is missing.*PackedSequenceCollator"):
        list(AccumulationLoader([{"input_ids": 1}], 1))
    with pytest.raises(ValueError, match="an integer >= 1, got 0"):
        AccumulationLoader([], 0)
    with pytest.raises(ValueError, match="must be an integer >= 1, got 2.0"):
        AccumulationLoader([], 2.0)
    with pytest.raises(ValueError, match="drop, pad, error, got 'keep'"):
        AccumulationLoader([], 2, last_window="keep")


@pytest.mark.parametrize(
    ("targets", "error", "words"),
    [
        (True, ValueError, "num_targets of a batch must be an integer .* got True"),
        (2.0, ValueError, r"got 2\.0"),
        (float("nan"), ValueError, "got nan"),
        ("2", ValueError, "got '2'"),
        (None, ValueError, "got None"),
        (torch.tensor(2.0), ValueError, r"got 2\.0"),
        (torch.tensor([1, 2]), ValueError, r"got tensor\(\[1, 2\]\)"),
        (-1, ValueError, "must be an integer >= 0 and <= 3, got -1"),
        (4, ValueError, "must be an integer >= 0 and <= 3, got 4"),
        (2**70, ValueError, "must be an integer >= 0 and <= 3"),
    ],
)
def test_numbers_of_targets_that_are_none(targets, error, words):
    (batch,) = make_batches([3])
    with pytest.raises(error, match=words):
        list(AccumulationLoader([{**batch, "num_targets": targets}], 1))


@pytest.mark.parametrize("kind", [int, np.int32, torch.tensor, lambda n: torch.tensor([n])])
def test_numbers_of_targets_of_any_integer_type(kind):
    batches = [{**batch, "num_targets": kind(batch["num_targets"])} for batch in make_batches([3, 5])]
    assert [batch["step_targets"] for batch in AccumulationLoader(batches, 2)] == [6, 6]
