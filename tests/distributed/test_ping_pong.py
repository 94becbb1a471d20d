# SPDX-License-Identifier: Apache-2.0
"""Two nano-batches give exactly what the micro-batch gives, and one's exchange runs under the other's work."""

from __future__ import annotations

import pytest

from tests.distributed import model_families
from tests.distributed.harness import run_ranks
from tests.distributed.operation_order import Message, Operation, run

WORKER = "tests.distributed.ping_pong_worker:"
WAYS = "tests.distributed.ping_pong_ways_worker:"
ORDER_WORKER = "tests.distributed.ping_pong_order_worker:"
NAMES = ("out", "lse", "dq", "dk", "dv")
TOLERANCE = 1e-5


def segments(*lengths: int, first: int = 0) -> list[list[int]]:
    """Whole documents of one rank, numbered from `first`."""
    return [[first + i, 0, n] for i, n in enumerate(lengths)]


LAYOUTS = {
    "one long document": [segments(121), segments(9, 20, 31, 40, 21, first=1)],
    "uneven": [segments(97), segments(*[7] * 13, first=1)],
    "ones": [segments(*[1] * 11, 70), segments(*[1] * 5, 2, first=12)],
    "odd and prime": [segments(7, 1, 31, 83), segments(9, 8, 8, 12, first=4)],
    "an empty half": [segments(150), segments(1, first=1)],
    "an empty rank": [[], segments(80, 17)],
    "longer than a rank": [[[0, 0, 61], [1, 0, 5]], [[0, 61, 60], [2, 0, 1]]],
    "head and tail": [[[0, 0, 20], [0, 100, 20]], [[0, 20, 80]]],
}


# Seeds 6 and 7 have ranks whose workspace holds nothing but their own rows, of one half, beside documents that cross.
@pytest.mark.parametrize("world, seed", [(1, 1), (2, 2), pytest.param(3, 3, marks=pytest.mark.quick), (4, 6), (4, 7)])
def test_random_plans_and_cuts_are_exact(world: int, seed: int) -> None:
    results = run_ranks(WORKER + "check_plans", world, seed=seed, cases=60)
    for worst in results:
        assert max(worst[name] for name in NAMES) < TOLERANCE, worst
    assert sum(worst["shared"] for worst in results) > 0
    assert world == 1 or (results[0]["crossing"] > 5 and results[0]["again"] > 2)
    assert world < 3 or results[0]["relayed"] > 5
    assert world < 3 or sum(worst["carried"] for worst in results) > 2


def test_bf16_is_as_exact_as_the_kernel_on_whole_documents() -> None:
    for worst in run_ranks(WORKER + "check_plans", 3, seed=7, cases=40, dtype="bfloat16"):
        assert worst["lse"] < 1e-5 and max(worst["out"], worst["dv"]) < 4e-3, worst
        assert max(worst[f"{name}_ratio"] for name in NAMES) < 1.02, worst


def check(results: list[list[dict]], cases: list[dict]) -> None:
    for outcomes in results:
        for case, outcome in zip(cases, outcomes, strict=True):
            error = abs(outcome["loss"] - outcome["expected"]) / outcome["expected"]
            assert error < TOLERANCE and outcome["gradient_error"] < TOLERANCE, (case, outcome)
            whole, *others = outcome["splits"]
            assert not whole and all(others), (case, outcome)  # all but the very first forward


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_exact_under_zero_accumulation_and_checkpointing(zero: int) -> None:
    layouts = [LAYOUTS[name] for name in ("one long document", "longer than a rank", "an empty rank")]
    cases = [
        dict(layouts=layouts[:n], zero=zero, checkpointing=checkpointing, seed=zero)
        for n in (1, 3)
        for checkpointing in (False, True)
    ]
    check(run_ranks(WORKER + "train_cases", 2, cases=cases), cases)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.quick), 3])
def test_exact_where_attention_is_computed_again(zero: int) -> None:
    long = [[[0, 0, 61], [1, 0, 5]], [[0, 61, 60], [2, 0, 1]]]
    layouts = [*LAYOUTS.values(), long]
    cases = [
        *(dict(layouts=[layout], block={"keep_attention": False}) for layout in layouts),
        *(dict(layouts=layouts[i : i + 3], room=room) for i, room in ((0, 0), (3, 1), (6, 1))),
    ]
    cases = [dict(**case, zero=zero, checkpointing=True, seed=i) for i, case in enumerate(cases)]
    results = run_ranks(WORKER + "train_cases", 2, cases=cases)
    check(results, cases)
    for outcomes in results:
        # Of two layers, by two nano-batches. Rank 1 has room for one more than rank 0, and all go by the least.
        assert [outcome["again"] for outcome in outcomes] == [4] * len(layouts) + [4, 2, 2]
        assert not any(outcome["left"] for outcome in outcomes)


