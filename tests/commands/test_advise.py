# SPDX-License-Identifier: Apache-2.0
"""``ds_distca advise``: it counts documents right, decides as training does, and says in one line what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest

from deepspeed_distca.cli import main
from deepspeed_distca.commands.shared import with_kinds_of_layers
from deepspeed_distca.data.lengths import read_lengths
from deepspeed_distca.layout import LENGTH, Layout
from deepspeed_distca.scheduler.cost_model import PHASES, CostModel
from deepspeed_distca.scheduler.routes import RouteCompiler
from deepspeed_distca.scheduler.worth import LINEAR_WORK, SEARCH, SEARCH_SEGMENT, Worth
from deepspeed_distca.simulator.documents import micro_batches
from deepspeed_distca.simulator.model import LLAMA_3_8B, Model, training_options
from deepspeed_distca.simulator.step import MEMORY_RATE, OTHER, Training, predict

TOKENS = 65536
MODEL = Model.of(LLAMA_3_8B)
LAYERS = 32
COST = CostModel.fitted(MODEL.heads)
OPTIONS = training_options(LLAMA_3_8B)
TRAINING = Training(MODEL, COST, OPTIONS)
UNEVEN = [TOKENS, *[TOKENS // 16] * 16] * 6


@pytest.fixture
def advise(tmp_path: Path, capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Runs the command on documents; exit status, standard output and standard error."""

    def run(documents: object, *more: str, ranks: int = 2, tokens: int = TOKENS) -> tuple[int, str, str]:
        file = tmp_path / "documents.json"
        if documents is not None:
            file.write_text(documents if isinstance(documents, str) else json.dumps(documents))
        status = main(["advise", str(file), "--ranks", str(ranks), "--tokens-per-rank", str(tokens), *more])
        return status, *capsys.readouterr()

    return run


def test_uneven_documents_pay_and_even_ones_do_not(advise) -> None:
    status, out, err = advise(UNEVEN, "--json")
    found = json.loads(out)
    assert (status, err, found["pays"], found["block"]) == (0, "", True, {"distca": {"enabled": True}})
    assert found["documents"] == {
        "documents": len(UNEVEN),
        "tokens": sum(UNEVEN),
        "median": TOKENS // 16,
        "nine_of_ten_below": TOKENS // 16,
        "longest": TOKENS,
    }
    assert found["micro_batches"] == sum(UNEVEN) // (2 * TOKENS)
    assert found["ideal_ms"][0] < found["plugin_ms"][0] < found["plain_ms"][0]
    found = json.loads(advise([4096] * 200, "--json")[1])
    assert not found["pays"] and found["block"] == {} and found["speed_up"] == [1.0, 1.0, 1.0] and found["moved"] == 0
    assert "little to gain" in found["why"]


def test_the_text_says_what_to_do(advise) -> None:
    status, out, _ = advise(UNEVEN)
    assert status == 0 and "use it" in out and '"distca": {"enabled": true}' in out and "node" not in out
    assert "in one node (--node-size)" in advise(UNEVEN * 4, ranks=16)[1]
    near, far = (json.loads(advise(UNEVEN * 4, "--json", *more, ranks=16)[1]) for more in ((), ("--node-size", "8")))
    assert far["block"] == {"distca": {"enabled": True}} and far["note"] == ""
    assert (near["overlap"], far["overlap"]) == ("local_first", "ping_pong")
    assert near["plugin_ms"][0] <= far["plugin_ms"][0] <= far["plain_ms"][0]
    out = advise([8192, *[512] * 16] * 6, "--checkpointing", tokens=8192)[1]
    assert "leave it out" in out and "ds_config.json" not in out


