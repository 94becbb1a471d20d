# SPDX-License-Identifier: Apache-2.0
"""The global loader: every document once over all ranks, the same batches after a resume, from any kind of data."""

from __future__ import annotations

import json
import logging
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from deepspeed_distca.data import AccumulationLoader
from deepspeed_distca.data.global_loader import GlobalPackedLoader
from tests.data.batches import corpus, same, spread
from tests.data.configs import by_pairs, config


def epochs(documents, ranks: int, count: int = 1, **options) -> list[list[list[dict]]]:
    """The batches of each epoch and rank."""
    loaders = [GlobalPackedLoader(documents, rank=r, num_ranks=ranks, **options) for r in range(ranks)]
    return [[list(loader) for loader in loaders] for _ in range(count)]


def documents_of(ranks: list[list[dict]]) -> list[tuple[list[int], list[int]]]:
    """Token ids and targets of the documents of an epoch, put together from all ranks of one group; checks that ranks
    agree, positions are true, and every token is there once."""
    assert len({len(batches) for batches in ranks}) == 1  # as many micro-batches on every rank
    found = []
    for parts in zip(*ranks, strict=True):
        layout = parts[0]["layout"].validate()
        assert layout.num_ranks == len(parts) and all(part["layout"] == layout for part in parts)
        tokens: dict[int, dict[int, tuple[int, int]]] = {}
        for rank, part in enumerate(parts):
            row = 0
            assert part["input_ids"].shape == part["position_ids"].shape == (1, int(layout.tokens[rank]))
            for document, start, length in layout.rank(rank):
                rows = slice(row, row + length)
                assert part["position_ids"][0, rows].tolist() == list(range(start, start + length))
                ids, targets = (part[key][0, rows].tolist() for key in ("input_ids", "shift_labels"))
                for position in range(length):
                    assert tokens.setdefault(document, {}).setdefault(start + position, None) is None
                    tokens[document][start + position] = ids[position], targets[position]
                row += length
            assert part["num_targets"] == int((part["shift_labels"] != -100).sum())
        for columns in tokens.values():
            ids, targets = zip(*(columns[i] for i in range(len(columns))), strict=True)
            found.append((list(ids), list(targets)))
    return found


def check_exact(documents, ranks: list[list[dict]]) -> None:
    """The multiset of documents is the one given, and every token but a document's last is told what comes next."""
    found = documents_of(ranks)
    assert Counter(tuple(ids) for ids, _ in found) == Counter(tuple(map(int, d)) for d in documents if len(d))
    assert all(targets == [*ids[1:], -100] for ids, targets in found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])  # with every length of a step: 1 + ranks % 3
def test_every_document_once_over_any_number_of_ranks(ranks: int) -> None:
    documents = [*spread(120, seed=ranks), np.zeros(0, dtype=int), *corpus([1, 1, 2, 64 * ranks])]
    documents = [d for d in documents if len(d) <= 64 * ranks]
    options = dict(tokens_per_rank=64, fill="whole", config=config(1 + ranks % 3), seed=ranks)
    first, second = epochs(documents, ranks, 2, **options)
    for epoch in (first, second):
        check_exact(documents, epoch)
        assert len(epoch[0]) % options["config"]["gradient_accumulation_steps"] == 0
    assert not same(first[0], second[0])  # another epoch, another order
    assert same(first[0], epochs(documents, ranks, **options)[0][0])


