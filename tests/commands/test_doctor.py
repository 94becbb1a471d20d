# SPDX-License-Identifier: Apache-2.0
"""``ds_distca doctor`` finds what does not work, and says so by its exit status."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaForCausalLM

from deepspeed_distca import compat
from deepspeed_distca.attention_server.kernels import Kernel
from deepspeed_distca.attention_server.kernels.reference import ReferenceKernel
from deepspeed_distca.cli import main
from deepspeed_distca.commands import doctor
from deepspeed_distca.config import DistCAConfig
from deepspeed_distca.huggingface import small_copy
from deepspeed_distca.profiling.link import measure_links
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.simulator.model import LLAMA_3_8B, Model

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def kernels() -> dict:
    """Of each kernel that was run how wrong it is."""
    return {}


@pytest.fixture(autouse=True)
def each_kernel_once(kernels: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running the kernel is all of what the command takes, a second each time."""
    run = doctor.kernel_error

    def known(kernel: Kernel, *given: object) -> float:
        # A kernel whose methods were replaced is another one.
        key = type(kernel), type(kernel).forward, type(kernel).backward, *given
        if key not in kernels:
            kernels[key] = run(kernel, *given)
        return kernels[key]

    monkeypatch.setattr(doctor, "kernel_error", known)


@pytest.fixture
def examine(capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, dict]]:
    """Runs the command: its exit status and report, findings by what was looked at."""

    def run(*arguments: object) -> tuple[int, dict]:
        status = main(["doctor", "--json", *map(str, arguments)])
        report = json.loads(capsys.readouterr().out)
        assert report["good"] == (status == 0)
        return status, {finding["what"]: finding for finding in report["findings"]}

    return run


def test_a_machine_on_which_the_tests_run_is_fine(examine, tmp_path: Path) -> None:
    config, model = tmp_path / "ds_config.json", tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": 2, "distca": {"enabled": True}, "fp16": {"enabled": "auto"}}))
    model.write_text(json.dumps({**LLAMA_3_8B, "num_hidden_layers": 4}))
    status, found = examine("--config", config, "--model", model, "--tokens-per-rank", 65536)
    assert status == 0 and not any(finding["verdict"] == "bad" for finding in found.values())
    looked_at = ("compat", "ds_config", "DeepSpeed", "model", "pipelines", "kernel")
    assert [found[what]["verdict"] for what in looked_at] == ["ok"] * len(looked_at)
    assert found["model"]["text"] == "LlamaForCausalLM with 4 attention layers; documents are packed"
    # 4 layers of [65536, 32, 128] bf16 and [32, 65536] fp32.
    assert f"up to {4 * 65536 * 32 * (256 + 4) / 2**30:.1f} GiB" in found["memory"]["text"]


def test_the_text_has_a_line_each_and_a_verdict(capsys) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "the plugin can run here" and any(line.startswith("ok    kernel") for line in lines)


@pytest.mark.parametrize(
    ("block", "verdict", "words"),
    [
        ({"enabled": True, "tolerence": 1}, "bad", "did you mean"),
        ({"enabled": False}, "note", "would do nothing"),
        (None, "note", "would do nothing"),
    ],
)
def test_a_block_is_checked_as_training_does(examine, tmp_path: Path, block, verdict, words) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({} if block is None else {"distca": block}))
    status, found = examine("--config", config)
    assert status == (verdict == "bad")
    assert found["ds_config"]["verdict"] == verdict and words in found["ds_config"]["text"]


@pytest.mark.parametrize(
    ("option", "text"),
    [*itertools.product(["--config", "--model"], [None, "{", "[]"]), ("--model", '{"model_type": "llama"}')],
)
def test_input_that_cannot_be_used_is_one_line_and_status_2(capsys, tmp_path: Path, option, text) -> None:
    file = tmp_path / "file.json"
    if text is not None:
        file.write_text(text)
    assert main(["doctor", option, str(file)]) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1 and str(file) in printed.err


@pytest.mark.parametrize(
    ("section", "what", "words"),
    [
        ({"zero_optimization": {"stage": 7}}, "DeepSpeed", "refuses the config"),
        ({"sequence_parallel_size": 2}, "DeepSpeed", "sequence parallelism"),
        ({"tensor_parallel": {"autotp_size": 16}}, "model", "16 tensor-parallel ranks share 8 key/value heads"),
    ],
)
def test_what_deepspeed_or_attach_would_refuse_is_bad(examine, tmp_path: Path, section, what, words) -> None:
    config, model = tmp_path / "ds_config.json", tmp_path / "config.json"
    config.write_text(json.dumps({"distca": {"enabled": True}, **section}))
    model.write_text(json.dumps(LLAMA_3_8B))
    status, found = examine("--config", config, "--model", model)
    assert status == 1 and found[what]["verdict"] == "bad" and words in found[what]["text"]


def test_names_that_an_option_needs_are_looked_for(examine, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"distca": {"overlap": "ping_pong"}, "zero_optimization": {"stage": 3}}))
    asked: list[tuple[str, ...]] = []
    with mock.patch.object(compat, "check", lambda *needs: asked.append(needs)):
        assert examine("--config", config)[0] == 0
    assert asked[-1] == ("zero_3", "ping_pong_zero_3")


def model_of(kind: str, **more: object) -> dict:
    return {**CONFIG_MAPPING[kind](**more).to_dict(), "model_type": kind}


