# SPDX-License-Identifier: Apache-2.0
"""LoRA, frozen layers, compiled models, several models, router losses and evaluation, over two ranks."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_ranks

BOUND = 1e-5


@pytest.fixture(scope="module")
def ranks():
    return run_ranks("tests.integrations.adaptations_worker:run", 2, timeout=280, seed=3)


def test_lora_and_frozen_layers_are_exact(ranks):
    for rank in ranks:
        for name, r in rank["exact"].items():
            assert max(r["loss_error"], r["gradient_error"]) <= BOUND, (name, r)
            assert r["trained"] and r["moved"], (name, r)


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