@pytest.mark.parametrize("placement", ["whole", "free", "contiguous", "head_tail"])
def test_exact_fill_meets_every_budget(placement: str) -> None:
    budgets = [50, 0, 90, 31]
    documents = spread(200)
    (ranks,) = epochs(documents, 4, tokens_per_rank=budgets, placement=placement, config=config(2))
    tokens = [part["layout"].tokens.tolist() for part in ranks[0]]
    last = next(i for i, t in enumerate(tokens) if t != budgets)
    assert tokens[:last] == [budgets] * last and last > len(tokens) - 3
    total = sum(map(len, documents))
    assert sum(map(sum, tokens)) == total
    # Documents may have been cut at the ends of batches: all tokens are there, and nearly all documents are whole.
    found = documents_of(ranks)
    assert Counter(t for ids, _ in found for t in ids) == Counter(int(t) for d in documents for t in d)
    whole = Counter(tuple(ids) for ids, _ in found) & Counter(tuple(map(int, d)) for d in documents)
    assert whole.total() > 0.9 * len(documents)
    # Whole documents of up to the sum of budgets: longer than any rank.
    assert max(len(ids) for ids, _ in found) > 90


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("streamed", [False, True])
def test_resume_in_the_middle_of_an_epoch(workers: int, streamed: bool) -> None:
    documents = spread(90)
    data = (lambda: iter(documents)) if streamed else documents
    given = config(3, advanced={"node_size": 2})
    options = dict(rank=1, num_ranks=3, tokens_per_rank=48, config=given, num_workers=workers, shuffle_buffer=20)
    loader = GlobalPackedLoader(data, **options)
    state, expected = loader.state_dict(), [list(loader), list(loader)]
    assert state == GlobalPackedLoader(data, **options).state_dict()
    for micro_batches in (0, 1, 5, 6, len(expected[0]) - 1):
        interrupted = GlobalPackedLoader(data, **options)
        before = list(islice(interrupted, micro_batches))
        state = json.loads(json.dumps(interrupted.state_dict()))  # plain values only
        resumed = GlobalPackedLoader(data, **options)
        resumed.load_state_dict(state)
        resumed.set_epoch(0)  # as loops over epochs do
        whole = micro_batches // 3 * 3  # a step that was not finished is trained again from its beginning
        assert same(before[:whole] + list(resumed), expected[0])
        if micro_batches == 5:
            assert same(list(resumed), expected[1])
    later = GlobalPackedLoader(data, **options)
    later.set_epoch(1)
    state = None
    for index, _ in enumerate(later):
        if index == 3:
            state = later.state_dict()
            break
    resumed = GlobalPackedLoader(data, **options)
    resumed.load_state_dict(state)
    assert resumed.epoch == 1 and same(list(resumed), expected[1][3:])


def test_workers_and_streams_make_the_same_batches() -> None:
    documents = spread(80)
    options = dict(tokens_per_rank=64, seed=3)
    (expected,) = epochs(documents, 2, **options)
    for workers in (1, 2):
        (ranks,) = epochs(documents, 2, num_workers=workers, prefetch_factor=3, **options)
        assert all(map(same, ranks, expected))
    # A stream has the order of a sequence that is not shuffled, and any buffer its own.
    (in_order,) = epochs(documents, 2, shuffle=False, **options)
    for workers in (0, 2):
        (ranks,) = epochs(lambda: (d.tolist() for d in documents), 2, shuffle=False, num_workers=workers, **options)
        assert all(map(same, ranks, in_order))
        (ranks,) = epochs(lambda: iter(documents), 2, shuffle_buffer=16, fill="whole", num_workers=workers, **options)
        check_exact(documents, ranks)
        assert not same(ranks[0], in_order[0])


def test_a_run_resumes_on_other_ranks() -> None:
    documents = spread(150)
    options = dict(seed=1, fill="whole", config=config(2))
    before = [GlobalPackedLoader(documents, 60, rank=r, num_ranks=4, **options) for r in range(4)]
    first = [list(islice(loader, 4)) for loader in before]
    after = [GlobalPackedLoader(documents, [100, 140], rank=r, num_ranks=2, **options) for r in range(2)]
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    found = documents_of(first) + documents_of([list(loader) for loader in after])
    assert Counter(tuple(ids) for ids, _ in found) == Counter(tuple(map(int, d)) for d in documents)