@pytest.mark.parametrize(
    ("config", "block", "verdict", "words"),
    [
        (model_of("qwen3_moe"), {}, "ok", "documents are packed"),
        (model_of("gemma3_text"), {}, "ok", "Gemma3ForCausalLM with 26 attention layers"),
        (model_of("minimax"), {}, "note", "each document needs a row of its own"),
        (model_of("minimax"), {"overlap": "ping_pong"}, "bad", "through a document"),
        (model_of("gpt2"), {}, "bad", "attention dropout"),
        (model_of("bert"), {}, "bad", "bert"),
        ({**LLAMA_3_8B, "model_type": "of_my_own"}, {}, "note", "none of transformers' own"),
        ({**LLAMA_3_8B, "hidden_act": "unheard_of"}, {}, "bad", "unheard_of"),
    ],
)
def test_a_model_is_tried_by_a_small_copy(examine, tmp_path: Path, config, block, verdict, words) -> None:
    ds_config, model = tmp_path / "ds_config.json", tmp_path / "config.json"
    ds_config.write_text(json.dumps({"distca": {"enabled": True, **block}}))
    model.write_text(json.dumps(config))
    status, found = examine("--config", ds_config, "--model", model)
    assert words in found["model"]["text"]
    assert (found["model"]["verdict"], status) == (verdict, int(verdict == "bad"))


def test_a_small_copy_that_fails_by_itself_is_no_verdict(examine, tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(LLAMA_3_8B))
    with mock.patch.object(small_copy, "small_config", side_effect=ValueError("does not divide")):
        status, found = examine("--model", model)
    assert status == 0 and "does not divide" in found["model"]["text"]

    def fail(self, input_ids=None, position_ids=None, **more):
        raise TypeError("of its own")

    with mock.patch.object(LlamaForCausalLM, "forward", fail):
        status, found = examine("--model", model)
    assert status == 0 and "of its own" in found["model"]["text"] and found["model"]["verdict"] == "note"


def test_a_small_copy_keeps_a_layer_of_each_kind() -> None:
    config = CONFIG_MAPPING["gemma3_text"](num_hidden_layers=12)
    small = small_copy.small_config(config)
    assert small.layer_types == ["sliding_attention", "full_attention"] and small.num_hidden_layers == 2
    assert small.head_dim == config.head_dim and small.hidden_size == small.num_attention_heads * config.head_dim
    assert config.num_hidden_layers == 12 and len(config.layer_types) == 12


@pytest.mark.ranks
def test_links_are_measured_by_processes_of_their_own() -> None:
    rate, latency = measure_links(2, "cpu")
    assert 1e5 < rate < 1e12 and latency > 0


def test_links_of_several_gpus_and_of_none(examine) -> None:
    assert examine()[1]["links"]["verdict"] == "note"
    with mock.patch.object(torch.cuda, "device_count", lambda: 2):
        with mock.patch.object(doctor, "measure_links", lambda count: (count * 50e9, 2e-5)):
            (finding,) = doctor._links()
        assert (finding.verdict, finding.text.count("100 GB/s"), finding.text.count("20 us")) == ("ok", 1, 1)
        with mock.patch.object(doctor, "measure_links", side_effect=RuntimeError("no route")):
            (finding,) = doctor._links()
        assert finding.verdict == "bad" and "no route" in finding.text


@pytest.mark.parametrize(
    ("keep", "total", "verdict"), [(True, 1, "bad"), (True, 80, "note"), (None, 3, "note"), (False, 1, "bad")]
)
def test_memory_that_cannot_be_had_is_bad(keep, total, verdict) -> None:
    block = DistCAConfig(keep_attention=keep)
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "mem_get_info", lambda: (2**29, total * 2**30)),
    ):
        finding = doctor._memory(block, Model.of(LLAMA_3_8B), 8192, 1)
    assert finding.verdict == verdict and f"{total}.0 GiB, 0.5 of them free" in finding.text


def test_a_kernel_that_is_not_installed_is_bad(examine, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"distca": {"enabled": True, "kernel": "flash_attn_3"}}))
    status, found = examine("--config", config)
    assert status == 1 and "flash_attn_3" in found["kernel"]["text"]


def test_a_kernel_is_run_and_wrong_results_are_seen(examine) -> None:
    heads = Heads(4, 2, 32)
    for given in (heads, Heads(4, 4, 48, 32)):
        assert doctor.kernel_error(ReferenceKernel(), given, CPU, torch.float32) < 1e-5
    right = ReferenceKernel.backward

    def wrong(self, inputs, tasks, spec, grads) -> None:
        right(self, inputs, tasks, spec, grads)
        if inputs.q.dtype == torch.float32:
            grads.dk[-1] += 1.0

    with mock.patch.object(ReferenceKernel, "backward", wrong):
        status, found = examine()
        assert status == 1 and found["kernel"]["verdict"] == "bad"
    with mock.patch.object(ReferenceKernel, "backward", lambda *_: None):  # writes nothing
        assert doctor.kernel_error(ReferenceKernel(), heads, CPU, torch.float32) > 0.1


def test_versions_that_nobody_tried_are_a_note_and_lost_names_are_bad(examine) -> None:
    with mock.patch.dict(compat.TRIED, torch=("1.0.0",)):
        status, found = examine()
        assert status == 0 and found["torch"]["verdict"] == "note" and "1.0.0" in found["torch"]["text"]
    with mock.patch.object(compat, "check", side_effect=compat.CompatError("has no `x`")):
        status, found = examine()
        assert status == 1 and found["compat"]["text"] == "has no `x`"
