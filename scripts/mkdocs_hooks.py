# SPDX-License-Identifier: Apache-2.0
"""For mkdocs: pages of docs/ link to files outside of it (`../benchmarks/results/...`), which the site gets too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results/"
_LINK = re.compile(r"\]\(\.\./([^)#\s]+)")
_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|%|[MG]iB)(?!\w))")
_BESIDE = re.compile(r"\]\(([\w.-]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds every file outside of docs/ that a page links to, and those that these link to in their own folder."""
    linked = {target for page in files.documentation_pages() for target in _LINK.findall(page.content_string)}
    for target in sorted(linked):
        if target.startswith(RESULTS) and target.endswith(".md"):
            linked |= {RESULTS + name for name in _BESIDE.findall((ROOT / target).read_text(encoding="utf-8"))}
    for target in sorted(linked):
        if (ROOT / target).is_file():  # of others mkdocs says that they are not there
            files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to them, from pages that all lie at the top of the site; numbers of tables stay beside their units."""
    lines = (_UNIT.sub("\u00a0", line) if line.startswith("|") else line for line in markdown.split("\n"))
    return _LINK.sub(r"](\1", "\n".join(lines))
