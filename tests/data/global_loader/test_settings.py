# SPDX-License-Identifier: Apache-2.0
"""What the loader reads in the DeepSpeed config."""

from __future__ import annotations

import json

import pytest

from deepspeed_distca.config import DistCAConfigError
from deepspeed_distca.data.global_loader import GlobalPackedLoader
from deepspeed_distca.layout import Layout
from deepspeed_distca.scheduler.topology import Topology
from tests.data.batches import same, spread
from tests.data.configs import by_pairs, config


@pytest.mark.parametrize("rank", range(4))
def test_weights_of_any_group_are_an_error_on_every_rank(rank: int) -> None:
    options = dict(rank=rank, num_ranks=4, tokens_per_rank=8)
    for weights, words in (
        ([1, 1, 0, 0], "server_weights"),
        ([1, 1, 1, 2_000_000], "server_weights"),
        ("measured", "`distca.advanced.server_weights` was given 'measured'"),
    ):
        with pytest.raises(ValueError, match=words):
            GlobalPackedLoader([[1, 2]], **options, config=config(servers=2, advanced={"server_weights": weights}))
    with pytest.raises(ValueError, match=r"tokens_per_rank must be whole numbers.*got 8\.0"):
        GlobalPackedLoader([[1, 2]], **{**options, "tokens_per_rank": 8.0})


def test_the_deepspeed_config_says_what_both_must_know(tmp_path) -> None:
    documents, given = (
        spread(80),
        config(2, servers=2, cost_model=by_pairs(), advanced={"server_weights": [1, 2, 1, 2]}),
    )
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(given))
    expected = list(GlobalPackedLoader(documents, 64, given, rank=3, num_ranks=4))
    assert expected[0]["layout"].num_ranks == 2 and len(expected) % 2 == 0
    for same_config in (path, str(path)):
        assert same(list(GlobalPackedLoader(documents, 64, same_config, rank=3, num_ranks=4)), expected)
    assert not same(list(GlobalPackedLoader(documents, 64, config(2, servers=2), rank=3, num_ranks=4)), expected)


@pytest.mark.parametrize("rank", [0, 3, 5])
def test_documents_are_stored_by_nodes(rank: int) -> None:
    """Of the config, or of the engine's planner; the same on all ranks of a group, and as ever with one node."""
    documents, place = spread(120), dict(tokens_per_rank=64, rank=rank, num_ranks=8)

    def layouts(advanced: dict | None = None, *, servers: int = 8, nodes: Topology | None = None) -> list[Layout]:
        given = config(2, servers=servers, cost_model=by_pairs(), advanced=advanced or {})
        loader = GlobalPackedLoader(documents, config=given, **place)
        if nodes is not None:
            loader.plan_ahead(_Planner(nodes))
        return [batch["layout"] for batch in loader]

    flat, of_two = layouts(), layouts({"node_size": 2})
    assert of_two != flat
    assert [layout.tokens.tolist() for layout in of_two] == [layout.tokens.tolist() for layout in flat]
    assert layouts({"node_size": 8}) == flat == layouts(nodes=Topology.of_size(8, 8))
    assert layouts(nodes=Topology.of_size(2, 8)) == of_two
    assert layouts({"node_size": 4}, servers=4) == layouts(servers=4) != layouts({"node_size": 2}, servers=4)
    place["rank"] = 7
    assert layouts({"node_size": 2}) == of_two


class _Planner:
    def __init__(self, nodes: Topology) -> None:
        self.nodes = nodes

    def __call__(self, layout: Layout) -> None:
        pass


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 1}, 6),
        ({"train_batch_size": 12}, 1),
        ({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}, 2),
    ],
)
def test_accumulation_steps_are_those_that_deepspeed_finds(sizes: dict, steps: int) -> None:
    loader = GlobalPackedLoader(spread(40), 64, {**sizes, "distca": {}}, rank=0, num_ranks=2)
    assert loader.state_dict()["identity"]["gradient_accumulation_steps"] == steps


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"gradient_accumulation_steps": 2}, DistCAConfigError, 'no `distca` block that is enabled.*"enabled": true'),
        (config(enabled=False), DistCAConfigError, "no `distca` block that is enabled"),
        (config(tolerance=0.1), DistCAConfigError, 'write "advanced": {"tolerance": 0.1}'),
        (config(cost_model="nowhere.json"), DistCAConfigError, "`distca.cost_model` was given 'nowhere.json'"),
        (config("auto"), ValueError, "gradient_accumulation_steps in the config must be an integer >= 1, got 'auto'"),
        ("nowhere.json", ValueError, "config 'nowhere.json' cannot be read"),
        (3, TypeError, "config must be the DeepSpeed config, a dict or the path of its file, got 3"),
    ],
)
def test_configs_that_cannot_be_used(given, error, words) -> None:
    with pytest.raises(error, match=words):
        GlobalPackedLoader([[1, 2]], 8, given, rank=0, num_ranks=2)


@pytest.mark.parametrize("name", ["servers", "gradient_accumulation_steps", "cost", "tolerance", "server_weights"])
def test_earlier_arguments_are_told_where_they_are_said_now(name: str) -> None:
    with pytest.raises(TypeError, match=f"takes no {name}: it reads .* in the DeepSpeed config"):
        GlobalPackedLoader([[1, 2]], 8, rank=0, num_ranks=2, **{name: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'shuffel'"):
        GlobalPackedLoader([[1, 2]], 8, rank=0, num_ranks=2, shuffel=True)