def test_regrouping_changes_micro_batches_but_no_step() -> None:
    # Of eight documents that fill a rank each the order puts some in either micro-batch of a step.
    documents = corpus([*[64] * 8, *[4] * 128])
    options = dict(tokens_per_rank=64, config=config(4, cost_model=by_pairs()))
    (regrouped,) = epochs(documents, 2, **options)
    (as_packed,) = epochs(documents, 2, regroup=False, **options)
    check_exact(documents, regrouped)

    def steps(ranks: list[list[dict]]) -> list[list[list[int]]]:
        parts = [[batches[i : i + 4] for batches in ranks] for i in range(0, len(ranks[0]), 4)]
        return [sorted(ids for ids, _ in documents_of(part)) for part in parts]

    assert steps(regrouped) == steps(as_packed)
    targets = [
        [sum(batches[i]["step_targets"] for batches in ranks) for i in range(8)] for ranks in (regrouped, as_packed)
    ]
    assert targets[0] == targets[1]

    def uneven(ranks: list[list[dict]]) -> int:
        """Micro-batches in which one rank has a long document and the other has not."""
        layouts = [batch["layout"] for batch in ranks[0]]
        longest = [[max(s.length for s in layout.rank(rank)) for rank in range(2)] for layout in layouts]
        return sum(a != b for a, b in longest)

    assert uneven(regrouped) < uneven(as_packed)
    # Orders are kept where they are asked for.
    for placement in ("contiguous", "head_tail"):
        given, without = (
            epochs(documents, 2, placement=placement, **options, **more)[0] for more in ({}, {"regroup": False})
        )
        assert all(map(same, given, without))


def test_a_step_that_was_interrupted_resumes_on_other_ranks_and_regrouped_otherwise() -> None:
    documents = spread(150)
    options = dict(seed=1, fill="whole", config=config(2, cost_model=by_pairs()))

    def loaders(budgets, **more) -> list[GlobalPackedLoader]:
        options.update(more)
        ranks = range(len(budgets))
        return [GlobalPackedLoader(documents, budgets, rank=r, num_ranks=len(ranks), **options) for r in ranks]

    before = loaders([60] * 4)
    first = [list(islice(loader, 5)) for loader in before]
    states = [loader.state_dict() for loader in before]
    assert states == states[:1] * 4 and states[0]["micro_batches"] == 4
    for budgets, more in (([100, 140], {}), ([60] * 4, {"window": 8}), ([240], {"regroup": False})):
        after = loaders(budgets, **more)
        for loader in after:
            loader.load_state_dict(states[0])
        found = documents_of([part[:4] for part in first]) + documents_of([list(loader) for loader in after])
        assert Counter(tuple(ids) for ids, _ in found) == Counter(tuple(map(int, d)) for d in documents)


def test_groups_of_servers() -> None:
    documents = spread(160)
    options = dict(config=config(2, servers=2), fill="whole", tokens_per_rank=[80, 70, 75, 75, 150, 0])
    (ranks,) = epochs(documents, 6, **options)
    groups = [documents_of(ranks[i : i + 2]) for i in (0, 2, 4)]
    assert all(groups)
    found = Counter(tuple(ids) for group in groups for ids, _ in group)
    assert found == Counter(tuple(map(int, d)) for d in documents)
    assert len({len(batches) for batches in ranks}) == 1


@pytest.mark.parametrize("accumulation", [1, 4])
def test_targets_of_a_step(accumulation: int) -> None:
    (ranks,) = epochs(spread(61), 3, tokens_per_rank=40, config=config(accumulation))
    for batches in ranks:
        for first in range(0, len(batches), accumulation):
            window = batches[first : first + accumulation]
            assert len(window) == accumulation
            targets = sum(batch["num_targets"] for batch in window)
            assert [batch["step_targets"] for batch in window] == [targets] * accumulation
    assert sum(batch["num_targets"] for batches in ranks for batch in batches) > 0


def test_the_last_step() -> None:
    documents = corpus([30, 30, 30, 30, 25])
    options = dict(tokens_per_rank=15, config=config(4), shuffle=False)
    (ranks,) = epochs(documents, 2, **options)
    sizes = [part["layout"].tokens.tolist() for part in ranks[0]]
    # Fewer tokens are spread over the ranks alike, and empty micro-batches complete the step.
    assert sizes == [[15, 15]] * 4 + [[12, 13]] + [[0, 0]] * 3
    assert ranks[0][-1]["input_ids"].shape == (1, 0) and ranks[0][-1]["num_targets"] == 0
    loader = GlobalPackedLoader(documents, rank=0, num_ranks=2, drop_last=True, **options)
    assert len(loader) == 4 and same(
        [{**b, "step_targets": 0} for b in loader], [{**b, "step_targets": 0} for b in ranks[0][:4]]
    )
    assert loader.counts.dropped_documents == 1
    assert len(GlobalPackedLoader(documents, rank=0, num_ranks=2, **options)) == 8