def test_attention_of_how_many_layers_is_kept(advise) -> None:
    """Under checkpointing, where there is not memory for all of them; over nodes in two nano-batches either way."""
    nodes = ("--node-size", "8", "--checkpointing")
    enough, short = (advise(UNEVEN * 4, *nodes, *more, ranks=16)[1] for more in (("--liger",), ("--zero", "0")))
    for out in (enough, short):  # all states of an optimizer on each GPU leave no memory
        assert '"distca": {"enabled": true}' in out and "with it, ping_pong" in out
    assert "is memory" not in enough
    assert "there is memory, by estimate, to keep core attention of 0 of 32 checkpointed layers" in short
    one = advise(UNEVEN * 4, "--checkpointing", "--zero", "0", ranks=16)[1]
    assert "in one node (--node-size)" in one
    assert "of 0 of 32 checkpointed layers" in one and "with it, local_first" in one
    assert "memory" not in advise([4096] * 600, *nodes, "--zero", "0", ranks=16)[1]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_is_the_sum_of_its_parts(checkpointing: bool) -> None:
    """Counted anew, from what training decides by."""
    layout = Layout.from_lengths([[TOKENS], [TOKENS // 16] * 16])
    training = replace(TRAINING, checkpointing=checkpointing)
    found = predict(training, layout)
    plain = plugin = TOKENS * MODEL.loss_bytes(liger=False) / MEMORY_RATE
    for phase in PHASES:
        again = checkpointing and phase == "forward"
        times = LINEAR_WORK[phase] + again
        products = (LAYERS * MODEL.layer_flops * times + MODEL.output_flops * LINEAR_WORK[phase]) * TOKENS
        work = (1 + OTHER) * COST.linear_seconds(products)
        work += (1 + again) * LAYERS * TOKENS * MODEL.element_bytes(phase, liger=False) / MEMORY_RATE
        worth = Worth(layout, None, phase, COST, OPTIONS, early=True, layers=LAYERS)
        _, compiler = worth.spread(RouteCompiler(layout, worth.home.rows))
        plain += work + LAYERS * float(worth.home.loads.max()) / 1e15 * (1 + again)
        plugin += work + LAYERS * worth.seconds(compiler) + SEARCH + SEARCH_SEGMENT * 17
        plugin += again * (LAYERS - training.kept(2, TOKENS)) * worth.seconds(compiler)
    # Attention that is repeated has not its most where backward's has.
    assert (found.plain, found.plugin) == pytest.approx((plain, plugin), rel=1e-3 if checkpointing else 1e-9)
    assert found.moves and found.balance == pytest.approx(1.86, abs=0.03)


def test_windows_count() -> None:
    sliding = {**LLAMA_3_8B, "sliding_window": 4096}
    configs = {
        "full": LLAMA_3_8B,
        "off": {**sliding, "use_sliding_window": False},
        "mixed": {**sliding, "layer_types": ["sliding_attention", "full_attention"] * 16},
        "all": sliding,
    }
    models = {name: Model.of(config) for name, config in configs.items()}
    assert [models[name].windows for name in configs] == [{None: 32}, {None: 32}, {None: 16, 4096: 16}, {4096: 32}]
    layout = Layout.from_lengths([[TOKENS], [TOKENS // 16] * 16])
    full, mixed, windowed = (
        predict(replace(TRAINING, model=models[name]), layout) for name in ("full", "mixed", "all")
    )
    assert mixed.plain == pytest.approx((full.plain + windowed.plain) / 2)
    assert full.plain > mixed.plain > windowed.plain and full.balance > mixed.balance > windowed.balance


def test_perfect_balance_is_never_slower() -> None:
    draw = np.random.default_rng(3)
    for tokens in (4096, 16384, 65536):
        for layout in micro_batches(draw.integers(1, tokens, 400), 4, tokens, 5, seed=1):
            found = predict(TRAINING, layout)
            assert found.ideal <= found.plugin * (1 + 1e-12) <= found.plain * (1 + 1e-9)


def test_micro_batches_are_full_and_lose_nothing() -> None:
    lengths = np.random.default_rng(0).integers(1, 900, 300)
    found = list(micro_batches(lengths, 3, 1000, 100, seed=5))
    assert len(found) == lengths.sum() // 3000
    assert all(layout.validate().tokens.tolist() == [1000] * 3 for layout in found)
    # Documents in the drawn order, cut at rows' ends alone.
    ends = {int(end) for end in np.cumsum(lengths[np.random.default_rng(5).permutation(300)])}
    borders = np.cumsum(np.concatenate([layout.segments[:, LENGTH] for layout in found])).tolist()
    rows = {1000 * row for row in range(1, 3 * len(found) + 1)}
    assert set(borders) == {end for end in ends if end <= 3000 * len(found)} | rows
    assert len(list(micro_batches(lengths, 3, 1000, 2, seed=5))) == 2


def test_lengths_are_read_from_all_that_people_have(tmp_path: Path) -> None:
    lengths = [3, 1, 5]
    tokens = [list(range(n)) for n in [*lengths, 0]]
    files = {name: tmp_path / name for name in ("a.json", "b.jsonl", "c.jsonl", "d.jsonl", "e.parquet", "f", "g")}
    files["a.json"].write_text(json.dumps([*lengths, 0]))
    files["b.jsonl"].write_text("\n".join(map(str, [*lengths, 0])) + "\n\n")
    files["c.jsonl"].write_text("\n".join(json.dumps({"input_ids": ids, "text": ""}) for ids in tokens))
    files["d.jsonl"].write_text("\n".join(json.dumps({"length": len(ids), "input_ids": []}) for ids in tokens))
    data = datasets.Dataset.from_dict({"input_ids": tokens, "size": [len(ids) for ids in tokens]})
    data.to_parquet(str(files["e.parquet"]))
    data.save_to_disk(str(files["f"]))
    data.select([3, 2, 0, 1]).save_to_disk(str(files["g"]))
    for name, file in files.items():
        assert sorted(read_lengths(file).tolist()) == sorted(lengths), name
    assert read_lengths(files["f"], "size").tolist() == lengths
    data.rename_column("input_ids", "ids").save_to_disk(str(tmp_path / "h"))
    assert read_lengths(tmp_path / "h", "ids").tolist() == lengths


def test_a_models_own_sizes_count(advise, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    small = {**LLAMA_3_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    config.write_text(json.dumps({"text_config": small}))
    status, out, _ = advise(UNEVEN, "--model", str(config))
    assert status == 0 and "16 layers of 2048" in out


SLIDING = {"sliding_window": 512, "num_hidden_layers": 8}


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"model_type": "gemma2", **SLIDING}, {None: 4, 512: 4}),
        ({"model_type": "olmo3", **SLIDING}, {None: 2, 512: 6}),
        ({"model_type": "cohere2", **SLIDING, "sliding_window_pattern": 2}, {None: 4, 512: 4}),
        ({"model_type": "gemma3_text", **SLIDING, "sliding_window_pattern": 3}, {None: 2, 512: 6}),
        ({"model_type": "qwen2", **SLIDING, "use_sliding_window": True, "max_window_layers": 6}, {None: 6, 512: 2}),
        ({"model_type": "qwen2", **SLIDING}, {None: 8}),
        ({"model_type": "mistral", **SLIDING}, {512: 8}),
        ({"model_type": "qwen3_next", "num_hidden_layers": 8, "linear_conv_kernel_dim": 4}, {None: 2, 0: 6}),
        ({"model_type": "lfm2", "num_hidden_layers": 8, "full_attn_idxs": [2, 5]}, {None: 2, 0: 6}),
        # What is not known, or cannot be read, is taken by the file's own words.
        ({"model_type": "nobodys", **SLIDING}, {512: 8}),
        ({"model_type": "exaone4", **SLIDING, "sliding_window_pattern": "no pattern"}, {512: 8}),
        ({"model_type": "gemma2", **SLIDING, "layer_types": ["full_attention"] * 8}, {None: 8}),
    ],
    ids=lambda value: value.get("model_type", ""),
)
def test_kinds_of_layers_are_as_transformers_derives_them(config: dict, kinds: dict) -> None:
    sizes = {key: LLAMA_3_8B[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
    config = {**sizes, "num_key_value_heads": 8, **config}
    assert Model.of(with_kinds_of_layers(config)).kinds == kinds
    for whole in ({"text_config": config}, {"text_config": config, "model_type": "nobodys"}):
        found = with_kinds_of_layers(whole)
        assert Model.of(found).kinds == kinds if "model_type" not in whole else found == whole


def test_a_models_file_alone_tells_of_windows_and_mixers(advise, tmp_path: Path) -> None:
    """Gemma 3 as it is published: within a model that takes images, without the kinds of its layers."""
    file, found = tmp_path / "config.json", {}
    text = {**LLAMA_3_8B, "model_type": "gemma3_text", "sliding_window": 1024}
    for name, config in {
        "full": LLAMA_3_8B,
        "mixed": {"model_type": "gemma3", "text_config": text},
        "windowed": {**LLAMA_3_8B, "model_type": "mistral", "sliding_window": 1024},
        "hybrid": {**LLAMA_3_8B, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8},
    }.items():
        file.write_text(json.dumps(config))
        status, out, err = advise(UNEVEN, "--model", str(file), "--json", "--html", str(tmp_path / "report.html"))
        assert (status, err) == (0, "")
        found[name] = json.loads(out)["plain_ms"][0]
    assert found["windowed"] < found["mixed"] < found["full"] and found["windowed"] < found["hybrid"] < found["full"]
    # 27 of 32 layers slide.
    assert found["mixed"] == pytest.approx(found["full"] - 27 / 32 * (found["full"] - found["windowed"]), rel=1e-6)


def test_transformers_is_imported_for_windows_alone() -> None:
    code = (
        "import sys; sys.argv[0] = 'ds_distca'; from deepspeed_distca.commands.shared import with_kinds_of_layers; "
        f"assert with_kinds_of_layers({LLAMA_3_8B!r}) == {LLAMA_3_8B!r}; "
        "print({'torch', 'deepspeed', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("documents", "more", "words"),
    [
        (None, (), "No such file"),
        ("[1, 2", (), "not valid JSON"),
        ("[" * 100000, (), "nested too deep"),
        ({"a": 1}, (), "a JSON list of lengths"),
        ([1, -2], (), "whole numbers from 0 on"),
        ([5, 2**63], (), "below 2^63 together"),
        ([2**63], (), "below 2^63 together"),
        ([2**64], (), "below 2^63 together"),
        ([2**62] * 2, (), "below 2^63 together"),
        ([1, 2.5], (), "a JSON list of lengths"),
        ([0, 0], (), "no document has a token"),
        ([], (), "no document has a token"),
        ([10, 20], (), "needs 131072"),
        ([10], ("--ranks", "0"), "1 or more"),
        ([10], ("--ranks", "1000000"), "allowed: 1 to 2048"),
        (UNEVEN, ("--model", "nowhere.json"), "nowhere.json"),
        (UNEVEN, ("--cost", "nowhere.json"), "nowhere.json"),
    ],
)
def test_wrong_input_is_one_line(advise, documents, more, words) -> None:
    status, out, err = advise(documents, *more)
    assert (status, out) == (2, "") and err.count("\n") == 1 and words in err


@pytest.mark.parametrize(
    ("config", "words"), [("{}", "no hidden_size"), ("[]", "got list"), ("{", "not valid JSON")], ids=str
)
def test_a_wrong_model_is_one_line(advise, tmp_path: Path, config: str, words: str) -> None:
    (tmp_path / "config.json").write_text(config)
    status, _, err = advise(UNEVEN, "--model", str(tmp_path / "config.json"))
    assert status == 2 and err.count("\n") == 1 and words in err


def test_a_wrong_line_or_column_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for text, words in (('{"text": "x"}', "line 1 has no 'input_ids'"), ('3\n"x"', "line 2"), ("3\n[", "line 2")):
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_lengths(file)
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(ValueError, match="no 'input_ids'"):
        read_lengths(tmp_path / "d")
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"length": [1]})).save_to_disk(str(tmp_path / "e"))
    with pytest.raises(ValueError, match="splits"):
        read_lengths(tmp_path / "e")