def test_exact_for_any_lengths() -> None:
    cases = [
        dict(layouts=[layout], zero=zero, seed=i, checkpointing=zero == 3)
        for i, layout in enumerate(LAYOUTS.values())
        for zero in (1, 3)
    ]
    check(run_ranks(WORKER + "train_cases", 2, cases=cases), cases)


@pytest.mark.parametrize("world", [pytest.param(3, marks=pytest.mark.quick), 4])
def test_exact_over_more_ranks(world: int) -> None:
    spanning = [[[0, r * 23, 23], [r + 1, 0, r + 1]] for r in range(world)]
    lonely = [segments(200), *[[] for _ in range(world - 2)], segments(5, first=1)]
    cases = [
        dict(layouts=[spanning, lonely], zero=zero, checkpointing=checkpointing, seed=world)
        for zero, checkpointing in ((0, False), (3, True))
    ]
    check(run_ranks(WORKER + "train_cases", world, cases=cases), cases)


def test_exact_with_frozen_layers_and_in_groups_of_servers() -> None:
    layout = [LAYOUTS["one long document"]]
    cases = [
        dict(layouts=layout, zero=zero, frozen=name) for name in ("layers.0", "embed", "_proj") for zero in (0, 2)
    ]
    check(run_ranks(WORKER + "train_cases", 2, cases=cases), cases)
    # The second group of servers has nothing to balance, and must go through the modules as the first does.
    layout = [segments(90), segments(*[9] * 10, first=1), segments(45, 45, first=20), segments(45, 45, first=30)]
    cases = [dict(layouts=[layout], zero=3, servers=2)]
    check(run_ranks(WORKER + "train_cases", 4, cases=cases), cases)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
@pytest.mark.parametrize("zero, checkpointing", [(0, False), (3, True)])
def test_every_family_of_decoders_is_exact(zero: int, checkpointing: bool, first: int) -> None:
    # But ERNIE 4.5-MoE under ZeRO-3: DeepSpeed gives no gradient of a bias that its loss does not depend on.
    names = [name for name in model_families.EXACT if not (zero and name == "ERNIE 4.5-MoE")][first::4]
    options = dict(names=names, zero=zero, checkpointing=checkpointing)
    found = run_ranks(WORKER + "families", 2, **options)[0]
    assert [r["name"] for r in found] == names
    bad = [r for r in found if "error" in r or not r["split"] or max(r["loss_error"], r["gradient_error"]) > TOLERANCE]
    assert not bad


def exact(results: list[dict]) -> None:
    assert all(found["split"] and found["gradient_error"] < TOLERANCE for found in results), results


@pytest.mark.parametrize("checkpointing, keep", [(False, True), (True, True), (True, False)])
def test_backward_does_not_come_to_layers_below_all_that_is_trained(checkpointing: bool, keep: bool) -> None:
    options = dict(layout=LAYOUTS["one long document"], checkpointing=checkpointing, keep_attention=keep)
    results = run_ranks(WAYS + "frozen", 2, **options)
    exact(results)
    assert [found["parts"] for found in results] == [4, 4]  # two layers of three, by two nano-batches


@pytest.mark.parametrize("zero, checkpointing", [(0, "off"), (2, "non-reentrant"), (3, "off")])
def test_a_loss_may_read_any_layer(zero: int, checkpointing: str) -> None:
    options = dict(layout=LAYOUTS["one long document"], zero=zero, checkpointing=checkpointing)
    exact(run_ranks(WAYS + "inner_loss", 2, **options))


@pytest.mark.parametrize("checkpointing", ["off", "non-reentrant"])
def test_one_backward_of_several_forwards(checkpointing: str) -> None:
    # Rank 1's graph of the last one has other nodes: those that stand in for a half without tokens.
    layouts = [LAYOUTS[name] for name in ("one long document", "one long document", "an empty half")]
    for found in run_ranks(WAYS + "one_backward", 2, layouts=layouts, checkpointing=checkpointing):
        assert found["gradient_error"] < TOLERANCE, found
        # None is divided while another one waits. The first of all forwards is not.
        assert found["splits"] == [False, False, False, True, False, False], found


@pytest.mark.parametrize("engines", [1, 2])
def test_one_backward_of_models_whose_graphs_differ_by_rank(engines: int) -> None:
    # Experts have nodes for those that got tokens: autograd numbers those of two threads otherwise on every rank.
    layouts = [[segments(150), segments(20, first=1)], [segments(10), segments(150, first=1)]]
    for found in run_ranks(WAYS + "joint_experts", 2, layouts=layouts, engines=engines):
        assert max(found["errors"]) < TOLERANCE, found
        assert found["splits"] == [False, False, True, False], found