def test_a_loop_that_was_left_starts_anew() -> None:
    loader = GlobalPackedLoader(spread(60), 50, rank=0, num_ranks=2)
    expected = list(loader)
    assert loader.epoch == 1
    loader.set_epoch(0)
    for _ in loader:
        break
    assert loader.epoch == 0 and same(list(loader), expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_of_as_many_batches_as_the_length_ends_the_epoch(workers: int) -> None:
    documents = spread(40)
    options = dict(rank=0, num_ranks=1, shuffle=True, num_workers=workers, config=config(2))
    whole = GlobalPackedLoader(documents, 300, **options)
    expected = [list(whole) for _ in range(3)]
    loader = GlobalPackedLoader(documents, 300, **options)
    for epoch in range(3):
        count = len(loader)
        iterator = iter(loader)
        found = [next(iterator) for _ in range(count - 1)]
        assert loader.epoch == epoch and loader.state_dict()["micro_batches"] == count - 2
        found.append(next(iterator))
        assert same(found, expected[epoch]) and loader.epoch == epoch + 1
        assert loader.state_dict()["micro_batches"] == 0 and next(iterator, None) is None
    assert not same(expected[0], expected[1])


def test_labels_are_kept() -> None:
    rng = np.random.default_rng(0)
    features = [
        {"input_ids": d.tolist(), "labels": np.where(rng.random(len(d)) < 0.4, -100, d).tolist()} for d in spread(50)
    ]
    expected = {tuple(f["input_ids"]): [*f["labels"][1:], -100] for f in features}
    for data in (features, lambda: iter(features)):
        (ranks,) = epochs(data, 3, tokens_per_rank=60, fill="whole")
        found = documents_of(ranks)
        assert len(found) == 50 and all(expected[tuple(ids)] == targets for ids, targets in found)
        for batches in ranks:
            assert sum(b["num_targets"] for b in batches) < sum(b["input_ids"].numel() for b in batches)
        assert ranks[0][0]["step_targets"] == ranks[0][0]["num_targets"]


def test_global_random_states_are_left_alone() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    list(GlobalPackedLoader(spread(30), 50, rank=0, num_ranks=2, num_workers=1))
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()


def test_an_accumulation_loader_around_it_changes_nothing() -> None:
    options = dict(tokens_per_rank=40, rank=0, num_ranks=2, config=config(2))
    loader = GlobalPackedLoader(spread(50), **options)
    expected = list(loader)
    wrapped = AccumulationLoader(GlobalPackedLoader(spread(50), **options), 2)
    assert len(wrapped) == len(expected)
    before = list(islice(wrapped, 5))
    resumed = AccumulationLoader(GlobalPackedLoader(spread(50), **options), 2)
    resumed.load_state_dict(wrapped.state_dict())
    assert same(before[:4] + list(resumed), expected)
    list(islice(wrapped, 1))  # a second loop: the state within its first step is not that of the one before
    resumed.set_epoch(0)
    resumed.load_state_dict(wrapped.state_dict())
    assert same(list(resumed), expected)


def test_states_of_other_runs_are_refused() -> None:
    documents = spread(40)
    state = GlobalPackedLoader(documents, 50, rank=0, num_ranks=2).state_dict()
    for change, word in (
        (dict(seed=5), "seed was 0, is 5"),
        (dict(tokens_per_rank=49), "capacities was"),
        (dict(config=config(2)), "gradient_accumulation_steps was 1, is 2"),
        (dict(documents=documents[:-1]), "documents was '40 of"),
    ):
        options = {"documents": documents, "tokens_per_rank": 50, "rank": 0, "num_ranks": 2, **change}
        with pytest.raises(ValueError, match=word):
            GlobalPackedLoader(**options).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"version": 1}, ValueError, "expected version 2, got 1; it was saved by another version"),
        ({"version": "2"}, ValueError, "expected version 2, got '2'"),
        ({"version": None}, ValueError, "'version' is missing"),
        ({"epoch": None}, ValueError, "'epoch' is missing; the keys are"),
        ({"micro_batches": None}, ValueError, "'micro_batches' is missing"),
        ({"identity": None, "more": 1}, ValueError, "'identity' is missing, 'more' is unknown"),
        ({"epoch": 1.0}, ValueError, r"epoch must be an integer >= 0, got 1\.0"),
        ({"epoch": True}, ValueError, "epoch must be .* got True"),
        ({"epoch": -1}, ValueError, "epoch must be an integer >= 0, got -1"),
        ({"micro_batches": "4"}, ValueError, "micro_batches must be .* got '4'"),
        ({"micro_batches": float("nan")}, ValueError, "micro_batches must be .* got nan"),
        ({"epoch": 10**9000}, ValueError, "epoch must be .* got a very large int"),
        ({"micro_batches": -2}, ValueError, "micro_batches must be an integer >= 0, got -2"),
        ({"micro_batches": 3}, ValueError, "multiple of the 2 of a step, got 3; .* beginning of a step"),
        ({"micro_batches": 10**6}, ValueError, r"micro_batches of epoch 0 must be .* <= \d+, got 1000000"),
        ({"identity": [1]}, TypeError, r"identity must be what state_dict\(\) returned, got \[1\]"),
        ({"identity": {"seed": 0}}, ValueError, "identity: 'capacities' is missing"),
        ({"identity.seed": None}, ValueError, "identity: 'seed' is missing"),
        ({"identity.more": 1}, ValueError, "identity: 'more' is unknown"),
        ({"identity.seed": False}, ValueError, "seed was False, is 0"),
        ({"identity.capacities": np.array([1, 2])}, ValueError, "capacities was array"),
    ],
)
def test_every_key_of_a_state_is_checked_and_nothing_changes_where_it_is_wrong(change, error, words) -> None:
    loader = GlobalPackedLoader(spread(40), 50, rank=0, num_ranks=2, config=config(2))
    list(islice(loader, 2))
    state = loader.state_dict()
    wrong = {**state, "identity": dict(state["identity"])}
    for key, value in change.items():
        *inner, key = key.split(".")
        values = wrong["identity"] if inner else wrong
        values.update({key: value})
        if value is None:
            del values[key]
    loader.set_epoch(5)
    before = dict(vars(loader))
    with pytest.raises(error, match=words):
        loader.load_state_dict(wrong)
    assert vars(loader) == before
    loader.load_state_dict(state)
    assert loader.state_dict() == state


