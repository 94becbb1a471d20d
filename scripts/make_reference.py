# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/reference.md from the code: options, statistics, public names, commands.

    python scripts/make_reference.py

What lies between `<!-- made: NAME -->` and `<!-- end -->` is made from fields and docstrings; the rest of the page is
written by hand. tests/test_docs.py fails when the page is not what this script writes.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deepspeed_distca.attention_server.statistics import StepStatistics
from deepspeed_distca.cli import COMMANDS, module_of
from deepspeed_distca.config import AdvancedConfig, DistCAConfig

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"

#: Where to read more about an option.
MORE = {
    "overlap": "design.md#two-nano-batches",
    "cost_model": "cost_model.md",
    "keep_attention": "how_to.md#give-memory-back",
    "timeout_seconds": "reliability.md",
    "min_gain": "design.md#when-rows-move",
    "exchange": "peer_copy.md",
    "staging_mib": "peer_copy.md",
    "server_weights": "design.md#cards-of-different-speed",
    "probe": "design.md#what-a-model-must-keep-to",
    "pipeline_scope": "pipeline.md",
}
_TYPES = {bool: "true, false", int: "whole number", float: "number", str: "text", list[int]: "list of whole numbers"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most"}


def page(text: str) -> str:
    """The page with all its tables made anew."""
    made = {
        "options": options(DistCAConfig),
        "advanced": options(AdvancedConfig),
        "statistics": statistics(),
        "deepspeed_distca": public("deepspeed_distca"),
        "deepspeed_distca.data": public("deepspeed_distca.data"),
        "deepspeed_distca.pipeline": public("deepspeed_distca.pipeline"),
        **{f"ds_distca {name}": arguments(name) for name in COMMANDS},
    }
    for name, table in made.items():
        mark = re.escape(f"<!-- made: {name} -->")
        block = f"<!-- made: {name} -->\n\n{table}\n\n<!-- end -->"
        text, count = re.subn(rf"{mark}.*?<!-- end -->", lambda _, block=block: block, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} places for {name!r}; it needs one: <!-- made: {name} -->")
    return text


def options(config: type[BaseModel]) -> str:
    """A table of a level's options: key, values, default, meaning."""
    rows = []
    for key, text in _field_docstrings(config).items():
        field = config.model_fields[key]
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        meaning, _, left_out = text.partition("Left out:")
        default = left_out.strip().rstrip(".") or f"`{_json(field.default)}`"
        if key in MORE:
            meaning = f"{meaning.strip()} ([more]({MORE[key]}))"
        rows.append((f"`{key}`", _allowed(field), _marked(default), _marked(meaning.strip())))
    return _table(("key", "values", "default", "meaning"), rows)


def statistics() -> str:
    """A table of StepStatistics' attributes and properties."""
    listed = inspect.getdoc(StepStatistics).split("Attributes:\n")[1]
    entries = re.findall(r"^([\w, ]+): (.*(?:\n +.*)*)", textwrap.dedent(listed), re.MULTILINE)
    rows = [(", ".join(f"`{name}`" for name in names.split(", ")), meaning) for names, meaning in entries]
    rows += [
        (f"`{name}`", inspect.getdoc(value))
        for name, value in vars(StepStatistics).items()
        if isinstance(value, property)
    ]
    missing = {f.name for f in dataclasses.fields(StepStatistics)} - set(re.findall(r"\w+", str([r[0] for r in rows])))
    if missing:
        raise ValueError(f"StepStatistics' docstring says nothing of {sorted(missing)}")
    return _table(("statistic", "meaning"), rows)


def public(module: str) -> str:
    """A table of a module's `__all__`, with the first sentence of each docstring."""
    package = importlib.import_module(module)
    rows = []
    for name in package.__all__:
        value = getattr(package, name)
        called = f"{name}({', '.join(inspect.signature(value).parameters)})" if inspect.isfunction(value) else name
        rows.append((f"`{called}`", _first_sentence(inspect.getdoc(value) or "")))
    return _table(("name", "what it is"), rows)


def arguments(command: str) -> str:
    """A table of a command's options."""
    parser = argparse.ArgumentParser(add_help=False)
    module_of(command).add_arguments(parser)
    rows = []
    for action in parser._actions:
        value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
        value = "/".join(action.choices or value.split("|"))
        rows.append(
            (f"`{' '.join([*action.option_strings[:1], value]).strip()}`", action.help or f"({action.default})")
        )
    return _table(("option", "meaning (default)"), rows)


def _field_docstrings(config: type[BaseModel]) -> dict[str, str]:
    """The string that follows each field, by the field's name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0].body
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[field.target.id] = " ".join(text.value.value.split())
    missing = set(config.model_fields) - set(found)
    if missing:
        raise ValueError(f"no docstring after {sorted(missing)} in {config.__name__}")
    return found


def _json(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _marked(text: str) -> str:
    """Values in quotes as code."""
    return re.sub(r'"\w+"', r"`\g<0>`", text)


def _allowed(field: FieldInfo) -> str:
    kind: Any = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in get_args(kind))
    bounds = [
        f"{words} {getattr(limit, name):g}"
        for limit in field.metadata
        for name, words in _BOUNDS.items()
        if hasattr(limit, name)
    ]
    return ", ".join([_TYPES[kind], *bounds])


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0]


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(tuple(header))]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
