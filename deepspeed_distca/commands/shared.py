# SPDX-License-Identifier: Apache-2.0
"""What several commands share. What takes long to import is imported where it is needed: `plan` does without."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_distca.cli import UsageError
from deepspeed_distca.scheduler.profiles import ProfileError, Setting, choose

if TYPE_CHECKING:
    import numpy as np

    from deepspeed_distca.report.page import Page
    from deepspeed_distca.simulator.step import Training

#: Ranks of a layout: its matrices of bytes have an entry for every two of them.
MAX_RANKS = 2048
#: With these begin names of sizes that models have whose layers are not all attention.
_OF_HYBRIDS = ("attn_layer", "conv", "full_attention_interval", "full_attn", "hybrid_", "linear_", "mamba_")


def documents_arguments(parser: argparse.ArgumentParser, micro_batches: int) -> None:
    """Of what predicts steps: documents, model, GPUs."""
    parser.add_argument(
        "documents",
        metavar="DOCUMENTS",
        help="a JSON list of lengths; JSON lines, a Parquet file or a folder of datasets.save_to_disk with a column "
        "of lengths or of token lists",
    )
    parser.add_argument("--ranks", type=positive_int, required=True, help="GPUs that share attention")
    parser.add_argument("--tokens-per-rank", type=positive_int, required=True, help="of a micro-batch")
    parser.add_argument("--column", help="of the documents (length where there is one, else input_ids)")
    parser.add_argument("--model", metavar="FILE", help="a model's config.json (Llama-3-8B's sizes)")
    parser.add_argument("--cost", metavar="FILE", help="of `ds_distca profile --save` (an H200's shipped one)")
    parser.add_argument("--checkpointing", action="store_true", help="activations are computed a second time")
    parser.add_argument("--liger", action="store_true", help="the model has Liger's kernels (transformers' own)")
    parser.add_argument("--zero", choices=("0", "1", "2", "3"), default="1", help="stage of ZeRO (1)")
    parser.add_argument(
        "--micro-batches",
        type=positive_int,
        default=micro_batches,
        help=f"the most that are drawn ({micro_batches})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of their order (0)")


def positive_int(text: str) -> int:
    """Of an option."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return value


def integer_list(text: str, low: int | None = None) -> list[int]:
    """Of an option: integers with commas between them, none below `low`."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or (low is not None and min(found) < low):
        kind = "integers" if low is None else f"integers of {low} or more"
        raise argparse.ArgumentTypeError(f"must be {kind} with commas between them, got {text[:80]!r}")
    return found


@contextmanager
def one_line(file: Path | str) -> Iterator[None]:
    """What is wrong with documents, a model, a layout of ranks or a file is an error of the command line.

    Args:
        file: that is named where the system's error names none.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename or file}: {error.strerror or error}") from error
    except (ValueError, TypeError, OverflowError, ProfileError) as error:
        raise UsageError(str(error)) from error


def read_documents(arguments: argparse.Namespace, node_size: int | None) -> tuple[np.ndarray, Training, str]:
    """Lengths of the documents, what is trained, and where its cost model is from."""
    from deepspeed_distca.data.lengths import read_lengths
    from deepspeed_distca.simulator.model import LLAMA_3_8B, Model, training_options
    from deepspeed_distca.simulator.step import Training

    if arguments.ranks > MAX_RANKS:
        raise UsageError(f"--ranks was given {arguments.ranks}; allowed: 1 to {MAX_RANKS}")
    config = LLAMA_3_8B if arguments.model is None else with_kinds_of_layers(read_config(Path(arguments.model)))
    model = Model.of(config)
    choice = choose(Setting("NVIDIA H200", "sm90", "flash_attn_4", "bf16"), model.heads, arguments.cost, folder=None)
    training = Training(
        model,
        choice.cost,
        training_options(config, arguments.ranks, node_size),
        arguments.checkpointing,
        arguments.liger,
        int(arguments.zero),
    )
    return read_lengths(Path(arguments.documents), arguments.column), training, choice.source


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object: a model's config.json, or a DeepSpeed config."""
    from deepspeed_distca.data.lengths import read_json

    with one_line(path):
        config = read_json(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(config, dict):
        raise UsageError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


def with_kinds_of_layers(model: dict[str, Any]) -> dict[str, Any]:
    """A model's config.json with the kinds of its layers. Many files leave them to transformers, which is asked, and
    imported, only where layers may differ: some have windows, or no attention. Where it does not know the model, or
    cannot read the file, that stays as it is."""
    text = model.get("text_config") or model
    if not isinstance(text, dict) or text.get("layer_types") or text.get("layers_block_type"):
        return model
    windows = bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False
    if not windows and not any(name.startswith(_OF_HYBRIDS) for name in text):
        return model
    from transformers import CONFIG_MAPPING

    whole = model if "model_type" in model else text
    kind = whole.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return model
    try:
        known = CONFIG_MAPPING[kind].from_dict(dict(whole)).get_text_config()
    except Exception:  # whatever a family's own class raises of a file that it cannot read
        return model
    kinds = {name: getattr(known, name) for name in ("layer_types", "sliding_window") if hasattr(known, name)}
    return {**model, **kinds} if text is model else {**model, "text_config": {**text, **kinds}}


def write_html(file: str, page: Page) -> None:
    """Writes a report."""
    with one_line(file):
        page.save(Path(file))