def test_a_state_that_came_back_from_a_file_in_other_types() -> None:
    options = dict(rank=0, num_ranks=2, config=config(2))
    first = GlobalPackedLoader(spread(40), 50, **options)
    expected = list(first)
    state = GlobalPackedLoader(spread(40), 50, **options).state_dict()
    state.update(version=np.int64(2), epoch=np.int32(0), micro_batches=np.uint8(len(expected) - 2))
    state["identity"]["capacities"] = tuple(np.int64(n) for n in state["identity"]["capacities"])
    resumed = GlobalPackedLoader(spread(40), 50, **options)
    resumed.load_state_dict(state)
    assert same(list(resumed), expected[-2:]) and type(resumed.state_dict()["micro_batches"]) is int
    # Behind the last batch of an epoch nothing is left of it.
    resumed.load_state_dict({**state, "micro_batches": len(expected)})
    assert list(resumed) == [] and resumed.epoch == 1
    for nothing in (None, [], "state", 3):
        with pytest.raises(TypeError, match="must be what state_dict"):
            resumed.load_state_dict(nothing)


def test_a_loop_ends_with_an_error_where_a_state_is_loaded_into_it() -> None:
    loader = GlobalPackedLoader(spread(40), 50, rank=0, num_ranks=2)
    state = loader.state_dict()
    iterator = iter(loader)
    first = next(iterator)
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="begin a new loop"):
        next(iterator)
    assert same([next(iter(loader))], [first])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_ends_before_the_place_is_an_error(workers: int) -> None:
    documents = spread(60)
    options = dict(tokens_per_rank=50, rank=0, num_ranks=2, config=config(2), num_workers=workers)
    first = GlobalPackedLoader(lambda: iter(documents), **options)
    list(islice(first, 6))
    shorter = GlobalPackedLoader(lambda: iter(documents[:20]), **options)
    shorter.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="ended after 2 steps of epoch 0, but .* at step 3"):
        list(shorter)


