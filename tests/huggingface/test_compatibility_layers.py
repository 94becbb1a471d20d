# SPDX-License-Identifier: Apache-2.0
"""Compiled models, tiled layers and losses, Liger's kernels, adapters, Accelerate's parallelism and the text of a
vision-language model: exact over two ranks with rows moving, or refused by name on every rank.
docs/compatibility.md names these tests."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from transformers import BertConfig, BertModel

from deepspeed_distca.huggingface.decoders import UnsupportedModelError, find_decoder
from tests.distributed.harness import ROOT, free_port, run_program, run_ranks
from tests.huggingface.test_compatibility_deepspeed import check
from tests.tiny_llama import SIZES, llama

#: By scenario words of the error.
REFUSED = {
    "tiled mean, ZeRO-0": "TiledMeanLlama: its loss gives parameters their gradients in forward",
    "tiled mean, ZeRO-3": "TiledMeanLlama: its loss gives parameters their gradients in forward",
    "tiled loss, two micro-batches": "TiledLlama: its loss gives parameters their gradients in forward",
    "prompt tuning": "as prompt tuning does",
    "p-tuning": "as prompt tuning does",
    "prefix tuning": "run without a KV cache",
    "AdaLoRA": "PeftModelForCausalLM computes the attention of LlamaForCausalLM without calling LlamaForCausalLM",
    "adaption prompt": "PeftModelForCausalLM computes the attention of LlamaForCausalLM without calling",
    "a part alone": "Around computes the attention of LlamaForCausalLM without calling LlamaForCausalLM",
    "Qwen2.5-VL, three axes": "(multi-axis) do not say where documents begin",
    "sp_size": "cannot be combined with sequence parallelism",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks("tests.huggingface.layers_worker:run", 2, folder=str(tmp_path_factory.mktemp("layers")))


def refused(ranks: list[dict], *names: str) -> None:
    for outcomes in ranks:
        for name in names:
            assert REFUSED[name] in str(outcomes[name]["error"]), (name, outcomes[name])


def test_engine_compile_makes_no_graph_after_the_second_step(ranks):
    check(ranks, "engine.compile")
    for outcomes in ranks:
        graphs = outcomes["engine.compile"]["graphs"]
        assert graphs[0] > 0 and graphs[1:] == [graphs[1]] * (len(graphs) - 1), graphs


@pytest.mark.parametrize("stage", [1, 3])
def test_tiled_mlp(ranks, stage):
    check(ranks, f"TiledMLP, ZeRO-{stage}")


@pytest.mark.parametrize("stage", [0, 3])
def test_tiled_loss(ranks, stage):
    check(ranks, f"tiled loss, ZeRO-{stage}")


def test_a_tiled_loss_that_would_be_weighted_too_late_is_refused(ranks):
    refused(ranks, "tiled mean, ZeRO-0", "tiled mean, ZeRO-3", "tiled loss, two micro-batches")


def test_dora(ranks):
    check(ranks, "DoRA")


def test_ia3(ranks):
    check(ranks, "IA3")


def test_tokens_put_before_a_row_are_refused(ranks):
    refused(ranks, "prompt tuning", "p-tuning", "prefix tuning")


def test_models_that_are_not_called_are_refused(ranks):
    refused(ranks, "AdaLoRA", "adaption prompt", "a part alone")


def test_the_trial_packs_no_weights_for_evaluation(ranks):
    check(ranks, "packed for evaluation")


def test_qlora(tmp_path):
    pytest.importorskip("bitsandbytes")
    check(run_ranks("tests.huggingface.layers_worker:run", 2, folder=str(tmp_path), only=["QLoRA"]), "QLoRA")


@pytest.mark.parametrize("name", ["tp_size", "cp_size", "dp_shard_size"])
def test_sizes_that_accelerate_keeps_from_deepspeed_change_nothing(ranks, name):
    check(ranks, name)


def test_sequence_parallelism_is_refused(ranks):
    refused(ranks, "sp_size")


@pytest.mark.parametrize("form", ["one axis", "four axes", "three axes and cu_seqlens"])
def test_text_of_qwen2_5_vl(ranks, form):
    check(ranks, f"Qwen2.5-VL, {form}")


def test_three_axes_alone_are_refused(ranks):
    refused(ranks, "Qwen2.5-VL, three axes")


def test_of_several_decoders_the_trained_one_is_found():
    first, second = llama(), llama()
    both = torch.nn.ModuleList([first, second])
    with pytest.raises(UnsupportedModelError, match="holds 2 decoders that are trained, LlamaForCausalLM, Llama"):
        find_decoder(both)
    first.requires_grad_(False)
    assert find_decoder(both) is second and find_decoder(first) is first
    second.requires_grad_(False)
    assert find_decoder(both) is first  # nothing is trained


def test_what_may_be_trained_beside_a_decoder():
    first, other = llama(), llama()
    other.model = first.model  # another head on the same layers
    assert find_decoder(torch.nn.ModuleList([first, other])) is first
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    encoder = BertModel(BertConfig(**sizes, num_hidden_layers=1))
    assert find_decoder(torch.nn.ModuleList([encoder, first])) is first


def test_domino_is_refused():
    from deepspeed.runtime.domino.transformer import DominoModule, DominoTransformer

    assert issubclass(DominoTransformer, DominoModule)
    with pytest.raises(UnsupportedModelError, match="DominoModule holds no HuggingFace model"):
        find_decoder(DominoModule())


@pytest.mark.slow  # the interpreter is
def test_liger(tmp_path):
    pytest.importorskip("liger_kernel")
    pytest.importorskip("triton")
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port()]
    # A process of its own: Triton's interpreter must be chosen before Triton is imported.
    done = run_program(
        [*start, "-m", "tests.huggingface.liger_worker", tmp_path], ROOT, environment={"TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stdout[-6000:]
    ranks = [{"Liger": json.loads((tmp_path / f"rank{rank}.json").read_text())} for rank in range(2)]
    check(ranks, "Liger")
    for rank in ranks:
        assert rank["Liger"]["patched"] == ["LigerRMSNorm", "LigerSwiGLUMLP", "lce_forward", "liger_rotary_pos_emb"]
