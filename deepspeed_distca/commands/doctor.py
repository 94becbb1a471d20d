# SPDX-License-Identifier: Apache-2.0
"""``ds_distca doctor``: what would keep a machine, a DeepSpeed config or a model from running the plugin, looked at by
what attach uses."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from deepspeed_distca import compat
from deepspeed_distca.attention_server.kernels import KernelError
from deepspeed_distca.cli import UsageError
from deepspeed_distca.commands.shared import positive_int, read_config, with_kinds_of_layers
from deepspeed_distca.compat.deepspeed import import_quietly, quietly
from deepspeed_distca.config import BLOCK, DistCAConfig, DistCAConfigError, get_distca_config
from deepspeed_distca.cost_choice import choose_kernel, own_cost_model
from deepspeed_distca.profiling.accuracy import kernel_error
from deepspeed_distca.profiling.link import measure_links
from deepspeed_distca.scheduler.heads import Heads
from deepspeed_distca.simulator.model import LLAMA_3_8B, Model

#: Of a kernel's results on a few documents, against the reference in fp64: some times what rounding makes of them.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        verdict: "ok"; "note": works, and is good to know; "bad": does not work.
        what: was looked at.
        text: what was found, and what to do about it.
    """

    verdict: Literal["ok", "note", "bad"]
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:5} {self.what:12} {self.text}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("--config", metavar="FILE", type=Path, help="a ds_config.json, which is checked")
    parser.add_argument(
        "--model", metavar="FILE", type=Path, help="a model's config.json, of which a small copy is tried"
    )
    parser.add_argument("--tokens-per-rank", type=positive_int, help="of a micro-batch: tells the memory it takes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Looks, and prints what was found; the exit status is 1 where something is bad."""
    found = _examine(arguments.config, arguments.model, arguments.tokens_per_rank)
    good = all(finding.verdict != "bad" for finding in found)
    if arguments.json:
        print(json.dumps({"good": good, "findings": [finding.__dict__ for finding in found]}))
    else:
        verdict = "the plugin can run here" if good else "the plugin cannot run as this is: see what is bad"
        print(*found, verdict, sep="\n")
    return int(not good)


def _examine(config: Path | None, model: Path | None, tokens: int | None) -> list[Finding]:
    """Everything that can be looked at without an engine; without a model by Llama-3-8B's sizes."""
    ds_config = None if config is None else read_config(config)
    architecture = LLAMA_3_8B if model is None else read_config(model)
    try:
        sizes = Model.of(_by_usual_names(with_kinds_of_layers(architecture)))
    except ValueError as error:
        raise UsageError(f"{model}: {error}") from error
    found, block, shards = [*_versions()], DistCAConfig(), 1
    if ds_config is not None:
        try:
            given = get_distca_config(ds_config)
            nothing = f"no `{BLOCK}` block that is enabled: the plugin would do nothing"
            text = f"its `{BLOCK}` block holds" if given else nothing
            found.append(Finding("ok" if given else "note", "ds_config", text))
            block = given or block
        except DistCAConfigError as error:
            found.append(Finding("bad", "ds_config", str(error)))
        shards = _tensor_parallel(ds_config)
        found.append(_of_deepspeed(ds_config, block))
    if model is not None:
        with quietly():
            found += _of_model(architecture, block, shards)
    found += [_devices(), *_links(), *_kernel(block, sizes.heads)]
    if tokens is not None:
        found.append(_memory(block, sizes, tokens, shards))
    return found


def _by_usual_names(model: dict[str, Any]) -> dict[str, Any]:
    """A model's config.json with its sizes by the names that most have: GPT-2's hidden_size is its n_embd."""
    from transformers import CONFIG_MAPPING

    kind = model.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return model
    names = CONFIG_MAPPING[kind].attribute_map
    return {**{usual: model[own] for usual, own in names.items() if own in model}, **model}


def _versions() -> Iterator[Finding]:
    """The libraries, and the private names of theirs that every engine needs."""
    for library, tried in compat.TRIED.items():
        try:
            here = version(library)
        except PackageNotFoundError:
            missing = Finding("bad", library, f'not installed: pip install "{library}=={tried[-1]}"')
            yield missing if library != "datasets" else Finding("note", library, "not installed; only data need it")
            continue
        known = here.partition("+")[0] in tried
        words = here if known else f"{here}, which nobody tried: {', '.join(tried)}"
        yield Finding("ok" if known else "note", library, words)
    try:
        import_quietly()
        compat.check("engine", "zero_3")
        yield Finding("ok", "compat", "all names that are not public are there")
    except (compat.CompatError, ImportError) as error:
        yield Finding("bad", "compat", str(error))


def _of_deepspeed(config: Mapping[str, Any], block: DistCAConfig) -> Finding:
    """What DeepSpeed makes of its config, and what of it the plugin refuses or needs."""
    from deepspeed.runtime.config import DeepSpeedConfig

    # Trainer fills "auto" in; how many ranks share a batch is not known here.
    known = {**_without_auto(config), "train_micro_batch_size_per_gpu": 1}
    known.pop("train_batch_size", None)
    known.pop("gradient_accumulation_steps", None)
    try:
        with quietly():
            stage = DeepSpeedConfig(known).zero_config.stage
    except Exception as error:  # assertions, pydantic's and others
        return Finding("bad", "DeepSpeed", f"refuses the config: {' '.join(str(error).split())}")
    if known.get("sequence_parallel_size", 1) != 1:
        words = f"the `{BLOCK}` block cannot be combined with sequence parallelism (Ulysses, ALST)"
        return Finding("bad", "DeepSpeed", f"{words}; remove one of the two")
    needs: list[compat.Need] = ["zero_3"] if stage == 3 else []
    if block.overlap == "ping_pong" and stage == 3:
        needs.append("ping_pong_zero_3")
    try:
        compat.check(*needs)
    except compat.CompatError as error:
        return Finding("bad", "DeepSpeed", str(error))
    words = f"takes the config, with ZeRO stage {int(stage)}; sizes of batches were not looked at"
    return Finding("ok", "DeepSpeed", words)


def _without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    nested = {k: _without_auto(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    return {k: v for k, v in nested.items() if v != "auto"}


def _tensor_parallel(config: Mapping[str, Any]) -> int:
    """Ranks that hold a model among them."""
    section = config.get("tensor_parallel")
    size = section.get("autotp_size", 1) if isinstance(section, Mapping) else 1
    return size if isinstance(size, int) and size > 1 else 1


def _of_model(given: Mapping[str, Any], block: DistCAConfig, shards: int) -> list[Finding]:
    """What attach would find out about a model: its modules on no device, and a small copy that is run."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from deepspeed_distca.huggingface.contract import find_contract
    from deepspeed_distca.huggingface.decoders import UnsupportedModelError, attention_modules
    from deepspeed_distca.huggingface.ping_pong import PingPong
    from deepspeed_distca.huggingface.small_copy import small_model
    from deepspeed_distca.model_sizes import heads_of
    from deepspeed_distca.pipeline.module import check_family

    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        words = f"model_type {kind!r} is none of transformers' own: it is tried when the engine is made"
        return [Finding("note", "model", words)]
    try:
        config = CONFIG_MAPPING[kind].from_dict(dict(given))
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        return [Finding("bad", "model", f"transformers cannot make it: {type(error).__name__}: {error}")]
    try:
        layers = len(attention_modules(whole))
        heads_of(config.get_text_config(), shards=shards)
    except UnsupportedModelError as error:
        return [Finding("bad", "model", str(error))]
    name = f"{type(whole).__name__} with {layers} attention layers"
    try:
        small = small_model(config)
        modules = attention_modules(small)
    except Exception as error:
        why = f"no small copy of it can be made ({type(error).__name__}: {error})"
        return [Finding("note", "model", f"{name}; {why}: it is tried when the engine is made")]
    try:
        contract = find_contract(small, small, modules, device=torch.device("cpu"), probe=block.advanced.probe)
        if block.overlap == "ping_pong":
            PingPong(small, modules, contract).remove()
    except UnsupportedModelError as error:
        # An error of the model's own may be the small copy's, whose numbers need not fit together.
        its_own = error.__cause__ is not None
        words = f"{name}; a small copy of it: {error}" + "; the engine tries the model itself" * its_own
        return [Finding("note" if its_own else "bad", "model", words)]
    rows = {
        "packed": "documents are packed",
        "told": "documents are packed, and its mixers are told where they end",
        "alone": f"each document needs a row of its own: {contract.why}",
    }[contract.rows]
    found = Finding("note" if contract.rows == "alone" else "ok", "model", f"{name}; {rows}")
    try:
        check_family(whole)
    except UnsupportedModelError as error:
        return [found, Finding("note", "pipelines", str(error))]
    return [found, Finding("ok", "pipelines", "it can be divided into stages by DecoderPipeline")]


def _devices() -> Finding:
    count = torch.cuda.device_count()
    if not count:
        return Finding("note", "GPUs", "none: CPUs run it to try it, not to gain")
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    apart = [f"{i} and {j}" for i in range(count) for j in range(i) if not torch.cuda.can_device_access_peer(i, j)]
    if apart:
        names += f"; no peer copies between {', '.join(apart[:4])}: NCCL is used"
    elif count > 1:
        names += ", each reaches the others' memory"
    return Finding("note" if apart else "ok", "GPUs", f"{count} x {names}")


def _links() -> list[Finding]:
    """Between this machine's GPUs, where there are several."""
    count = torch.cuda.device_count()
    if count < 2:
        return [Finding("note", "links", f"not measured: that takes two GPUs, and here are {count or 'none'}")]
    try:
        rate, latency = measure_links(count)
    except RuntimeError as error:
        return [Finding("bad", "links", f"{count} processes could not send to each other by NCCL: {error}")]
    text = f"each GPU sends and receives {rate / 1e9:.0f} GB/s at once by NCCL, and 64 KiB in {latency * 1e6:.0f} us"
    return [Finding("ok", "links", text)]


def _kernel(block: DistCAConfig, heads: Heads) -> list[Finding]:
    """The attention kernel that a layer would get, run on a few documents, and the cost model."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        kernel = choose_kernel(block.kernel, heads, device, dtype, None)
    except KernelError as error:
        return [Finding("bad", "kernel", str(error))]
    apart = kernel_error(kernel, heads, device, dtype)
    text = f"{kernel.name} on {device.type}: relative error {apart:.1e}, forward and backward"
    found = [Finding("ok" if apart <= _TOLERANCE[dtype] else "bad", "kernel", text)]
    if device.type == "cuda" and kernel.name == "reference":
        found = [Finding("note", "kernel", f"{text}; it is slow: pip install -e .[gpu] on Hopper or Blackwell")]
    try:
        choice = own_cost_model(block, heads, device=device, dtype=dtype, window=None)
        found += [] if choice is None else [Finding("ok", "cost model", choice.source)]
    except ValueError as error:
        found.append(Finding("bad", "cost model", str(error)))
    return found


def _memory(block: DistCAConfig, model: Model, tokens: int, shards: int) -> Finding:
    """What the plugin takes of a GPU beside what training does, and what there is."""
    layers = model.attention_layers
    kept = layers * tokens * model.heads.return_bytes / shards / _GIB
    staging = block.advanced.staging_mib / 1024
    use = {
        True: f"needs {kept:.1f} GiB to keep attention of all {layers} layers under activation checkpointing",
        None: f"takes up to {kept:.1f} GiB under activation checkpointing, of what training leaves free, to keep "
        f"attention of up to {layers} layers",
        False: "keeps no attention under activation checkpointing",
    }[block.keep_attention]
    text = f"with {tokens} tokens a rank the plugin {use}"
    text += f", and {staging:.1f} GiB for staging where peer copies are used"
    if not torch.cuda.is_available():
        return Finding("note", "memory", f"{text}; there is no GPU here to compare with")
    free, total = (value / _GIB for value in torch.cuda.mem_get_info())
    text += f"; the GPU has {total:.1f} GiB, {free:.1f} of them free now"
    needed = staging + (kept if block.keep_attention else 0.0)
    if needed > total:
        return Finding("bad", "memory", f"{text}: it does not fit. Leave `keep_attention` out, or take fewer tokens")
    return Finding("note", "memory", text)