@pytest.mark.parametrize("checkpointing", ["off", "non-reentrant"])
def test_nothing_is_left_of_a_forward_without_backward(checkpointing: str) -> None:
    for found in run_ranks(WAYS + "dropped", 2, layout=LAYOUTS["one long document"], checkpointing=checkpointing):
        assert found["split"] and len(set(found["tensors"])) == 1, found


def test_parts_of_layers_in_reentrant_checkpoints() -> None:
    for found in run_ranks(WAYS + "reentrant_parts", 2, layout=LAYOUTS["one long document"], zero=2):
        assert "reentrant" in found["asked"] and "distca.overlap" in found["asked"]
        assert not found["chosen"]["split"] and found["chosen"]["gradient_error"] < TOLERANCE, found


@pytest.mark.parametrize("zero", [1, 3])
def test_a_checkpoint_around_the_whole_model(zero: int) -> None:
    for found in run_ranks(WAYS + "model_in_checkpoint", 2, layout=LAYOUTS["one long document"], zero=zero):
        assert "in an activation checkpoint as a whole" in found["asked"], found
        for name in ("whole", "chosen"):
            assert found[name]["gradient_error"] < TOLERANCE and not found[name]["split"], found


@pytest.mark.parametrize("zero, keep", [(1, False), (3, True)])
def test_checkpoints_within_checkpoints(zero: int, keep: bool) -> None:
    exact(run_ranks(WAYS + "nested", 2, layout=LAYOUTS["longer than a rank"], zero=zero, keep_attention=keep))


def test_twenty_steps_as_without_the_plugin() -> None:
    curves = run_ranks("tests.distributed.engine_worker:loss_curves", 2, steps=20, overlap="ping_pong")
    for curve in curves:
        differences = [abs(a - b) / b for a, b in zip(curve["plugin"], curve["plain"], strict=True)]
        assert max(differences) < TOLERANCE, differences
        assert curve["plain"][-1] < 0.95 * curve["plain"][0]


@pytest.mark.parametrize("name", ["one long document", "an empty half", "longer than a rank"])
def test_every_rank_takes_the_same_steps_in_the_same_order(name: str) -> None:
    first, second = run_ranks(ORDER_WORKER + "record", 2, layout=LAYOUTS[name])
    assert first["calls"] == second["calls"] and len(first["calls"]) == 4 * 12
    forward = [tuple(call[1:]) for call in first["calls"] if call[0] == "forward"]
    backward = [tuple(call[1:]) for call in first["calls"] if call[0] == "backward"]
    mirror = {"dispatch": "gradients", "serve": "serve", "collect": "dispatch"}
    assert backward == [(mirror[stage], nano) for stage, nano in reversed(forward)]


NODES = {"overlap": None, "advanced": {"granularity": 8, "node_size": 2}}
#: A node of two ranks with a long document and short ones, and another one.
OVER_NODES = [segments(180), segments(*[9] * 5, first=1), segments(*[15] * 3, first=10), segments(40, first=20)]


def test_chosen_over_nodes() -> None:
    layouts = [OVER_NODES, [[[0, r * 23, 23], [r + 1, 0, r + 1]] for r in range(4)]]
    cases = [
        *(dict(layouts=layouts[:n], zero=zero, seed=zero, block=NODES) for n, zero in ((1, 1), (2, 3))),
        dict(layouts=layouts, zero=3, checkpointing=True, block=NODES),
        dict(layouts=layouts, zero=3, checkpointing=True, block={**NODES, "keep_attention": False}),
        dict(layouts=layouts, zero=1, checkpointing=True, block=NODES, room=1),
    ]
    check(run_ranks(WORKER + "train_cases", 4, cases=cases), cases)


def test_not_chosen_where_it_would_not_do() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
    rope |= {"original_max_position_embeddings": 256, "factor": 2.0}
    cases: list[dict] = [
        dict(layouts=[OVER_NODES], block={**NODES, "advanced": {"granularity": 8}}),  # one node
        dict(layouts=[OVER_NODES], block={**NODES, "overlap": "local_first"}),
        *(dict(layouts=[OVER_NODES], checkpointing=how, block=NODES) for how in ("reentrant", "deepspeed")),
        dict(layouts=[OVER_NODES], model={"rope_parameters": rope}, block=NODES),
        dict(layouts=[OVER_NODES], unable=[2], block=NODES),  # of one rank, and so of all
    ]
    for outcomes in run_ranks(WORKER + "train_cases", 4, cases=cases):
        for case, outcome in zip(cases, outcomes, strict=True):
            assert abs(outcome["loss"] - outcome["expected"]) / outcome["expected"] < TOLERANCE, (case, outcome)
            assert outcome["gradient_error"] < TOLERANCE and not any(outcome["splits"]), (case, outcome)


