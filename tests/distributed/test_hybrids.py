# SPDX-License-Identifier: Apache-2.0
"""Hybrid models where the kernels of their other mixers keep documents apart. What they do without these kernels is in
the sweep over all models (``test_models``)."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.distributed import mixer_kernels, models_table
from tests.distributed.harness import run_ranks

NAMES = ["lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "olmo_hybrid"]


@pytest.fixture(scope="module")
def found() -> list[list[dict]]:
    return run_ranks("tests.distributed.hybrids_worker:run", 2, names=NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_are_exact_where_kernels_are_told_of_borders(found, name):
    """A packed row and a document a row have the loss and gradients of documents run alone, and rows moved."""
    for rank in found:
        ways = rank[NAMES.index(name)]["ways"]
        for way in ("packed", "padded right"):
            assert ways[way]["error"] <= models_table.BOUND and ways[way]["bytes_moved"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_what_they_are_not_told_is_refused_on_both_ranks(found, name):
    for rank in found:
        ways = rank[NAMES.index(name)]["ways"]
        assert "a document continues on other ranks" in ways["continued"]["refused"] and ways["continued"]["by_name"]
        assert "told of borders in a single row only" in ways["padded left"]["refused"]


def test_a_document_a_row_under_zero_3_with_recomputed_layers():
    """Here without the kernels. Rows moved as well."""
    for rank in run_ranks(
        "tests.distributed.hybrids_worker:partitioned", 2, names=["lfm2", "qwen3_5_text", "falcon_h1"]
    ):
        assert max(rank.values()) <= models_table.BOUND, rank


def test_the_stand_ins_compute_what_transformers_does_without_kernels():
    torch.manual_seed(0)
    conv = inspect.unwrap(modeling_qwen3_next.causal_conv1d_fn)
    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
    given = mixer_kernels.causal_conv1d_fn(x, weight, activation="silu")
    torch.testing.assert_close(given, conv(x, weight, activation="silu"))
    rule = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    q, k, v = (torch.randn(2, 70, heads, 8) for heads in (2, 2, 4))
    arguments = q, k, v, -torch.rand(2, 70, 4), torch.rand(2, 70, 4)
    given, _ = mixer_kernels.chunk_gated_delta_rule(*arguments, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(given, rule(*arguments, use_qk_l2norm_in_kernel=True)[0])
