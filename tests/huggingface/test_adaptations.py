# SPDX-License-Identifier: Apache-2.0
"""LoRA, frozen layers, compiled models, several models, router losses and evaluation, over two ranks."""

from __future__ import annotations

import csv

import pytest

from tests.distributed.harness import run_ranks

BOUND = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("monitor")


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks("tests.huggingface.adaptations_worker:run", 2, seed=3, folder=str(folder))


def test_lora_and_frozen_layers_are_exact(ranks):
    for rank in ranks:
        for name, r in rank["exact"].items():
            assert max(r["loss_error"], r["gradient_error"]) <= BOUND, (name, r)
            assert r["trained"] and r["moved"], (name, r)


def test_hooks_taken_out_before_backward_are_there_for_recomputation(ranks):
    for rank in ranks:
        for r in rank["detached"]:
            assert max(r["loss_error"], r["gradient_error"]) <= BOUND, r


def test_gradients_of_gradients_are_refused(ranks):
    assert all("no second derivative" in rank["exact"]["second engine"]["refused"] for rank in ranks)


def test_a_mask_that_only_a_later_batch_has_is_refused(ranks):
    for rank in ranks:
        assert rank["later mask"]["text"] == "no error"
        assert "Gemma3Attention masks by" in rank["later mask"]["image"]


def test_a_loss_that_is_divided_or_made_otherwise_is_refused_on_every_rank(ranks):
    for rank in ranks:
        said = rank["other losses"]["said"]
        for name, shown in {"zero": "0", "text": "'9'", "two": "a tensor of torch.float32", "nan": "nan"}.items():
            assert f"num_items_in_batch was given {shown}" in said[name]
        assert "the loss_function of LlamaForCausalLM is another one" in said["another"]
        assert max(rank["other losses"]["loss_errors"]) <= BOUND
        [warning] = rank["other losses"]["warnings"]
        assert "a backward follows a forward of LlamaForCausalLM in evaluation" in warning


def test_a_compiled_model_is_exact_and_does_not_compile_without_end(ranks):
    for rank in ranks:
        r = rank["compiled"]
        assert max(r["loss_error"], r["gradient_error"]) <= BOUND, r
        assert r["graphs"][-1] == r["graphs"][-3], r


def test_two_engines_and_a_reference_from_one_configuration(ranks):
    for rank in ranks:
        assert rank["two models"]["gradient_error"] <= BOUND
        assert rank["two models"]["reference_error"] == 0.0


def test_router_losses_are_those_of_the_rows(ranks):
    for rank in ranks:
        assert max(rank["router losses"].values()) <= BOUND, rank["router losses"]


def test_a_copy_is_a_model_of_its_own(ranks):
    for rank in ranks:
        assert rank["copies"]["error"] <= BOUND
        assert "LlamaAttention was given a layout of 2 ranks, but no plan" in rank["copies"]["alone"]


def test_without_weighting_the_loss_is_the_mean_of_the_ranks_means(ranks):
    for rank in ranks:
        assert max(rank["unweighted"].values()) <= BOUND, rank["unweighted"]


def test_evaluation_is_the_plain_model(ranks):
    assert "packed 2" in ranks[1]["evaluation"] and "packed 2" not in ranks[0]["evaluation"]
    for rank in ranks:
        for name, error in rank["evaluation"].items():
            assert error <= BOUND, (name, error)
        # These go the model's own way: the same code, the same bits.
        assert all(rank["evaluation"][name] == 0.0 for name in ("logits", "padded", "generate", "cache"))


def test_what_one_rank_cannot_use_is_an_error_on_all(ranks):
    first, second = (rank["one rank fails"] for rank in ranks)
    for name, message in first.items():
        kind, text = message.split(": ", 1)
        assert kind in ("LayoutError", "UnsupportedModelError"), (name, message)
        assert second[name] == f"AgreementError: rank 0 cannot use its micro-batch: {text}"


def test_the_monitor_has_a_line_for_every_optimizer_step(ranks, folder):
    def column(name: str) -> list[float]:
        _, *rows = csv.reader(next(folder.rglob(f"Train_DistCA_{name}.csv")).open())
        return [float(value) for _, value in rows]

    expected = ranks[0]["monitored"]["expected"]
    assert column("balance_before") == pytest.approx([balance for balance, _ in expected])
    assert column("bytes_moved") == [moved for _, moved in expected]
    assert all(a <= b for a, b in zip(column("balance_after"), column("balance_before"), strict=True))
    assert all(0 < share < 1 for share in column("moved_share"))
    # From the second step on, by the time from within one step to within the next.
    rates, times = column("tokens_per_second"), ranks[0]["monitored"]["times"]
    assert len(rates) == 2
    for rate, (begin, end, _), (next_begin, next_end, tokens) in zip(rates, times, times[1:], strict=False):
        assert tokens > 131 and tokens / (next_end - begin) <= rate <= tokens / (next_begin - end)
    assert len(column("planning_ms")) == 3 and min(column("planning_ms")) > 0.0
    # Measured times are those of the step before, so that nobody waits for a device; the first step has none.
    measured = ranks[0]["monitored"]["measured"][:-1]
    assert column("previous_server_ms") == pytest.approx([server for server, _ in measured])
    assert column("previous_exposed_ms") == pytest.approx([exposed for _, exposed in measured])
    assert all(server > 0 and exposed > 0 for server, exposed in measured) and all(moved > 0 for _, moved in expected)
    assert not any(rank["monitored"]["left"] for rank in ranks)