def test_wrong_arguments() -> None:
    for options, word in (
        (dict(rank=2, num_ranks=2), "rank must be an integer >= 0 and <= 1, got 2"),
        (dict(rank=0), "both rank and num_ranks"),
        (dict(rank=0.0, num_ranks=2), r"rank must be an integer .* got 0\.0"),
        (dict(rank=0, num_ranks=2.0), "num_ranks must be an integer"),
        (dict(config=config(servers=3)), "divisor of the 2 ranks"),
        (dict(tokens_per_rank=[1, 2, 3]), "one for each of 2 ranks; got 3"),
        (dict(tokens_per_rank=[-1, 3]), "at least 0"),
        (dict(tokens_per_rank=[4, 0], config=config(servers=1)), "budget of at least 1"),
        (dict(placement="best"), "placement must be"),
        (dict(regroup="free"), "regroup must be True or False, got 'free'"),
        (dict(config=config(0)), "gradient_accumulation_steps in the config must be"),
        (
            dict(config=config(advanced={"server_weights": [1, 2, 3]})),
            "server_weights` was given .* for each of the 2 data-parallel ranks",
        ),
        (dict(shuffle=1), "shuffle must be True or False, got 1"),
        (dict(drop_last=None), "drop_last must be True or False, got None"),
        (dict(seed=-1), "seed must be"),
        (dict(overflow="error", documents=[[1] * 21]), "document 0 has 21 tokens, the ranks that share it hold 20"),
    ):
        given = {"documents": [[1, 2]], "tokens_per_rank": 10, "rank": 0, "num_ranks": 2, **options}
        if "rank" in options and "num_ranks" not in options:
            del given["num_ranks"]
        with pytest.raises(ValueError, match=word):
            list(GlobalPackedLoader(**given))


def test_a_loaded_place_is_given_up_with_a_warning_only(caplog) -> None:
    documents, options = spread(60), dict(rank=0, num_ranks=2, tokens_per_rank=48)
    loader = GlobalPackedLoader(documents, **options)
    expected = [list(loader) for _ in range(3)]
    loader = GlobalPackedLoader(documents, **options)
    list(loader)
    before = list(islice(loader, 3))
    state = loader.state_dict()

    resumed = GlobalPackedLoader(documents, **options)
    resumed.load_state_dict(state)
    found = []
    with caplog.at_level(logging.WARNING):
        for epoch in range(resumed.epoch, 3):
            resumed.set_epoch(epoch)
            found.append(list(resumed))
    assert same(before + found[0], expected[1]) and same(found[1], expected[2]) and len(found) == 2
    assert not caplog.records

    resumed.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        resumed.set_epoch(0)
        resumed.set_epoch(2)
    assert [r.getMessage() for r in caplog.records] == [
        "set_epoch(0) gives up the place that was loaded, micro-batch 3 of epoch 1; loop over "
        "range(loader.epoch, epochs) to go on there"
    ]
    assert same(list(resumed), expected[2])


def test_no_tokens_at_all_are_an_error(caplog):
    def loader(documents, **options):
        return GlobalPackedLoader(documents, 16, rank=0, num_ranks=2, **options)

    for documents in ([], [[], []]):
        with pytest.raises(ValueError, match=f"none of the {len(documents)} documents has a token"):
            loader(documents)
        with pytest.raises(ValueError, match="the stream gave no document"):
            list(loader(lambda found=documents: iter(found)))
        # What a worker leaves out it counts itself.
        caplog.clear()
        assert list(loader(lambda found=documents: iter(found), num_workers=1)) == []
        assert "the stream gave no document" in caplog.text
    dropped = loader([[1, 2]], drop_last=True)
    assert list(dropped) == [] and dropped.counts.dropped_documents == 1