def test_given_up_once_the_engine_is_compiled() -> None:
    """Before the first forward; and later, as soon as no backward needs it. Two nodes of one rank: every rank makes
    its graphs, seconds of a core."""
    given = dict(zero=3, block={"overlap": None, "advanced": {"granularity": 8, "node_size": 1}})
    layout = [OVER_NODES[0], OVER_NODES[1]]
    later = dict(layouts=[layout, layout], compiled=2, checkpointing=True, **given)
    later["block"] = {**later["block"], "keep_attention": True}
    cases = [dict(layouts=[layout], compiled=0, **given), later]
    for outcomes in run_ranks(WORKER + "train_cases", 2, cases=cases):
        for outcome, splits in zip(outcomes, ([False, False], [False, True, True, False]), strict=True):
            assert abs(outcome["loss"] - outcome["expected"]) / outcome["expected"] < TOLERANCE, outcome
            assert outcome["gradient_error"] < TOLERANCE and outcome["splits"] == splits, outcome


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("node_size", [None, 2])
def test_what_ranks_issue_completes_in_any_backend(keep: bool, node_size: int | None) -> None:
    layouts = [
        [segments(150), segments(5, 6, first=1), segments(*[3] * 20, first=3), []],
        [[[0, r * 23, 23], [r + 1, 0, 7 * r + 1]] for r in range(4)],
    ]
    options = dict(layouts=layouts, zero=3, checkpointing=True, node_size=node_size, keep_attention=keep)
    records = run_ranks(WORKER + "operations", 4, **options)
    programs = [
        [
            Operation(o["group"], o["collective"], tuple(o["members"]), tuple(Message(**m) for m in o["messages"]))
            for o in record
        ]
        for record in records
    ]
    assert sum(len(o.messages) for program in programs for o in program) > 100
    assert run(programs) == sum(map(len, programs))


def covers(events: list[list], nano: int) -> bool:
    return any(what in ("tasks", "linear") and other == 1 - nano for what, _, _, other in events)


@pytest.mark.parametrize("zero, checkpointing", [(1, False), (3, False), (3, True)])
def test_every_exchange_runs_under_the_other_nano_batch(zero: int, checkpointing: bool) -> None:
    # Documents cut by the halves on both ranks; work moves in both halves, forward and backward.
    layout = [segments(60, 1, 59, 3, 3), segments(*[11] * 5, 6, *[11] * 6, first=5)]
    results = run_ranks(ORDER_WORKER + "record", 2, layout=layout, zero=zero, checkpointing=checkpointing)
    for found in results:
        events, under = found["events"], {}
        for i, (what, *key) in enumerate(events):
            if what != "start":
                continue
            end = next(j for j in range(i + 1, len(events)) if events[j] == ["wait", *key])
            under.setdefault(tuple(key), []).append(covers(events[i:end], key[2]))
        assert {(phase, stage) for phase, stage, _ in under} == {
            (phase, stage) for phase in ("forward", "backward") for stage in ("dispatch", "serve")
        }
        assert {nano for _, _, nano in under} == {0, 1}
        assert all(len(layers) == 4 and all(layers) for layers in under.values()), under


@pytest.mark.parametrize("checkpointing", [False, True])
def test_zero_3_keeps_its_trace_and_frees_parameters(checkpointing: bool) -> None:
    layout = LAYOUTS["one long document"]
    results = run_ranks(ORDER_WORKER + "record", 2, layout=layout, zero=3, checkpointing=checkpointing)
    for found in results:
        assert found["lost_traces"] == 0
        # After a layer's backward no more than its own nine parameters are there; without the right counts ever more.
        assert len(found["available"]) == 4 and max(found["available"]) <= 9


def test_what_cannot_be_combined_is_refused_and_hooks_come_off() -> None:
    for found in run_ranks(WORKER + "refusals", 2):
        assert "use_reentrant=False" in found["reentrant"] and "use_reentrant=False" in found["deepspeed"]
        assert '"longrope"' in found["longrope"] and "distca.overlap" in found["longrope"]
        assert "leaf module" in found["leaf"] and '"classes": []' in found["leaf"]
        assert "[3, 1, 8]" in found["bad first input"] and found["splits afterwards"] == [False, True]
        assert found["restored"] and found["hooks_left"] == 0
        assert found["evaluation_error"] < 1e-6 and found["generated_same"]


@pytest.mark.quick
def test_outputs_are_put_together_as_they_were() -> None:
    for found in run_ranks(WORKER + "outputs", 2):
        assert found["split"] == [False, True]
        assert max(found["errors"].values()) < TOLERANCE, found
        assert {"loss", "aux_loss", "logits", "hidden_states", "router_logits"} <= set(found["errors"])


@pytest.mark.quick
def test_bf16_under_autocast() -> None:
    for found in run_ranks(WORKER + "autocast", 2):
        assert found["split"] and abs(found["ping_pong"] - found["none"]) < 2e-3 * found["none"], found
