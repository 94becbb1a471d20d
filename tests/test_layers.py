# SPDX-License-Identifier: Apache-2.0
"""Imports go down only, as CONTRIBUTING.md has the layers; and each layer knows the libraries that it may."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "deepspeed_distca"
#: From the bottom. Who is further up may import who is below.
LAYERS = (
    ("compat", "given", "defaults"),
    ("trees",),
    ("config", "layout"),
    ("scheduler",),
    ("attention_server", "model_sizes"),
    ("plan_options",),
    ("data", "profiling", "monitor", "cost_choice"),
    ("huggingface", "building"),
    ("overlap",),
    ("pipeline", "engine_runtime"),
    ("engine_hooks",),
    ("__init__",),
    ("simulator",),
    ("report",),
    ("cli",),  # imports commands by their names, when they are asked for
    ("commands", "run"),
)
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
#: What a layer does without, at the top of its modules or inside of functions.
WITHOUT = {
    "given": ("torch", "deepspeed", "transformers"),
    "defaults": ("torch", "deepspeed", "transformers"),
    "config": ("torch", "deepspeed", "transformers"),
    "layout": ("torch", "deepspeed", "transformers"),
    "trees": ("torch", "deepspeed", "transformers"),
    "scheduler": ("torch", "deepspeed", "transformers"),
    "attention_server": ("deepspeed", "transformers"),
    "data": ("deepspeed", "transformers"),
    "profiling": ("deepspeed", "transformers"),
    "simulator": ("torch", "deepspeed", "transformers"),
    "report": ("torch", "deepspeed", "transformers"),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    mine = layer(path)
    for name in imported(path):
        library, *rest = name.split(".")
        if library != "deepspeed_distca":
            assert library not in WITHOUT.get(mine, ()), f"{mine} does without {library}"
        elif rest and rest[0] != mine:
            assert HEIGHT[rest[0]] < HEIGHT[mine], f"{mine} imports {rest[0]}, which is not below it"


def test_every_module_has_a_layer() -> None:
    assert {layer(path) for path in FILES} == set(HEIGHT)
