# SPDX-License-Identifier: Apache-2.0
"""PipelineEngine over real process groups: losses and every gradient of three steps are those of each document run
alone in one process, whatever the stages, replicas, micro-batches and options."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_ranks

WORKER = "tests.distributed.pipeline_worker"
TOLERANCE = 1e-5


def case(
    micro_batches: int, scope: str, checkpointing: str = "off", zero: int = 0, tied: bool = False, **more
) -> dict:
    return {
        "micro_batches": micro_batches,
        "interval": int(checkpointing != "off"),
        "reentrant": checkpointing == "reentrant",
        "zero": zero,
        "tied": tied,
        "distca": {"advanced": {"granularity": 8, "pipeline_scope": scope}},
        **more,
    }


# Every pair of values of two options is in some case.
CASES = [
    case(1, "grid", "off", 0, False),
    case(1, "stage", "reentrant", 1, True),
    case(3, "grid", "reentrant", 1, False, form="pair"),
    case(3, "grid", "non-reentrant", 0, True),
    case(3, "stage", "off", 1, False),
    case(8, "grid", "off", 1, True),
    case(8, "stage", "non-reentrant", 0, False, form="pair"),
    case(1, "grid", "non-reentrant", 1, False),
    case(8, "grid", "reentrant", 0, False),
]


def check(results: list[list[dict]], cases: list[dict]) -> None:
    for index, given in enumerate(cases):
        outcomes = [result[index] for result in results]
        for outcome in outcomes:
            assert outcome["losses"] == pytest.approx(outcome["expected"], rel=TOLERANCE), (given, outcome)
            assert outcome["evaluation"] == pytest.approx(outcome["expected"][0], rel=TOLERANCE), (given, outcome)
            assert outcome["gradient_error"] < TOLERANCE, (given, outcome)
            assert outcome["micro_batches"] == given.get("micro_batches", 3)
        names = {name for outcome in outcomes for name in outcome["parameters"]}
        layers = given.get("layers", 4)
        assert sum("q_proj.weight" in name for name in names) == layers
        assert "model.embed_tokens.weight" in names and ("lm_head.weight" in names) != given.get("tied", False)


@pytest.mark.long
@pytest.mark.parametrize("stages", [2, 4, 1], ids=["2 stages x 2 replicas", "4 x 1", "1 x 4"])
def test_losses_and_gradients_are_those_of_one_process(stages: int) -> None:
    # A stage has two layers at least.
    cases = CASES if stages > 1 else [{**given, "layers": 2} for given in CASES[2:7]]
    results = run_ranks(f"{WORKER}:train_cases", 4, stages=stages, cases=cases)
    check(results, cases)
    for given, outcome in zip(cases, results[0], strict=True):
        alone = stages == 4 and given["distca"]["advanced"]["pipeline_scope"] == "stage"
        assert (outcome["bytes_moved"] == 0) == alone or given["micro_batches"] == 1, (given, outcome)
        if stages > 1 and given["distca"]["advanced"]["pipeline_scope"] == "grid":
            # Idle stages serve: without them the balance would be that of the bubbles.
            before, after = outcome["balance"]
            assert after < 0.8 * before, (given, outcome)


def test_uneven_stages_groups_of_servers_shared_documents_and_windows() -> None:
    windows = {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 0}
    windows["layer_types"] = ["full_attention", "sliding_attention"] * 2
    cases = [
        case(3, "grid", "reentrant", layers=5, steps=2),
        {**case(3, "grid", steps=2), "interval": 2, "layers": 5, "tied": True},
        case(2, "grid", steps=2, form="shared"),
        case(2, "stage", steps=2, form="shared"),
        {**case(3, "grid", steps=2), "distca": {"servers": 2, "overlap": "none"}},
        case(2, "grid", steps=1, family="mistral", options={"sliding_window": 20}),
        case(2, "grid", "reentrant", steps=1, family="qwen2", options=windows),
        case(3, "grid", static=True, steps=2),
        case(2, "stage", steps=1, family="qwen3"),
        case(2, "grid", steps=1, family="olmo2"),
    ]
    check(run_ranks(f"{WORKER}:train_cases", 4, stages=2, cases=cases), cases)


def test_frozen_layers_of_the_first_stage_go_backward_with_those_of_the_others() -> None:
    frozen = {"frozen": ["embed_tokens", "layers.0."], "steps": 1}
    cases = [
        case(3, "grid", **frozen),
        case(3, "grid", "reentrant", zero=1, **frozen),
        {**case(3, "grid", "non-reentrant", **frozen), "distca": {"overlap": "ping_pong"}},
    ]
    for outcomes in run_ranks(f"{WORKER}:train_cases", 2, stages=2, cases=cases):
        for given, outcome in zip(cases, outcomes, strict=True):
            assert outcome["gradient_error"] < TOLERANCE, (given, outcome)


@pytest.mark.quick
def test_a_resumed_run_and_the_saved_model_go_on_where_it_was(tmp_path) -> None:
    cases = [case(3, "grid", "reentrant", zero=1, tied=True), case(3, "stage")]
    ranks = run_ranks(f"{WORKER}:save_and_resume", 4, stages=2, folder=str(tmp_path), cases=cases)
    assert all(outcomes == ranks[0] for outcomes in ranks)
    for outcome in ranks[0]:
        assert outcome["again"] == outcome["losses"][2:]
        assert outcome["evaluation"] == pytest.approx(outcome["of the saved model"], rel=TOLERANCE)


def test_ranks_find_out_the_nodes_of_their_servers() -> None:
    for found in run_ranks(f"{WORKER}:over_nodes", 4, stages=2):
        assert found == [None, [0, 0, 1, 1], None, [0, 1]]


@pytest.mark.long
@pytest.mark.parametrize("stages", [2, 4, 1], ids=["2 stages x 2 replicas", "4 x 1", "1 x 4"])
def test_plans_by_nodes_and_two_nano_batches(stages: int) -> None:
    """Rows move between nodes, keys once to a node. Over nodes micro-batches run as two nano-batches, which hide it,
    where the pipeline can; within a node where that is asked for."""

    def with_options(given: dict, overlap: str | None = None, node_size: int = 2) -> dict:
        advanced = {**given["distca"]["advanced"], "node_size": node_size}
        return {**given, "distca": {"overlap": overlap, "advanced": advanced}}

    scope = "grid" if stages > 1 else "stage"
    cases = [
        with_options(case(3, scope, "reentrant", seed=1)),
        with_options(case(3, scope, zero=1, form="shared", seed=2), "none"),
        with_options(case(2, scope, "non-reentrant", tied=True, layers=5, seed=3)),
        with_options(case(8, scope, zero=1, seed=4)),
        with_options(case(2, scope, "non-reentrant", form="shared", seed=5), node_size=1),
        with_options(case(3, scope, "non-reentrant", zero=1, tied=True, seed=6), "ping_pong", node_size=4),
        with_options(case(2, "stage", form="shared", seed=7), "ping_pong", node_size=4),
    ]
    if stages == 1:
        cases = [{**given, "layers": 2} for given in cases]
    results = run_ranks(f"{WORKER}:train_cases", 4, stages=stages, cases=cases)
    check(results, cases)
    two, relayed = [False, False, stages == 1, True, True, True, True], 0
    for index, given in enumerate(cases):
        outcomes = [result[index] for result in results]
        assert {outcome["in_two"] for outcome in outcomes} == {two[index]}, given
        alone = stages == 4 and given["distca"]["advanced"]["pipeline_scope"] == "stage"
        size = given["distca"]["advanced"]["node_size"]
        nodes = None if size == 4 else [rank // size for rank in range(4)]
        assert all(outcome["nodes"] == nodes for outcome in outcomes)
        assert (outcomes[0]["bytes_moved"] == 0) == alone
        relayed += sum(outcome["relayed"] for outcome in outcomes)
    assert relayed > 0


@pytest.mark.quick
def test_what_cannot_be_used_is_refused_on_every_rank() -> None:
    outcomes = run_ranks(f"{WORKER}:refusals", 4, stages=2)
    for outcome in outcomes:
        assert "loaded different micro-batches" in outcome["different data"]
        assert "different numbers of micro-batches, by rank [3, 2, 3, 2]" in outcome["different numbers"]
        assert "the data ended after 2 of the batch's 3 micro-batches" in outcome["short data"]
        assert "begins at position 1, not 0" in outcome["middle of a document"]
        assert "a document has 65 tokens; this model's rotary frequencies change" in outcome["rotary"]
        assert outcome["afterwards"] < 1e-4 and outcome["left over"] == []
        assert "attention layer 0 of the stages has windows of [None, 6] keys" in outcome["windows"]
        assert "`distca.servers` was given 3; with scope 'grid' allowed: 2 (stages) times" in outcome["servers"]
        assert "`distca.advanced.server_weights` cannot be combined with a PipelineModule" in outcome["weights"]
        reentrant, uneven = outcome["overlap"]
        assert '"use_reentrant": false' in reentrant and "different numbers of attention layers" in uneven
        assert "`distca.advanced.pipeline_scope` was given 'all'" in outcome["scope"]
        assert "`distca.advanced.pipeline_scopes` is not an option" in outcome["scope"]
        assert "1 decoder layers cannot be divided over 2 stages" in outcome["stages"]
        assert "model type 'gemma'" in outcome["family"]
        assert "DecoderPipeline (given: PipelineModule)" in outcome["module"]


@pytest.mark.quick
def test_the_module_works_without_the_plugin() -> None:
    for outcome in run_ranks(f"{WORKER}:without_the_plugin", 2, stages=2):
        assert outcome["evaluation"] == pytest.approx(outcome["expected"], rel=TOLERANCE)
        assert outcome["training"] == pytest.approx(outcome["expected"], rel=TOLERANCE)
